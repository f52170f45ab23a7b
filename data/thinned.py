"""Records evenly spread over a source, so few that they can be encoded at once."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from outrider.data.forms import CONVERSATIONS
from outrider.data.mixture import Mixture, Numbered
from outrider.data.sources import Record

MOST_WORK = 20_000_000
"""Characters: about 12 seconds of one processor."""
LONGEST_TOKENS = 32
"""Characters a token, above which no text lies: where reading stops that has a limit of tokens."""
TOKENISED = ("prompt_ids", "input_ids")
IDS_SHARE = 8
"""Characters of a list of ids that take no longer than one of text."""
TURN, FULL = 2654435769, 1 << 32
"""The golden section of a full turn: multiples of it are spread evenly, and in step with no period
that rows of a file may have (Knuth, The Art of Computer Programming 3, section 6.4)."""


@dataclass(frozen=True)
class Thinned:
    """One of every `stride` records of a source."""

    found: list[Numbered]
    stride: int
    """1 where all records are here."""
    read: int
    """Records that were read."""
    ran_out: str | None
    """The source whose end was the end of a mix."""


def thin(source: str, *, limit_tokens: int | None = None, most_work: int = MOST_WORK) -> Thinned:
    """One of every `stride` records of each source, the first always.

    `stride` is the least power of two for which encoding takes no more than `most_work`. All of the
    source is read, or as much as can hold the first `limit_tokens`.
    """
    mixture, stride, read, characters = Mixture(source), 1, 0, 0
    kept, whole = list[tuple[Numbered, int]](), 0
    for one in mixture:
        if limit_tokens is not None and characters > LONGEST_TOKENS * limit_tokens:
            break
        if is_kept(one.number, stride):
            kept.append((one, work(one.record)))
            whole += kept[-1][1]
        while whole > most_work and len(kept) > len(mixture.parts):
            stride *= 2
            kept = [(found, cost) for found, cost in kept if is_kept(found.number, stride)]
            whole = sum(cost for _, cost in kept)
        characters += len(str(one.record)) if limit_tokens is not None else 0
        read += 1
    return Thinned([found for found, _ in kept], stride, read, mixture.ran_out)


def is_kept(number: int, stride: int) -> bool:
    """Whether a record of this number, from 1, is one of those that stand for all."""
    return (number - 1) * TURN % FULL < FULL // stride


def work(record: Record | str) -> int:
    """Characters that encoding a record tokenises, about: a conversation once for each message."""
    if isinstance(record, str):
        return 0
    if any(name in record for name in TOKENISED):
        return len(str(record)) // IDS_SHARE
    talk: Any = next((record[name] for name in CONVERSATIONS if name in record), None)
    if not isinstance(talk, list):
        return len(str(record))
    return sum(accumulate(len(str(one)) for one in talk))
