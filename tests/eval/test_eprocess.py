"""The e-process rejects what differs in about the draws it states, and seldom what does not."""

import math

import numpy as np
import pytest

from outrider.eval.certificate.eprocess import ALARM, EProcess, draws_needed

CELLS = 16


def laws(distance, seed=0):
    p = np.random.default_rng(seed).dirichlet(np.full(CELLS, 20.0))
    shift = np.where(np.arange(CELLS) % 2 == 0, 1, -1) * distance / (CELLS / 2)
    found = p + shift
    assert (found > 0).all()
    return p, found


def draws_until_rejected(p, found, limit, seed):
    process = EProcess(p)
    for cell in np.random.default_rng(seed).choice(CELLS, size=limit, p=found):
        process.add(int(cell))
        if process.is_rejected:
            return process.num_draws
    return None


@pytest.mark.parametrize("distance", [0.10, 0.05])
def test_the_stated_number_of_draws_is_enough(distance):
    p, found = laws(distance)
    needed = draws_needed(p, found)
    used = [draws_until_rejected(p, found, 3 * needed, seed) for seed in range(5)]
    assert None not in used
    assert needed / 1.5 < np.median(used) < needed * 1.5


def test_the_draws_stated_in_the_docstring():
    p = np.full(CELLS, 1 / CELLS)
    spread = np.where(np.arange(CELLS) % 2 == 0, 1, -1) / (CELLS / 2)
    single = np.where(np.arange(CELLS) == 0, 1, -1 / (CELLS - 1))
    stated = {0.10: (550, 2200), 0.05: (2600, 11000), 0.02: (19000, 90000)}
    for distance, (least, most) in stated.items():
        assert draws_needed(p, p + distance * single) == pytest.approx(least, rel=0.03)
        assert draws_needed(p, p + distance * spread) == pytest.approx(most, rel=0.03)


def test_an_exact_sampler_raises_no_alarm():
    p, _ = laws(0.0)
    assert all(draws_until_rejected(p, p, 4000, seed) is None for seed in range(10))


def test_wealth_is_a_fair_bet():
    """Under p the mean of the wealth stays one: summed over all short sequences, exactly."""
    p = [0.5, 0.3, 0.2]
    total = 0.0
    for text in np.ndindex(3, 3, 3):
        process = EProcess(p)
        for cell in text:
            process.add(cell)
        total += math.prod(p[cell] for cell in text) * math.exp(process.log_wealth)
    assert total == pytest.approx(1.0, abs=1e-12)


def test_an_impossible_draw_is_decisive():
    process = EProcess([1.0, 0.0])
    assert process.add(0) < math.log(ALARM)
    assert process.add(1) == math.inf
    assert process.is_rejected
    assert draws_needed([1.0, 0.0], [0.5, 0.5]) == 2


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="give a law"):
        EProcess([0.5, 0.4])
    with pytest.raises(ValueError, match="prior is 0; give a positive number"):
        EProcess([0.5, 0.5], prior=0)
    with pytest.raises(ValueError, match="never told apart"):
        draws_needed([0.5, 0.5], [0.5, 0.5])
