"""An exponential average of the weights over the optimiser steps: what is judged and exported."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def decay_at(step: int, decay: float) -> float:
    """Share of the average that update `step` (from 0) keeps: min(decay, (1 + step) / (10 + step)).

    The warm-up lets the first weights, which were never trained, fade within some ten steps.
    """
    return min(decay, (1 + step) / (10 + step))


class WeightAverage:
    """The average of a module's trainable parameters, in their own precision.

    Parameters that are frozen when this is made have no average: they keep their one value.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.live = {name: x for name, x in module.named_parameters() if x.requires_grad}
        self.average = {name: value.detach().clone() for name, value in self.live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights as optimiser step `step` (from 0) left them."""
        share = 1 - decay_at(step, self.decay)
        for name, value in self.live.items():
            self.average[name].lerp_(value, share)

    @contextmanager
    def applied(self) -> Generator[None]:
        """Inside the block the module holds the average, after it its own weights again."""
        kept = {name: value.detach().clone() for name, value in self.live.items()}
        self._fill(self.average)
        try:
            yield
        finally:
            self._fill(kept)

    def load(self, stored: Mapping[str, Tensor]) -> None:
        """Take over a stored average. Raises ValueError where it is another module's."""
        for name in sorted(stored.keys() ^ self.average.keys()):
            where = "the stored average" if name in self.average else "this head"
            raise ValueError(f"tensor {name} is missing from {where}")
        for name, value in stored.items():
            self.average[name].copy_(value)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, value in self.live.items():
            value.copy_(values[name])
