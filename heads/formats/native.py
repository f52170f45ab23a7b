"""The native EAGLE-3 and EAGLE-1 layouts, as vLLM, SGLang and llama.cpp read them.

What engines need stands in their own keys; what only we need (tokenizer size, explicit layers,
provenance) stands under the one key `outrider`, which they ignore.

Layers after the first are `layers.1.`, `layers.2.` and so on. Their norm before attention is
written twice, since vLLM reads it as input_layernorm and SGLang as hidden_norm, and both have a
place for the other name that they do not use. A window stands in layer_types and sliding_window,
which vLLM reads; formats/engines.py says what engines cannot do.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.heads.config import DecoderConfig, default_aux_layers
from outrider.heads.eagle import EagleConfig, EagleHead
from outrider.heads.formats.files import check_unedited, floats_in
from outrider.heads.rope import rope_settings
from outrider.heads.tables import Tables

ARCHITECTURES = {"eagle3": "LlamaForCausalLMEagle3", "eagle1": "LlamaForCausalLMEagle"}
EAGLE1_NAMES = ("LlamaForCausalLMEagle", "LlamaForCausalLM", "EagleLlamaForCausalLM")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FC_NORM_ALIASES = {
    f"aux_norm_{name}": f"fc_norm.{i}" for i, name in enumerate(("low", "mid", "high"))
}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
FULL, SLIDING = "full_attention", "sliding_attention"
LATER_NORM = re.compile(r"layers\.[1-9]\d*\.hidden_norm\.weight")
"""SGLang's name of the norm before attention of a layer after the first."""


def config_json(
    config: EagleConfig, dtype: torch.dtype, notes: Mapping[str, Any]
) -> dict[str, Any]:
    """The config.json of a head."""
    values = {
        "architectures": [ARCHITECTURES[config.kind]],
        **decoder_keys(config, dtype),
        "num_hidden_layers": config.num_layers,
        "bias": False,
    }
    if config.kind == "eagle3":
        values |= _eagle3_keys(config) | _window_keys(config)
    return {**values, "outrider": {"head": config.to_dict(), **notes}}


def decoder_keys(config: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Keys of a Llama decoder layer."""
    name = str(dtype).removeprefix("torch.")
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": name,
        "dtype": name,
        **_rope_keys(config),
    }


def _rope_keys(config: DecoderConfig) -> dict[str, Any]:
    """Rotary settings in the old flat style and in the new one."""
    rope = dict(config.rope)
    keys: dict[str, Any] = {
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "rope_scaling": None,
    }
    if rope["partial_rotary_factor"] != 1.0:
        keys["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope["rope_type"] != "default":
        keys["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return keys


def _eagle3_keys(config: EagleConfig) -> dict[str, Any]:
    """Keys of EAGLE-3. Default layers stay unnamed: engines agree on them, not on explicit ids.

    Explicit ids are written twice: top level as vLLM reads them (state entering the layer), and
    less one inside eagle_config, where SGLang takes outputs of Llama and Qwen layers.
    """
    keys: dict[str, Any] = {name: getattr(config, name) for name in FLAGS}
    keys["draft_vocab_size"] = config.draft_vocab_size
    keys["num_aux_hidden_states"] = len(config.aux_layers)
    inner: dict[str, Any] = {"use_aux_hidden_state": True, "norm_before_fc": config.norm_before_fc}
    if not _are_default(config):
        keys[LAYER_IDS] = list(config.aux_layers)
        inner[LAYER_IDS] = [layer - 1 for layer in config.aux_layers]
    keys["eagle_config"] = inner
    if config.hidden_size != config.target_hidden_size:
        keys["target_hidden_size"] = config.target_hidden_size
    return keys


def _window_keys(config: EagleConfig) -> dict[str, Any]:
    if config.sliding_window is None:
        return {}
    windows = [config.window(layer) for layer in range(config.num_layers)]
    kinds = [FULL if window is None else SLIDING for window in windows]
    return {"sliding_window": config.sliding_window, "layer_types": kinds}


def _are_default(config: EagleConfig) -> bool:
    num = config.num_target_layers
    return num >= 7 and config.aux_layers == default_aux_layers(num)


def tensors(head: EagleHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors under their published names, floats in the export's dtype.

    EAGLE-1 ships a zero fc.bias: SGLang always has one and would leave it random, vLLM drops it.
    """
    state = floats_in(dtype, head.state_dict())
    for layer in range(1, head.config.num_layers):
        norm = state[f"layers.{layer}.input_layernorm.weight"]
        state[f"layers.{layer}.hidden_norm.weight"] = norm.clone()
    if head.config.kind == "eagle1":
        state["fc.bias"] = torch.zeros(head.config.hidden_size, dtype=dtype)
    return state


def read_config(
    values: Mapping[str, Any], found: Mapping[str, Tensor], tables: Tables
) -> EagleConfig:
    """The head's config from its config.json; ours is checked against what engines will read."""
    if values.get("outrider") is None:
        return _foreign_config(values, found, tables)
    config = EagleConfig.from_dict(values["outrider"]["head"])
    check_unedited(values, config_json(config, torch.float32, {}))
    return config


def _foreign_config(
    values: Mapping[str, Any], found: Mapping[str, Tensor], tables: Tables
) -> EagleConfig:
    kind = _kind(values)
    _refuse_unknown(values)
    rows, width = tables.output_VH.shape
    inner = values.get("eagle_config") or {}
    layers = values.get(LAYER_IDS)
    if layers is None and inner.get(LAYER_IDS):
        layers = [layer + 1 for layer in inner[LAYER_IDS]]
    if kind == "eagle3" and layers is None:
        layers = default_aux_layers(tables.num_layers)
    flags: dict[str, Any] = {name: bool(values.get(name) or inner.get(name)) for name in FLAGS}
    return EagleConfig(
        kind=kind,
        **geometry(values),
        vocab_size=rows,
        tokenizer_size=tables.tokenizer_size,
        draft_vocab_size=int(values.get("draft_vocab_size") or rows) if kind == "eagle3" else rows,
        target_hidden_size=int(values.get("target_hidden_size") or width),
        num_target_layers=tables.num_layers,
        aux_layers=tuple(layers or ()),
        own_embedding="embed_tokens.weight" in found,
        **stack(values),
        **flags,
    )


def geometry(values: Mapping[str, Any]) -> dict[str, Any]:
    """The shape of a Llama draft layer from flat config keys."""
    num_heads = int(values["num_attention_heads"])
    return {
        "hidden_size": int(values["hidden_size"]),
        "intermediate_size": int(values["intermediate_size"]),
        "num_heads": num_heads,
        "num_kv_heads": int(values.get("num_key_value_heads") or num_heads),
        "head_dim": int(values.get("head_dim") or values["hidden_size"] // num_heads),
        "rms_norm_eps": float(values["rms_norm_eps"]),
        "rope": rope_settings(values),
        "max_position_embeddings": int(values["max_position_embeddings"]),
    }


def stack(values: Mapping[str, Any]) -> dict[str, Any]:
    """How many layers flat config keys describe, and what each of them sees."""
    num_layers = int(values.get("num_hidden_layers") or 1)
    kinds = values.get("layer_types") or [FULL] * num_layers
    if len(kinds) != num_layers or not {*kinds} <= {FULL, SLIDING}:
        raise ValueError(
            f"layer_types is {kinds}; a head of {num_layers} layers has that many, each {FULL} or "
            f"{SLIDING}"
        )
    if SLIDING not in kinds:
        return {"num_layers": num_layers}
    window = values.get("sliding_window")
    if not isinstance(window, int):
        raise ValueError(f"sliding_window is {window!r}; layer_types names {SLIDING}, so give it")
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)
    return {
        "num_layers": num_layers,
        "sliding_window": window,
        "full_attention_layers": full,
    }


def _kind(values: Mapping[str, Any]) -> str:
    name = (values.get("architectures") or [None])[0]
    if name in EAGLE1_NAMES:
        return "eagle1"
    if name is not None and "Eagle3" in name:
        return "eagle3"
    raise ValueError(
        f"architectures is {values.get('architectures')!r}; an EAGLE head says "
        f"{' or '.join(ARCHITECTURES.values())}"
    )


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    if values.get("hidden_act", "silu") != "silu":
        raise ValueError(
            f"hidden_act is {values['hidden_act']!r}; only 'silu' is supported for a draft layer"
        )
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key):
            raise ValueError(f"{key} is {values[key]!r}; draft layers here have no biases")


def _check_twins(found: Mapping[str, Tensor], name: str, tensor: Tensor) -> None:
    """A later layer's one norm has two names, and engines read one or the other."""
    other = found.get(name, tensor)
    if other.shape != tensor.shape or not torch.equal(other, tensor):
        twin = name.replace("input_layernorm", "hidden_norm")
        raise ValueError(
            f"{name} and {twin} differ, and vLLM reads the former, SGLang the latter; make them "
            "equal to the one that the head was trained with"
        )


def rename(
    found: Mapping[str, Tensor],
    config: EagleConfig,
    tables: Tables,  # noqa: ARG001 - other layouts hold rows of the target's
) -> dict[str, Tensor]:
    """Tensors under this project's names: midlayer for EAGLE-3, no zero bias, no identity map."""
    named: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if config.kind == "eagle3":
            if name.startswith("layers.0."):
                name = name.replace("layers.0.", "midlayer.", 1)
            if LATER_NORM.fullmatch(name):
                name = name.replace("hidden_norm", "input_layernorm")
                _check_twins(found, name, tensor)
        for alias, ours in FC_NORM_ALIASES.items():
            name = name.replace(alias, ours)
        named[name] = tensor
    bias = named.get("fc.bias")
    if bias is not None and not bool(bias.any()):
        del named["fc.bias"]
    full_map = not config.is_reduced and not bool(named.get("d2t", torch.zeros(1)).any())
    for key in ("d2t", "t2d"):
        if full_map:
            named.pop(key, None)
    return named
