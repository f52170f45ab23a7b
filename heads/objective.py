"""What training minimises at one position: a weighted sum of divergences, and how it is measured.

Letters: N rows, W draft vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.heads import losses
from outrider.heads.losses import OBJECTIVES


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A weighted sum of divergences. Weights are used as they are, not normalised."""

    terms: tuple[tuple[str, float], ...] = (("soft_ce", 1.0),)
    """Names of `losses.OBJECTIVES` and weights."""
    lk_decay: float = 3.0
    """lk_lambda only: how fast it turns from KL to TV as acceptance grows."""
    top_k: int | None = None
    """Compare the laws over the teacher's so many likeliest tokens and one outcome for all others
    (`losses.coarsen`); hard_ce looks at tokens alone. None compares whole laws."""
    temperature: float = 1.0
    """Of both laws: logits are divided by it, and the loss is not scaled back."""
    aim: int | None = None
    """Weigh every draft step by the target calls that its acceptance saves there, for chains of
    this length (`saved_calls`). None weighs all places alike."""

    def __post_init__(self) -> None:
        for name, weight in self.terms:
            if name not in OBJECTIVES:
                raise ValueError(f"loss is {name!r}; choose of {', '.join(sorted(OBJECTIVES))}")
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"loss {name} has the weight {weight:g}; give a number above 0")
        names = self.names
        if not names:
            raise ValueError("loss names no divergence; give at least one")
        if len(set(names)) < len(names):
            raise ValueError(f"loss is {', '.join(names)}; name each divergence once")
        if not (self.lk_decay >= 0 and math.isfinite(self.lk_decay)):
            raise ValueError(f"lk_decay is {self.lk_decay}; give at least 0")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature is {self.temperature}; give a number above 0")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; keep at least 1 token of the teacher's law")
        if self.aim is not None and self.aim < 1:
            raise ValueError(f"aim is {self.aim}; give the length of a chain, at least 1")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the divergences."""
        return tuple(name for name, _ in self.terms)

    @property
    def weights(self) -> tuple[float, ...]:
        """Their weights."""
        return tuple(weight for _, weight in self.terms)

    def each(self, logits_NW: Tensor, teacher_NW: Tensor) -> Tensor:
        """Every divergence of every row, [N, terms], differentiable.

        teacher holds the target's probabilities at this temperature.
        """
        logits = logits_NW / self.temperature
        laws = (logits, teacher_NW)
        if self.top_k is not None:
            laws = losses.coarsen(logits, teacher_NW, self.top_k)
        found: list[Tensor] = []
        for name in self.names:
            if name == "lk_lambda":
                found.append(losses.lk_lambda(*laws, decay=self.lk_decay))
            else:
                seen = (logits, teacher_NW) if name == "hard_ce" else laws
                found.append(OBJECTIVES[name](*seen))
        return torch.stack(found, -1)

    def loss(self, logits_NW: Tensor, teacher_NW: Tensor) -> Tensor:
        """The weighted sum for every row, [N], differentiable."""
        each = self.each(logits_NW, teacher_NW)
        return each @ each.new_tensor(self.weights)


def saved_calls(accept_NK: Tensor, valid_NK: Tensor, length: int) -> Tensor:
    """What a little more acceptance of each draft step saves in target calls a token, [N, K].

    A chain of acceptances a_1, a_2, ... makes tau = 1 + a_1 + a_1 a_2 + ... tokens a call; where
    text around is as hard, a token costs 1/tau calls, and the weight of step k is
    -d(1/tau)/da_k = a_1 ... a_{k-1} (1 + a_{k+1} + a_{k+1} a_{k+2} + ...) / tau^2. So hard places
    count most at their first step, and easy ones at all steps alike. Steps after the last, up to
    `length`, accept like the last; a step that is not valid ends the chain. A chain shorter than
    the steps gives the others nothing.
    """
    steps = accept_NK.shape[1]
    alive_NK = accept_NK * valid_NK
    alive_NK = alive_NK * (torch.arange(steps, device=alive_NK.device) < length)
    later_N = torch.zeros_like(alive_NK[:, 0])
    for _ in range(length - steps):
        later_N = alive_NK[:, -1] * (1 + later_N)
    worth_NK = torch.empty_like(alive_NK)
    for step in reversed(range(steps)):
        worth_NK[:, step] = 1 + later_N
        later_N = alive_NK[:, step] * (1 + later_N)
    reach_NK = alive_NK.cumprod(1).roll(1, 1)
    reach_NK[:, 0] = 1.0
    inside = (torch.arange(steps, device=alive_NK.device) < length).to(alive_NK.dtype)
    return reach_NK * worth_NK * inside / (1 + later_N).square().unsqueeze(1)
