"""Settings of what a run optimises, shared by all heads; every docstring is a flag's help."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from outrider.train.mixture import parse_terms
from outrider.train.schedule import check_range

if TYPE_CHECKING:
    from outrider.heads.objective import Objective


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What is optimised: the divergence from the target, over the draft steps."""

    unroll_decay: float = 0.8
    """Draft step i counts unroll_decay^i."""

    step_weights: tuple[float, ...] | None = None
    """What each draft step counts, one number a step, instead of unroll_decay. Only their ratios
    matter."""

    aim: int | None = None
    """Weigh each draft step at each place by the target calls that its acceptance saves there, for
    chains of this length, beside unroll_decay or step_weights; with --loss tv that is the gradient
    of calls per token. Places weigh alike when left out."""

    normalise: Literal["token", "document"] = "token"
    """What weighs the same in an optimiser step: every supervised token, or every document (row)
    with all its supervised tokens together, however many."""

    loss: str = "soft_ce"
    """Divergence from the target's law over the draft vocabulary: soft_ce, kl, reverse_kl, jsd,
    hard_ce (to the target's likeliest token), tv, lk_alpha (minus log acceptance), lk_lambda (KL
    turning into TV); or a sum such as tv:0.9,soft_ce:0.1."""

    lk_decay: float = 3.0
    """lk_lambda only: KL weighs exp(-lk_decay * acceptance), TV the rest; 0 is KL alone."""

    teacher_top_k: int | None = None
    """Compare laws over the target's so many likeliest tokens and one outcome for all others, which
    keeps the tail's mass but not its shape; whole laws by default."""

    loss_temperature: float = 1.0
    """Temperature of both laws in the loss; sampling at this temperature is what it aims at."""

    def __post_init__(self) -> None:
        check_range("unroll_decay", self.unroll_decay, above=0, high=1)
        check_range("lk_decay", self.lk_decay, low=0)
        check_range("loss_temperature", self.loss_temperature, above=0)
        for name in ("teacher_top_k", "aim"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), low=1)
        for weight in self.step_weights or ():
            check_range("step_weights", weight, above=0)
            check_range("step_weights", weight, low=1e-6, high=1e6)  # others are lost in fp32
        parse_terms(self.loss)

    def divergence(self) -> "Objective":
        """What is minimised at one position."""
        from outrider.heads.objective import Objective  # settings are read before models load

        return Objective(
            terms=parse_terms(self.loss),
            lk_decay=self.lk_decay,
            top_k=self.teacher_top_k,
            temperature=self.loss_temperature,
            aim=self.aim,
        )

    def weights(self, num_steps: int) -> tuple[float, ...]:
        """What each of so many draft steps counts."""
        if self.step_weights is None:
            return tuple(self.unroll_decay**step for step in range(num_steps))
        if len(self.step_weights) != num_steps:
            raise ValueError(
                f"step_weights has {len(self.step_weights)} numbers for {num_steps} draft steps; "
                "give one for each"
            )
        return self.step_weights
