"""Times of ragged batches against full enumeration and against simulated rows."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.eval.tune.ragged import closed_batch, plain_batch, progress, rounds_of

LAWS = ([0.5, 0.2, 0.3], [0.1, 0.9], [1.0], [0.4, 0.0, 0.0, 0.6])


def cost(rows: int, context: float) -> float:
    """Steps up with the rows, as kernels do, and rises with keys and values read."""
    return 5.0 + (0.0, 1.0, 1.5, 4.0, 4.5)[rows] + 0.01 * rows * context


def enumerated(law: Sequence[float], lengths: Sequence[int], context: float) -> tuple[float, float]:
    """Every way that a batch can go, one after another: expected time and rounds."""

    def go(left: tuple[int, ...]) -> tuple[float, float]:
        rows = [i for i, tokens in enumerate(left) if tokens > 0]
        if not rows:
            return 0.0, 0.0
        # The mean context of the rows at work, here and now: not a mean of means.
        at = context + sum(lengths[i] - left[i] for i in rows) / len(rows)
        total, rounds = cost(len(rows), at), 1.0
        for drawn in itertools.product(range(1, len(law) + 1), repeat=len(rows)):
            chance = float(np.prod([law[size - 1] for size in drawn]))
            if chance:
                after = list(left)
                for i, size in zip(rows, drawn, strict=True):
                    after[i] -= size
                later = go(tuple(max(0, tokens) for tokens in after))
                total += chance * later[0]
                rounds += chance * later[1]
        return total, rounds

    return go(tuple(lengths))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("lengths", [(1,), (5,), (3, 3), (1, 4), (2, 3, 4)])
def test_a_closed_batch_takes_what_enumeration_says(
    law: list[float], lengths: tuple[int, ...]
) -> None:
    found = closed_batch(law, lengths, cost, context=10)
    seconds, rounds = enumerated(law, lengths, 10)
    assert found.seconds == pytest.approx(seconds, rel=1e-12)
    assert found.rounds == pytest.approx(rounds, rel=1e-12)


def test_simulated_rows_fall_inside_the_interval() -> None:
    law, lengths, runs = [0.45, 0.25, 0.1, 0.2], (9, 14, 20, 20), 4000
    generator = np.random.default_rng(5)
    times = np.zeros(runs)
    for run in range(runs):
        left = np.array(lengths)
        while (left > 0).any():
            rows = left > 0
            at = 30 + float((np.array(lengths) - left)[rows].mean())
            times[run] += cost(int(rows.sum()), at)
            left[rows] -= generator.choice(4, size=int(rows.sum()), p=law) + 1
    found = closed_batch(law, lengths, cost, context=30)
    error = times.std() / runs**0.5
    assert abs(found.seconds - times.mean()) < 4 * error
    assert 1 <= found.mean_rows <= 4


def test_a_full_batch_emits_tau_a_round_in_the_long_run() -> None:
    law = [0.45, 0.25, 0.1, 0.2]
    tau = sum(size * chance for size, chance in enumerate(law, start=1))
    assert 4000 / rounds_of(law, 4000) == pytest.approx(tau, rel=1e-3)
    # Short requests end inside a round, which then emits less.
    assert 5 / rounds_of(law, 5) < tau


def test_rows_that_accept_more_never_cost_the_batch_more() -> None:
    lengths = (12, 12, 12)
    worse = closed_batch([0.6, 0.4], lengths, cost).seconds
    better = closed_batch([0.4, 0.6], lengths, cost).seconds
    assert better < worse < plain_batch(lengths, cost).seconds


def test_the_slowest_row_sets_the_rounds_of_a_batch() -> None:
    law = [0.5, 0.5]
    assert closed_batch(law, (10,) * 4, cost).rounds > rounds_of(law, 10)
    assert closed_batch([1.0], (10,) * 4, cost).rounds == pytest.approx(10)


def test_no_round_is_counted_once_all_is_written() -> None:
    steps = progress([0.0, 1.0], 5)
    assert steps.active_R.tolist() == [1.0, 1.0, 1.0]
    assert steps.written_R.tolist() == [0.0, 2.0, 4.0]


def test_bad_input_is_refused() -> None:
    for law in ([], [0.5, 0.4], [1.2, -0.2]):
        with pytest.raises(ValueError, match="none negative, 1 in all"):
            progress(law, 3)
    with pytest.raises(ValueError, match="num_tokens is 0"):
        progress([1.0], 0)
    with pytest.raises(ValueError, match="lengths is empty"):
        closed_batch([1.0], (), cost)
