"""Packed weights give the same answers, and leave no trace."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from outrider.data import packed_linears as module
from outrider.data.answers import Decoding, Request
from outrider.data.local_answers import LocalAnswers, answers
from outrider.data.packed_linears import can_pack, packed_linears, packed_weights
from outrider.data.sampling import Sampling
from outrider.data.target import Target

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@pytest.fixture
def target(make_model):
    return Target.from_model(make_model())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (2, 7), (40, 3), (0, 3), (4,), ()])
def test_a_packed_product_is_the_product(shape, has_bias, dtype):
    torch.manual_seed(0)
    linear = nn.Linear(48, 36, bias=has_bias).to(dtype).requires_grad_(requires_grad=False)
    given = torch.randn(*shape, 48).to(dtype)
    exact = given.double() @ linear.weight.double().T
    exact = exact + linear.bias.double() if has_bias else exact
    with packed_weights([linear.weight]) as can:
        found = linear(given)
    assert can == can_pack(linear.weight)
    assert found.shape == exact.shape
    assert found.dtype == dtype
    slack = 1e-5 if dtype == torch.float32 else 0.02
    assert ((found.double() - exact).abs() <= slack * (1 + exact.abs())).all()


def is_packed(given, weight, known):
    """Whether a product comes from a packed copy, made to be of half the weight here."""
    packs = torch.ops.mkldnn._reorder_linear_weight
    with pytest.MonkeyPatch.context() as patch, packed_weights(known):
        patch.setattr(module._Weight, "packed", lambda one: packs(one._plain / 2, module.ROWS))
        found = F.linear(given, weight)
    return torch.allclose(found, given @ weight.T / 2, atol=1e-5)


def test_which_products_are_packed():
    torch.manual_seed(0)
    weight, given = torch.randn(32, 32), torch.randn(3, 32)
    assert is_packed(given, weight, [weight])
    assert is_packed(given, weight[:20], [weight, weight[:20]])
    assert not is_packed(given, weight[:20], [weight])  # other rows of the same memory
    assert not is_packed(given, weight.T, [weight])
    assert not is_packed(given, weight.clone(), [weight])
    assert not is_packed(given.double(), weight.double(), [weight.double()])
    assert not is_packed(given.requires_grad_(), weight, [weight])
    with torch.no_grad():
        assert is_packed(given, weight, [weight])


def test_a_weight_that_was_written_to_is_packed_anew():
    torch.manual_seed(0)
    weight, given = torch.randn(32, 16), torch.randn(3, 16)
    with packed_weights([weight]):
        F.linear(given, weight)
        weight.mul_(2)
        torch.testing.assert_close(F.linear(given, weight), given @ weight.T)
    with torch.inference_mode():
        fixed = weight.clone()
        with packed_weights([fixed]):
            torch.testing.assert_close(F.linear(given, fixed), given @ weight.T)


def test_contexts_share_copies_and_leave_no_trace():
    weight, given, before = torch.randn(32, 16), torch.randn(3, 16), F.linear
    held = []

    def fail():
        with packed_weights([weight]):
            F.linear(given, weight)
            held.extend(one.held for known in module._contexts for one in known.values())
            raise KeyError

    with packed_weights([weight]), packed_weights([]):
        F.linear(given, weight)
        with pytest.raises(KeyError):
            fail()
    assert held == [4 * weight.numel(), 0]
    assert F.linear is before
    assert not module._contexts


def test_no_more_is_held_than_allowed(monkeypatch):
    weights, given = [torch.randn(32, 16) for _ in range(3)], torch.randn(3, 16)
    monkeypatch.setattr(module, "MOST_BYTES", 2 * 32 * 16 * 4)
    with packed_weights(weights):
        for weight in weights * 2:
            torch.testing.assert_close(F.linear(given, weight), given @ weight.T)
        held = [one.held for one in module._contexts[0].values()]
    assert held == [2048, 2048, 0]


def test_states_and_logits_are_those_of_the_target(target):
    ids = torch.randint(2, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    before = target.run(ids).last_BTH
    logits = target.logits(before[0])
    with packed_linears(target) as can:
        assert can
        states, drawn = target.run(ids).last_BTH, target.logits(before[0])
        held = sum(one.held for one in module._contexts[0].values())
    torch.testing.assert_close(states, before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(drawn, logits, rtol=1e-4, atol=1e-5)
    linears = [one.weight for one in target.decoder.modules() if type(one) is nn.Linear]
    assert held == 4 * sum(one.numel() for one in [target.output_VH, *linears])
    assert torch.equal(target.run(ids).last_BTH, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_the_same_token_by_token(target, temperature):
    made = torch.Generator().manual_seed(2)
    prompts = [
        (
            Request(f"r{n}", [], Sampling(temperature=temperature), {}),
            torch.randint(2, 60, (3 + n % 5,), generator=made).tolist(),
        )
        for n in range(9)
    ]
    plain = {
        one.request.id: one.answer_ids
        for one in answers(target, prompts, Decoding(max_new_tokens=12))
    }
    for batch_size in (1, 4, 9):
        found = {}
        decoding = Decoding(max_new_tokens=12, batch_size=batch_size)
        LocalAnswers(target, decoding).answer(
            prompts, lambda one, found=found: found.update({one.request.id: one.answer_ids})
        )
        assert found == plain
