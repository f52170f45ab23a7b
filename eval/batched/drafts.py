"""Drafted trees, their laws and noise as tensors: what batched verification reads and returns.

Dimensions: B rounds, N nodes, R rows of q, V vocabulary, D depths, E depths and one more.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.eval.batched.shapes import Shapes
from outrider.eval.rules.verdict import Siblings, Verdict

_SUM_ERROR = 1e-3


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
    """int64: the row of `q_BRV` for each node's children, any of its rows where there are none.
    None: that of the node's own number."""
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
        if self.rows_BN is not None and self.q_BRV is not None:
            last = self.q_BRV.shape[1] - 1
            if bool(((self.rows_BN < 0) | (self.rows_BN > last)).any()):
                raise ValueError(
                    f"rows_BN has a row outside 0 to {last}, those of q_BRV; give one of these for "
                    "every node, any for a node without children"
                )
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
        (
            "q_BRV",
            q is None or rows is not None or q.shape[1] >= drafts.shapes.num_inner,
            f"give a row for each of the first {drafts.shapes.num_inner} nodes, or rows_BN",
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

    Fresh in every round, but for `targets_BE`, which may be keyed by the row and position of the
    token alone: coins shared by rounds tie them, see `outrider.eval.noise`. Drafts must be drawn
    from fresh coins, too.
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

    def check(self) -> None:
        """Raise ValueError for what is no uniform; waits for the device."""
        for name in ("coins_BN", "targets_BE", "rests_BE"):
            one = getattr(self, name)
            # Not a number is outside, too.
            if not bool(((one >= 0) & (one < 1)).all()):
                raise ValueError(f"{name} has a value outside [0, 1); give uniforms, 1 left out")


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
