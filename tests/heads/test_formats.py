"""Published layouts: what is written, what is read back, and every way a folder can be wrong."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.heads import EagleConfig, EagleHead, load_head, save_head
from outrider.heads.formats.engines import limits
from outrider.heads.rope import rotary

EAGLE3 = {
    "fc.weight": [32, 96],
    "midlayer.self_attn.q_proj.weight": [64, 64],
    "midlayer.self_attn.k_proj.weight": [32, 64],
    "midlayer.self_attn.v_proj.weight": [32, 64],
    "midlayer.self_attn.o_proj.weight": [32, 64],
    "midlayer.mlp.gate_proj.weight": [48, 32],
    "midlayer.mlp.up_proj.weight": [48, 32],
    "midlayer.mlp.down_proj.weight": [32, 48],
    "midlayer.hidden_norm.weight": [32],
    "midlayer.input_layernorm.weight": [32],
    "midlayer.post_attention_layernorm.weight": [32],
    "norm.weight": [32],
}
MAPS = {"lm_head.weight": [20, 32], "d2t": [20], "t2d": [50]}
EAGLE1 = {
    "fc.weight": [32, 64],
    "fc.bias": [32],
    "layers.0.self_attn.q_proj.weight": [64, 32],
    "layers.0.self_attn.k_proj.weight": [32, 32],
    "layers.0.self_attn.v_proj.weight": [32, 32],
    "layers.0.self_attn.o_proj.weight": [32, 64],
    "layers.0.mlp.gate_proj.weight": [48, 32],
    "layers.0.mlp.up_proj.weight": [48, 32],
    "layers.0.mlp.down_proj.weight": [32, 48],
    "layers.0.post_attention_layernorm.weight": [32],
}
LATER = {
    name.replace("midlayer", "layers.1"): shape
    for name, shape in EAGLE3.items()
    if name.startswith("midlayer")
}
LATER |= {
    f"layers.1.self_attn.{x}_proj.weight": [n, 32] for x, n in (("q", 64), ("k", 32), ("v", 32))
}
"""Ordinary layers read the width once; vLLM's and SGLang's name of their norm are both there."""
WANTED = {
    "reduced": EAGLE3 | MAPS,
    "eagle3": EAGLE3 | {"lm_head.weight": [50, 32]},
    "norm_before_fc": EAGLE3 | {"lm_head.weight": [50, 32], "input_norm.weight": [96]},
    "fc_norm": EAGLE3
    | {"lm_head.weight": [50, 32]}
    | {f"fc_norm.{i}.weight": [32] for i in range(3)},
    "eagle1": EAGLE1,
    "two_layers": EAGLE3 | LATER | {"lm_head.weight": [50, 32]},
    "deep_window": EAGLE3 | LATER | MAPS,
    "own_embedding": EAGLE3 | {"lm_head.weight": [50, 32], "embed_tokens.weight": [50, 32]},
}
ALL = [*WANTED, "residual", "norm_output", "all", "narrow"]
ALL += ["one_fused", "five_fused", "own_heads", "three_layers", "mixed_window", "deep_narrow"]


def logits_of(head: EagleHead, data: Any) -> Tensor:
    kind = head.fc.weight.dtype
    feature = head.project(data.aux.to(kind), data.last.to(kind))
    with torch.no_grad():
        return head.draft_logits(head.step(feature, data.ids, data.position))


def edit(folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    """Change a written folder in place."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", ALL)
def test_reload_gives_the_same_logits(name: str, ref: ModuleType, tmp_path: Path):
    head, data = ref.make_head(**ref.FLAGS[name]), ref.packed_for(name)
    save_head(head, tmp_path / "head", provenance={"target": "tiny"})
    again = load_head(tmp_path / "head", head.lent(), dtype=torch.float64)
    assert again.config == head.config
    assert torch.equal(logits_of(again, data), logits_of(head, data))
    assert torch.equal(again.draft_ids_W, head.draft_ids_W)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "config.json",
        "head",
        "model.safetensors",
    ]


@pytest.mark.parametrize("name", sorted(WANTED))
def test_c20_names_shapes_and_types_are_the_published_ones(
    name: str, ref: ModuleType, tmp_path: Path
):
    head = ref.make_head(**ref.FLAGS[name])
    save_head(head, tmp_path / "head", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert {key: list(tensor.shape) for key, tensor in tensors.items()} == WANTED[name]
    kinds = {"d2t": torch.int64, "t2d": torch.bool}
    for key, tensor in tensors.items():
        assert tensor.dtype == kinds.get(key, torch.bfloat16), key
    if name == "eagle1":
        assert not tensors["fc.bias"].any()


def test_c09_maps_are_in_the_weights_only_when_reduced(ref: ModuleType, tmp_path: Path):
    head = ref.make_head(draft_vocab_size=20)
    save_head(head, tmp_path / "reduced")
    tensors = load_file(tmp_path / "reduced" / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(20)
    assert torch.equal(ids, head.draft_ids_W)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    save_head(ref.make_head(), tmp_path / "full")
    assert not {"d2t", "t2d"} & load_file(tmp_path / "full" / "model.safetensors").keys()
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    assert config["draft_vocab_size"] == config["vocab_size"] == 50


def test_c11_a_tied_target_shares_rows_and_ships_none(ref: ModuleType, tmp_path: Path):
    head = ref.make_head(draft_vocab_size=20)
    table = head.lent().embedding_VH
    tied = head.lent()._replace(output_VH=table)
    head.attach(tied).start_from_target()
    save_head(head, tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], table[head.draft_ids_W])
    assert "embed_tokens.weight" not in tensors
    again, data = load_head(tmp_path / "head", tied, dtype=torch.float64), ref.Packed()
    assert torch.equal(logits_of(again, data), logits_of(head, data))


@pytest.mark.parametrize("name", ["eagle1", "reduced", "fc_norm", "deep_window"])
def test_c20_losing_or_renaming_any_tensor_is_refused(name: str, ref: ModuleType, tmp_path: Path):
    head = ref.make_head(**ref.FLAGS[name])
    optional = ("t2d", "fc.bias", "layers.1.hidden_norm.weight", "layers.1.input_layernorm.weight")
    for index, key in enumerate(sorted(WANTED[name])):
        lost, renamed = tmp_path / f"lost{index}", tmp_path / f"renamed{index}"
        save_head(head, lost)
        edit(lost, lambda _, tensors, key=key: tensors.pop(key))
        if key not in optional:
            with pytest.raises(ValueError, match=key.removesuffix(".weight").replace(".", r"\.")):
                load_head(lost, head.lent())
        save_head(head, renamed)
        edit(renamed, lambda _, tensors, key=key: tensors.update(other=tensors.pop(key)))
        with pytest.raises(ValueError, match=r"unexpected other|d2t is absent"):
            load_head(renamed, head.lent())


def test_wrong_shapes_and_types_are_listed(ref: ModuleType, tmp_path: Path):
    head = ref.make_head()
    save_head(head, tmp_path / "head")

    def spoil(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["norm.weight"] = torch.ones(31)
        tensors["fc.weight"] = tensors["fc.weight"].long()

    edit(tmp_path / "head", spoil)
    message = r"fc\.weight is torch\.int64, not .*; norm\.weight is \[31\], not \[32\]; nothing"
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path / "head", head.lent())


def test_maps_that_disagree_are_refused(ref: ModuleType, tmp_path: Path):
    head = ref.make_head(draft_vocab_size=20)
    for name, message in (("t2d", "name different ids"), ("d2t", "outside 0..49|name different")):
        save_head(head, tmp_path / name)
        edit(tmp_path / name, lambda _, t, name=name: t.update({name: t[name].roll(1)}))
        with pytest.raises(ValueError, match=message):
            load_head(tmp_path / name, head.lent())


def test_an_edited_config_is_refused(ref: ModuleType, tmp_path: Path):
    head = ref.make_head()
    save_head(head, tmp_path / "head")
    edit(tmp_path / "head", lambda config, _: config.update(rope_theta=7.0))
    with pytest.raises(ValueError, match=r"edited: rope_theta is 7\.0, not 500\.0"):
        load_head(tmp_path / "head", head.lent())


def test_missing_files_are_named(ref: ModuleType, tmp_path: Path):
    head = ref.make_head()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"lacks model\.safetensors .* convert pickled \.bin"):
        load_head(tmp_path, head.lent())


def test_engines_find_their_keys(ref: ModuleType, tmp_path: Path):
    """Default layers stay unnamed; explicit ones are written in both conventions."""
    save_head(ref.make_head(), tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["tie_word_embeddings"] is False
    assert config["num_hidden_layers"] == 1
    assert config["num_aux_hidden_states"] == 3
    ids = "eagle_aux_hidden_state_layer_ids"
    assert ids not in config
    assert ids not in config["eagle_config"]
    assert config["outrider"]["head"]["aux_layers"] == [2, 4, 5]
    save_head(ref.make_head(aux_layers=(1, 3, 6)), tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert config[ids] == [1, 3, 6]
    assert config["eagle_config"][ids] == [0, 2, 5]


@pytest.mark.parametrize("kind", ["default", "llama3", "linear", "yarn"])
def test_c07_the_export_turns_like_the_target(kind: str, ref: ModuleType, tmp_path: Path):
    scaling: dict[str, Any] = {"rope_type": kind, "rope_theta": 5e5}
    if kind != "default":
        scaling["factor"] = 4.0
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = 16
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    target = {k: v for k, v in ref.TARGET.items() if k != "rope_theta"}
    config = EagleConfig.from_target({**target, "rope_parameters": scaling})
    head = EagleHead(config)
    save_head(head, tmp_path / "head")
    wanted = rotary(config.rope, 16)
    engine = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path / "head"))
    assert torch.equal(engine.inv_freq, wanted.inverse_R)
    assert engine.attention_scaling == wanted.factor
    again = load_head(tmp_path / "head", ref.make_head().lent())
    assert torch.equal(rotary(again.config.rope, 16).inverse_R, wanted.inverse_R)


def test_c08_the_exported_limit_is_the_one_asked_for(ref: ModuleType, tmp_path: Path):
    save_head(ref.make_head(max_position_embeddings=48), tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["max_position_embeddings"] == 48


def test_a_kill_between_the_renames_loses_nothing(ref: ModuleType, tmp_path: Path):
    head = ref.make_head()
    save_head(head, tmp_path / "head")
    (tmp_path / "head").rename(tmp_path / ".head.old")
    assert load_head(tmp_path / "head", head.lent()).config == head.config
    (tmp_path / "head").rename(tmp_path / ".head.old")
    save_head(head, tmp_path / "head")
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


# Heads made elsewhere


def foreign(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Strip what only this project writes."""
    del config["outrider"], config["rope_parameters"], config["dtype"]
    tensors.pop("t2d", None)


@pytest.mark.parametrize("name", ALL)
def test_a_native_head_without_our_block_is_read(name: str, ref: ModuleType, tmp_path: Path):
    head, data = ref.make_head(**ref.FLAGS[name]), ref.packed_for(name)
    save_head(head, tmp_path / "head")
    edit(tmp_path / "head", foreign)
    again = load_head(tmp_path / "head", head.lent(), dtype=torch.float64)
    assert torch.equal(logits_of(again, data), logits_of(head, data))
    assert again.config.aux_layers == head.config.aux_layers


@pytest.mark.parametrize("kept", ["input_layernorm", "hidden_norm"])
def test_either_name_of_a_later_layers_norm_is_read(kept: str, ref: ModuleType, tmp_path: Path):
    """vLLM and SGLang each read one of them, so a head of either's making has it at least."""
    head, data = ref.make_head(num_layers=2), ref.Packed()
    save_head(head, tmp_path / "head")
    lost = {"input_layernorm": "hidden_norm", "hidden_norm": "input_layernorm"}[kept]
    edit(tmp_path / "head", lambda _, tensors: tensors.pop(f"layers.1.{lost}.weight"))
    again = load_head(tmp_path / "head", head.lent(), dtype=torch.float64)
    assert torch.equal(logits_of(again, data), logits_of(head, data))


def test_norms_of_a_later_layer_that_differ_are_refused(ref: ModuleType, tmp_path: Path):
    head = ref.make_head(num_layers=2)
    save_head(head, tmp_path / "head")
    edit(tmp_path / "head", lambda _, tensors: tensors["layers.1.hidden_norm.weight"].add_(1))
    with pytest.raises(ValueError, match="vLLM reads the former, SGLang the latter"):
        load_head(tmp_path / "head", head.lent())


def test_a_window_stands_where_vllm_reads_it(ref: ModuleType, tmp_path: Path):
    save_head(ref.make_head(**ref.FLAGS["mixed_window"]), tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    assert config["sliding_window"] == 2
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]


def test_a_reloaded_head_has_the_same_logits_in_fp32(ref: ModuleType, tmp_path: Path):
    for name in ("deep_window", "deep_narrow", "five_fused"):
        head, data = ref.make_head(**ref.FLAGS[name]).float(), ref.packed_for(name)
        save_head(head, tmp_path / name)
        again = load_head(tmp_path / name, head.lent())
        assert torch.allclose(logits_of(again, data), logits_of(head, data), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({}, []),
        ({"kind": "eagle1"}, []),
        ({"num_layers": 2, "sliding_window": 9}, ["one layer", "draft-window-size 8"]),
        (
            {"num_layers": 2, "sliding_window": 9, "full_attention_layers": (1,)},
            ["one l", "cannot"],
        ),
        ({"fc_norm": True}, ["llama.cpp ignores"]),
        ({"norm_before_residual": True}, ["SGLang ignores"]),
        ({"aux_layers": (1, 3, 8)}, ["SGLang does not capture layer 8"]),
        ({"aux_layers": (4,)}, ["leaves out fc"]),
    ],
)
def test_what_engines_cannot_do_is_told(
    settings: dict[str, Any], lines: list[str], ref: ModuleType
):
    found = list(limits(ref.make_head(**settings).config))
    assert len(found) == len(lines)
    assert all(part in line for part, line in zip(lines, found, strict=True))


def test_a_native_head_with_only_sglang_ids_is_read(ref: ModuleType, tmp_path: Path):
    head = ref.make_head(aux_layers=(1, 3, 6))
    save_head(head, tmp_path / "head")
    edit(tmp_path / "head", foreign)
    edit(tmp_path / "head", lambda config, _: config.pop("eagle_aux_hidden_state_layer_ids"))
    assert load_head(tmp_path / "head", head.lent()).config.aux_layers == (1, 3, 6)


def to_speculators(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Rewrite a native folder as speculators 0.9.0 writes it."""
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    kept = {key: config[key] for key in (*flags, "draft_vocab_size")}
    dropped = ("outrider", "eagle_config", "architectures", *kept)
    layer = {key: value for key, value in config.items() if key not in dropped}
    layer.setdefault("layer_types", ["full_attention"] * layer["num_hidden_layers"])
    config.clear()
    config.update(
        speculators_model_type="eagle3",
        architectures=["Eagle3Speculator"],
        transformer_layer_config=layer,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        **kept,
    )
    tensors.pop("layers.1.hidden_norm.weight", None)
    for key in list(tensors):
        tensors[key.replace("midlayer.", "layers.0.")] = tensors.pop(key)


@pytest.mark.parametrize(
    "name",
    [
        *("reduced", "eagle3", "residual", "norm_before_fc", "fc_norm", "all"),
        *("two_layers", "window_2", "deep_window", "mixed_window"),
    ],
)
def test_a_speculators_head_is_read_with_its_flags(name: str, ref: ModuleType, tmp_path: Path):
    head, data = ref.make_head(**ref.FLAGS[name]), ref.packed_for(name)
    save_head(head, tmp_path / "head")
    edit(tmp_path / "head", to_speculators)
    embedding = head.lent().embedding_VH.bfloat16()
    edit(tmp_path / "head", lambda _, t: t.update({"embed_tokens.weight": embedding}))
    again = load_head(tmp_path / "head", head.lent(), dtype=torch.float64)
    assert again.config.own_embedding
    assert not again.embed_tokens.weight.requires_grad
    shape = ("num_layers", "sliding_window", "full_attention_layers", "aux_layers")
    assert [getattr(again.config, x) for x in shape] == [getattr(head.config, x) for x in shape]
    rounded = head.lent()._replace(embedding_VH=embedding.double())
    assert torch.equal(logits_of(again, data), logits_of(head.attach(rounded), data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "dflash"}, "only 'eagle3' heads"),
        ({"norm_before_residual": None}, "readers assume different values"),
        ({"layer": {"model_type": "qwen3"}}, "model_type is 'qwen3'; only 'llama' can be read"),
        ({"layer": {"num_hidden_layers": 2, "layer_types": None}}, "missing layers.1.input_layer"),
        ({"layer": {"num_hidden_layers": 2}}, "a head of 2 layers has that many"),
        ({"layer": {"layer_types": ["chunked_attention"]}}, "layer_types is ['chunked_attention']"),
        ({"layer": {"layer_types": ["sliding_attention"]}}, "sliding_window is None"),
        ({"layer": {"attention_bias": True}}, "draft layers have no biases"),
    ],
)
def test_a_speculators_head_that_cannot_be_computed_is_refused(
    change: dict[str, Any], message: str, ref: ModuleType, tmp_path: Path
):
    head = ref.make_head()
    save_head(head, tmp_path / "head")
    edit(tmp_path / "head", to_speculators)

    def spoil(config: dict[str, Any], _: dict[str, Tensor]) -> None:
        config["transformer_layer_config"].update(change.get("layer", {}))
        config.update({key: value for key, value in change.items() if key != "layer"})
        if change.get("norm_before_residual", 0) is None:
            del config["norm_before_residual"]

    edit(tmp_path / "head", spoil)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_head(tmp_path / "head", head.lent())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaModel"]}, "an EAGLE head says LlamaForCausalLMEagle3"),
        ({"num_hidden_layers": 2}, r"missing layers\.1\."),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "have no biases"),
    ],
)
def test_a_foreign_head_that_cannot_be_computed_is_refused(
    change: dict[str, Any], message: str, ref: ModuleType, tmp_path: Path
):
    head = ref.make_head()
    save_head(head, tmp_path / "head")
    edit(tmp_path / "head", foreign)
    edit(tmp_path / "head", lambda config, _: config.update(change))
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path / "head", head.lent())


def test_a_trained_fc_bias_is_refused(ref: ModuleType, tmp_path: Path):
    head = ref.make_head(kind="eagle1")
    save_head(head, tmp_path / "head")
    edit(tmp_path / "head", lambda _, tensors: tensors["fc.bias"].add_(1))
    with pytest.raises(ValueError, match=r"unexpected fc\.bias"):
        load_head(tmp_path / "head", head.lent())
