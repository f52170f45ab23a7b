"""Many rows decoded in step: one call of the target verifies the drafts of all of them.

Rows are of unlike lengths and accept unlike numbers of drafts; a round is over when the call is.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from outrider.data.target import Captured
from outrider.eval.drafters import Draft, Drafter, Noise
from outrider.eval.drafters.replay import Plain
from outrider.eval.rules.verdict import Siblings


class RowsDrafter(Protocol):
    """Guesses ahead for rows 0, 1, ... of a batch, as a `Drafter` does for one."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Target layers whose states the drafter reads."""
        ...

    @property
    def siblings(self) -> Siblings:
        """How a node's children come about."""
        ...

    def start(self, row: int, ids: Sequence[int], captured: Captured) -> None:
        """Begin a row: its tokens, and the target's states [1, T, .] at all but the newest."""
        ...

    def propose(self, max_depth: int, noises: Sequence[Noise]) -> list[Draft]:
        """Draft for every row, at most `max_depth` tokens ahead of its root."""
        ...

    def accept(
        self, tokens: Sequence[Sequence[int]], captured: Captured, kept: Sequence[Sequence[int]]
    ) -> None:
        """Go on by each row's tokens; its states are those of `captured` at its kept nodes."""
        ...

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        ...

    def save(self) -> Any:  # noqa: ANN401 - its own affair
        """What `restore` needs to come back to here, as long as no row is started or dropped."""
        ...

    def restore(self, saved: Any) -> None:  # noqa: ANN401
        """Come back to where `save` was called."""
        ...


class EachRow:
    """A drafter of its own for every row, for those that read no states: lookup, or none."""

    def __init__(self, make: Callable[[], Drafter] = Plain) -> None:
        self._make = make
        self._drafters: list[Drafter] = []
        self._first = make()

    @property
    def layers(self) -> tuple[int, ...]:
        """None are read."""
        return ()

    @property
    def siblings(self) -> Siblings:
        """As each drafter says."""
        return self._first.siblings

    def start(self, row: int, ids: Sequence[int], captured: Captured) -> None:
        """See `RowsDrafter`."""
        while len(self._drafters) <= row:
            self._drafters.append(self._make())
        self._drafters[row].start(ids, captured)

    def propose(self, max_depth: int, noises: Sequence[Noise]) -> list[Draft]:
        """See `RowsDrafter`."""
        pairs = zip(self._drafters, noises, strict=True)
        return [drafter.propose(max_depth, noise) for drafter, noise in pairs]

    def accept(
        self, tokens: Sequence[Sequence[int]], captured: Captured, kept: Sequence[Sequence[int]]
    ) -> None:
        """See `RowsDrafter`."""
        for drafter, ids, _ in zip(self._drafters, tokens, kept, strict=True):
            drafter.accept(ids, captured)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """See `RowsDrafter`."""
        self._drafters = [self._drafters[row] for row in rows]

    def save(self) -> None:
        """Nothing: such drafters follow the text, and are not rolled back."""

    def restore(self, saved: None) -> None:
        """Nothing."""
