"""A passage of text, token by token, with what drafting did for each."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from outrider.eval.metrics import RoundCounts

Mark = Literal["accepted", "corrected", "plain"]

LEGEND: dict[Mark, str] = {
    "accepted": "drafted by the head and accepted",
    "corrected": "a draft was rejected here; the target's own token stands",
    "plain": "the target's own token after a fully accepted draft, or the prefill's",
}


class Decoder(Protocol):
    """The one method of a tokenizer that is needed."""

    def decode(self, ids: list[int], /) -> object:
        """Text of token ids."""
        ...


def marks(rounds: Sequence[RoundCounts], depth: int) -> list[Mark]:
    """What each token is, the prefill's first; `depth` is the longest path of a draft."""
    found: list[Mark] = ["plain"]
    for one in rounds:
        kept = min(one.accepted, one.emitted)
        accepted: Mark = "accepted"
        found += [accepted] * kept
        if one.emitted > kept:
            was_rejected = one.accepted < min(depth, one.drafted)
            found.append("corrected" if was_rejected else "plain")
    return found


def passage(
    title: str,
    prompt: str,
    ids: Sequence[int],
    rounds: Sequence[RoundCounts],
    tokenizer: Decoder,
    *,
    depth: int,
) -> dict[str, Any]:
    """The coloured passage of the report: `pieces` of text with their marks, and the counts."""
    found = marks(rounds, depth)
    if len(found) != len(ids):
        raise ValueError(
            f"{len(ids)} tokens but the rounds emitted {len(found)} with the prefill's; give the "
            "rounds of this very text"
        )
    pieces: list[dict[str, str]] = []
    before = ""
    for end, mark in enumerate(found, start=1):
        # Half a character decodes to a replacement sign; it shows with the token that ends it.
        text = str(tokenizer.decode(list(ids[:end])))
        whole = text.rstrip("\ufffd") if end < len(ids) else text
        pieces.append({"text": whole[len(before) :], "mark": mark})
        before = whole
    return {
        "title": title,
        "prompt": prompt,
        "pieces": pieces,
        "tokens": len(ids),
        "calls": 1 + len(rounds),
    }
