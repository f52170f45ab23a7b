"""Intervals cover what they claim and pair prompts."""

import numpy as np
import pytest

from outrider.eval.stats import (
    Interval,
    median,
    ratio,
    ratio_difference,
    ratio_differences,
    ratios,
)


def test_ratio_is_sum_over_sum_not_mean_of_ratios() -> None:
    result = ratio([10.0, 1.0], [10.0, 2.0])
    assert result.value == pytest.approx(11 / 12)
    assert result.value != pytest.approx(0.75)


def test_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    trials = 200
    for trial in range(trials):
        bottom = rng.integers(20, 60, size=40).astype(float)
        rate = rng.normal(2.0, 0.4, size=40)
        interval = ratio(bottom * rate, bottom, seed=trial, resamples=300)
        hits += 2.0 in interval
    assert 0.89 <= hits / trials <= 0.99


def test_pairing_narrows_a_difference() -> None:
    rng = np.random.default_rng(0)
    rounds = rng.uniform(20, 60, size=30)
    hard = rng.normal(2.0, 0.5, size=30)
    a, b = rounds * (hard + 0.1 + rng.normal(0, 0.02, 30)), rounds * hard
    paired = ratio_difference((a, rounds), (b, rounds))
    assert paired.value == pytest.approx(0.1, abs=0.02)
    assert paired.low > 0
    shuffled = rng.permutation(30)
    unpaired = ratio_difference((a, rounds), (b[shuffled], rounds[shuffled]))
    assert unpaired.high - unpaired.low > 3 * (paired.high - paired.low)


def test_same_seed_same_interval() -> None:
    top, bottom = [5.0, 9.0, 4.0, 8.0], [3.0, 4.0, 3.0, 3.0]
    assert ratio(top, bottom, seed=3) == ratio(top, bottom, seed=3)
    assert ratio(top, bottom, seed=3) != ratio(top, bottom, seed=4)


def test_degenerate_inputs_have_an_answer() -> None:
    same = ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert same == Interval(2.0, 2.0, 2.0)
    alone = ratio([3.0], [2.0])
    assert alone.value == 1.5
    assert np.isnan(alone.low)
    assert alone.text() == "1.500"
    empty = ratio([0.0, 0.0], [0.0, 0.0])
    assert np.isnan(empty.value)
    some_empty = ratio([1.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0])
    assert some_empty.value == 0.5
    assert not np.isnan(some_empty.low)


def test_median_interval_brackets_the_median() -> None:
    values = np.random.default_rng(0).normal(1.2, 0.1, 60)
    result = median(values)
    assert result.low < result.value < result.high
    assert 1.2 in result
    assert median([1.0, 1.0]) == Interval(1.0, 1.0, 1.0)


def test_unlike_prompt_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="one number a prompt"):
        ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="one number a prompt"):
        ratio([], [])


def test_many_ratios_at_once_are_scipys_one_by_one() -> None:
    rng = np.random.default_rng(3)
    bottom = rng.gamma(2, 10, (40, 4))
    top = bottom * rng.beta(3, 2, (40, 4))
    top[:, 3] = 2 * bottom[:, 3]
    other = bottom * rng.beta(3, 2, (40, 4))
    found = ratios(top, bottom, seed=4)
    compared = ratio_differences((top, bottom), (other, bottom), seed=4)
    for q in range(4):
        assert found[q] == pytest.approx(ratio(top[:, q], bottom[:, q], seed=4))
        one = ratio_difference((top[:, q], bottom[:, q]), (other[:, q], bottom[:, q]), seed=4)
        assert compared[q] == pytest.approx(one)


def test_many_ratios_say_where_there_is_nothing() -> None:
    lone, none = ratios([[2.0, 0.0]], [[4.0, 0.0]])
    assert lone.value == 0.5
    assert np.isnan([lone.low, lone.high, *none]).all()
    # Prompts that lack a part of the text are resampled with the others.
    part = ratios([[1.0], [0.0], [3.0]], [[2.0], [0.0], [4.0]])[0]
    assert part.value == pytest.approx(4 / 6)
    assert part.low <= part.value <= part.high
    with pytest.raises(ValueError, match="one row a prompt"):
        ratios([[1.0]], [[1.0, 2.0]])
