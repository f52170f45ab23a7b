"""A prompt in chunks leaves the states, keys and texts of a whole pass."""

import copy

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from outrider.data.cache import RowCache
from outrider.data.target import Target
from outrider.eval import prefill as prefill_module
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.link import tables
from outrider.eval.prefill import prefill
from outrider.eval.rows.head import HeadRows
from outrider.eval.rows.loop import decode_rows
from outrider.eval.trees.plans import plan_named

IDS = [(7 * place + 3) % 61 for place in range(23)]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def target(request, tiny_target):
    if request.param == "llama":
        return Target.from_model(copy.deepcopy(tiny_target.model).double())
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=8,
        initializer_range=0.3,
        pad_token_id=0,
    )
    return Target.from_model(Gemma3ForCausalLM(config).double())


@pytest.mark.parametrize("chunk", [1, 4, 22, 23, 99])
def test_states_and_keys_are_those_of_a_whole_pass(target, chunk):
    whole, parts = RowCache(1), RowCache(1)
    wanted = prefill(target, IDS, whole, (1, 3))
    found = prefill(target, IDS, parts, (1, 3), chunk)
    assert parts.lengths_B.tolist() == [23]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-5  # norms of these models are float32 within
    for ours, theirs in zip(parts.keys, whole.keys, strict=True):
        assert (ours[:, :, :23] - theirs[:, :, :23]).abs().max() < 1e-5


def test_a_chunk_that_forgets_those_before_is_noticed(target, monkeypatch):
    wanted = prefill(target, IDS, RowCache(1), ())
    masks = prefill_module.attention_masks
    monkeypatch.setattr(
        prefill_module,
        "attention_masks",
        lambda config, lengths, *more: _blind(masks(config, lengths, *more), int(lengths.max())),
    )
    found = prefill(target, IDS, RowCache(1), (), 4)
    assert (found.last_BTH - wanted.last_BTH).abs().max() > 1e-2


def _blind(masks, past):
    def hide(mask):
        mask = mask.clone()
        mask[..., :past] = False
        return mask

    return (
        {key: hide(one) for key, one in masks.items()} if isinstance(masks, dict) else hide(masks)
    )


@pytest.mark.parametrize("chunk", [3, 16])
def test_both_loops_write_the_same_text_in_chunks(tiny_target, tiny_head, chunk):
    target = Target.from_model(copy.deepcopy(tiny_target.model).double())
    head = copy.deepcopy(tiny_head).double().attach(tables(target))
    plan = plan_named("tree:3,3,8")
    whole = Decoding(max_new_tokens=20, ignore_eos=True)
    parts = Decoding(max_new_tokens=20, ignore_eos=True, prefill_chunk=chunk)
    wanted = decode(target, IDS, HeadDrafter(head, plan), whole)
    found = decode(target, IDS, HeadDrafter(head, plan), parts)
    assert (found.ids, found.rounds) == (wanted.ids, wanted.rounds)
    (row,) = decode_rows(target, [IDS], HeadRows(head, plan, 1), parts, batch_size=1).done
    assert (row.new_ids, row.rounds) == (wanted.ids, wanted.rounds)
