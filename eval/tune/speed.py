"""What speculation buys: speed-up of every draft by batch and context, and where it ends.

A round of a full batch costs what its call costs, and each row writes tau tokens in it on average:
speed-up = tau t_plain(B) / t_round(B). Rows that accept more than others do not wait for anyone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from outrider.eval.tune.acceptance import Acceptance
from outrider.eval.tune.costs import PLAIN, Costs, Pieces
from outrider.eval.tune.roofline import RooflineCosts


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One draft at one batch and context."""

    draft: str
    """PLAIN for plain decoding."""
    batch: int
    context: float
    tau: float
    pieces: Pieces
    plain_seconds: float
    """Of a plain step at this batch and context."""
    low: float
    """Speed-up at the ends of tau's interval."""
    high: float

    @property
    def speedup(self) -> float:
        """Tokens a second over those of plain decoding at the same batch."""
        return self.tau * self.plain_seconds / self.pieces.total

    @property
    def break_even(self) -> float:
        """The tau at which it would be as fast as plain decoding."""
        return self.pieces.total / self.plain_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return self.batch * self.tau / self.pieces.total

    @property
    def token_seconds(self) -> float:
        """A user's mean time between tokens."""
        return self.pieces.total / self.tau

    def record(self) -> dict[str, Any]:
        """Ready for JSON: times in milliseconds."""
        return {
            "draft": self.draft,
            "batch": self.batch,
            "context": self.context,
            "tau": self.tau,
            "speedup": {"value": self.speedup, "low": self.low, "high": self.high},
            "break_even_tau": self.break_even,
            "ms": {
                "draft": 1000 * self.pieces.draft,
                "verify": 1000 * self.pieces.verify,
                "other": 1000 * self.pieces.other,
                "round": 1000 * self.pieces.total,
                "plain": 1000 * self.plain_seconds,
                "token": 1000 * self.token_seconds,
            },
            "tokens_per_second": self.tokens_per_second,
        }


def predict(costs: Costs, one: Acceptance, batch: int, context: float) -> Prediction:
    """The speed of one draft at one batch and context."""
    plain = costs.round(PLAIN, 1, batch, context).total
    pieces = costs.round(one.draft, one.tokens, batch, context)
    if not (plain > 0 and pieces.total > 0):
        raise ValueError(
            f"a round at batch {batch} and context {context} takes {pieces.total} s and a plain "
            f"step {plain} s; costs must be above 0"
        )
    ratio = plain / pieces.total
    return Prediction(
        draft=one.draft,
        batch=batch,
        context=context,
        tau=one.tau,
        pieces=pieces,
        plain_seconds=plain,
        low=one.tau_low * ratio,
        high=one.tau_high * ratio,
    )


def plain_prediction(costs: Costs, batch: int, context: float) -> Prediction:
    """Plain decoding in the same terms."""
    pieces = costs.round(PLAIN, 1, batch, context)
    return Prediction(
        draft=PLAIN,
        batch=batch,
        context=context,
        tau=1.0,
        pieces=pieces,
        plain_seconds=pieces.total,
        low=1.0,
        high=1.0,
    )


def best(costs: Costs, acceptances: Sequence[Acceptance], batch: int, context: float) -> Prediction:
    """The fastest setting, plain decoding included; of equals the first, plain before all."""
    found = [plain_prediction(costs, batch, context)]
    found += [predict(costs, one, batch, context) for one in acceptances]
    return max(found, key=lambda one: one.speedup)


class BreakEven(NamedTuple):
    """Where even the best draft is slower than plain decoding."""

    batch: int | None
    """The smallest such batch; None where there is none up to the limit."""
    limit: int
    """The largest batch looked at."""
    returns: bool
    """Whether some draft pays again at a larger batch, so that the curve crosses more than once."""


def break_even(
    costs: Costs, acceptances: Sequence[Acceptance], context: float, limit: int
) -> BreakEven:
    """The first batch at which no draft pays, among all up to `limit`."""
    _check(acceptances, limit)
    first: int | None = None
    for batch in range(1, limit + 1):
        pays = any(predict(costs, one, batch, context).speedup > 1 for one in acceptances)
        if first is None and not pays:
            first = batch
        elif first is not None and pays:
            return BreakEven(first, limit, returns=True)
    return BreakEven(first, limit, returns=False)


class Range(NamedTuple):
    """Batches with one best setting."""

    first: int
    last: int
    draft: str


def schedule(
    costs: Costs, acceptances: Sequence[Acceptance], context: float, limit: int
) -> list[Range]:
    """The best setting of every batch up to `limit`, as ranges without gaps."""
    _check(acceptances, limit)
    found: list[Range] = []
    for batch in range(1, limit + 1):
        draft = best(costs, acceptances, batch, context).draft
        if found and found[-1].draft == draft:
            found[-1] = found[-1]._replace(last=batch)
        else:
            found.append(Range(batch, batch, draft))
    return found


class Peak(NamedTuple):
    """Tokens a second at the largest batch that fits."""

    batch: int
    draft: str
    tokens_per_second: float


class Throughput(NamedTuple):
    """What one accelerator gives at most, with the head in its memory and without."""

    context: float
    plain: Peak | None
    """None where not even one row fits."""
    drafted: Peak | None


def throughput(
    costs: RooflineCosts, acceptances: Sequence[Acceptance], context: float
) -> Throughput:
    """Tokens a second of one accelerator at the largest batch that fits.

    With the head loaded fewer rows fit, so its figure may fall below plain decoding's although it
    pays at every batch. A server with the head may still decode plainly where that is faster.
    """
    if not acceptances:
        raise ValueError("acceptances is empty; give at least one draft")
    many = costs.hardware.tensor_parallel
    plain_rows = costs.largest_batch(context, 1).plain
    plain = None
    if plain_rows:
        rate = plain_prediction(costs, plain_rows, context).tokens_per_second
        plain = Peak(plain_rows, PLAIN, rate / many)
    peaks: list[Peak] = []
    for one in acceptances:
        rows = costs.largest_batch(context, one.tokens).drafted
        if rows:
            peaks += [
                Peak(rows, found.draft, found.tokens_per_second / many)
                for found in (
                    predict(costs, one, rows, context),
                    plain_prediction(costs, rows, context),
                )
            ]
    return Throughput(context, plain, max(peaks, key=lambda peak: peak[2], default=None))


def _check(acceptances: Sequence[Acceptance], limit: int) -> None:
    if not acceptances:
        raise ValueError("acceptances is empty; give at least one draft")
    if limit < 1:
        raise ValueError(f"max_batch is {limit}; look at 1 or more")
