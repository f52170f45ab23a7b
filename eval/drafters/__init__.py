"""Drafters behind one small protocol: what the decode loop asks of anything that guesses ahead.

Dimensions: T positions, F fused feature channels, H hidden size, V vocabulary, N tree nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from outrider.data.cache import RowCache
from outrider.data.target import Captured
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.tree import Tree


@dataclass(frozen=True)
class Draft:
    """A drafted tree; `law(node)` is the [V] law a node's token was drawn from, None if chosen.

    That law is the one given the siblings drawn before it. `law` is left out of chosen trees.
    """

    tree: Tree
    law: Callable[[int], Tensor | None] | None = None
    watch: Callable[[Tensor], None] | None = None
    """Called with the target's logits [N, V] after every node, before `Drafter.accept`."""


class Noise(Protocol):
    """Where drawn drafts get their coins from."""

    def draft(self, depth: int, slot: int = 0) -> float:
        """The coin in [0, 1) of the draft, numbered `slot`, that follows a node of this depth."""
        ...


class Drafter(Protocol):
    """Guesses what the target says next, for one row of text.

    The text is known up to the root, the newest token; the target has run up to the one before.
    """

    @property
    def layers(self) -> tuple[int, ...]:
        """Target layers whose states the drafter reads."""
        ...

    @property
    def siblings(self) -> Siblings:
        """How a node's children come about; of drawn ones `Draft.law` gives the law."""
        ...

    def start(self, ids: Sequence[int], captured: Captured) -> None:
        """Begin a row: its tokens, and the target's states at all of them but the newest."""
        ...

    def propose(self, max_depth: int, noise: Noise) -> Draft:
        """Draft at most `max_depth` tokens ahead of the root."""
        ...

    def accept(self, ids: Sequence[int], captured: Captured) -> None:
        """Go on by these tokens; states at the old root and at all of them but the newest."""
        ...


@runtime_checkable
class ReadsCache(Protocol):
    """A drafter that reads the target's keys and values of the text."""

    def share(self, cache: RowCache) -> None:
        """Take the cache of the row that starts next, in row 0.

        Between rounds it holds all positions but the newest token's; it belongs to the loop.
        """
        ...


@runtime_checkable
class KeepsTexts(Protocol):
    """A drafter that learns from finished texts: `accept` does not tell their last tokens."""

    def end(self, ids: Sequence[int]) -> None:
        """The row has ended with these tokens."""
        ...
