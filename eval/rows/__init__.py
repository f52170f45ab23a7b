"""Many rows decoded in step: one call of the target verifies the drafts of all of them.

Rows are of unlike lengths and accept unlike numbers of drafts; a round is over when the call is.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from outrider.data.target import Captured
from outrider.eval.drafters import Draft, Drafter, KeepsTexts, Noise, ReadsCache
from outrider.eval.drafters.replay import Plain
from outrider.eval.rules.verdict import Siblings


class RowsDrafter(Protocol):
    """Guesses ahead for rows 0, 1, ... of a batch, as a `Drafter` does for one.

    It serves one run: rows that are dropped do not come back.
    """

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

    def propose(self, max_depths: Sequence[int], noises: Sequence[Noise]) -> list[Draft]:
        """Draft for every row, at most its depth of tokens ahead of its root.

        A row's draft is what it would be alone, so that its text is, too.
        """
        ...

    def accept(
        self, tokens: Sequence[Sequence[int]], captured: Captured, kept: Sequence[Sequence[int]]
    ) -> None:
        """Go on by each row's tokens; its states are those of `captured` at its kept nodes."""
        ...

    def end(self, row: int, ids: Sequence[int]) -> None:
        """A row ends with these tokens; what `accept` says of it next means nothing."""
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
    """A drafter of its own for every row: whatever drafts one row drafts many, if not in step."""

    def __init__(self, make: Callable[[], Drafter] = Plain) -> None:
        self._make = make
        self._drafters: list[Drafter] = []
        self._first = make()
        self._ended: set[int] = set()
        if isinstance(self._first, ReadsCache):
            raise ValueError(
                f"{type(self._first).__name__} reads the target's cache of one row; decode with it "
                "one row at a time"
            )

    @property
    def layers(self) -> tuple[int, ...]:
        """As each drafter says."""
        return self._first.layers

    @property
    def siblings(self) -> Siblings:
        """As each drafter says."""
        return self._first.siblings

    def start(self, row: int, ids: Sequence[int], captured: Captured) -> None:
        """See `RowsDrafter`."""
        while len(self._drafters) <= row:
            self._drafters.append(self._make())
        self._ended.discard(row)
        self._drafters[row].start(ids, captured)

    def propose(self, max_depths: Sequence[int], noises: Sequence[Noise]) -> list[Draft]:
        """See `RowsDrafter`."""
        rows = zip(self._drafters, max_depths, noises, strict=True)
        return [drafter.propose(max_depth, noise) for drafter, max_depth, noise in rows]

    def accept(
        self, tokens: Sequence[Sequence[int]], captured: Captured, kept: Sequence[Sequence[int]]
    ) -> None:
        """See `RowsDrafter`."""
        for row, (drafter, ids, nodes) in enumerate(zip(self._drafters, tokens, kept, strict=True)):
            if row not in self._ended:
                found = Captured(*(states[row : row + 1, list(nodes)] for states in captured))
                drafter.accept(ids, found)

    def end(self, row: int, ids: Sequence[int]) -> None:
        """See `RowsDrafter`."""
        self._ended.add(row)
        drafter = self._drafters[row]
        if isinstance(drafter, KeepsTexts):
            drafter.end(ids)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """See `RowsDrafter`."""
        self._drafters = [self._drafters[row] for row in rows]
        self._ended = {new for new, old in enumerate(rows) if old in self._ended}

    def save(self) -> None:
        """Nothing: drafters of one row are not rolled back; those that read no states need not."""

    def restore(self, saved: None) -> None:
        """Nothing."""
