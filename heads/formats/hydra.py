"""Hydra heads on disk: the names of the original repository (zankner/Hydra), as safetensors.

What engines load: none serves Hydra; the original's own code reads these names from a pickle,
hydra_lm_head.pt. It puts dropout before every layer of a head with a prefix layer, so that indices
there count twice, and gives output heads a bias, which is zero here; it shares one block over the
later layers of a head (`[block] * n`), which this project does not. What embeddings are raised by
here goes into the weights that read them. Not the original's: output rows shared with the target
(nothing is written for them) and draft vocabularies (d2t and t2d).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.heads.formats.files import check_unedited, floats_in
from outrider.heads.formats.native import decoder_keys
from outrider.heads.hydra import HydraConfig, HydraHead
from outrider.heads.tables import Tables

PREFIX = "prefix_embeding_layer"
"""Spelled as the original spells it."""


def config_json(
    config: HydraConfig, dtype: torch.dtype, notes: Mapping[str, Any]
) -> dict[str, Any]:
    """The config.json of a head."""
    return {
        **decoder_keys(config, dtype),
        "model_type": "hydra",
        "hydra_num_heads": config.num_draft_heads,
        "hydra_num_layers": config.num_draft_layers,
        "hydra_head_arch": "prefix-mlp" if config.prefix_layer else "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "draft_vocab_size": config.draft_vocab_size,
        "outrider": {"head": config.to_dict(), **notes},
    }


def tensors(head: HydraHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors under the original's names, floats in the export's dtype."""
    has_prefix = head.config.prefix_layer
    state: dict[str, Tensor] = {}
    for name, tensor in floats_in(dtype, head.state_dict()).items():
        tensor = _scaled(name, tensor, head.config, head.config.embed_gain)
        plain = name.replace("prefix_layer.", f"{PREFIX}.layers.0.", 1)
        plain = plain.replace("prefix_norm.", f"{PREFIX}.norm.", 1)
        if has_prefix:
            plain = re.sub(
                r"^(hydra_mlp\.\d+)\.(\d+)\.",
                lambda found: f"{found[1]}.{2 * int(found[2]) + 1}.",
                plain,
            )
            plain = re.sub(r"^(hydra_lm_head\.\d+)\.", r"\1.1.", plain)
        state[plain] = tensor
        if plain.startswith("hydra_lm_head."):
            bias_W = torch.zeros(tensor.shape[0], dtype=dtype)
            state[plain.removesuffix("weight") + "bias"] = bias_W
    return state


def read_config(
    values: Mapping[str, Any],
    found: Mapping[str, Tensor],  # noqa: ARG001 - all is in the config
    tables: Tables,  # noqa: ARG001
) -> HydraConfig:
    """The head's config from its config.json, checked against what others would read."""
    config = HydraConfig.from_dict(values["outrider"]["head"])
    check_unedited(values, config_json(config, torch.float32, {}))
    return config


def rename(
    found: Mapping[str, Tensor],
    config: HydraConfig,
    tables: Tables,  # noqa: ARG001 - other layouts hold rows of the target's
) -> dict[str, Tensor]:
    """Tensors under this project's names; output biases must be zero."""
    named: dict[str, Tensor] = {}
    for name, tensor in found.items():
        plain = name.replace(f"{PREFIX}.layers.0.", "prefix_layer.", 1)
        plain = plain.replace(f"{PREFIX}.norm.", "prefix_norm.", 1)
        if config.prefix_layer:
            plain = re.sub(
                r"^(hydra_mlp\.\d+)\.(\d+)\.",
                lambda found: f"{found[1]}.{int(found[2]) // 2}.",
                plain,
            )
            plain = re.sub(r"^(hydra_lm_head\.\d+)\.1\.", r"\1.", plain)
        is_bias = plain.startswith("hydra_lm_head.") and plain.endswith(".bias")
        if not (is_bias and not bool(tensor.any())):
            named[plain] = _scaled(plain, tensor, config, 1 / config.embed_gain)
    return named


def _scaled(name: str, tensor: Tensor, config: HydraConfig, gain: float) -> Tensor:
    """Weights that read embeddings, times a power of two: exact in every precision."""
    if re.fullmatch(r"hydra_mlp\.\d+\.0\.(linear|res_connection)\.weight", name) is None:
        return tensor
    state, embeddings = tensor[:, : config.hidden_size], tensor[:, config.hidden_size :]
    return torch.cat([state, embeddings * gain], dim=1)
