"""Medusa-2: the settings of a run that trains heads and target together, and its two stages.

In the first stage the heads learn alone, on the target as it is; in the second both learn. What the
heads' loss asks of the target rises from nothing as a quarter sine (Cai et al. 2024, section 2.2.2:
combined loss, differential learning rates, heads warm-up).
"""

import math
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Literal

from outrider.train.schedule import check_range


@dataclass(frozen=True, kw_only=True)
class JointSettings:
    """Medusa-2: whether the target learns, too, how fast, and what holds it to its original."""

    joint: Literal["none", "lora", "full"] = "none"
    """lora tunes the target through adapters (needs the extra outrider[lora]); full tunes its
    layers and norms themselves. Its embedding and output rows stay, for heads borrow them."""

    target_lr: float = 1e-4
    """Peak learning rate of the target, over the second stage; below the heads' as in the paper."""

    lora_rank: int = 32
    """lora only: rank of each adapter."""

    lora_alpha: int = 16
    """lora only: adapters count lora_alpha / lora_rank."""

    heads_first: float = 0.4
    """Share of all steps in which the heads learn alone (Medusa-1); 0 with heads that are trained
    already and come by --init."""

    head_weight: float = 0.2
    """Weight that the heads' loss ends with in what the target learns."""

    head_rise: float = 1.0
    """Share of the second stage in which that weight rises from 0."""

    kl_weight: float = 1.0
    """Weight of the divergence from the original's law to the tuned target's, per token."""

    lm_weight: float = 0.0
    """Weight of the tuned target's cross-entropy on the supervised tokens, per token."""

    def __post_init__(self) -> None:
        for name in ("target_lr", "head_weight", "kl_weight", "lm_weight"):
            check_range(name, getattr(self, name), low=0)
        check_range("lora_rank", self.lora_rank, low=1)
        check_range("lora_alpha", self.lora_alpha, low=1)
        check_range("heads_first", self.heads_first, low=0, below=1)
        check_range("head_rise", self.head_rise, low=0, high=1)
        idle = {"none": [field.name for field in fields(self)], "full": ["lora_rank", "lora_alpha"]}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in idle.get(self.joint, ()) and value != field.default:
                wanted = "lora" if self.joint == "full" else "lora or full"
                raise ValueError(
                    f"{field.name} is {value} with joint {self.joint}, which does not use it; "
                    f"leave it out or set joint to {wanted}"
                )
        if self.joint == "lora":
            check_peft()
        if self.joint != "none" and self.kl_weight == 0 and self.lm_weight == 0:
            raise ValueError(
                "kl_weight and lm_weight are both 0: nothing would hold the target to what it "
                "says; give one of them (kl_weight 1 is self-distillation)"
            )


def first_joint_step(joint: JointSettings, num_steps: int) -> int:
    """The first optimiser step (from 0) in which the target learns."""
    return min(round(joint.heads_first * num_steps), num_steps - 1)


def head_weight(joint: JointSettings, step: int, num_steps: int) -> float:
    """Weight of the heads' loss in the target's gradient at a step: 0 in the first stage."""
    begin = first_joint_step(joint, num_steps)
    if step < begin:
        return 0.0
    rise = joint.head_rise * (num_steps - begin)
    progress = min(1.0, (step - begin + 1) / rise) if rise > 0 else 1.0
    return joint.head_weight * math.sin(math.pi / 2 * progress)


def check_peft() -> None:
    """Refuse adapters where peft is not installed."""
    try:
        metadata.version("peft")
    except metadata.PackageNotFoundError:
        raise ValueError(
            "joint is 'lora', which needs the package peft: pip install 'outrider[lora]' (in a "
            "checkout: pip install -e '.[lora]'), or use --joint full"
        ) from None
