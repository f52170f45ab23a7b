"""Speed-ups, break-even batches and schedules against simulation and by hand."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from outrider.eval.tune.acceptance import Acceptance, from_alpha
from outrider.eval.tune.costs import PLAIN, Pieces
from outrider.eval.tune.formula import best_length, speedup
from outrider.eval.tune.models import DraftSizes, TargetSizes
from outrider.eval.tune.roofline import RooflineCosts, hardware_named
from outrider.eval.tune.speed import best, break_even, predict, schedule, throughput


class Bent:
    """A pass is flat up to `knee` tokens of all rows, then rises with them."""

    name = "bent"

    def __init__(self, knee: float = 64, c: float = 0.1) -> None:
        self.knee, self.c = knee, c

    def round(self, draft: str, tokens: int, batch: int, context: float) -> Pieces:
        length = 0 if draft == PLAIN else int(draft.removeprefix("chain:"))
        verify = max(1.0, batch * tokens / self.knee) + 1e-5 * context * batch
        return Pieces(self.c * length, verify, 0.02)


class Unit:
    """Costs of the paper: verification as dear as a plain step, nothing else."""

    name = "unit"

    def __init__(self, c: float) -> None:
        self.c = c

    def round(self, draft: str, tokens: int, batch: int, context: float) -> Pieces:
        length = 0 if draft == PLAIN else int(draft.removeprefix("chain:"))
        return Pieces(self.c * length, 1.0, 0.0)


@pytest.mark.parametrize("c", [0.05, 0.2])
@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.9])
def test_unit_costs_give_the_paper_s_formula_and_its_best_length(alpha: float, c: float) -> None:
    chains = from_alpha(alpha, range(1, 20))
    for one in chains:
        length = len(one.survival)
        assert predict(Unit(c), one, 1, 0).speedup == pytest.approx(speedup(alpha, length, c))
    assert best(Unit(c), chains, 1, 0).draft == f"chain:{best_length(alpha, c).length}"


@pytest.mark.parametrize("batch", [1, 4, 16, 40])
def test_a_full_batch_s_speed_is_that_of_simulated_rows(batch: int) -> None:
    """Rows draw what they accept on their own; a round lasts as long as its call."""
    costs, one = Bent(), from_alpha(0.7, [3])[0]
    generator = np.random.default_rng(batch)
    num_rounds = 6000
    # Each draft's coin by itself: a run of successes, cut at three.
    coins = generator.random((num_rounds, batch, 3)) < 0.7
    emitted = 1 + coins.cumprod(-1).sum(-1)
    seconds = num_rounds * costs.round(one.draft, one.tokens, batch, 200).total
    plain = emitted.sum() / batch * costs.round(PLAIN, 1, batch, 200).total
    error = emitted.std() / emitted.mean() / (num_rounds * batch) ** 0.5
    assert predict(costs, one, batch, 200).speedup == pytest.approx(plain / seconds, rel=4 * error)


def test_break_even_is_the_first_batch_that_no_draft_pays_at() -> None:
    costs, chains = Bent(), from_alpha(0.6, range(1, 6))
    found = break_even(costs, chains, 0, 200)
    assert found.batch is not None
    assert not found.returns
    for batch in range(1, 200):
        fastest = max(predict(costs, one, batch, 0).speedup for one in chains)
        assert (fastest > 1) == (batch < found.batch)
        assert (best(costs, chains, batch, 0).draft == PLAIN) == (batch >= found.batch)
    assert break_even(costs, chains, 0, found.batch - 1).batch is None


def test_a_schedule_names_the_best_draft_of_every_batch_without_gaps() -> None:
    costs, chains = Bent(), from_alpha(0.8, range(1, 9))
    ranges = schedule(costs, chains, 0, 100)
    assert ranges[0].first == 1
    assert ranges[-1].last == 100
    assert len(ranges) > 3
    for one, later in pairwise(ranges):
        assert later.first == one.last + 1
        assert later.draft != one.draft
    for one in ranges:
        for batch in (one.first, one.last):
            assert best(costs, chains, batch, 0).draft == one.draft
    lengths = [0 if r.draft == PLAIN else int(r.draft.removeprefix("chain:")) for r in ranges]
    assert lengths == sorted(lengths, reverse=True)


def test_more_acceptance_and_cheaper_drafts_never_slow_down() -> None:
    for batch in (1, 8, 64):
        slow = [predict(Bent(), from_alpha(a, [4])[0], batch, 0).speedup for a in (0.2, 0.5, 0.9)]
        assert slow == sorted(slow)
        cheap = [
            predict(Bent(c=c), from_alpha(0.7, [4])[0], batch, 0).speedup for c in (0.3, 0.1, 0)
        ]
        assert cheap == sorted(cheap)
    # Up to the knee of plain steps; beyond it a draft's fixed cost is spread over more rows.
    falling = [predict(Bent(), from_alpha(0.7, [4])[0], b, 0).speedup for b in (1, 16, 32, 64)]
    assert falling == sorted(falling, reverse=True)


def test_a_prediction_s_parts_fit_together() -> None:
    one = Acceptance(
        draft="chain:2", tokens=3, survival=(0.6, 0.3), tau=1.9, tau_low=1.8, tau_high=2.0,
        source="here",
    )  # fmt: skip
    found = predict(Bent(), one, 4, 100)
    assert found.speedup == pytest.approx(found.tau / found.break_even)
    assert found.low / found.high == pytest.approx(1.8 / 2.0)
    assert found.tokens_per_second == pytest.approx(4 / found.token_seconds)
    record: dict[str, Any] = found.record()
    assert record["ms"]["round"] == pytest.approx(
        sum(record["ms"][name] for name in ("draft", "verify", "other"))
    )


LLAMA = TargetSizes(
    name="8B", parameters=8e9, dense=8e9, kv_numbers=2 * 32 * 8 * 128, num_layers=32
)


def h100(draft: DraftSizes | None, **changes: float) -> RooflineCosts:
    return RooflineCosts(hardware=hardware_named("h100", **changes), target=LLAMA, draft=draft)


def test_the_head_s_weights_and_keys_cost_rows_and_so_throughput() -> None:
    small = DraftSizes(name="small", parameters=1e8, step=1e8, kv_numbers=2 * 8 * 128)
    large = DraftSizes(name="large", parameters=8e9, step=1e8, kv_numbers=2 * 8 * 128)
    wide = DraftSizes(name="wide", parameters=1e8, step=1e8, kv_numbers=2 * 64 * 8 * 128)
    chains = from_alpha(0.7, [1, 3])
    found = {d.name: throughput(h100(d), chains, 4096) for d in (small, large, wide)}
    rows = {name: peak.drafted.batch for name, peak in found.items() if peak.drafted}
    # By hand: 0.9 x 80 GB less 16 GB of target and the head, over (4096 + 1) positions of a row.
    plain = int((72e9 - 16e9) / (4097 * 2 * 32 * 8 * 128 * 2))
    assert found["small"].plain is not None
    assert found["small"].plain.batch == plain
    assert rows["large"] < rows["small"] < plain
    assert rows["wide"] < rows["small"]
    rates = {name: peak.drafted.tokens_per_second for name, peak in found.items() if peak.drafted}
    assert rates["large"] < rates["small"]
    assert rates["wide"] < rates["small"]


def test_a_target_that_does_not_fit_has_no_throughput() -> None:
    found = throughput(h100(None, memory=10e9), from_alpha(0.7, [3]), 1024)
    assert found.plain is None
    assert found.drafted is None


def test_bad_input_is_refused() -> None:
    chains = from_alpha(0.5, [1])
    with pytest.raises(ValueError, match="acceptances is empty"):
        break_even(Unit(0.1), [], 0, 5)
    with pytest.raises(ValueError, match="max_batch is 0"):
        schedule(Unit(0.1), chains, 0, 0)

    class Free(Unit):
        def round(self, draft: str, tokens: int, batch: int, context: float) -> Pieces:
            return Pieces(0.0, 0.0, 0.0)

    with pytest.raises(ValueError, match="costs must be above 0"):
        predict(Free(0.1), chains[0], 1, 0)
