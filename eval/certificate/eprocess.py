"""A bet against a law that may be watched for ever: for samplers that cannot be enumerated.

The wealth after n draws is prod (n_i + a)/(n + K a) / p_i, each factor from the counts before its
draw: a Dirichlet mixture over alternatives, fair under p. By Ville's inequality wealth ever
reaches W with probability at most 1/W if p is right, however long one looks and whenever one stops.

Draws needed grow as log W + (K - 1)/2 log n over KL(found || p); `draws_needed` gives them for any
pair of laws. On 16 equal cells at W = 1,000, from a fault in one cell to one spread evenly: 550 to
2,200 draws for total variation 0.10, 2,600 to 11,000 for 0.05, 19,000 to 90,000 for 0.02.
Dimensions: K cells.
"""

import math
from collections.abc import Sequence

import numpy as np

ALARM = 1000.0
"""Wealth at which a law is rejected: at most one false alarm in a thousand runs."""
_PRIOR = 0.5


class EProcess:
    """Bets on the frequencies so far against the law p_K; cells of probability zero are allowed."""

    def __init__(self, p_K: Sequence[float], prior: float = _PRIOR) -> None:
        """Raises ValueError for a law that does not sum to one, or a prior that is not positive."""
        self._p_K = np.asarray(p_K, dtype=np.float64)
        if (self._p_K < 0).any() or abs(self._p_K.sum() - 1) > 1e-9:
            raise ValueError(
                f"p_K sums to {self._p_K.sum()} with least entry {self._p_K.min()}; give a law"
            )
        if prior <= 0:
            raise ValueError(f"prior is {prior}; give a positive number, such as 0.5")
        self._prior = prior
        self._counts_K = np.zeros(len(self._p_K))
        self.log_wealth = 0.0
        self.most = 0.0
        """The largest log-wealth so far; what Ville's inequality is about."""
        self.num_draws = 0

    @property
    def is_rejected(self) -> bool:
        """Whether the wealth has ever reached `ALARM`."""
        return self.most >= math.log(ALARM)

    def add(self, cell: int) -> float:
        """Take one draw; returns the log-wealth, infinite after a draw that p rules out."""
        share = (self._counts_K[cell] + self._prior) / (
            self.num_draws + self._prior * len(self._p_K)
        )
        p = self._p_K[cell]
        self.log_wealth += math.log(share / p) if p > 0 else math.inf
        self._counts_K[cell] += 1
        self.num_draws += 1
        self.most = max(self.most, self.log_wealth)
        return self.log_wealth


def draws_needed(p_K: Sequence[float], found_K: Sequence[float], alarm: float = ALARM) -> int:
    """About how many draws from `found_K` it takes to reject p_K; ValueError if they are equal."""
    p, found = np.asarray(p_K, dtype=np.float64), np.asarray(found_K, dtype=np.float64)
    seen = found > 0
    if (p[seen] == 0).any():
        return math.ceil(1 / found[p == 0].sum())
    divergence = float((found[seen] * np.log(found[seen] / p[seen])).sum())
    if divergence <= 0:
        raise ValueError("found_K equals p_K; equal laws are never told apart")
    # What betting without knowing `found` costs: the regret of a Dirichlet(1/2) mixture, less the
    # gain of half a unit for each free cell from fitting the frequencies.
    free, half = len(p) - 1, _PRIOR
    constant = len(p) * math.lgamma(half) - math.lgamma(len(p) * half) - free / 2
    draws = 1.0
    for _ in range(100):
        cost = free / 2 * math.log(max(draws, 2 * math.pi) / (2 * math.pi)) + constant
        draws = (math.log(alarm) + max(cost, 0.0)) / divergence
    return math.ceil(draws)
