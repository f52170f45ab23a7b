"""The optimiser: which parameters decay, which are orthogonalised, and their rates.

Weights are fp32 masters; compute in bf16 happens under autocast and never touches them.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outrider.train.muon import Muon, Split
from outrider.train.schedule import ScheduleSettings, check_range, rate


@dataclass(frozen=True, kw_only=True)
class OptimSettings:
    """The optimiser: fp32 master weights whatever the compute precision."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon orthogonalises updates of the inner matrices (those of attention a head at a time);
    tables and norms stay with AdamW."""

    lr: float = 1e-4
    """Peak learning rate."""

    muon_lr: float = 1e-3
    """muon only: peak learning rate of the inner matrices."""

    beta1: float = 0.9
    """Decay of the gradient average."""

    beta2: float = 0.95
    """Decay of the squared-gradient average."""

    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; norms never decay."""

    clip: float = 0.5
    """Largest gradient norm; larger gradients are scaled down to it. 0 turns clipping off."""

    ema: float | None = None
    """Judge and export the exponential average of the weights with this decay a step, warmed up as
    (1 + step) / (10 + step); 0.999 is usual."""

    def __post_init__(self) -> None:
        check_range("lr", self.lr, above=0)
        check_range("muon_lr", self.muon_lr, above=0)
        for name in ("beta1", "beta2"):
            check_range(name, getattr(self, name), low=0, below=1)
        check_range("weight_decay", self.weight_decay, low=0)
        check_range("clip", self.clip, low=0)
        if self.ema is not None:
            check_range("ema", self.ema, low=0, below=1)


def build(head: nn.Module, optim: OptimSettings) -> list[Optimizer]:
    """Optimisers over the head's own parameters; each group remembers its peak rate."""
    inner = inner_matrices(head, optim)
    taken = {id(value) for value in inner}
    rest = [x for x in head.parameters() if x.requires_grad and id(x) not in taken]
    groups = [
        {
            "params": [value for value in rest if (value.ndim > 1) == decays],
            "weight_decay": optim.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    found: list[Optimizer] = []
    if groups:
        betas = (optim.beta1, optim.beta2)
        found.append(torch.optim.AdamW(groups, lr=optim.lr, betas=betas, fused=True))
    if inner:
        groups = [{"params": values, "split": split} for split, values in by_split(head, inner)]
        found.append(Muon(groups, lr=optim.muon_lr, weight_decay=optim.weight_decay))
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return found


def inner_matrices(head: nn.Module, optim: OptimSettings) -> list[Tensor]:
    """The trained matrices that Muon moves: none of a table, and none under AdamW."""
    if optim.optimizer != "muon":
        return []
    return [
        value
        for name, value in head.named_parameters()
        if value.requires_grad
        and value.ndim == 2
        and not any(table in name for table in ("lm_head", "embed_tokens"))
    ]


def by_split(
    head: nn.Module, inner: Iterable[Tensor]
) -> Iterator[tuple[Split | None, list[Tensor]]]:
    """Matrices that Muon moves, grouped by the blocks into which they fall."""
    from outrider.heads.layers import Attention  # settings are read before torch models load

    splits: dict[int, Split] = {}
    for module in head.modules():
        if isinstance(module, Attention):
            size = module.head_dim
            for part in (module.q_proj, module.k_proj, module.v_proj):
                splits[id(part.weight)] = ("rows", size)
            splits[id(module.o_proj.weight)] = ("columns", size)
    found: dict[Split | None, list[Tensor]] = {}
    for value in inner:
        found.setdefault(splits.get(id(value)), []).append(value)
    yield from found.items()


def set_rate(
    optimizers: Iterable[Optimizer], step: int, num_steps: int, shape: ScheduleSettings
) -> None:
    """Give every group its peak rate times the schedule's share.

    A group with "begin" learns from that step on, over a course of its own; its rate is 0 before.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            begin = group.get("begin", 0)
            share = rate(step - begin, num_steps - begin, shape) if step >= begin else 0.0
            group["lr"] = group["peak"] * share


def clip(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale gradients down to norm `limit` (0: leave them) and return the norm before it."""
    with_grad = [value for value in parameters if value.grad is not None]
    return torch.nn.utils.clip_grad_norm_(with_grad, limit if limit > 0 else math.inf)


def state_bytes(num_parameters: int, *, num_inner: int = 0, has_average: bool = False) -> int:
    """Bytes of fp32 weights, gradients and moments, and of the weights' average.

    AdamW keeps two moments of a parameter; Muon one, of the `num_inner` that it moves.
    """
    return 4 * (num_parameters * (5 if has_average else 4) - num_inner)
