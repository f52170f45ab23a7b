"""Drafters without a model: none at all, a replayed text, one that is never right, random ones.

They bound what a head can do (nothing, everything) and exercise the loop in tests.
"""

from collections.abc import Sequence

import torch

from outrider.data.target import Captured
from outrider.eval.drafters import Draft, Noise
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.tree import chain


class Plain:
    """Drafts nothing: the loop is then plain decoding."""

    layers: tuple[int, ...] = ()
    siblings = Siblings.NONE  # any rule will do

    def start(self, ids: Sequence[int], captured: Captured) -> None:  # noqa: ARG002
        """Note the newest token."""
        self._root = ids[-1]

    def propose(self, max_depth: int, noise: Noise) -> Draft:  # noqa: ARG002
        """The root alone."""
        return Draft(chain(self._root, ()))

    def accept(self, ids: Sequence[int], captured: Captured) -> None:  # noqa: ARG002
        """Note the newest token."""
        self._root = ids[-1]


class Replay:
    """Drafts the given continuation of the row: a ceiling when it is the target's own answer.

    With `shift`, every drafted id is moved by it, so that a right text becomes an always wrong one.
    """

    layers: tuple[int, ...] = ()
    siblings = Siblings.CHOSEN

    def __init__(
        self, ids: Sequence[int], length: int, *, shift: int = 0, vocab_size: int = 0
    ) -> None:
        self._text, self._length = list(ids), length
        if shift:
            self._text = [(token + shift) % vocab_size for token in self._text]

    def start(self, ids: Sequence[int], captured: Captured) -> None:  # noqa: ARG002
        """Note where the row stands."""
        self._root, self._place = ids[-1], len(ids)

    def propose(self, max_depth: int, noise: Noise) -> Draft:  # noqa: ARG002
        """The next tokens of the text, by position in the row."""
        stop = self._place + min(self._length, max_depth)
        return Draft(chain(self._root, self._text[self._place : stop]))

    def accept(self, ids: Sequence[int], captured: Captured) -> None:  # noqa: ARG002
        """Move on."""
        self._root, self._place = ids[-1], self._place + len(ids)


class Uniform:
    """Draws every draft from the uniform law: the worst honest drafter."""

    layers: tuple[int, ...] = ()
    siblings = Siblings.SINGLE

    def __init__(self, vocab_size: int, length: int) -> None:
        self._law_V = torch.full((vocab_size,), 1 / vocab_size)
        self._length = length

    def start(self, ids: Sequence[int], captured: Captured) -> None:  # noqa: ARG002
        """Note the newest token."""
        self._root = ids[-1]

    def propose(self, max_depth: int, noise: Noise) -> Draft:
        """A chain of uniform tokens."""
        size = len(self._law_V)
        depths = range(min(self._length, max_depth))
        tokens = [int(noise.draft(depth) * size) for depth in depths]
        return Draft(chain(self._root, tokens), lambda node: self._law_V)  # noqa: ARG005

    def accept(self, ids: Sequence[int], captured: Captured) -> None:  # noqa: ARG002
        """Note the newest token."""
        self._root = ids[-1]
