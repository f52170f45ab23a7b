"""Learning rates step by step."""

from itertools import pairwise

import pytest

from outrider.train.schedule import ScheduleSettings, rate


def rates(num_steps: int, **shape: object) -> list[float]:
    settings = ScheduleSettings(**shape)  # type: ignore[arg-type]
    return [rate(step, num_steps, settings) for step in range(num_steps)]


@pytest.mark.parametrize("shape", ["cosine", "wsd"])
@pytest.mark.parametrize("num_steps", [2, 3, 5, 20, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.5])
def test_the_last_step_has_exactly_the_final_rate(
    shape: str, num_steps: int, warmup: float
) -> None:
    found = rates(num_steps, schedule=shape, warmup=warmup, final_lr=0.125)
    assert found[-1] == 0.125
    assert max(found[:-1]) <= 1


@pytest.mark.parametrize("shape", ["cosine", "wsd", "constant"])
def test_the_rate_rises_then_never_rises_again(shape: str) -> None:
    found = rates(100, schedule=shape, warmup=0.1)
    assert found[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert found[10] == 1
    assert all(a >= b for a, b in pairwise(found[10:]))


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert rates(101, schedule="cosine", warmup=0.0)[50] == pytest.approx(0.5)


def test_wsd_holds_the_peak_until_its_cooldown() -> None:
    found = rates(101, schedule="wsd", warmup=0.0, cooldown=0.2)
    assert set(found[:80]) == {1.0}
    assert found[90] == pytest.approx(10 / 21, abs=0.01)


def test_constant_stays() -> None:
    assert rates(10, schedule="constant", warmup=0.0) == [1.0] * 10


def test_a_single_step_uses_the_peak() -> None:
    assert rates(1, schedule="cosine", warmup=0.5) == [1.0]


def test_steps_outside_the_run_are_refused() -> None:
    with pytest.raises(ValueError, match="step is 10; allowed: 0 to 9"):
        rate(10, 10, ScheduleSettings())
