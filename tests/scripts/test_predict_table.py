"""Predicted beside measured: what counts as an error, a loss, a crossing."""

from typing import Any

import pytest

from outrider.eval.tune.acceptance import from_alpha
from outrider.eval.tune.costs import PLAIN, MeasuredCosts, Point, Spread
from outrider.scripts.predict_table import compare, show

BATCHES = (1, 4, 16)
CHAINS = from_alpha(0.5, [1, 3])


def seconds(draft: str, batch: int) -> tuple[float, float]:
    """Drafting and verifying: dear once a call has over 16 tokens."""
    length = 0 if draft == PLAIN else int(draft.removeprefix("chain:"))
    return 0.1 * length, max(1.0, batch * (length + 1) / 16)


def costs() -> MeasuredCosts:
    points = []
    for draft in (PLAIN, "chain:1", "chain:3"):
        for batch in BATCHES:
            drafting, verifying = seconds(draft, batch)
            values = {"draft": drafting, "verify": verifying, "other": 0.0}
            pieces = {name: Spread(v, v, v) for name, v in values.items()}
            points.append(Point(draft, 1, batch, 100, pieces, 1))
    return MeasuredCosts(
        points=points, target="t", head="h", dtype="float32", device="cpu", threads=1
    )


def speeds(slower: dict[tuple[str, int], float] | None = None) -> list[dict[str, Any]]:
    """Runs that go exactly as predicted, but for some that take longer."""
    found = []
    taus = {PLAIN: 1.0, **{one.draft: one.tau for one in CHAINS}}
    for batch in BATCHES:
        for draft, tau in taus.items():
            drafting, verifying = seconds(draft, batch)
            factor = (slower or {}).get((draft, batch), 1.0)
            found.append(
                {
                    "batch": batch, "draft": draft, "tokens": 400 * batch * tau,
                    "row_rounds": 400 * batch, "draft_s": 400 * drafting * factor,
                    "verify_s": 400 * verifying * factor, "other_s": 0.0,
                }
            )  # fmt: skip
    return found


def test_runs_as_predicted_have_no_error_and_no_loss() -> None:
    found = compare(costs(), CHAINS, speeds())
    assert found.error == pytest.approx(0, abs=1e-12)
    assert [row.tau_measured for row in found.rows] == pytest.approx(
        [row.tau_predicted for row in found.rows]
    )
    assert all(choice.loss == pytest.approx(0) for choice in found.choices)
    assert [choice.predicted for choice in found.choices] == ["chain:3", "chain:3", PLAIN]
    assert found.holds
    assert "holds" in show(found)


def test_an_error_is_relative_to_what_was_measured() -> None:
    found = compare(costs(), CHAINS, speeds({("chain:3", 1): 1.25}))
    row = next(row for row in found.rows if (row.draft, row.batch) == ("chain:3", 1))
    assert row.error == pytest.approx(0.25)
    assert found.error == pytest.approx(0.25 / 6)
    # chain:3 was chosen, chain:1 would have been faster.
    assert found.choices[0].measured == "chain:1"
    assert found.choices[0].loss == pytest.approx(1 - found.choices[0].chosen_speedup / (1.5 / 1.1))
    assert found.choices[0].loss > 0.03
    assert not found.holds
    assert show(found).endswith("DOES NOT HOLD")


def test_large_errors_do_not_hold() -> None:
    slow = {(draft, batch): 1.2 for draft in ("chain:1", "chain:3") for batch in (1, 4)}
    found = compare(costs(), CHAINS, speeds(slow))
    assert found.error > 0.10
    assert not found.holds


def test_the_crossing_is_found_between_batches_and_compared() -> None:
    found = compare(costs(), CHAINS, speeds())
    best = {
        batch: max(row.measured for row in found.rows if row.batch == batch) for batch in BATCHES
    }
    assert best[4] > 1 >= best[16]
    assert found.crossover_measured is not None
    assert found.crossover_predicted is not None
    assert 4 < found.crossover_measured < 16
    share = (best[4] - 1) / (best[4] - best[16])
    assert found.crossover_measured == pytest.approx(4 * (16 / 4) ** share)
    assert found.factor is not None
    assert 1 <= found.factor < 1.5


def test_a_curve_that_does_not_cross_says_so() -> None:
    found = compare(costs(), CHAINS, [one for one in speeds() if one["batch"] < 16])
    assert found.crossover_measured is None
    assert found.factor is None
    assert "does not cross" in show(found)


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(ValueError, match="run the other stages first"):
        compare(costs(), CHAINS, [])
    drafted = [one for one in speeds() if one["draft"] != PLAIN]
    with pytest.raises(ValueError, match="plain decoding was not timed at batch 1"):
        compare(costs(), CHAINS, drafted)
