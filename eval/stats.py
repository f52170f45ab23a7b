"""Intervals: prompts are what was sampled, so prompts are what is resampled.

R prompts, Q figures, S resamples.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri
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


def ratios(
    top_RQ: ArrayLike,
    bottom_RQ: ArrayLike,
    *,
    seed: int = 0,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> list[Interval]:
    """What `ratio` finds, for many figures of the same prompts at once.

    All figures share the resampled prompts, so that hundreds cost little more than one. A figure
    with nothing to divide by has the value NaN, and one of a single prompt no bounds. Raises
    ValueError for tables of unlike shapes or no prompt.
    """
    top, bottom = np.asarray(top_RQ, dtype=np.float64), np.asarray(bottom_RQ, dtype=np.float64)
    _check_tables(top, bottom)
    weight_SR = _resampled(len(top), seed, resamples)
    with np.errstate(divide="ignore", invalid="ignore"):
        value_Q = _over(top.sum(0), bottom.sum(0))
        drawn_SQ = _over(weight_SR @ top, weight_SR @ bottom)
        left_RQ = _over(top.sum(0) - top, bottom.sum(0) - bottom)
    return _bca(value_Q, drawn_SQ, left_RQ, confidence)


def ratio_differences(
    a: tuple[ArrayLike, ArrayLike],
    b: tuple[ArrayLike, ArrayLike],
    *,
    seed: int = 0,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> list[Interval]:
    """What `ratio_difference` finds, for many figures of the same prompts at once."""
    tables = [np.asarray(table, dtype=np.float64) for table in (*a, *b)]
    _check_tables(*tables)
    weight_SR = _resampled(len(tables[0]), seed, resamples)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = [table.sum(0) for table in tables]
        drawn = [weight_SR @ table for table in tables]
        left = [table.sum(0) - table for table in tables]
        value_Q, drawn_SQ, left_RQ = (
            _over(part[0], part[1]) - _over(part[2], part[3]) for part in (whole, drawn, left)
        )
    return _bca(value_Q, drawn_SQ, left_RQ, confidence)


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


def _check_tables(*tables: Floats) -> None:
    shapes = {table.shape for table in tables}
    if len(shapes) != 1 or tables[0].ndim != 2 or len(tables[0]) == 0:
        raise ValueError(
            f"tables of prompts by figures have shapes {sorted(shapes)}; give one row a prompt, "
            "for the same prompts and figures, and at least one prompt"
        )


def _resampled(num_prompts: int, seed: int, resamples: int) -> Floats:
    """How often each prompt is in each resample, [S, R]: scipy's own draws for this seed."""
    rng = np.random.default_rng(seed)
    index_SR = rng.integers(0, num_prompts, (resamples, num_prompts))
    place_SR = index_SR + num_prompts * np.arange(resamples)[:, None]
    count = np.bincount(place_SR.ravel(), minlength=resamples * num_prompts)
    return count.reshape(resamples, num_prompts).astype(np.float64)


def _over(top: Floats, bottom: Floats) -> Floats:
    # What is left of a sum of like terms may be rounding instead of zero.
    return np.where(np.abs(bottom) > 1e-9, top / bottom, np.nan)


def _bca(value_Q: Floats, drawn_SQ: Floats, left_RQ: Floats, confidence: float) -> list[Interval]:
    """Bias-corrected and accelerated bounds (Efron 1987); percentiles where those do not exist."""
    if len(left_RQ) < 2:
        return [Interval(float(value), np.nan, np.nan) for value in value_Q]
    tail = (1 - confidence) / 2
    below_Q = ((drawn_SQ < value_Q).mean(0) + (drawn_SQ <= value_Q).mean(0)) / 2
    pull_RQ = (len(left_RQ) - 1) * (left_RQ.mean(0) - left_RQ)
    with np.errstate(divide="ignore", invalid="ignore"):
        speed_Q = (pull_RQ**3).sum(0) / (6 * (pull_RQ**2).sum(0) ** 1.5)
        shift_Q = ndtri(below_Q)
        bounds = [_moved(shift_Q, speed_Q, z) for z in ndtri([tail, 1 - tail])]
    found: list[Interval] = []
    for q, value in enumerate(value_Q):
        drawn_S = drawn_SQ[:, q]
        places = [float(bound[q]) for bound in bounds]
        if np.isnan(drawn_S).any() or np.isnan(places).any():
            drawn_S, places = drawn_S[~np.isnan(drawn_S)], [tail, 1 - tail]
        if np.isnan(value) or not len(drawn_S):
            found.append(Interval(float(value), np.nan, np.nan))
            continue
        low, high = np.quantile(drawn_S, places)
        found.append(Interval(float(value), float(low), float(high)))
    return found


def _moved(shift_Q: Floats, speed_Q: Floats, z: float) -> Floats:
    """The quantile to read a bound at, for the normal quantile z."""
    return ndtr(shift_Q + (shift_Q + z) / (1 - speed_Q * (shift_Q + z)))
