"""Geometry and rotary from the target's config: cases C07, C08 and C12, and every refusal."""

import re
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.heads import EagleConfig, EagleHead, HeadCache, Tables
from outrider.heads.config import default_aux_layers
from outrider.heads.rope import rotary
from outrider.heads.tables import START_NORM

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}


def head_for(config: EagleConfig) -> EagleHead:
    torch.manual_seed(0)
    table = torch.randn(config.vocab_size, config.target_hidden_size)
    tables = Tables(
        embedding_VH=table,
        output_VH=table,
        tokenizer_size=config.tokenizer_size,
        num_layers=config.num_target_layers,
    )
    head = EagleHead(config).attach(tables)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(std=0.2)
    return head


@pytest.mark.parametrize("style", ["flat", "new", "nested", "object"])
@pytest.mark.parametrize("name", sorted(SCALINGS))
def test_c07_frequencies_equal_the_targets(name: str, style: str):
    scaling = SCALINGS[name]
    target = LlamaConfig(**BASE, rope_parameters={**scaling, "rope_theta": 5e5})
    theirs = LlamaRotaryEmbedding(target)
    source: Any = {
        "flat": {**BASE, "rope_theta": 5e5, "rope_scaling": scaling},
        "new": {**BASE, "rope_parameters": {**scaling, "rope_theta": 5e5}},
        "nested": {"text_config": {**BASE, "rope_theta": 5e5, "rope_scaling": scaling}},
        "object": target,
    }[style]
    config = EagleConfig.from_target(source)
    ours = rotary(config.rope, config.head_dim)
    assert torch.equal(ours.inverse_R, theirs.inv_freq)
    assert ours.factor == theirs.attention_scaling


def test_c07_old_type_key_and_layered_parameters_are_read():
    old = {**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert EagleConfig.from_target(old).rope["rope_type"] == "linear"
    layered = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = EagleConfig.from_target({**BASE, "rope_parameters": layered})
    assert config.rope["rope_theta"] == 1e6


@pytest.mark.parametrize("place", ["top", "rope_parameters"])
def test_c07_partial_factor_turns_a_quarter_of_the_channels(place: str):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    target = {**BASE, "rope_parameters": rope}
    (target if place == "top" else rope)["partial_rotary_factor"] = 0.25
    config = EagleConfig.from_target(target)
    assert rotary(config.rope, 16).inverse_R.shape == (2,)
    head = head_for(config)
    x = torch.randn(3, 64)
    at = [head.queries(x, torch.full((3,), place), head.weights()) for place in (0, 9)]
    same = (at[0] == at[1]).all(0).all(0)
    assert same.tolist() == [False] * 4 + [True] * 12


def test_c07_unknown_type_is_refused():
    scaling = {"rope_type": "spiral", "factor": 2.0}
    with pytest.raises(
        ValueError, match=r"rope_type is 'spiral', and a draft head can follow default"
    ):
        EagleConfig.from_target({**BASE, "rope_scaling": scaling})


def test_c07_incomplete_scaling_is_refused():
    with pytest.raises(ValueError, match=r"'linear' lacks 'factor'"):
        EagleConfig.from_target({**BASE, "rope_scaling": {"rope_type": "linear"}})


def test_c08_positions_are_honoured():
    """A constant shift leaves rotary attention unchanged; a gap in the positions does not."""
    head = head_for(EagleConfig.from_target(BASE))
    feature, ids = torch.randn(1, 20, 32), torch.randint(0, 64, (1, 20))
    position = torch.arange(20)[None]
    plain = head.step(feature, ids, position)
    caches = HeadCache(), HeadCache()
    shifted = head.step(feature, ids, position + 5, caches[0])
    head.step(feature, ids, position, caches[1])
    keys = [cache.append(torch.zeros(1, 1, 2, 16), torch.zeros(1, 1, 2, 16))[0] for cache in caches]
    assert not torch.allclose(keys[0], keys[1], atol=1e-2)
    assert torch.allclose(shifted, plain, atol=1e-4)
    gap = head.step(feature, ids, position + 5 * (position > 9))
    assert torch.allclose(gap[:, :10], plain[:, :10], atol=1e-5)
    assert not torch.allclose(gap[:, 10:], plain[:, 10:], atol=1e-3)


@pytest.mark.parametrize("length", [20, 40, 100, 300])
def test_c08_longer_contexts_than_the_limit_do_not_crash(length: int):
    config = EagleConfig.from_target(BASE, max_position_embeddings=32)
    assert config.max_position_embeddings == 32
    head = head_for(config)
    feature, ids = torch.randn(1, length, 32), torch.randint(0, 64, (1, length))
    hidden = head.step(feature, ids, torch.arange(length)[None])
    assert bool(head.draft_logits(hidden).isfinite().all())


def test_c12_head_size_is_read_and_not_guessed():
    config = EagleConfig.from_target(BASE)
    assert (config.head_dim, config.num_heads, config.num_kv_heads) == (16, 4, 2)
    head = EagleHead(config)
    assert head.layer.self_attn.q_proj.weight.shape == (64, 64)
    assert head.layer.self_attn.o_proj.weight.shape == (32, 64)


def test_c12_a_narrower_draft_has_its_own_embedding():
    config = EagleConfig.from_target(BASE, hidden_size=24)
    assert config.own_embedding
    head = head_for(config).start_from_target()
    assert head.embed_tokens.weight.requires_grad
    assert head.embed_tokens.weight.shape == (64, 24)
    feature = head.project(torch.randn(1, 5, 96), None)
    hidden = head.step(feature, torch.randint(0, 64, (1, 5)), torch.arange(5)[None])
    assert head.draft_logits(hidden).shape == (1, 5, 64)
    with pytest.raises(ValueError, match="engines then need own_embedding=True"):
        EagleConfig.from_target(BASE, hidden_size=24, own_embedding=False)


def test_a_new_head_starts_from_the_targets_tables():
    ids = torch.arange(0, 64, 2)
    config = EagleConfig.from_target(BASE, draft_vocab_size=32)
    table = torch.randn(64, 32)
    tables = Tables(
        embedding_VH=table,
        output_VH=table,
        tokenizer_size=64,
        num_layers=8,
        norm_H=torch.rand(32),
    )
    head = EagleHead(config, ids).attach(tables).start_from_target()
    assert torch.equal(head.lm_head.weight, table[ids])
    assert tables.norm_H is not None
    torch.testing.assert_close(head.norm.weight, tables.norm_H * START_NORM)
    aux = torch.randn(1, 5, 96)
    assert torch.equal(head.project(aux, None), aux[..., 64:])


def test_tables_are_neither_parameters_nor_state():
    head = head_for(EagleConfig.from_target(BASE))
    names = {*dict(head.named_parameters()), *head.state_dict()}
    assert not [name for name in names if "embed" in name or "table" in name]
    assert head.to(torch.float64).lent().embedding_VH.dtype == torch.float32


def test_a_head_refuses_another_target_and_no_target():
    head = EagleHead(EagleConfig.from_target(BASE))
    with pytest.raises(ValueError, match=r"call head.attach\(tables\) first"):
        head.lent()
    table = torch.randn(63, 32)
    tables = Tables(embedding_VH=table, output_VH=table, tokenizer_size=63, num_layers=8)
    with pytest.raises(ValueError, match="is 63 x 32 but this head was made for 64 x 32"):
        head.attach(tables)


def test_config_survives_a_dictionary():
    config = EagleConfig.from_target({**BASE, "rope_scaling": LLAMA3}, fc_norm=True)
    assert EagleConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match=r"unknown head settings \['colour'\]"):
        EagleConfig.from_dict({**config.to_dict(), "colour": 1})


def test_default_layers():
    assert default_aux_layers(30) == (2, 15, 27)
    assert default_aux_layers(7) == (2, 3, 4)
    with pytest.raises(ValueError, match=r"num_hidden_layers is 6; .* give aux_layers explicitly"):
        default_aux_layers(6)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"kind": "eagle2"}, "kind is 'eagle2'; choose one of eagle3, eagle1"),
        ({"num_key_value_heads": 3}, {}, "num_heads is 4; it must be a multiple"),
        ({"num_attention_heads": None}, {}, "the target's config lacks num_attention_heads"),
        ({"intermediate_size": [1, 2]}, {}, "give intermediate_size for the draft"),
        ({}, {"tokenizer_size": 65}, r"tokenizer_size is 65; it must be in 1\.\.64"),
        ({}, {"draft_vocab_size": 65}, r"draft_vocab_size is 65; it must be in 1\.\.64"),
        ({}, {"draft_vocab_size": 60, "tokenizer_size": 50}, "only 50 ids exist"),
        ({}, {"aux_layers": (3, 1)}, r"aux_layers is \(3, 1\); give rising ids in 0\.\.8"),
        ({}, {"aux_layers": (1, 9)}, r"aux_layers is \(1, 9\)"),
        ({}, {"norm_before_fc": True, "fc_norm": True}, "choose one of them"),
        ({}, {"kind": "eagle1", "fc_norm": True}, "fc_norm set for an eagle1 head"),
        ({}, {"kind": "eagle1", "hidden_size": 24}, "hidden_size must be 32 (is 24)"),
        ({}, {"kind": "eagle1", "draft_vocab_size": 8}, "draft_vocab_size 64 (is 8)"),
        ({}, {"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({}, {"num_layers": 0}, "num_layers is 0; it must be at least 1"),
        ({}, {"sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
        ({}, {"full_attention_layers": (0,)}, "full_attention_layers is (0,); give layers in 0..0"),
        (
            {},
            {"sliding_window": 4, "full_attention_layers": (2,), "num_layers": 2},
            "give layers in 0..1",
        ),
        ({}, {"kind": "eagle1", "sliding_window": 4}, "sliding_window set for an eagle1 head"),
        ({}, {"kind": "eagle1", "num_layers": 2}, "num_layers set for an eagle1 head"),
        ({}, {"num_heads": 3}, "num_heads is 3; it must be a multiple of num_kv_heads (2)"),
        ({}, {"head_dim": 7}, "head_dim is 7; rotary positions turn pairs"),
        ({}, {"head_dim": 1}, "head_dim is 1; rotary positions turn pairs"),
    ],
)
def test_refusals(changes: dict[str, Any], settings: dict[str, Any], message: str):
    pattern = message if "\\" in message else re.escape(message)
    with pytest.raises(ValueError, match=pattern):
        EagleConfig.from_target({**BASE, **changes}, **settings)
