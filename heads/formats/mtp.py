"""MTP modules on disk: the names of DeepSeek-V3's checkpoints, where the module is one more layer.

`model.layers.{n}.` with n the target's decoder layers, then `enorm`, `hnorm`, `eh_proj`,
`shared_head.norm`, and a decoder layer's own names (vllm/model_executor/models/deepseek_mtp.py).
The embedding and the output head are the target's and are not written; a draft vocabulary is
written as EAGLE-3's d2t and t2d. What engines load: vLLM and SGLang take MTP modules for the
architectures that ship them, as part of the target's checkpoint, with the decoder layer of that
architecture; for a target without such a module, as here, none does.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.heads.formats.files import check_unedited, floats_in
from outrider.heads.formats.native import decoder_keys
from outrider.heads.mtp import MtpConfig, MtpHead
from outrider.heads.tables import Tables

OWN = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")
MAPS = ("d2t", "t2d")


def config_json(config: MtpConfig, dtype: torch.dtype, notes: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a head."""
    return {
        "architectures": ["LlamaMTPModel"],
        **decoder_keys(config, dtype),
        "num_hidden_layers": config.num_target_layers,
        "num_nextn_predict_layers": 1,
        "draft_vocab_size": config.draft_vocab_size,
        "outrider": {"head": config.to_dict(), **notes},
    }


def _prefix(config: MtpConfig) -> str:
    return f"model.layers.{config.num_target_layers}."


def tensors(head: MtpHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors under their published names, floats in the export's dtype."""
    prefix = _prefix(head.config)
    return {
        name if name in MAPS else prefix + name.removeprefix("mtp_block."): tensor
        for name, tensor in floats_in(dtype, head.state_dict()).items()
    }


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
    prefix = _prefix(config)
    named: dict[str, Tensor] = {}
    for name, tensor in found.items():
        plain = name.removeprefix(prefix)
        is_inner = name.startswith(prefix) and not plain.startswith(OWN)
        named["mtp_block." + plain if is_inner else plain] = tensor
    return named
