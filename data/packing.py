"""Rows into packs of one size: a row never crosses a pack's end."""

from collections.abc import Iterator, Sequence

import numpy as np


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """First fit in the order given: the rows of each pack, whose lengths sum to `size` at most.

    Shuffle the rows first. Longest-first would fill packs a little better, but it gathers rows of
    one length, and so of one kind, in a step. A tree of free space finds the first fit in O(log n).
    """
    for row, length in enumerate(lengths):
        if not 0 < length <= size:
            raise ValueError(
                f"row {row} has {length} tokens, a pack holds 1 to {size}: rows are never split; "
                f"read rows with a max_length of at most {size}, or raise the pack size"
            )
    free = _FirstFit(len(lengths), size)
    packs: list[list[int]] = []
    for row, length in enumerate(lengths):
        place = free.take(length)
        if place == len(packs):
            packs.append([])
        packs[place].append(row)
    return packs


def shuffled_packs(lengths: Sequence[int], size: int, seed: int) -> list[list[int]]:
    """Rows in an order drawn from the seed, packed."""
    order = np.random.default_rng([seed, 0]).permutation(len(lengths)).tolist()
    packs = pack([lengths[row] for row in order], size)
    return [[order[place] for place in places] for places in packs]


class _FirstFit:
    """The free space of `count` packs; each inner node holds the most that any pack below has."""

    def __init__(self, count: int, size: int) -> None:
        self.width = 1 << max(count - 1, 0).bit_length()
        self.most = [size] * (2 * self.width)

    def take(self, length: int) -> int:
        """Use `length` of the first pack that has it; its number."""
        node = 1
        while node < self.width:
            node = 2 * node if self.most[2 * node] >= length else 2 * node + 1
        place = node - self.width
        self.most[node] -= length
        while node := node // 2:
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])
        return place


def passes(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Rows by index, those of like length together, `limit` padded tokens at a time, longest first.

    A row that is longer than the limit comes alone.
    """
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if group and lengths[group[0]] * (len(group) + 1) > limit:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
