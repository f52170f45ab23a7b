"""Draft trees: tokens under parents, who sees whom, and how a tree is grown.

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


class Growth:
    """An EAGLE-2 tree in the making: score = product of draft probabilities along the path.

    Call `add_level` with the likeliest children of `frontier` until deep enough, then `select`.
    Scores are sums of log-probabilities, so no child outscores its parent; ties keep the order of
    growth, shallower first, so the selected nodes are connected.
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.scores = [0.0]
        self.frontier: list[int] = [0]
        self.parent_slots: list[int] = [0]

    def add_level(
        self, log_probs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], width: int
    ) -> list[int]:
        """Hang children under the frontier's nodes; the best `width` of them are the new frontier.

        Row i holds the children of `frontier[i]`, likeliest first. Afterwards `parent_slots` says
        which row each node of the new frontier came from.
        """
        start = len(self.tokens)
        slot = {node: row for row, node in enumerate(self.frontier)}
        for parent, row_log_probs, row_tokens in zip(self.frontier, log_probs, tokens, strict=True):
            score = self.scores[parent]
            self.tokens += row_tokens
            self.parents += [parent] * len(row_tokens)
            self.scores += [score + min(log_prob, 0.0) for log_prob in row_log_probs]
        self.frontier = self._best(range(start, len(self.tokens)), width)
        self.parent_slots = [slot[self.parents[node]] for node in self.frontier]
        return self.frontier

    def select(self, num_drafts: int) -> Tree:
        """The tree of the `num_drafts` best nodes under the root."""
        kept = [0, *self._best(range(1, len(self.tokens)), num_drafts)]
        number = {old: new for new, old in enumerate(kept)}
        parents = tuple(number.get(self.parents[node], -1) for node in kept)
        return Tree(tuple(self.tokens[node] for node in kept), parents)

    def _best(self, nodes: range, count: int) -> list[int]:
        return sorted(sorted(nodes, key=lambda node: -self.scores[node])[:count])


@dataclass(frozen=True)
class ChainPlan:
    """Draft `length` tokens, each after the last."""

    length: int

    def __post_init__(self) -> None:
        _at_least_one("chain length", self.length)

    @property
    def depth(self) -> int:
        """The most tokens one round can accept."""
        return self.length


@dataclass(frozen=True)
class TreePlan:
    """Draft an EAGLE-2 tree: `depth` levels, `width` nodes expanded in each, `nodes` kept."""

    depth: int
    width: int
    nodes: int

    def __post_init__(self) -> None:
        _at_least_one("tree depth", self.depth)
        _at_least_one("tree width", self.width)
        _at_least_one("tree nodes", self.nodes)


Plan = ChainPlan | TreePlan


def plan_named(text: str) -> Plan:
    """Read `chain:LENGTH` or `tree:DEPTH,WIDTH,NODES`. Raises ValueError for anything else."""
    kind, _, rest = text.partition(":")
    numbers = rest.split(",")
    if all(number.isdecimal() for number in numbers):
        values = [int(number) for number in numbers]
        if kind == "chain" and len(values) == 1:
            return ChainPlan(values[0])
        if kind == "tree" and len(values) == 3:
            return TreePlan(*values)
    raise ValueError(
        f"draft is {text!r}; write chain:LENGTH, such as chain:3, or tree:DEPTH,WIDTH,NODES, such "
        "as tree:4,4,16"
    )


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}; draft at least 1")
