"""Intervals: prompts are what was sampled, so prompts are what is resampled.

R prompts.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import bootstrap

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """A figure and where it would lie for other prompts of the same kind."""

    value: float
    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, float | int) and self.low <= value <= self.high

    def text(self, digits: int = 3) -> str:
        """The figure with its bounds in brackets."""
        if np.isnan(self.low):
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def ratio(
    top_R: ArrayLike,
    bottom_R: ArrayLike,
    *,
    seed: int = 0,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Sum over sum, with a bootstrap interval over prompts (BCa, percentile where that fails)."""
    top, bottom = _columns(top_R, bottom_R)
    return _bootstrap((top, bottom), _pooled, seed, confidence, resamples)


def ratio_difference(
    a: tuple[ArrayLike, ArrayLike],
    b: tuple[ArrayLike, ArrayLike],
    *,
    seed: int = 0,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Pooled ratio of `a` less that of `b`; prompt i of one is prompt i of the other."""
    columns = _columns(*a, *b)
    return _bootstrap(columns, _pooled_difference, seed, confidence, resamples)


def mean_quotient(
    pairs: Sequence[tuple[tuple[ArrayLike, ArrayLike], tuple[ArrayLike, ArrayLike]]],
    *,
    seed: int = 0,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> Interval:
    """Mean over pairs (a, b) of the pooled ratio of `a` over that of `b`, all of the same prompts.

    A pair is two heads of one training seed, say; the interval is over prompts, seeds held fixed.
    Raises ValueError for no pair, or arrays of unlike lengths.
    """
    if not pairs:
        raise ValueError("pairs is empty; give at least one pair of columns")
    columns = _columns(*(column for a, b in pairs for column in (*a, *b)))
    return _bootstrap(columns, _mean_quotient, seed, confidence, resamples)


def median(
    values_R: ArrayLike, *, seed: int = 0, confidence: float = 0.95, resamples: int = 2000
) -> Interval:
    """Median with a bootstrap interval (percentile: a median has no smooth jackknife)."""
    (values,) = _columns(values_R)
    point = float(np.median(values))
    if len(values) < 2 or np.ptp(values) == 0:
        return Interval(point, *((point, point) if len(values) > 1 else (np.nan, np.nan)))
    rng = np.random.default_rng(seed)
    drawn = rng.choice(values, size=(resamples, len(values)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.median(drawn, axis=1), [tail, 1 - tail])
    return Interval(point, float(low), float(high))


def _columns(*arrays: ArrayLike) -> tuple[Floats, ...]:
    columns = tuple(np.asarray(array, dtype=np.float64) for array in arrays)
    lengths = {column.shape for column in columns}
    if len(lengths) != 1 or columns[0].ndim != 1 or len(columns[0]) == 0:
        raise ValueError(
            f"per-prompt arrays have shapes {sorted(lengths)}; give one number a prompt, for the "
            "same prompts in the same order, and at least one prompt"
        )
    return columns


def _pooled(top: Floats, bottom: Floats, axis: int = -1) -> Floats:
    below = bottom.sum(axis=axis)
    return np.divide(
        top.sum(axis=axis), below, out=np.full_like(below, np.nan, subok=False), where=below != 0
    )


def _pooled_difference(
    top_a: Floats, bottom_a: Floats, top_b: Floats, bottom_b: Floats, axis: int = -1
) -> Floats:
    return _pooled(top_a, bottom_a, axis) - _pooled(top_b, bottom_b, axis)


def _mean_quotient(*columns: Floats, axis: int = -1) -> Floats:
    pairs = zip(columns[::2], columns[1::2], strict=True)
    pooled = [_pooled(top, bottom, axis) for top, bottom in pairs]
    return np.mean([a / b for a, b in zip(pooled[::2], pooled[1::2], strict=True)], axis=0)


def _bootstrap(
    columns: Sequence[Floats], statistic: object, seed: int, confidence: float, resamples: int
) -> Interval:
    point = float(statistic(*columns))  # type: ignore[operator]
    if len(columns[0]) < 2 or np.isnan(point):
        return Interval(point, np.nan, np.nan)
    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            # A ratio that is the same for every prompt has no spread to accelerate.
            warnings.simplefilter("ignore")
            result = bootstrap(
                columns,
                statistic,
                paired=True,
                vectorized=True,
                n_resamples=resamples,
                confidence_level=confidence,
                method=method,
                rng=np.random.default_rng(seed),
            )
        low, high = (float(bound) for bound in result.confidence_interval)
        if not (np.isnan(low) or np.isnan(high)):
            return Interval(point, low, high)
    drawn = result.bootstrap_distribution
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(drawn, [tail, 1 - tail])
    return Interval(point, float(low), float(high))
