"""MTP modules on disk: the names of the families whose targets ship them.

`deepseek` (DeepSeek-V3, GLM-4.5, and what is written for a target without such a module) has one
more decoder layer, `model.layers.{n}.` with n the target's; `qwen` (Qwen3-Next, Qwen3.5) has `mtp.`
and `mimo` `model.mtp_layers.{i}.` (vllm/model_executor/models/deepseek_mtp.py, qwen3_next_mtp.py,
mimo_mtp.py). The embedding and the output head are the target's and are not written; a draft
vocabulary is written as EAGLE-3's d2t and t2d. What engines load: vLLM and SGLang take MTP modules
for the architectures that ship them, as part of the target's checkpoint: for such a target these
tensors take the place of the old ones there, and a target without a module none serves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.heads.formats.files import check_unedited, floats_in
from outrider.heads.formats.native import decoder_keys
from outrider.heads.mtp import MtpConfig, MtpHead
from outrider.heads.tables import Tables

MAPS = ("d2t", "t2d")
BLOCK = "mtp_block."


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family names its module, and what it does that DeepSeek's does not."""

    architecture: str
    prefix: str
    """Of the first module; `{n}` is the number of the target's decoder layers."""
    own: Mapping[str, str]
    """Their names for what stands around the decoder layer, by ours."""
    block: str = ""
    """What stands before the decoder layer's own names."""
    flags: Mapping[str, Any]
    """The config flags that hold for all of the family."""


FAMILIES: dict[str, Family] = {
    "deepseek": Family(
        architecture="LlamaMTPModel",
        prefix="model.layers.{n}.",
        own={name: name for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")},
        flags={},
    ),
    "qwen": Family(
        architecture="Qwen3NextMTP",
        prefix="mtp.",
        own={
            "enorm": "pre_fc_norm_embedding",
            "hnorm": "pre_fc_norm_hidden",
            "eh_proj": "fc",
            "shared_head.norm": "norm",
        },
        block="layers.0.",
        flags={"norm_output": True},
    ),
    "mimo": Family(
        architecture="MiMoMTPModel",
        prefix="model.mtp_layers.0.",
        own={
            "enorm": "token_layernorm",
            "hnorm": "hidden_layernorm",
            "eh_proj": "input_proj",
            "shared_head.norm": "final_layernorm",
        },
        flags={"norm_output": True, "hidden_first": True},
    ),
}
"""By name. DeepSeek's state is fed back before the last norm, as vLLM does; SGLang norms it."""


def config_json(config: MtpConfig, dtype: torch.dtype, notes: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a head."""
    return {
        "architectures": [FAMILIES[config.names].architecture],
        **decoder_keys(config, dtype),
        "attention_bias": config.attention_bias,
        "num_hidden_layers": config.num_target_layers,
        "num_nextn_predict_layers": 1,
        "draft_vocab_size": config.draft_vocab_size,
        "outrider": {"head": config.to_dict(), **notes},
    }


def published_name(name: str, config: MtpConfig) -> str:
    """The family's name of one of our parameters, or of a map."""
    family = FAMILIES[config.names]
    prefix = family.prefix.format(n=config.num_target_layers)
    if name in MAPS:
        return name
    if name.startswith(BLOCK):
        return prefix + family.block + name.removeprefix(BLOCK)
    module, _, leaf = name.rpartition(".")
    return f"{prefix}{family.own[module]}.{leaf}"


def tensors(head: MtpHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors under their published names, floats in the export's dtype."""
    state = floats_in(dtype, head.state_dict())
    return {published_name(name, head.config): tensor for name, tensor in state.items()}


def read_config(
    values: Mapping[str, Any],
    found: Mapping[str, Tensor],  # noqa: ARG001 - all is in the config
    tables: Tables,  # noqa: ARG001
) -> MtpConfig:
    """The head's config from its config.json, checked against what engines would read."""
    config = MtpConfig.from_dict(values["outrider"]["head"])
    check_unedited(values, config_json(config, torch.float32, {}))
    return config


def rename(
    found: Mapping[str, Tensor],
    config: MtpConfig,
    tables: Tables,  # noqa: ARG001 - other layouts hold rows of the target's
) -> dict[str, Tensor]:
    """Tensors under this project's names."""
    prefix = FAMILIES[config.names].prefix.format(n=config.num_target_layers)
    return {our_name(name, prefix, config.names) or name: found[name] for name in found}


def our_name(name: str, prefix: str, names: str) -> str | None:
    """Our name of a family's tensor behind this prefix; None where it stands elsewhere."""
    if not name.startswith(prefix):
        return None
    family, plain = FAMILIES[names], name.removeprefix(prefix)
    for ours, theirs in family.own.items():
        if plain.startswith(f"{theirs}."):
            return ours + plain.removeprefix(theirs)
    return BLOCK + plain.removeprefix(family.block) if plain.startswith(family.block) else None
