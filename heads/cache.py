"""Keys and values of a draft layer, preallocated so that a draft step copies nothing old.

Letters: B rows, T new entries, S all entries, A key-value heads, E head size.
"""

import torch
from torch import Tensor


class HeadCache:
    """Grows by doubling; entries past `length` are free. One cache per head, B rows alike."""

    def __init__(self, capacity: int = 256) -> None:
        self.length = 0
        self._capacity = capacity
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def append(self, key_BTAE: Tensor, value_BTAE: Tensor) -> tuple[Tensor, Tensor]:
        """Add entries; returns views [B, A, S, E] of all keys and all values so far."""
        end = self.length + key_BTAE.shape[1]
        key, value = self._reserve(key_BTAE, end)
        key[:, :, self.length : end] = key_BTAE.transpose(1, 2)
        value[:, :, self.length : end] = value_BTAE.transpose(1, 2)
        self.length = end
        return key[:, :, :end], value[:, :, :end]

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
        if self._key is None or self._value is None:
            return
        size = keep_S.shape[0]
        self._key[:, :, :size] = self._key[:, :, keep_S]
        self._value[:, :, :size] = self._value[:, :, keep_S]
        self.length = size

    def _reserve(self, like_BTAE: Tensor, end: int) -> tuple[Tensor, Tensor]:
        rows, _, heads, size = like_BTAE.shape
        if self._key is None or self._value is None:
            self._capacity = max(self._capacity, end)
            shape = (rows, heads, self._capacity, size)
            self._key, self._value = like_BTAE.new_zeros(shape), like_BTAE.new_zeros(shape)
        elif end > self._capacity:
            grown = max(2 * self._capacity, end)
            self._key = _grow(self._key, grown)
            self._value = _grow(self._value, grown)
            self._capacity = grown
        return self._key, self._value


def _grow(old: Tensor, capacity: int) -> Tensor:
    rows, heads, used, size = old.shape
    new = old.new_zeros((rows, heads, capacity, size))
    new[:, :, :used] = old
    return new


def causal_mask(num_new: int, num_all: int, device: torch.device) -> Tensor:
    """Bool [1, 1, T, S]: new entry i sees everything up to itself."""
    mask = torch.ones(num_new, num_all, dtype=torch.bool, device=device)
    return mask.tril(num_all - num_new)[None, None]
