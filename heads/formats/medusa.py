"""Medusa heads on disk: vLLM's layout is written; FasterDecoding's v1 and v2 names are read, too.

What engines load, by their sources: vLLM up to 0.32 reads `blocks.{i}.layers.{j}.{weight,bias}`,
`lm_heads.{i}.weight` (or one `lm_head.weight` with original_lm_head) and `token_map`, and skips
every other name without a word, FasterDecoding's `{i}.0.linear.weight` among them: such a head
serves at random. Its v1 engine takes chains only. Later vLLM and SGLang serve no Medusa.
FasterDecoding's own code loads its v1 names from a pickle; TGI loads v1 and v2 from
medusa_lm_head.safetensors. The original shares one residual block over the layers of a head
(`[block] * n`), which shows only with more layers than one.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.heads.formats.files import check_unedited, floats_in
from outrider.heads.medusa import MedusaConfig, MedusaHead
from outrider.heads.tables import Tables


def is_medusa(values: Mapping[str, Any]) -> bool:
    """Whether a config.json of another maker describes Medusa heads."""
    return values.get("model_type") == "medusa" or "medusa_num_heads" in values


def config_json(
    config: MedusaConfig, dtype: torch.dtype, notes: Mapping[str, Any]
) -> dict[str, Any]:
    """The config.json of a head, with the keys of both layouts."""
    name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_draft_heads,
        "num_hidden_layers": config.num_draft_layers,
        "medusa_num_heads": config.num_draft_heads,
        "medusa_num_layers": config.num_draft_layers,
        "medusa_fc_bias": True,
        "original_lm_head": config.shared_output,
        "max_position_embeddings": config.max_position_embeddings,
        "torch_dtype": name,
        "dtype": name,
        "outrider": {"head": config.to_dict(), **notes},
    }


def tensors(head: MedusaHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors under vLLM's names, floats in the export's dtype; shared output rows are copied in.

    vLLM has no way to borrow the target's rows, so a file without them would serve at random.
    """
    state = floats_in(dtype, head.state_dict())
    if head.config.is_reduced:
        del state["d2t"], state["t2d"]
        state["token_map"] = head.draft_ids_W
    if head.config.shared_output:
        state["lm_head.weight"] = _shared_rows(head.config, head.lent(), head.draft_ids_W, dtype)
    return state


def _shared_rows(
    config: MedusaConfig, tables: Tables, draft_ids_W: Tensor, dtype: torch.dtype
) -> Tensor:
    rows_WH = tables.output_VH[draft_ids_W] if config.is_reduced else tables.output_VH
    return rows_WH.to(dtype)


def read_config(
    values: Mapping[str, Any], found: Mapping[str, Tensor], tables: Tables
) -> MedusaConfig:
    """The head's config from its config.json; ours is checked against what engines will read."""
    if values.get("outrider") is not None:
        config = MedusaConfig.from_dict(values["outrider"]["head"])
        check_unedited(values, config_json(config, torch.float32, {}))
        return config
    rows, width = tables.output_VH.shape
    names = renamed(found)
    has_own = any(name.startswith("lm_heads.") for name in names)
    return MedusaConfig(
        hidden_size=width,
        max_position_embeddings=int(values.get("max_position_embeddings") or 2**31 - 1),
        vocab_size=rows,
        tokenizer_size=tables.tokenizer_size,
        draft_vocab_size=len(names["token_map"]) if "token_map" in names else rows,
        target_hidden_size=width,
        num_target_layers=tables.num_layers,
        num_draft_heads=1 + max(_heads(names), default=0),
        num_draft_layers=int(
            values.get("medusa_num_layers") or values.get("num_hidden_layers") or 1
        ),
        shared_output=not has_own,
    )


def _heads(names: Mapping[str, Tensor]) -> list[int]:
    return [int(name.split(".")[1]) for name in names if name.startswith("blocks.")]


def renamed(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """FasterDecoding's names (`{i}.{j}.linear.*`, `{i}.{layers}.weight` for output) as vLLM's."""
    named: dict[str, Tensor] = {}
    for name, tensor in found.items():
        plain = re.sub(r"^medusa_heads?\.", "", name)
        plain = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", plain)
        plain = re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", plain)
        named[plain] = tensor
    return named


def rename(found: Mapping[str, Tensor], config: MedusaConfig, tables: Tables) -> dict[str, Tensor]:
    """Tensors under this project's names; shared output rows must be the target's."""
    named = renamed(found)
    ids_W = named.pop("token_map", None)
    if ids_W is not None:
        named["d2t"] = ids_W - torch.arange(len(ids_W))
    rows_WH = named.pop("lm_head.weight", None)
    if config.shared_output and rows_WH is not None:
        theirs = tables.output_VH.cpu()
        theirs = theirs if ids_W is None else theirs[ids_W]
        if rows_WH.shape != theirs.shape or not _is_same(rows_WH.float(), theirs.float()):
            raise ValueError(
                "lm_head.weight is not the target's output head, which original_lm_head says; "
                "pair the head with its own target"
            )
    return named


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether rows agree up to half precision, in which either the file or the target may be."""
    return torch.allclose(ours, theirs, rtol=2**-8, atol=1e-5 * float(theirs.abs().max()))
