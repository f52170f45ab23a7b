"""The shapes of B draft trees as tables: what batched verification looks children up in.

How many children a depth has room for is known on the host, the rest only on the device.
Dimensions: B rounds, N nodes, K children of a node, D depths, M nodes at one depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from outrider.eval.trees.tree import Tree


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The trees of B rounds without their tokens. Nodes and children that are not there are -1."""

    parents_BN: Tensor
    depths_BN: Tensor
    """Distance from the root; 0 also where a round has no such node."""
    slots_BN: Tensor
    """Which child of its parent a node is."""
    ranks_BN: Tensor
    """Place in the order of leaving the nodes depth first; the root's is the last."""
    children_BNK: Tensor
    """In draw order."""
    levels_BDM: Tensor
    """The nodes at each depth, those with most children first."""
    groups: tuple[tuple[int, ...], ...]
    """By depth and slot: how many nodes of a round have such a child, at most."""
    num_inner: int
    """One more than the largest number of a node with children."""
    alike: tuple[tuple[int, ...], ...] | None = None
    """`levels_BDM` on the host where all trees are one, so that rows need no copy."""

    @property
    def widths(self) -> tuple[int, ...]:
        """By depth, the most children of a node."""
        return tuple(map(len, self.groups))

    @property
    def is_chain(self) -> bool:
        """Whether no node has a second child."""
        return max(self.widths, default=1) == 1


@dataclass(frozen=True)
class _Table:
    """The tables of one tree."""

    parents: tuple[int, ...]
    depths: tuple[int, ...]
    slots: tuple[int, ...]
    ranks: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    levels: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def _table(parents: tuple[int, ...]) -> _Table:
    tree = Tree(tuple(0 for _ in parents), parents)  # checks them
    children, depths = tree.children, tree.depths
    slots, ranks = [0] * len(parents), [0] * len(parents)
    for family in children:
        for slot, child in enumerate(family):
            slots[child] = slot
    # The reverse of a walk that sees a node before its children, and these last to first.
    waiting, rank = [0], len(parents)
    while waiting:
        node, rank = waiting.pop(), rank - 1
        ranks[node] = rank
        waiting += children[node]
    levels = tuple(
        tuple(
            sorted(
                (node for node, at in enumerate(depths) if at == depth),
                key=lambda node: -len(children[node]),
            )
        )
        for depth in range(max(depths))
    )
    return _Table(parents, depths, tuple(slots), tuple(ranks), children, levels)


def shapes_of(
    parents: Sequence[Sequence[int]], device: torch.device | str = "cpu", num_nodes: int = 0
) -> Shapes:
    """Tables of B trees, each given by its nodes' parents as in `Tree`.

    `num_nodes` makes room for more nodes than any of them has. Raises ValueError for no trees, and
    for parents that are not a tree.
    """
    if not parents:
        raise ValueError("parents are empty; give the parents of at least one tree")
    tables = [_table(tuple(one)) for one in parents]
    num_nodes = max(num_nodes, *(len(one.parents) for one in tables))
    num_depths = max(len(one.levels) for one in tables)
    most = max(len(family) for one in tables for family in one.children)
    groups = tuple(_group(tables, depth) for depth in range(num_depths))
    widest = max((group[0] for group in groups), default=1)

    def filled(rows: Sequence[Sequence[int]], size: int, empty: int = -1) -> list[list[int]]:
        return [[*row[:size], *[empty] * (size - len(row))] for row in rows]

    def tensor(rows: Sequence[object]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=device)

    return Shapes(
        parents_BN=tensor(filled([one.parents for one in tables], num_nodes)),
        depths_BN=tensor(filled([one.depths for one in tables], num_nodes, 0)),
        slots_BN=tensor(filled([one.slots for one in tables], num_nodes, 0)),
        ranks_BN=tensor(filled([one.ranks for one in tables], num_nodes, num_nodes)),
        children_BNK=tensor(
            [
                filled([*one.children, *[()] * (num_nodes - len(one.parents))], max(most, 1))
                for one in tables
            ]
        ),
        levels_BDM=tensor(
            [filled([*one.levels, *[()] * num_depths][:num_depths], widest) for one in tables]
        ).reshape(len(tables), num_depths, widest),
        groups=groups,
        num_inner=max(1 + max(one.parents) for one in tables),
        alike=tables[0].levels if len({one.parents for one in tables}) == 1 else None,
    )


def _group(tables: Sequence[_Table], depth: int) -> tuple[int, ...]:
    """For each slot at this depth, the most nodes of a tree that have such a child."""
    counts = [
        [len(one.children[node]) for node in one.levels[depth]]
        for one in tables
        if depth < len(one.levels)
    ]
    most = max(max(row) for row in counts)
    return tuple(max(sum(n > slot for n in row) for row in counts) for slot in range(most))
