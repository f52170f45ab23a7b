"""Muon against float64 singular value decompositions and a from-scratch reference."""

from typing import Literal

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

from outrider.train import muon, optim
from outrider.train.muon import COEFFICIENTS, Muon, Split, orthogonalise
from outrider.train.optim import OptimSettings, inner_matrices, state_bytes


def polar(x_MN: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(x_MN.double(), full_matrices=False)
    return left @ right


def made(num_rows: int, num_columns: int, smallest: float, seed: int = 0) -> Tensor:
    """A matrix with singular values from 1 down to `smallest`, evenly in the logarithm."""
    generator = torch.Generator().manual_seed(seed)
    rank = min(num_rows, num_columns)
    x_MN = torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)
    left, _, right = torch.linalg.svd(x_MN, full_matrices=False)
    return (left * torch.logspace(0, np.log10(smallest), rank)) @ right


@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (33, 33), (1, 7), (7, 1)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-3), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_the_nearest_orthogonal_matrix(
    shape: tuple[int, int], dtype: torch.dtype, limit: float, size: float
) -> None:
    x_MN = made(*shape, 0.2) * size
    found = orthogonalise(x_MN.to(dtype)).double()
    assert float(torch.linalg.matrix_norm(found - polar(x_MN), 2)) < limit


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_low_ranks_and_rounding_do_not_run_away(rank: int) -> None:
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        left_MR = torch.randn(24, rank, generator=generator, dtype=torch.float64)
        right_RN = torch.randn(rank, 40, generator=generator, dtype=torch.float64)
        x_MN = left_MR @ right_RN
        found = orthogonalise(x_MN.bfloat16()).double()
        largest = float(torch.linalg.matrix_norm(found, 2))
        assert 0.9 < largest < 1.1, seed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_singular_value_grows_far_above_one_however_small_it_was(dtype: torch.dtype) -> None:
    found = orthogonalise(made(96, 200, 1e-7).to(dtype)).double()
    assert float(torch.linalg.matrix_norm(found, 2)) < 1.06


def test_stacked_matrices_are_orthogonalised_apart_and_scaled() -> None:
    x_BMN = torch.stack([made(16, 24, 0.1, seed) * 10.0**seed for seed in range(3)]).float()
    together = orthogonalise(x_BMN, scale=-0.5)
    for x_MN, found in zip(x_BMN, together, strict=True):
        torch.testing.assert_close(found, -0.5 * orthogonalise(x_MN))


def test_zero_stays_zero() -> None:
    assert not orthogonalise(torch.zeros(2, 4, 9)).any()


def test_coefficients_are_the_minimax_ones() -> None:
    low, high = 0.02, 1.0
    for coefficients in COEFFICIENTS:
        x_X = np.linspace(low, high, 2001)
        powers_XP = np.stack([x_X, x_X**3, x_X**5], 1)
        ones = np.ones((len(x_X), 1))
        bounds = np.block([[powers_XP, -ones], [-powers_XP, -ones]])
        limits = np.concatenate([ones, -ones]).ravel()
        best = linprog([0, 0, 0, 1], A_ub=bounds, b_ub=limits, bounds=[(None, None)] * 4)
        np.testing.assert_allclose(coefficients, best.x[:3], atol=2e-4)
        low, high = 1 - best.x[3], 1 + best.x[3]
    assert high - 1 < 1e-3


def reference(values: Tensor, grads: list[Tensor], split: Split | None) -> Tensor:
    """Muon written out in float64 with exact polar factors, block by block."""
    value, average = values.double(), torch.zeros_like(values, dtype=torch.float64)
    for grad in grads:
        average = 0.95 * average + 0.05 * grad
        ahead = 0.05 * grad + 0.95 * average
        parts = [ahead]
        if split is not None:
            parts = list(ahead.split(split[1], dim=0 if split[0] == "rows" else 1))
        turned = [polar(part) * 0.2 * max(part.shape) ** 0.5 for part in parts]
        update = torch.cat(turned, dim=1 if split is not None and split[0] == "columns" else 0)
        value = value * (1 - 0.01 * 0.3) - 0.01 * update
    return value


SPLITS: list[Split | None] = [None, ("rows", 4), ("columns", 6)]


def stepped(split: Split | None) -> tuple[Tensor, Tensor]:
    """Weights after three steps: Muon's and the reference's."""
    generator = torch.Generator().manual_seed(0)
    value = torch.nn.Parameter(torch.randn(12, 18, generator=generator))
    grads = [torch.randn(12, 18, generator=generator) for _ in range(3)]
    expected = reference(value.detach(), [grad.double() for grad in grads], split)
    optimizer = Muon([{"params": [value], "split": split}], lr=0.01, weight_decay=0.3)
    for grad in grads:
        value.grad = grad
        optimizer.step()
    return value.detach().double(), expected


def deviation(split: Split | None) -> float:
    found, expected = stepped(split)
    return float((found - expected).abs().max())


@pytest.mark.parametrize("split", SPLITS)
def test_steps_equal_the_reference(split: Split | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "product_dtype", lambda: torch.float32)
    assert deviation(split) < 2e-4  # an update's entries are about 2e-3


def test_planted_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "product_dtype", lambda: torch.float32)
    with monkeypatch.context() as planted:
        planted.setattr(muon, "blocks", lambda value, split: value)  # heads not apart
        assert deviation(("rows", 4)) > 2e-4
    with monkeypatch.context() as planted:
        planted.setattr(muon, "COEFFICIENTS", ((3.4445, -4.775, 2.0315),) * 2)  # too few
        assert deviation(None) > 2e-4
    with monkeypatch.context() as planted:
        planted.setattr(muon, "CUSHION", 1.0)
        with pytest.raises(AssertionError):
            test_low_ranks_and_rounding_do_not_run_away(1)
    with monkeypatch.context() as planted:
        right = muon.orthogonalise
        planted.setattr(muon, "orthogonalise", lambda x, k: right(x, k * 1.1))  # another size
        assert deviation(None) > 2e-4


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_state_is_as_large_as_planned(optimizer: Literal["adamw", "muon"]) -> None:
    head = nn.ModuleDict({"inner": nn.Linear(7, 5), "lm_head": nn.Linear(5, 3, bias=False)})
    settings = OptimSettings(optimizer=optimizer)
    sum((value**2).sum() for value in head.parameters()).backward()
    kept = [*head.parameters(), *(value.grad for value in head.parameters())]
    for one in optim.build(head, settings):
        one.step()
        kept += [x for state in one.state.values() for x in state.values() if x.ndim]
    inner = sum(value.numel() for value in inner_matrices(head, settings))
    assert inner == (35 if optimizer == "muon" else 0)
    planned = state_bytes(55, num_inner=inner)
    assert planned == sum(value.numel() * value.element_size() for value in kept)
