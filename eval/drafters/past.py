"""Counts of what followed each n-gram of some texts, and the chain that they make likeliest."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

LEAST_CHANCE = 0.1
"""Least product of counted shares along a draft; ArcticInference's default for its tokens."""


class Guess(NamedTuple):
    """A chain of tokens by their counts."""

    tokens: list[int]
    matched: int
    """Tokens of the suffix that the first one followed."""
    score: float
    """How many tokens the counts expect to be right: the sum of the products of shares."""


class _After(NamedTuple):
    count: int
    last: int


class Counts:
    """n-gram -> next token -> times seen and place last seen, over one text or several."""

    def __init__(self, match: int) -> None:
        self._match = match
        self._after: dict[tuple[int, ...], dict[int, _After]] = {}
        self._place = 0

    def __len__(self) -> int:
        """The n-grams kept."""
        return len(self._after)

    def add(self, before: Sequence[int], token: int) -> None:
        """Note that a token followed a text, of which the last `match` tokens are read."""
        self._place += 1
        for gram in self._grams(before):
            after = self._after.setdefault(gram, {})
            count = after[token].count if token in after else 0
            after[token] = _After(count + 1, self._place)

    def remove(self, before: Sequence[int], token: int) -> None:
        """Take one `add` back; what was seen last stays the last."""
        for gram in self._grams(before):
            after = self._after[gram]
            count, last = after[token]
            if count > 1:
                after[token] = _After(count - 1, last)
            else:
                del after[token]
            if not after:
                del self._after[gram]

    def guess(self, before: Sequence[int], length: int) -> Guess:
        """The likeliest chain; it ends where the counts say that it is unlikely to be right."""
        recent, chance, score, matched = list(before[-self._match :]), 1.0, 0.0, 0
        tokens: list[int] = []
        while len(tokens) < length:
            found = self._likeliest(recent)
            if found is None or chance * found[1] < LEAST_CHANCE:
                break
            token, share, size = found
            matched = matched or size
            tokens.append(token)
            chance *= share
            score += chance
            recent = [*recent, token][-self._match :]
        return Guess(tokens, matched, score)

    def _likeliest(self, recent: Sequence[int]) -> tuple[int, float, int] | None:
        """The token that followed the longest known suffix most, its share, the suffix's size."""
        for first in range(len(recent)):
            after = self._after.get(tuple(recent[first:]))
            if after:
                token = max(after, key=lambda one: after[one])
                total = sum(one.count for one in after.values())
                return token, after[token].count / total, len(recent) - first
        return None

    def _grams(self, before: Sequence[int]) -> list[tuple[int, ...]]:
        recent = tuple(before[-self._match :])
        return [recent[first:] for first in range(len(recent))]


class PastTexts:
    """Counts over the latest texts of at most `room` tokens together, the oldest dropped first."""

    def __init__(self, match: int, room: int) -> None:
        self.counts = Counts(match)
        self._match, self._room = match, room
        self._texts: deque[list[int]] = deque()
        self.num_tokens = 0
        """Tokens of the texts kept."""

    def add(self, ids: Sequence[int]) -> None:
        """Keep a finished text, or its last `room` tokens."""
        text = list(ids[-self._room :])
        self._texts.append(text)
        self.num_tokens += len(text)
        for place in range(1, len(text)):
            self.counts.add(text[max(0, place - self._match) : place], text[place])
        while self.num_tokens > self._room:
            oldest = self._texts.popleft()
            self.num_tokens -= len(oldest)
            for place in range(1, len(oldest)):
                self.counts.remove(oldest[max(0, place - self._match) : place], oldest[place])
