"""Objectives against plain sums, gradients against differences, the fused pass against both."""

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from outrider.heads import fused, losses
from outrider.heads.losses import OBJECTIVES, Total, feature_noise, objective, smooth_l1, total


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
    return {
        "soft_ce": -sum(a * math.log(b) for a, b in pairs),
        "kl": kl,
        "reverse_kl": sum(b * math.log(b / a) for a, b in pairs),
        "tv": 1 - accept,
        "lk_alpha": -math.log(accept),
        "lk_lambda": weight * kl + (1 - weight) * (1 - accept),
    }[name]


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_objective_equals_its_definition(name: str):
    logits, teacher = laws()
    ours = objective(name)(logits, teacher)
    for row in range(len(logits)):
        wanted = plain(name, logits[row].tolist(), teacher[row].tolist())
        assert abs(float(ours[row]) - wanted) < 1e-12


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_gradient_equals_finite_differences(name: str):
    """lk_lambda's weight is a constant in its gradient, so it is held fixed in the differences."""
    logits, teacher = laws(rows=1)
    found = losses.slope(name, logits, teacher).grad_NW[0]
    weight = float((-3.0 * losses.acceptance(logits, teacher)).exp())

    def value(z: Tensor) -> float:
        if name == "lk_lambda":
            parts = losses.kl(z, teacher), losses.tv(z, teacher)
            return float(weight * parts[0] + (1 - weight) * parts[1])
        return float(objective(name)(z, teacher))

    for column in range(logits.shape[1]):
        step = torch.zeros_like(logits)
        step[0, column] = 1e-6
        slope = (value(logits + step) - value(logits - step)) / 2e-6
        assert abs(float(found[column]) - slope) < 1e-8


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


def test_unknown_objective_lists_the_known():
    with pytest.raises(ValueError, match=r"'ce'; choose one of kl, lk_alpha"):
        objective("ce")


def test_smooth_l1_is_the_mean_over_channels():
    loss = smooth_l1(torch.tensor([[0.5, 3.0]]), torch.zeros(1, 2))
    assert torch.allclose(loss, torch.tensor([(0.125 + 2.5) / 2]))


def test_feature_noise_is_uniform_and_shrinks_with_length():
    generator = torch.Generator().manual_seed(0)
    for length, limit in ((512, 0.1), (1024, 0.05)):
        noise = feature_noise(torch.zeros(1, length, 64), generator)
        assert limit * 0.99 < float(noise.abs().max()) <= limit
        assert abs(float(noise.mean())) < limit / 50


# The fused pass

PREDICTED, STEPS = 7, 3


def grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def fused_inputs(ref: ModuleType, name: str) -> tuple[Tensor, Tensor, fused.Teacher, Tensor]:
    head = ref.make_head(**ref.FLAGS[name])
    torch.manual_seed(2)
    hidden = torch.randn(PREDICTED, STEPS, 32, dtype=torch.float64) * 0.3
    state = torch.randn(PREDICTED, 32, dtype=torch.float64) * 0.3
    weight = torch.rand(PREDICTED, STEPS, dtype=torch.float64)
    weight[2] = 0
    weight[4, 1] = 0
    output = head.output_weights()[0].detach().clone()
    return hidden, output, fused.teacher_of(head, state, torch.float64), weight


@pytest.mark.parametrize("setting", ["eagle1", "eagle3", "reduced"])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_fused_equals_autograd_in_any_chunks(
    name: str, setting: str, ref: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    hidden, output, teacher, weight = fused_inputs(ref, setting)
    probs = (teacher.state_PH @ teacher.table_WH.T).softmax(-1).unsqueeze(1)
    results = []
    for chunk, part in ((1 << 20, 1 << 20), (300, 100), (1, 1)):
        monkeypatch.setattr(fused, "CHUNK_ELEMENTS", chunk)
        monkeypatch.setattr(fused, "SLICE_ELEMENTS", part)
        mine, table = hidden.clone().requires_grad_(), output.clone().requires_grad_()
        scored = fused.score_pairs(mine, [table], teacher, weight, name)
        (scored.loss * 0.7).backward()
        results.append((scored, grad(mine), grad(table)))
    mine, table = hidden.clone().requires_grad_(), output.clone().requires_grad_()
    logits = mine @ table.T
    loss = objective(name)(logits, probs.expand_as(logits))
    ((loss * weight).sum() * 0.7).backward()
    for scored, grad_hidden, grad_output in results:
        assert torch.allclose(scored.loss, (loss * weight).sum())
        assert torch.allclose(scored.loss_PK, loss)
        assert torch.allclose(scored.accept_PK, losses.acceptance(logits, probs))
        assert torch.allclose(grad_hidden, grad(mine), atol=1e-12)
        assert torch.allclose(grad_output, grad(table), atol=1e-12)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_an_output_head_for_each_step_equals_autograd_in_any_chunks(
    name: str, ref: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    hidden, first, teacher, weight = fused_inputs(ref, "reduced")
    outputs = [first, first.flip(0) * 0.5, torch.randn_like(first)]
    probs = (teacher.state_PH @ teacher.table_WH.T).softmax(-1).unsqueeze(1)
    mine = hidden.clone().requires_grad_()
    tables = [output.clone().requires_grad_() for output in outputs]
    logits = torch.stack([mine[:, k] @ table.T for k, table in enumerate(tables)], 1)
    loss = objective(name)(logits, probs.expand_as(logits))
    ((loss * weight).sum() * 0.7).backward()
    for chunk, part in ((1 << 20, 1 << 20), (50, 30), (1, 1)):
        monkeypatch.setattr(fused, "CHUNK_ELEMENTS", chunk)
        monkeypatch.setattr(fused, "SLICE_ELEMENTS", part)
        again = hidden.clone().requires_grad_()
        copies = [output.clone().requires_grad_() for output in outputs]
        scored = fused.score_pairs(again, copies, teacher, weight, name)
        (scored.loss * 0.7).backward()
        torch.testing.assert_close(scored.loss_PK, loss.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grad(again), grad(mine), rtol=1e-10, atol=1e-12)
        for copy, table in zip(copies, tables, strict=True):
            torch.testing.assert_close(grad(copy), grad(table), rtol=1e-10, atol=1e-12)


def test_output_heads_for_some_steps_only_are_refused(ref: ModuleType):
    hidden, output, teacher, weight = fused_inputs(ref, "eagle3")
    with pytest.raises(ValueError, match="2 output heads are given for 3 steps"):
        fused.score_pairs(hidden, [output, output], teacher, weight)


def test_fused_honours_scale_and_cap_of_the_target(ref: ModuleType):
    hidden, output, teacher, weight = fused_inputs(ref, "eagle3")
    bent = teacher._replace(tables=teacher.tables._replace(logit_scale=2.0, softcap=1.5))
    scores = 1.5 * torch.tanh(2.0 * (teacher.state_PH @ teacher.table_WH.T) / 1.5)
    scored = fused.score_pairs(hidden, [output], bent, weight)
    wanted = losses.soft_ce(hidden @ output.T, scores.softmax(-1).unsqueeze(1))
    assert torch.allclose(scored.loss_PK, wanted)


def test_fused_without_rows_is_zero(ref: ModuleType):
    hidden, output, teacher, weight = fused_inputs(ref, "eagle3")
    empty = teacher._replace(state_PH=teacher.state_PH[:0])
    mine = hidden[:0].requires_grad_()
    scored = fused.score_pairs(mine, [output.requires_grad_()], empty, weight[:0])
    scored.loss.backward()
    assert float(scored.loss.detach()) == 0
    assert not grad(output).any()


def test_bf16_products_stay_near_fp32(ref: ModuleType):
    hidden, output, teacher, weight = fused_inputs(ref, "eagle3")
    exact = fused.score_pairs(hidden, [output], teacher, weight)
    low = teacher._replace(table_WH=teacher.table_WH.bfloat16())
    rough = fused.score_pairs(hidden.bfloat16(), [output.float()], low, weight.float())
    assert rough.loss.dtype == torch.float32
    assert abs(float(rough.loss) - float(exact.loss)) < 0.02 * float(exact.loss)


def test_best_is_inside_looks_at_the_whole_vocabulary(ref: ModuleType):
    head = ref.make_head(draft_vocab_size=20)
    table = head.lent().output_VH
    state = table[torch.arange(50)]
    best = (state @ table.T).argmax(-1)
    wanted = torch.isin(best, head.draft_ids_W)
    assert torch.equal(fused.best_is_inside(head, state, chunk=7), wanted)
    assert wanted.any()
    assert not wanted.all()


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
