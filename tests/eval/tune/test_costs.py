"""Costs in a file, between points, and measured with the code that decodes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.target import Target
from outrider.eval.rows.loop import RowsRun
from outrider.eval.tune import measure as measuring
from outrider.eval.tune.acceptance import from_alpha
from outrider.eval.tune.costs import (
    PLAIN,
    MeasuredCosts,
    Point,
    Spread,
    line,
    merged,
    read_costs,
    spread,
)
from outrider.eval.tune.measure import MeasureSettings, measure
from outrider.eval.tune.speed import predict
from outrider.heads import EagleHead


def point(draft: str, batch: int, context: int, draft_s: float, verify_s: float) -> Point:
    pieces = {"draft": draft_s, "verify": verify_s, "other": 0.5, "total": draft_s + verify_s + 0.5}
    shown = {name: Spread(value, value, value) for name, value in pieces.items()}
    return Point(draft, 1, batch, context, shown, 3)


def costs_of(points: list[Point], **changes: Any) -> MeasuredCosts:
    known: dict[str, Any] = {
        "points": points, "target": "t", "head": "h", "dtype": "float32", "device": "cpu",
        "threads": 1,
    }  # fmt: skip
    return MeasuredCosts(**{**known, **changes})


def plane(draft: str, slope: float) -> list[Point]:
    """Costs that are a plane over batch and context, so that lines between points are exact."""
    return [
        point(draft, b, c, slope * b, 1 + 2 * b + 0.01 * c) for b in (1, 2, 8) for c in (100, 300)
    ]


def test_between_points_costs_go_by_straight_lines() -> None:
    costs = costs_of(plane(PLAIN, 0) + plane("chain:2", 3) + plane("chain:6", 7))
    for batch, context in ((1, 100), (5, 100), (2, 170), (4, 260), (12, 300), (8, 500)):
        found = costs.round("chain:2", 3, batch, context)
        assert found.draft == pytest.approx(3 * batch)
        assert found.verify == pytest.approx(1 + 2 * batch + 0.01 * context)
        assert found.other == pytest.approx(0.5)
        # Chains between two that were measured, too.
        assert costs.round("chain:5", 6, batch, context).draft == pytest.approx(6 * batch)


def test_lines_never_promise_less_than_was_measured_beyond_the_ends() -> None:
    points = {1.0: 5.0, 2.0: 4.0, 4.0: 3.0}
    assert line(points, 3) == 3.5
    assert line(points, 9) == 3.0
    assert line({1.0: 1.0, 2.0: 3.0}, 4) == 7.0
    assert line({4.0: 2.0, 8.0: 6.0}, 1) == 0.0
    assert line({4.0: 2.0}, 100) == 2.0


def test_what_was_not_measured_is_refused() -> None:
    costs = costs_of(plane(PLAIN, 0) + plane("chain:2", 3) + plane("chain:6", 7))
    for draft in ("chain:7", "chain:1", "tree:2,2,4"):
        with pytest.raises(ValueError, match=f"draft '{draft}' was not measured"):
            costs.round(draft, 3, 1, 100)
    with pytest.raises(ValueError, match="hold no plain step"):
        costs_of(plane("chain:2", 3))
    with pytest.raises(ValueError, match="batch is 0"):
        costs.round(PLAIN, 1, 0, 100)
    with pytest.raises(ValueError, match="no valid place"):
        costs_of([point(PLAIN, 0, 100, 0, 1)])
    with pytest.raises(ValueError, match="no valid draft"):
        costs_of([point(PLAIN, 1, 100, float("nan"), 1)])


def test_a_file_of_costs_comes_back_as_it_was(tmp_path: Path) -> None:
    costs = costs_of(plane(PLAIN, 0) + plane("chain:2", 3))
    costs.save(tmp_path / "costs.json")
    found = read_costs(tmp_path / "costs.json")
    assert list(found.points) == list(costs.points)
    assert found.notes["versions"]["torch"] == torch.__version__
    assert (found.batches, found.contexts) == ([1, 2, 8], [100, 300])


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for text in ("", "[]", "{}", json.dumps({"what": "outrider costs", "format": 9})):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a file of measured costs"):
            read_costs(path)
    with pytest.raises(ValueError, match="outrider tune --measure"):
        read_costs(tmp_path / "absent.json")


def test_costs_measured_apart_join_only_if_alike() -> None:
    one, two = costs_of(plane(PLAIN, 0)), costs_of(plane("chain:2", 3) + plane(PLAIN, 0))
    assert merged([one, two]).drafts == [PLAIN, "chain:2"]
    with pytest.raises(ValueError, match="threads is 1 in one file of costs and 2 in another"):
        merged([one, costs_of(plane(PLAIN, 0), threads=2)])


def test_median_and_quartiles() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]) == (3.0, 2.0, 4.0)
    assert spread([1.0, 2.0]) == (1.5, 1.25, 1.75)
    with pytest.raises(ValueError, match="at least one time"):
        spread([])


SMALL = MeasureSettings(
    drafts=("chain:1", "chain:3", "tree:2,2,4"), batches=(1, 3), contexts=(24,), repeats=2
)


def test_measured_rounds_are_rounds_of_decoding(
    tiny_target: Target, tiny_head: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, float, set[int]]] = []
    real = RowsRun.round

    def spy(run: RowsRun) -> Any:
        lengths = [len(row.ids) for row in run.rows if row]
        found = real(run)
        rounds = [row.rounds[-1] for row in run.rows if row]
        accepted = {one.accepted for one in rounds}
        seen.append((len(lengths), rounds[0].drafted, sum(lengths) / len(lengths), accepted))
        return found

    monkeypatch.setattr(RowsRun, "round", spy)
    costs = measure(tiny_target, tiny_head, SMALL)
    assert {(p.draft, p.batch, p.tokens) for p in costs.points} == {
        (draft, batch, tokens)
        for batch in (1, 3)
        for draft, tokens in ((PLAIN, 1), ("chain:1", 2), ("chain:3", 4), ("tree:2,2,4", 5))
    }
    assert all(p.samples == 2 and p.pieces["total"].median > 0 for p in costs.points)
    assert all(p.pieces["draft"].median > 0 for p in costs.points if p.draft != PLAIN)
    # Every round starts from the same place, whatever was drafted and accepted before it.
    drafted = [one for one in seen if one[1]]
    for batch in (1, 3):
        assert len({mean for rows, size, mean, _ in drafted[1:] if rows == batch}) <= 2
        means = [mean for rows, _, mean, _ in seen if rows == batch]
        assert all(abs(mean - 24) < 4 for mean in means)
    assert {0, 1} <= set().union(*(accepted for rows, _, _, accepted in drafted if rows == 3))


def test_drafts_take_turns(
    tiny_target: Target, tiny_head: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = measuring._Runs.round

    def spy(runs: Any, plan: Any) -> Any:
        order.append("plain" if plan is None else str(plan.depth))
        return real(runs, plan)

    monkeypatch.setattr(measuring._Runs, "round", spy)
    wanted = MeasureSettings(drafts=("chain:1", "chain:3"), batches=(1,), contexts=(24,), repeats=3)
    measure(tiny_target, tiny_head, wanted)
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 4
    assert all(sorted(one) == ["1", "3", "plain"] for one in rounds)
    assert len({one[0] for one in rounds}) == 3


def test_a_stopped_measurement_goes_on_and_another_one_s_file_is_refused(
    tiny_target: Target, tiny_head: EagleHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "costs.partial.jsonl"
    real = measuring.measure_at
    places: list[int] = []

    def stops(target: Any, head: Any, settings: Any, batch: int, context: int) -> Any:
        if places:
            raise KeyboardInterrupt
        places.append(batch)
        return real(target, head, settings, batch, context)

    monkeypatch.setattr(measuring, "measure_at", stops)
    with pytest.raises(KeyboardInterrupt):
        measure(tiny_target, tiny_head, SMALL, journal=journal)
    first = journal.read_text()

    def counts(target: Any, head: Any, settings: Any, batch: int, context: int) -> Any:
        places.append(batch)
        return real(target, head, settings, batch, context)

    monkeypatch.setattr(measuring, "measure_at", counts)
    costs = measure(tiny_target, tiny_head, SMALL, journal=journal)
    assert places == [1, 3]
    assert journal.read_text().startswith(first)
    assert costs.batches == [1, 3]
    again = measure(tiny_target, tiny_head, SMALL, journal=journal)
    assert again.points == costs.points
    other = MeasureSettings(drafts=("chain:1",), batches=(1,), contexts=(24,), repeats=2)
    with pytest.raises(ValueError, match="line 1 was measured with other settings"):
        measure(tiny_target, tiny_head, other, journal=journal)


def test_predictions_come_from_measured_costs(tiny_target: Target, tiny_head: EagleHead) -> None:
    costs = measure(tiny_target, tiny_head, SMALL)
    one = from_alpha(0.5, [2])[0]
    found = predict(costs, one, 2, 24)
    assert found.speedup > 0
    assert found.pieces.draft > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batches": ()}, "batches is empty"),
        ({"batches": (0,)}, r"batches is \(0,\); give 1 or more"),
        ({"contexts": (1,)}, r"contexts is \(1,\); give 2 or more"),
        ({"repeats": 0}, "repeats is 0"),
        ({"drafts": ("chain",)}, "draft is 'chain'"),
        ({"accepted": (-1,)}, "accepted is"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeasureSettings(**changes)


def test_a_context_beyond_the_target_s_positions_is_refused(
    tiny_target: Target, tiny_head: EagleHead
) -> None:
    wanted = MeasureSettings(drafts=("chain:1",), batches=(1,), contexts=(4000,), repeats=1)
    with pytest.raises(ValueError, match="context is 4000; target and head have room"):
        measure(tiny_target, tiny_head, wanted)
