"""Predicted beside measured speed-ups: errors, the best draft's loss, where drafts stop paying."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Any, NamedTuple

from outrider.eval.tune.acceptance import Acceptance
from outrider.eval.tune.costs import PLAIN, MeasuredCosts
from outrider.eval.tune.speed import break_even, predict

MOST_ERROR, MOST_LOSS, MOST_FACTOR = 0.10, 0.03, 1.5
"""Limits: mean absolute error of the speed-up, speed lost by the draft that is predicted best, and
quotient of the predicted and the measured crossover batch."""


class Compared(NamedTuple):
    """One draft at one batch."""

    batch: int
    draft: str
    predicted: float
    measured: float
    tau_predicted: float
    tau_measured: float
    plain_ms: tuple[float, float]
    """Predicted and measured."""
    round_ms: tuple[float, float]

    @property
    def error(self) -> float:
        """Relative, of the speed-up."""
        return self.predicted / self.measured - 1


class Choice(NamedTuple):
    """What would be chosen at a batch, and what that costs."""

    batch: int
    predicted: str
    """The draft predicted best, plain decoding included."""
    measured: str
    """The fastest in fact."""
    measured_speedup: float
    """Its own."""
    chosen_speedup: float
    """Measured, of the draft predicted best."""

    @property
    def loss(self) -> float:
        """Share of the best speed that is lost."""
        return 1 - self.chosen_speedup / self.measured_speedup


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All of it."""

    rows: Sequence[Compared]
    choices: Sequence[Choice]
    crossover_predicted: int | None
    """The first batch at which no draft is predicted to pay; None where there is none."""
    crossover_measured: float | None
    """Between the batches measured, on a logarithmic scale."""

    @property
    def error(self) -> float:
        """Mean absolute error over drafts and batches."""
        return mean(abs(row.error) for row in self.rows)

    @property
    def factor(self) -> float | None:
        """How far off the crossover is; None where one of the two is not there."""
        if not (self.crossover_predicted and self.crossover_measured):
            return None
        quotient = self.crossover_predicted / self.crossover_measured
        return max(quotient, 1 / quotient)

    @property
    def holds(self) -> bool:
        """Whether all limits are kept."""
        is_close = self.error <= MOST_ERROR and all(c.loss <= MOST_LOSS for c in self.choices)
        if self.crossover_measured is None:
            return is_close
        return is_close and self.factor is not None and self.factor <= MOST_FACTOR

    def record(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "rows": [{**row._asdict(), "error": row.error} for row in self.rows],
            "choices": [{**one._asdict(), "loss": one.loss} for one in self.choices],
            "mean_absolute_error": self.error,
            "crossover": {
                "predicted": self.crossover_predicted,
                "measured": self.crossover_measured,
                "factor": self.factor,
            },
            "holds": self.holds,
        }


def compare(
    costs: MeasuredCosts,
    acceptances: Sequence[Acceptance],
    speeds: Sequence[Mapping[str, Any]],
    *,
    limit: int = 256,
) -> Comparison:
    """Predictions of measured costs and offline acceptance, beside timings of real decoding.

    `speeds` are records of runs: batch, draft, tokens, row_rounds, and seconds by piece.
    """
    context = costs.contexts[0]
    by_name = {one.draft: one for one in acceptances}
    rows: list[Compared] = []
    for batch in sorted({one["batch"] for one in speeds}):
        here = [one for one in speeds if one["batch"] == batch]
        plain = _pooled([one for one in here if one["draft"] == PLAIN], batch)
        for draft in dict.fromkeys(one["draft"] for one in here):
            if draft == PLAIN or draft not in by_name:
                continue
            found = _pooled([one for one in here if one["draft"] == draft], batch)
            said = predict(costs, by_name[draft], batch, context)
            rows.append(
                Compared(
                    batch=batch,
                    draft=draft,
                    predicted=said.speedup,
                    measured=plain.seconds_a_token / found.seconds_a_token,
                    tau_predicted=said.tau,
                    tau_measured=found.tau,
                    plain_ms=(1000 * said.plain_seconds, plain.round_ms),
                    round_ms=(1000 * said.pieces.total, found.round_ms),
                )
            )
    if not rows:
        raise ValueError("no draft was both scored and timed; run the other stages first")
    choices = [_choice(rows, batch) for batch in dict.fromkeys(row.batch for row in rows)]
    known = [one for one in acceptances if any(row.draft == one.draft for row in rows)]
    return Comparison(
        rows=rows,
        choices=choices,
        crossover_predicted=break_even(costs, known, context, limit).batch,
        crossover_measured=_crossing([(c.batch, _best_drafted(rows, c.batch)) for c in choices]),
    )


class _Pooled(NamedTuple):
    seconds_a_token: float
    tau: float
    round_ms: float


def _pooled(runs: Sequence[Mapping[str, Any]], batch: int) -> _Pooled:
    if not runs:
        raise ValueError(f"plain decoding was not timed at batch {batch}; time it with the drafts")
    tokens = sum(one["tokens"] for one in runs)
    row_rounds = sum(one["row_rounds"] for one in runs)
    seconds = sum(one["draft_s"] + one["verify_s"] + one["other_s"] for one in runs)
    return _Pooled(seconds / tokens, tokens / row_rounds, 1000 * seconds * batch / row_rounds)


def _choice(rows: Sequence[Compared], batch: int) -> Choice:
    here = [row for row in rows if row.batch == batch]
    said, fact = max(here, key=lambda r: r.predicted), max(here, key=lambda r: r.measured)
    is_plain_said, is_plain_fact = said.predicted <= 1, fact.measured <= 1
    return Choice(
        batch=batch,
        predicted=PLAIN if is_plain_said else said.draft,
        measured=PLAIN if is_plain_fact else fact.draft,
        measured_speedup=1.0 if is_plain_fact else fact.measured,
        chosen_speedup=1.0 if is_plain_said else said.measured,
    )


def _best_drafted(rows: Sequence[Compared], batch: int) -> float:
    return max(row.measured for row in rows if row.batch == batch)


def _crossing(points: Sequence[tuple[int, float]]) -> float | None:
    """The batch at which the best speed-up falls to 1, linear in the logarithm of the batch."""
    for (left, before), (right, after) in pairwise(points):
        if before > 1 >= after:
            share = (before - 1) / (before - after)
            return math.exp(math.log(left) + share * (math.log(right) - math.log(left)))
    return None


def show(found: Comparison) -> str:
    """The comparison as text."""
    lines = [
        (
            f"{'batch':<7}{'draft':<14}{'predicted':<11}{'measured':<10}{'error':<9}"
            f"{'tau: said, was':<16}round ms: said, was (plain)"
        )
    ]
    for row in found.rows:
        lines.append(
            f"{row.batch:<7}{row.draft:<14}{row.predicted:<11.3f}{row.measured:<10.3f}"
            f"{row.error:<+9.1%}{f'{row.tau_predicted:.3f}, {row.tau_measured:.3f}':<16}"
            f"{row.round_ms[0]:.1f}, {row.round_ms[1]:.1f} ({row.plain_ms[0]:.1f}, "
            f"{row.plain_ms[1]:.1f})"
        )
    lines.append(f"mean absolute error {found.error:.1%} (limit {MOST_ERROR:.0%})")
    for one in found.choices:
        lines.append(
            f"batch {one.batch}: predicted best {one.predicted}, in fact {one.measured} at "
            f"{one.measured_speedup:.3f}x; the choice loses {one.loss:.1%} (limit {MOST_LOSS:.0%})"
        )
    crossing = found.crossover_measured
    fact = "does not cross" if crossing is None else f"crosses at {crossing:.1f}"
    factor = "" if found.factor is None else f", a factor of {found.factor:.2f}"
    lines.append(
        f"best speed-up by batch {fact}; predicted at {found.crossover_predicted}{factor} (limit "
        f"{MOST_FACTOR})"
    )
    lines.append("holds" if found.holds else "DOES NOT HOLD")
    return "\n".join(lines)
