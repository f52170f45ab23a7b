"""A draft's keys and values for rows of unlike lengths: each row appends, counts and rolls back.

Letters: B rows, T new entries, S all entries, A key-value heads, E head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from outrider.heads.cache import Entries, HeadCache, Store


class RowHeadCache(HeadCache):
    """A step writes its entries after each row's length; none counts until `advance` says so.

    Steps need a mask and positions by row, as entries behind a row's length are another's or old.
    """

    def __init__(self, num_rows: int, capacity: int = 256) -> None:
        super().__init__(capacity)
        self.lengths_B = torch.zeros(num_rows, dtype=torch.long)
        """Entries that count, per row."""

    @override
    def append(
        self,
        key_BTAE: Tensor,
        value_BTAE: Tensor,
        position_BT: Tensor | None = None,
        layer: int = 0,
    ) -> Entries:
        """Write T entries after each row's length; returns S = longest length + T of them."""
        num_new = key_BTAE.shape[1]
        end = self.length + num_new
        if layer not in self._layers:
            self._layers[layer] = Store(key_BTAE, max(self._capacity, end), position_BT)
        store = self._layers[layer]
        store.reserve(end)
        lengths_B1 = self.lengths_B.to(key_BTAE.device)[:, None]
        rows_B1 = torch.arange(len(lengths_B1), device=key_BTAE.device)[:, None]
        slots_BT = lengths_B1 + torch.arange(num_new, device=key_BTAE.device)
        # Index tensors around a slice put their own axes first, hence [B, T, A, E].
        store.key[rows_B1, :, slots_BT] = key_BTAE
        store.value[rows_B1, :, slots_BT] = value_BTAE
        position_BS = None
        if store.position is not None and position_BT is not None:
            store.position[rows_B1, slots_BT] = position_BT
            position_BS = store.position[:, :end]
        return Entries(store.key[:, :, :end], store.value[:, :, :end], position_BS)

    @override
    def skip(self, num_rows: int) -> None:
        """Nothing: `advance` counts."""

    def advance(self, counts: int | Sequence[int] | Tensor) -> None:
        """Count the last step's first entries, one number or one a row."""
        self.set_lengths(self.lengths_B + torch.as_tensor(counts))

    def set_lengths(self, lengths_B: Tensor) -> None:
        """Count other numbers of entries; what was written stays until overwritten."""
        self.lengths_B = lengths_B
        self.length = int(lengths_B.max()) if len(lengths_B) else 0

    def replace_row(self, row: int, other: "RowHeadCache") -> None:
        """Make `row` a copy of the one row of another cache."""
        length = int(other.lengths_B[0])
        for layer, theirs in other._layers.items():
            if layer not in self._layers:
                self._layers[layer] = theirs.blank(len(self.lengths_B))
            self._layers[layer].copy_row(row, theirs, length)
        lengths_B = self.lengths_B.clone()
        lengths_B[row] = length
        self.set_lengths(lengths_B)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        for store in self._layers.values():
            store.keep_rows(rows)
        self.set_lengths(self.lengths_B[list(rows)])
