"""Did this text come from this target at these settings? Acceptance figures hold only if so.

Greedy text must be the argmax everywhere, near ties apart. Sampled text must be as surprising as
the law says: minus log-probability less entropy, summed over tokens, is a martingale whose variance
is known, so its z-score flags a wrong temperature or foreign text. N tokens, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.data.sampling import Sampling

# Logit gaps below these are noise of batch shape, seen between prefill and token-by-token decoding.
_NEAR_TIE = {torch.float64: 1e-3, torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.1}
_MAX_MISMATCH_SHARE = 0.002
_MAX_Z = 4.5


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """Counts that tell a target's own text from any other; add those of all rows."""

    is_greedy: bool
    """Whether the text claims to be the most likely token everywhere."""
    tokens: int = 0
    """Answer tokens looked at."""
    near_ties: int = 0
    """Greedy: tokens that are not the argmax, by less than rounding noise."""
    mismatches: int = 0
    """Greedy: tokens that are not the argmax by more than that."""
    impossible: int = 0
    """Tokens of probability zero under the stated sampling."""
    surprise: float = 0.0
    """Sum of minus log-probability less entropy, nats."""
    variance: float = 0.0
    """Variance of `surprise` if the text is the target's own."""

    def __add__(self, other: "OnPolicy") -> "OnPolicy":
        return OnPolicy(
            is_greedy=self.is_greedy,
            tokens=self.tokens + other.tokens,
            near_ties=self.near_ties + other.near_ties,
            mismatches=self.mismatches + other.mismatches,
            impossible=self.impossible + other.impossible,
            surprise=self.surprise + other.surprise,
            variance=self.variance + other.variance,
        )

    @property
    def z(self) -> float:
        """Standard deviations between the text's surprise and the law's; 0 for greedy text."""
        return self.surprise / math.sqrt(self.variance) if self.variance > 0 else 0.0

    @property
    def is_off(self) -> bool:
        """Whether the text cannot be the target's own."""
        if self.is_greedy:
            return self.mismatches > _MAX_MISMATCH_SHARE * self.tokens
        return self.impossible > 0 or abs(self.z) > _MAX_Z

    def text(self) -> str:
        """The finding in one line."""
        if self.is_greedy:
            return (
                f"{self.tokens} tokens, {self.near_ties} near ties, "
                f"{self.mismatches} not the argmax"
            )
        return f"{self.tokens} tokens, surprise z = {self.z:+.2f}, {self.impossible} impossible"

    def refuse_off_policy(self, where: str) -> None:
        """ValueError when the text is not the target's own at the stated sampling."""
        if self.is_off:
            raise ValueError(
                f"the text of {where} is not this target's own at this sampling ({self.text()}; "
                f"allowed: {_MAX_MISMATCH_SHARE:.1%} not the argmax, |z| up to {_MAX_Z}, none "
                "impossible); state the sampling it was drawn with, let the target answer the "
                "prompts anew with outrider generate, or measure it as foreign text with "
                "--off-policy"
            )


def check_text(
    logits_NV: Tensor, probs_NV: Tensor, ids_N: Tensor, dtype: torch.dtype, sampling: Sampling
) -> OnPolicy:
    """Compare tokens with the raw logits and the processed law that they claim to come from."""
    if sampling.is_greedy:
        chosen_N = probs_NV.gather(-1, ids_N[:, None])[:, 0] > 0
        if sampling.moves_logits:
            # The gap in raw logits says nothing once they have been moved.
            gap_N = torch.full_like(ids_N, 1, dtype=torch.float32)
        else:
            gap_N = logits_NV.max(-1).values - logits_NV.gather(-1, ids_N[:, None])[:, 0]
        near_N = gap_N < _NEAR_TIE[dtype]
        return OnPolicy(
            is_greedy=True,
            tokens=len(ids_N),
            near_ties=int((~chosen_N & near_N).sum()),
            mismatches=int((~chosen_N & ~near_N).sum()),
        )
    probs_NV = probs_NV.double()
    chance_N = probs_NV.gather(-1, ids_N[:, None])[:, 0]
    possible_N = chance_N > 0
    entropy_N = torch.special.entr(probs_NV).sum(-1)
    square_N = torch.where(probs_NV > 0, probs_NV * probs_NV.log() ** 2, 0).sum(-1)
    surprise_N = torch.where(possible_N, -chance_N.log() - entropy_N, 0)
    return OnPolicy(
        is_greedy=False,
        tokens=len(ids_N),
        impossible=int((~possible_N).sum()),
        surprise=float(surprise_N.sum()),
        variance=float((square_N - entropy_N**2).sum()),
    )
