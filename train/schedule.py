"""Learning-rate schedules as pure functions of the optimiser step.

A run of N steps uses rates rate(0) .. rate(N - 1); the last one is exactly the final rate.
A run of one step uses the peak.
"""

import math
from dataclasses import dataclass
from typing import Literal


def check_range(
    name: str,
    value: float,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Raise ValueError unless low <= value <= high and above < value < below."""
    limits = [
        (low, "at least", low is None or value >= low),
        (above, "above", above is None or value > above),
        (high, "at most", high is None or value <= high),
        (below, "below", below is None or value < below),
    ]
    if not (all(holds for _, _, holds in limits) and math.isfinite(value)):
        wanted = " and ".join(f"{word} {limit}" for limit, word, _ in limits if limit is not None)
        raise ValueError(f"{name} is {value}; allowed: {wanted or 'finite numbers'}")


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """How the learning rate moves over the optimiser steps of the whole run."""

    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; wsd stays at the peak, then falls linearly."""

    warmup: float = 0.015
    """Share of all steps in which the rate rises from zero to its peak."""

    cooldown: float = 0.2
    """wsd only: share of all steps in which the rate falls to its end."""

    final_lr: float = 0.0
    """Rate of the very last step, as a share of the peak; constant has no fall."""

    def __post_init__(self) -> None:
        check_range("warmup", self.warmup, low=0, below=1)
        check_range("cooldown", self.cooldown, low=0, high=1)
        check_range("final_lr", self.final_lr, low=0, high=1)
        if self.schedule == "wsd" and self.warmup + self.cooldown > 1:
            raise ValueError(
                f"warmup {self.warmup} and cooldown {self.cooldown} together exceed the whole run; "
                "their sum must be at most 1"
            )


def rate(step: int, num_steps: int, shape: ScheduleSettings) -> float:
    """Share of the peak rate that optimiser step `step` (from 0) of `num_steps` uses."""
    if not 0 <= step < num_steps:
        raise ValueError(f"step is {step}; allowed: 0 to {num_steps - 1}")
    if num_steps == 1:
        return 1.0
    num_warm = min(math.ceil(shape.warmup * num_steps), num_steps - 1)
    if step < num_warm:
        return (step + 1) / (num_warm + 1)
    if shape.schedule == "constant":
        return 1.0
    start = num_warm
    if shape.schedule == "wsd":
        start = max(num_warm, num_steps - 1 - math.ceil(shape.cooldown * num_steps))
    last = num_steps - 1
    if step == last:
        return shape.final_lr
    progress = max(0, step - start) / (last - start)
    fall = 1 - progress if shape.schedule == "wsd" else (1 + math.cos(math.pi * progress)) / 2
    return shape.final_lr + (1 - shape.final_lr) * fall
