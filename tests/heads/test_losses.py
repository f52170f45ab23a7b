"""Objectives against plain sums, gradients against differences, the fused pass against both."""

import math

import pytest
import torch
from torch import Tensor

from outrider.heads import losses
from outrider.heads.losses import OBJECTIVES, Total, feature_noise, smooth_l1, total
from outrider.heads.objective import Objective
from outrider.heads.slopes import slope


def laws(rows: int = 6, width: int = 9) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(rows, width, dtype=torch.float64) * 2
    teacher = (torch.randn(rows, width, dtype=torch.float64) * 2).softmax(-1)
    return logits, teacher


def plain(name: str, logits: list[float], p: list[float]) -> float:
    """The definition of one row, number by number."""
    whole = sum(math.exp(z) for z in logits)
    q = [math.exp(z) / whole for z in logits]
    pairs = list(zip(p, q, strict=True))
    kl = sum(a * math.log(a / b) for a, b in pairs)
    accept = sum(min(a, b) for a, b in pairs)
    weight = math.exp(-3.0 * accept)
    middle = [(a + b) / 2 for a, b in pairs]
    return {
        "soft_ce": -sum(a * math.log(b) for a, b in pairs),
        "kl": kl,
        "reverse_kl": sum(b * math.log(b / a) for a, b in pairs),
        "jsd": sum(
            0.5 * a * math.log(a / m) + 0.5 * b * math.log(b / m)
            for (a, b), m in zip(pairs, middle, strict=True)
        ),
        "hard_ce": -math.log(q[p.index(max(p))]),
        "tv": 1 - accept,
        "lk_alpha": -math.log(accept),
        "lk_lambda": weight * kl + (1 - weight) * (1 - accept),
    }[name]


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_objective_equals_its_definition(name: str):
    logits, teacher = laws()
    ours = OBJECTIVES[name](logits, teacher)
    for row in range(len(logits)):
        wanted = plain(name, logits[row].tolist(), teacher[row].tolist())
        assert abs(float(ours[row]) - wanted) < 1e-12


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_gradient_equals_finite_differences(name: str):
    """lk_lambda's weight is a constant in its gradient, so it is held fixed in the differences."""
    logits, teacher = laws(rows=1)
    found = slope(logits[None], teacher[None], Objective(terms=((name, 1.0),))).grad_PKW[0, 0]
    weight = float((-3.0 * losses.acceptance(logits, teacher)).exp())

    def value(z: Tensor) -> float:
        if name == "lk_lambda":
            parts = losses.kl(z, teacher), losses.tv(z, teacher)
            return float(weight * parts[0] + (1 - weight) * parts[1])
        return float(OBJECTIVES[name](z, teacher))

    for column in range(logits.shape[1]):
        step = torch.zeros_like(logits)
        step[0, column] = 1e-6
        wanted = (value(logits + step) - value(logits - step)) / 2e-6
        assert abs(float(found[column]) - wanted) < 1e-8


def test_zero_mask_counts_nothing_and_halves_add_up():
    logits, teacher = laws()
    loss = losses.soft_ce(logits, teacher)
    none = total(loss, torch.zeros(6, dtype=torch.bool))
    assert (float(none.sum), int(none.count), float(none.mean())) == (0.0, 0, 0.0)
    mask = torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    halves = total(loss[:3], mask[:3]) + total(loss[3:], mask[3:])
    assert torch.allclose(halves.mean(), total(loss, mask).mean())
    assert isinstance(halves, Total)


def test_a_masked_row_that_is_not_finite_counts_nothing():
    loss = torch.tensor([1.0, float("nan")])
    assert float(total(loss, torch.tensor([True, False])).sum) == 1.0


def test_smooth_l1_is_the_mean_over_channels():
    loss = smooth_l1(torch.tensor([[0.5, 3.0]]), torch.zeros(1, 2))
    assert torch.allclose(loss, torch.tensor([(0.125 + 2.5) / 2]))


def test_feature_noise_is_uniform_and_shrinks_with_length():
    generator = torch.Generator().manual_seed(0)
    for length, limit in ((512, 0.1), (1024, 0.05)):
        noise = feature_noise(torch.zeros(1, length, 64), generator)
        assert limit * 0.99 < float(noise.abs().max()) <= limit
        assert abs(float(noise.mean())) < limit / 50


def test_channel_noise_follows_each_channel_and_leaves_uncounted_positions_out_of_it() -> None:
    torch.manual_seed(0)
    state_BTD = torch.randn(2, 500, 3) * torch.tensor([1.0, 10.0, 0.0]) + 5
    state_BTD[:, 0] = 1e6
    counted_BT = torch.ones(2, 500).bool()
    counted_BT[:, 0] = False
    noise = losses.channel_noise(state_BTD, counted_BT, 0.2)[:, 1:] - state_BTD[:, 1:]
    assert torch.allclose(noise.std((0, 1)), torch.tensor([0.2, 2.0, 0.0]), rtol=0.1)
    assert abs(float(noise[..., 1].mean())) < 0.3
    assert torch.equal(losses.channel_noise(state_BTD, counted_BT & False, 0.2), state_BTD)
