"""Between two tokenizers by way of text, piece by piece as a row grows.

Whatever is guessed here is verified by the target, so an unlucky split costs a draft and no more.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

LOOK_BACK = 10
"""Tokens before a seam that are encoded again with what follows: merges reach across it."""


class TextOf:
    """The text of a growing row of ids, decoded once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.text = ""
        """Without the first bytes of a character whose last ones are still to come."""
        self.is_whole = True
        """Whether the ids end where a character ends."""
        self._anchor = self._settled = 0

    def add(self, ids: Sequence[int]) -> None:
        """Go on by these ids."""
        self.ids += ids
        # Only what follows a few settled ids is decoded: a word's spaces depend on those before.
        before = decoded(self._tokenizer, self.ids[self._anchor : self._settled])
        now = decoded(self._tokenizer, self.ids[self._anchor :])
        self.is_whole = not now.endswith("\ufffd")
        if self.is_whole:
            self.text += now[len(before) :]
            self._anchor = max(self._anchor, len(self.ids) - LOOK_BACK)
            self._settled = len(self.ids)


class IdsOf:
    """The ids of a growing text by another tokenizer, of which each step encodes the end anew."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        start = tokenizer("")["input_ids"]
        bos = tokenizer.bos_token_id
        self._start = [bos] if bos is not None and bos in start else []
        self._text = ""
        self._ids: list[int] = []
        self._firsts: list[int] = []

    @property
    def ids(self) -> list[int]:
        """The text's ids, behind the start token that the tokenizer asks for, if any."""
        return [*self._start, *self._ids]

    def become(self, text: str) -> None:
        """Take on a text that goes on from the one before."""
        assert text.startswith(self._text), "a verified text only grows"
        if text == self._text:
            return
        kept = max(0, len(self._ids) - LOOK_BACK)
        self._ids, self._firsts = self._joined(text, kept) or self._encoded(text, 0)
        self._text = text

    def _joined(self, text: str, kept: int) -> tuple[list[int], list[int]] | None:
        """The old ids up to where the end, encoded alone, falls into step with them."""
        if not kept:
            return None
        ids, firsts = self._encoded(text, self._firsts[kept])
        old = {pair: place for place, pair in enumerate(zip(self._firsts, self._ids, strict=True))}
        for place, pair in enumerate(zip(firsts, ids, strict=True)):
            if pair in old:
                cut = old[pair]
                return self._ids[:cut] + ids[place:], self._firsts[:cut] + firsts[place:]
        return None

    def _encoded(self, text: str, start: int) -> tuple[list[int], list[int]]:
        """Ids of a text from a character on, and the character each begins at."""
        found = self._tokenizer(text[start:], add_special_tokens=False, return_offsets_mapping=True)
        return found["input_ids"], [start + first for first, _ in found["offset_mapping"]]


def continued(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], more: str) -> list[int]:
    """Ids that go on from `ids` and say `more`; empty where no split of it fits.

    The end of `ids` is encoded with `more`. If that gives those ids again, what follows them is the
    answer; if a token would reach across the seam, `more` is encoded alone. Either is taken only if
    it decodes to the very text.
    """
    tail = list(ids[-LOOK_BACK:])
    text = decoded(tokenizer, tail)
    together = tokenizer(text + more, add_special_tokens=False)["input_ids"]
    found = [together[len(tail) :]] if together[: len(tail)] == tail else []
    found.append(tokenizer(more, add_special_tokens=False)["input_ids"])
    for new in found:
        if decoded(tokenizer, [*tail, *new]) == text + more:
            return list(new)
    return []


def decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of ids as it is, special tokens too."""
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
