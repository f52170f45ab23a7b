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
