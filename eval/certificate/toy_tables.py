"""The seed article's tables on the four-token language: samplers judged by counting, and speed.

Dimensions: S contexts, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.eval.certificate.law import Law, Text, target_law
from outrider.eval.certificate.toy import (
    NUM_TOKENS,
    Toy,
    call_starts,
    faulty_round,
    rejection_round,
    sample_texts,
)

COUNTS = (1_000, 10_000, 100_000, 400_000)
COSTS = (0.02, 0.1, 0.3)
_TEXT = 4


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Sampled texts beside the exact law of texts."""

    sampler: str
    num_texts: int
    distance: float
    """Total variation of the counts; falls as 1/sqrt(num_texts) for an exact sampler."""
    chi_square: float
    """Pearson's statistic over degrees of freedom: near one for an exact sampler."""


def counted(toy: Toy, counts: Sequence[int] = COUNTS, seed: int = 0) -> list[Counted]:
    """Target-only, exact and faulty sampling of texts of four tokens, three drafts a call."""
    law = target_law(toy.language(), _TEXT)
    samplers = {
        "target only": rejection_round(toy, 0),
        "rejection": rejection_round(toy, 3),
        "planted fault": faulty_round(toy, 3),
    }
    return [
        _compare(name, sample_texts(run, num_texts=n, num_tokens=_TEXT, seed=seed), law)
        for name, run in samplers.items()
        for n in counts
    ]


def _compare(name: str, texts: dict[Text, int], law: Law) -> Counted:
    num_texts = sum(texts.values())
    rows = [(texts.get(text, 0), num_texts * float(chance)) for text, chance in law.items()]
    distance = sum(abs(seen - wanted) for seen, wanted in rows) / (2 * num_texts)
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in rows) / (len(rows) - 1)
    return Counted(sampler=name, num_texts=num_texts, distance=distance, chi_square=chi_square)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A draft length in the long run, exactly, and by the formula for one alpha."""

    length: int
    judged_alpha: float
    """Accepted over judged drafts; judged are the accepted and the first refused."""
    tokens: float
    """Tokens per target call."""
    formula: float
    """(1 - alpha^(k+1))/(1 - alpha) with the judged alpha (Leviathan et al. 2023)."""
    speedups: tuple[float, ...]
    """tokens/(k c + 1) for each draft cost c of `COSTS`."""


def speed(toy: Toy, length: int) -> Speed:
    """The tables of one draft length."""
    accept_SV = np.minimum(toy.target_SV, toy.draft_SV)
    reach_SS = np.eye(NUM_TOKENS)
    starts_S = call_starts(toy, length)
    survival = [1.0]
    for _ in range(length):
        reach_SS = reach_SS @ accept_SV
        survival.append(float(starts_S @ reach_SS.sum(1)))
    alpha, tokens = sum(survival[1:]) / sum(survival[:-1]), sum(survival)
    return Speed(
        length=length,
        judged_alpha=alpha,
        tokens=tokens,
        formula=(1 - alpha ** (length + 1)) / (1 - alpha),
        speedups=tuple(tokens / (length * cost + 1) for cost in COSTS),
    )
