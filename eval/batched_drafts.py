"""Drafted trees, their laws and noise as tensors: what batched verification reads and returns.

Tables have a fixed size whatever the trees look like, so that one compiled or captured round serves
them all. Dimensions: B rounds, N nodes, R rows of q, V vocabulary, K children of a node, D depths,
E depths and one more, M nodes at one depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from outrider.eval.tree import Tree
from outrider.eval.verdict import Siblings, Verdict

_SUM_ERROR = 1e-3


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


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """B drafted trees with the laws at their nodes.

    Raises ValueError for tensors that do not fit each other; what only the device knows, such as
    whether laws sum to one, is looked at by `check`.
    """

    shapes: Shapes
    siblings: Siblings
    """How children came about, in every round alike."""
    tokens_BN: Tensor
    """int64; the root's is not read."""
    p_BNV: Tensor
    """The target's law after each node; float32 or float64, contiguous."""
    q_BRV: Tensor | None = None
    """The laws that children were drawn from, one for all children of a node: a child drawn
    without replacement, or beside chosen ones, has that law without its elder siblings'
    tokens, normalised. None where all are chosen."""
    rows_BN: Tensor | None = None
    """int64: the row of `q_BRV` for each node's children, any where it has none. None: that of the
    node's own number."""
    is_drawn_BN: Tensor | None = None
    """bool: which nodes were drawn; only for hybrid siblings, where others were chosen."""

    def __post_init__(self) -> None:
        size = tuple(self.shapes.parents_BN.shape)
        for name, is_allowed, remedy in _checks(self, size):
            if not is_allowed:
                value = getattr(self, name)
                shown = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else value
                raise ValueError(f"{name} is {shown}; {remedy}")

    @property
    def is_judged_without(self) -> bool:
        """Whether a drawn token left the law of its younger siblings."""
        return self.siblings in (Siblings.WITHOUT, Siblings.HYBRID)

    @property
    def rounds_B(self) -> Tensor:  # noqa: N802 (a dimension suffix)
        """The numbers of the rounds."""
        return torch.arange(len(self.p_BNV), device=self.p_BNV.device)

    def row_of(self, round_X: Tensor, node_X: Tensor) -> Tensor:
        """The rows of `q_BRV` that the children of these nodes were drawn from."""
        assert self.q_BRV is not None
        if self.rows_BN is None:
            return node_X.clamp(max=self.q_BRV.shape[1] - 1)
        return self.rows_BN[round_X, node_X]

    def check(self) -> None:
        """Raise ValueError for values that no certificate covers; waits for the device."""
        is_node_BN = self.shapes.parents_BN >= 0
        vocab = self.p_BNV.shape[-1]
        if bool((is_node_BN & ((self.tokens_BN < 0) | (self.tokens_BN >= vocab))).any()):
            raise ValueError(f"tokens_BN has a token outside 0 to {vocab - 1}; give target ids")
        is_node_BN[:, 0] = True
        for name, law, asked in (("p_BNV", self.p_BNV, is_node_BN), ("q_BRV", self.q_BRV, None)):
            if law is None:
                continue
            sums = law.sum(-1)
            is_law = ((sums - 1).abs() < _SUM_ERROR) & (law >= 0).all(-1)
            if not bool((is_law if asked is None else is_law | ~asked).all()):
                raise ValueError(
                    f"{name} has rows that sum to {float(sums.min()):.4g} to "
                    f"{float(sums.max()):.4g}, or a negative entry; give laws"
                )


def _checks(drafts: Drafts, size: tuple[int, ...]) -> list[tuple[str, bool, str]]:
    """Field, whether it is allowed, and what is."""
    p, q, rows, drawn = drafts.p_BNV, drafts.q_BRV, drafts.rows_BN, drafts.is_drawn_BN
    floats = (torch.float32, torch.float64)
    is_chosen = drafts.siblings in (Siblings.CHOSEN, Siblings.NONE)
    is_hybrid = drafts.siblings is Siblings.HYBRID
    shape = f"one int64 for each of {size[0]} rounds' {size[1]} nodes"

    def is_table(one: Tensor | None, dtype: torch.dtype) -> bool:
        return one is not None and one.dtype == dtype and tuple(one.shape) == size

    return [
        ("tokens_BN", is_table(drafts.tokens_BN, torch.int64), f"give {shape}"),
        (
            "p_BNV",
            p.dim() == 3 and tuple(p.shape[:2]) == size and p.dtype in floats and p.is_contiguous(),
            f"give a contiguous float32 or float64 law for each node: {[*size, 'vocabulary']}",
        ),
        ("q_BRV", is_chosen or q is not None, f"give the laws that {drafts.siblings} drafts have"),
        (
            "q_BRV",
            q is None
            or (
                q.dim() == 3
                and (q.shape[0], q.shape[2]) == (p.shape[0], p.shape[2])
                and q.dtype == p.dtype
                and q.is_contiguous()
            ),
            f"give contiguous {p.dtype} laws over the same vocabulary, so many a round",
        ),
        ("rows_BN", rows is None or is_table(rows, torch.int64), f"give {shape}, or None"),
        (
            "is_drawn_BN",
            is_table(drawn, torch.bool) if is_hybrid else drawn is None,
            "give one bool a node for hybrid siblings, and None for others",
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Independent uniforms in [0, 1), float64, for B rounds.

    Keyed by (seed, row, position) they are those of `outrider.eval.noise.KeyedNoise`.
    """

    coins_BN: Tensor
    """The coin that judges each node; rules with one coin a node take its first child's."""
    targets_BE: Tensor
    """By depth, the draw of a token from p; plain decoding's own."""
    rests_BE: Tensor
    """By depth, the draw of a token from what a rejection left."""

    def __post_init__(self) -> None:
        for name in ("coins_BN", "targets_BE", "rests_BE"):
            if getattr(self, name).dtype != torch.float64:
                raise ValueError(
                    f"{name} is {getattr(self, name).dtype}; give float64, as a token rarer than "
                    "a coarse coin's step would never be drawn"
                )


def noise_for(shapes: Shapes, generator: torch.Generator | None = None) -> Noise:
    """Fresh noise for these trees from torch's generator."""
    parents = shapes.parents_BN
    num_rounds, num_draws = len(parents), len(shapes.groups) + 1

    def uniforms(count: int) -> Tensor:
        return torch.rand(
            num_rounds, count, dtype=torch.float64, generator=generator, device=parents.device
        )

    return Noise(
        coins_BN=uniforms(parents.shape[1]),
        targets_BE=uniforms(num_draws),
        rests_BE=uniforms(num_draws),
    )


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """What B rounds emit: the accepted nodes' tokens, then `tokens_B`."""

    paths_BD: Tensor
    """The accepted nodes, -1 after the last."""
    lengths_B: Tensor
    """How many nodes were accepted."""
    tokens_B: Tensor
    num_degenerate_B: Tensor
    """Rejections that left nothing to draw from (rounding: p and q equal), settled by p."""
    is_defect_B: Tensor
    """Whether the round judged a token that its own law cannot produce, or a law without mass."""

    def to_list(self) -> list[Verdict]:
        """The verdicts one by one; waits for the device. Raises ValueError for a defect."""
        defects = self.is_defect_B.nonzero().flatten().tolist()
        if defects:
            raise ValueError(
                f"rounds {defects} have a drafted token with probability 0 under its own draft "
                "law, or a law without mass; give the laws that tokens were drawn from"
            )
        columns = (self.paths_BD, self.lengths_B, self.tokens_B, self.num_degenerate_B)
        return [
            Verdict(path=tuple(path[:length]), token=token, num_degenerate=count)
            for path, length, token, count in zip(*(c.tolist() for c in columns), strict=True)
        ]
