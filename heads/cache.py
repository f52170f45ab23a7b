"""Keys and values of a draft's layers, preallocated so that a draft step copies nothing old.

Letters: B rows, T new entries, S all entries, A key-value heads, E head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Entries(NamedTuple):
    """All entries of a layer so far; views that the next step leaves as they are."""

    key_BASE: Tensor
    value_BASE: Tensor
    position_BS: Tensor | None
    """Kept for layers with a window."""


class HeadCache:
    """Grows by doubling; entries past `length` are free. One cache per head, B rows alike.

    A step appends to every layer in turn, so between steps all layers hold as many entries.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.length = 0
        self._capacity = capacity
        self._layers: dict[int, Store] = {}

    def append(
        self,
        key_BTAE: Tensor,
        value_BTAE: Tensor,
        position_BT: Tensor | None = None,
        layer: int = 0,
    ) -> Entries:
        """Add a step's entries to a layer; returns all of that layer's."""
        num_new = key_BTAE.shape[1]
        # Layer 0 comes first in a step and moves the end, which the others then meet.
        start = self.length if layer == 0 else self.length - num_new
        end = start + num_new
        if layer not in self._layers:
            self._layers[layer] = Store(key_BTAE, max(self._capacity, end), position_BT)
        store = self._layers[layer]
        store.reserve(end)
        store.key[:, :, start:end] = key_BTAE.transpose(1, 2)
        store.value[:, :, start:end] = value_BTAE.transpose(1, 2)
        position_BS = None
        if store.position is not None and position_BT is not None:
            store.position[:, start:end] = position_BT
            position_BS = store.position[:, :end]
        self.length = end
        return Entries(store.key[:, :, :end], store.value[:, :, :end], position_BS)

    def skip(self, num_rows: int) -> None:
        """Count rows of a head that attends to nothing, so that it keeps no keys."""
        self.length += num_rows

    def truncate(self, length: int) -> None:
        """Forget every entry from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length is {length}; the cache holds {self.length} entries")
        self.length = length

    def compact(self, keep_S: Tensor) -> None:
        """Keep only the entries with these rising indices, moved to the front."""
        for store in self._layers.values():
            store.compact(keep_S)
            self.length = keep_S.shape[0]


class Store:
    """The tensors of one layer."""

    def __init__(self, like_BTAE: Tensor, capacity: int, position_BT: Tensor | None) -> None:
        rows, _, heads, size = like_BTAE.shape
        self.key = like_BTAE.new_zeros((rows, heads, capacity, size))
        self.value = torch.zeros_like(self.key)
        self.position: Tensor | None = None
        if position_BT is not None:
            self.position = position_BT.new_zeros((rows, capacity))

    def reserve(self, end: int) -> None:
        """Room for entries up to `end`."""
        if end <= self.key.shape[2]:
            return
        capacity = max(2 * self.key.shape[2], end)
        self.key, self.value = _grow(self.key, capacity, 2), _grow(self.value, capacity, 2)
        if self.position is not None:
            self.position = _grow(self.position, capacity, 1)

    def compact(self, keep_S: Tensor) -> None:
        size = keep_S.shape[0]
        self.key[:, :, :size] = self.key[:, :, keep_S]
        self.value[:, :, :size] = self.value[:, :, keep_S]
        if self.position is not None:
            self.position[:, :size] = self.position[:, keep_S]

    def blank(self, num_rows: int) -> "Store":
        """As many entries of `num_rows` rows, all zero."""
        _, heads, capacity, size = self.key.shape
        store = Store(self.key.new_empty((num_rows, 0, heads, size)), capacity, None)
        if self.position is not None:
            store.position = self.position.new_zeros((num_rows, capacity))
        return store

    def copy_row(self, row: int, other: "Store", length: int) -> None:
        """Take the first entries of another store's only row."""
        self.reserve(length)
        self.key[row, :, :length] = other.key[0, :, :length]
        self.value[row, :, :length] = other.value[0, :, :length]
        if self.position is not None and other.position is not None:
            self.position[row, :length] = other.position[0, :length]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these."""
        self.key, self.value = self.key[list(rows)], self.value[list(rows)]
        if self.position is not None:
            self.position = self.position[list(rows)]


def _grow(old: Tensor, capacity: int, dim: int) -> Tensor:
    shape = list(old.shape)
    shape[dim] = capacity
    new = old.new_zeros(shape)
    new.narrow(dim, 0, old.shape[dim]).copy_(old)
    return new
