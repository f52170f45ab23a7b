"""The first difference of two texts: found, measured, and told apart from a planted defect."""

import copy

import pytest
import torch

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval import divergence
from outrider.eval.decode import Decoding, decode
from outrider.eval.divergence import Context, find_divergence, gap_moves, logits_after

PROMPT = [5, 9, 14, 22]


@pytest.fixture(scope="module")
def target(tiny_target):
    return Target.from_model(copy.deepcopy(tiny_target.model).bfloat16())


def plain(target, sampling, count=24):
    decoding = Decoding(max_new_tokens=count, sampling=sampling, ignore_eos=True)
    return decode(target, PROMPT, None, decoding).ids


def choices(target, sampling, ids):
    """Tokens by logit after the prompt and some of the answer."""
    row = logits_after(target, [*PROMPT, *ids], len(PROMPT) + len(ids) - 1, 1)[-1]
    return row.sort(descending=True)


def test_equal_texts_have_no_divergence(target):
    ids = plain(target, Sampling())
    context = Context(prompt_ids=PROMPT, sampling=Sampling())
    assert find_divergence(target, context, ids, ids) is None


def test_the_logits_of_a_linear_pass_are_found_for_any_width(tiny_target):
    ids = [*PROMPT, 8, 31, 40, 17, 3, 6]
    whole = tiny_target.logits(tiny_target.run(torch.tensor([ids])).last_BTH[0])
    for start, width in ((0, 1), (3, 1), (3, 4), (9, 8), (0, 20)):
        found = logits_after(tiny_target, ids, start, width)
        torch.testing.assert_close(found, whole[start:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("place", [0, 5, 23])
def test_a_token_that_nothing_explains_is_a_defect(target, place):
    ids = plain(target, Sampling())
    worst = int(choices(target, Sampling(), ids[:place]).indices[-1])
    other = [*ids[:place], worst, *ids[place + 1 :]]
    found = find_divergence(target, Context(prompt_ids=PROMPT, sampling=Sampling()), ids, other)
    assert (found.place, found.plain, found.other) == (place, ids[place], worst)
    assert found.kind == "defect"
    assert found.gap > found.noise > 0
    assert f"first difference at token {place}" in found.text()


def test_a_near_tie_is_a_tie_flip_and_its_gap_is_the_top_two():
    """Two output rows apart by less than bfloat16 can see: whichever wins, it is no defect."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        initializer_range=0.3,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).bfloat16()
    with torch.no_grad():
        model.lm_head.weight[30:60] = model.lm_head.weight[:30]
        model.lm_head.weight[60] = 0
    target = Target.from_model(model)
    ids = plain(target, Sampling())
    token = ids[9]
    twin = token + 30 if token < 30 else token - 30
    other = [*ids[:9], twin, *ids[10:]]
    found = find_divergence(target, Context(prompt_ids=PROMPT, sampling=Sampling()), ids, other)
    assert found.kind == "tie-flip"
    assert found.gap == found.top_gap == 0


def test_sampled_gaps_include_the_noise_of_the_draw(target):
    sampling = Sampling(temperature=0.8, top_p=0.98, frequency_penalty=0.3)
    ids = plain(target, sampling)
    context = Context(prompt_ids=PROMPT, sampling=sampling)
    for place in (0, 7, 20):
        for token in range(3):
            if token == ids[place]:
                continue
            other = [*ids[:place], token, *ids[place + 1 :]]
            found = find_divergence(target, context, ids, other)
            # Plain decoding's token won its race, up to what a replay of its passes rounds.
            assert found.gap >= -found.noise
            assert found.gap >= found.top_gap - 1e-6 or found.gap <= found.noise


def test_a_text_that_ends_early_is_a_defect(target):
    ids = plain(target, Sampling())
    context = Context(prompt_ids=PROMPT, sampling=Sampling())
    for shorter, longer in ((ids[:7], ids), (ids, ids[:7])):
        found = find_divergence(target, context, shorter, longer)
        assert (found.place, found.kind) == (7, "defect")
        assert None in (found.plain, found.other)


def test_noise_is_that_of_the_two_tokens_alone():
    one = torch.tensor([[5.0, 4.0, 0.0], [2.0, 1.0, 0.0]])
    other = one + torch.tensor([[0.1, -0.2, 0.0], [0.3, 0.3, 0.5]])
    for pair, moves in (((0, 1), [0.3, 0.0]), ((1, 0), [0.3, 0.0]), ((1, 2), [0.2, 0.2])):
        torch.testing.assert_close(gap_moves(one, other, pair), torch.tensor(moves))


@pytest.mark.parametrize(("gap", "kind"), [(0.1, "tie-flip"), (0.9, "defect")])
def test_noise_between_other_tokens_excuses_no_gap(target, monkeypatch, gap, kind):
    """Two tokens whose gap hardly moves, beside a third that moves by four."""
    ids = plain(target, Sampling())
    place, other = 9, (ids[9] + 1) % 61
    third = (ids[9] + 2) % 61

    def runs(target, ids, start, width):
        logits_NV = torch.zeros(len(ids) - start, 61)
        logits_NV[:, ids_at] = 10.0
        logits_NV[:, other] = 10.0 - gap
        if width > 1:
            logits_NV[:, other] -= 0.15
            logits_NV[:, third] += 4.0
        return logits_NV

    ids_at = ids[place]
    monkeypatch.setattr(divergence, "logits_after", runs)
    context = Context(prompt_ids=PROMPT, sampling=Sampling())
    found = find_divergence(target, context, ids, [*ids[:place], other, *ids[place + 1 :]])
    assert found.kind == kind
    assert found.gap == pytest.approx(gap, abs=1e-4)
    assert found.moved == pytest.approx(0.15, abs=1e-4)
    assert found.noise == pytest.approx(0.15, abs=1e-4)
