"""Where a row's states come from: the target itself, once and stored or whenever asked.

Letters: B rows of one pass, T positions, F captured layers times H, H hidden size.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from outrider.data.batches import StoredRow
from outrider.data.capture import check_layers
from outrider.data.rows import Row
from outrider.data.target import Target


class RowStates(NamedTuple):
    """A row's states, in the precision and on the device that they were computed in."""

    aux_TF: Tensor
    last_TH: Tensor


class States(Protocol):
    """States of rows by some means."""

    def key(self) -> dict[str, object]:
        """What names the means in a store's key; nothing for the target itself."""
        ...

    def of(self, rows: Sequence[Row]) -> list[RowStates]:
        """The states of rows that fit into one pass."""
        ...


class TargetStates(States):
    """One pass of the target over rows padded on the right, which a causal target cannot see."""

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        self.target = target
        self.layers = check_layers(layers, target.num_layers)

    @override
    def key(self) -> dict[str, object]:
        return {}

    @override
    def of(self, rows: Sequence[Row]) -> list[RowStates]:
        ids_BT = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.int64)
        for place, row in enumerate(rows):
            ids_BT[place, : len(row)] = row.ids
        aux_BTF, last_BTH = self.target.run(ids_BT.to(self.target.device), layers=self.layers)
        return [
            RowStates(aux_BTF[place, : len(row)], last_BTH[place, : len(row)])
            for place, row in enumerate(rows)
        ]


class OnlineFeatures:
    """Rows whose features the target computes when asked: no disk, one pass per pack."""

    def __init__(
        self,
        target: Target,
        rows: Sequence[Row],
        *,
        layers: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.target = target
        self.dtype = dtype or target.dtype
        self._states = TargetStates(target, layers)
        self.layers = self._states.layers
        self._rows = list(rows)
        self.lengths = [len(row) for row in rows]
        self.row_ids = [row.row_id for row in rows]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def row(self, index: int) -> StoredRow:
        """One row with its features."""
        return self.rows([index])[0]

    def rows(self, indices: Sequence[int]) -> list[StoredRow]:
        """The named rows with their features, from one padded pass."""
        chosen = [self._rows[index] for index in indices]
        return [
            StoredRow(
                row.ids, row.mask, aux_TF.to("cpu", self.dtype), last_TH.to("cpu", self.dtype)
            )
            for row, (aux_TF, last_TH) in zip(chosen, self._states.of(chosen), strict=True)
        ]


class BareRows:
    """Rows without features, for those who run the target themselves; states are of width 0."""

    def __init__(self, rows: Sequence[Row], *, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._rows = list(rows)
        self.lengths = [len(row) for row in rows]
        self.row_ids = [row.row_id for row in rows]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def rows(self, indices: Sequence[int]) -> list[StoredRow]:
        """The named rows."""
        chosen = [self._rows[index] for index in indices]
        empty = [torch.empty(len(row), 0, dtype=self.dtype) for row in chosen]
        return [
            StoredRow(row.ids, row.mask, none, none)
            for row, none in zip(chosen, empty, strict=True)
        ]
