"""Packed weights give the same answers, and leave no trace."""

import pytest
import torch

from outrider.data import packed_linears as module
from outrider.data.answers import Decoding, Request
from outrider.data.local_answers import LocalAnswers, answers
from outrider.data.packed_linears import packed_linears, product
from outrider.data.sampling import Sampling
from outrider.data.target import Target

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@pytest.fixture
def target(make_model):
    return Target.from_model(make_model())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (2, 7), (40, 3)])
def test_a_packed_product_is_the_product(shape, bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 36, bias=bias)
    given = torch.randn(*shape, 48)
    exact = given.double() @ linear.weight.double().T
    exact = exact + linear.bias.double() if bias else exact
    found = product(linear)(given)
    assert found.shape == exact.shape
    assert (found.double() - exact).abs().max() < 1e-5


def test_states_are_those_of_the_target_and_layers_are_left_as_they_were(target):
    ids = torch.randint(2, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    before = target.run(ids).last_BTH
    with packed_linears(target) as does:
        assert does
        within = target.run(ids).last_BTH
    torch.testing.assert_close(within, before, rtol=1e-4, atol=1e-5)
    assert torch.equal(target.run(ids).last_BTH, before)
    with pytest.raises(KeyError), packed_linears(target):
        raise KeyError
    with pytest.MonkeyPatch.context() as patch:  # what is packed is what runs
        patch.setattr(
            module,
            "product",
            lambda linear: lambda given: 2 * linear.weight[:, 0] + 0 * given[..., :1],
        )
        with packed_linears(target):
            assert not torch.allclose(target.run(ids).last_BTH, before, atol=1e-2)
    assert not [one for one in target.model.modules() if "forward" in vars(one)]


def test_other_targets_stay_as_they_are(make_model, monkeypatch):
    half = Target.from_model(make_model().to(torch.bfloat16))
    with packed_linears(half) as does:
        assert not does
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    with packed_linears(Target.from_model(make_model())) as does:
        assert not does


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
