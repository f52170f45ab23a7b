"""Draft trees: tokens under parents, and who sees whom.

Node 0 is the root: the newest token, not yet seen by the target. Dimensions: N nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """Tokens of the nodes and the parent of each, parents first; the root's parent is -1."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(
                f"tree has {len(self.tokens)} tokens and {len(self.parents)} parents; give one "
                "parent per token"
            )
        _shape(self.parents)  # checks them

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depths(self) -> tuple[int, ...]:
        """Each node's distance from the root."""
        return _shape(self.parents).depths

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Each node's children, in node order."""
        return _shape(self.parents).children

    @property
    def is_chain(self) -> bool:
        """Whether every node is the child of the one before it."""
        return _shape(self.parents).is_chain

    @property
    def ancestors(self) -> Tensor:
        """Bool [N, N]: is the column's node on the row's path from the root, itself included?"""
        return _ancestors(self.parents)

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from the root's child down to this one; empty for the root."""
        found: list[int] = []
        while node > 0:
            found.append(node)
            node = self.parents[node]
        return tuple(reversed(found))


@dataclass(frozen=True)
class _Shape:
    depths: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    is_chain: bool


@lru_cache(maxsize=4096)
def _shape(parents: tuple[int, ...]) -> _Shape:
    if not parents or parents[0] != -1:
        raise ValueError(f"parents start with {parents[:1]}; node 0 is the root, its parent -1")
    depths = [0]
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise ValueError(
                f"node {node} has parent {parent}; a parent comes before its node: 0 to {node - 1}"
            )
        depths.append(depths[parent] + 1)
        children[parent].append(node)
    return _Shape(tuple(depths), tuple(map(tuple, children)), depths == list(range(len(parents))))


@lru_cache(maxsize=1024)
def _ancestors(parents: tuple[int, ...]) -> Tensor:
    # By doubling: each pass looks twice as far up.
    num_nodes = len(parents)
    seen_NN = torch.eye(num_nodes, dtype=torch.bool)
    # The root stands for "no more ancestors": it is its own parent and sees only itself.
    up_N = torch.tensor(parents).clamp(min=0)
    for _ in range((num_nodes - 1).bit_length()):
        seen_NN = seen_NN | seen_NN[up_N]
        up_N = up_N[up_N]
    return seen_NN


def chain(root: int, drafts: Sequence[int]) -> Tree:
    """The tree in which every draft follows the one before."""
    return Tree((root, *drafts), tuple(range(-1, len(drafts))))


def shape_from_counts(counts: Sequence[int]) -> tuple[int, ...]:
    """Parents of a fixed tree, breadth first, from each node's number of children.

    Counts of trailing leaves may be left out: (2, 1) is two children, a grandchild under the first.
    """
    parents = [-1]
    for node, count in enumerate(counts):
        if node >= len(parents) or count < 0:
            raise ValueError(
                f"child counts are {tuple(counts)}, but entry {node} is negative or for a node "
                "that does not exist; count breadth first, 0 for a leaf"
            )
        parents += [node] * count
    return tuple(parents)
