"""Reader of speculators' EAGLE-3 folders, so that heads trained elsewhere are judged here."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from outrider.heads.config import default_aux_layers
from outrider.heads.eagle import EagleConfig
from outrider.heads.formats.native import FLAGS, LAYER_IDS, geometry, stack
from outrider.heads.tables import Tables


def is_speculators(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is in this layout."""
    return "speculators_model_type" in values


def read_config(
    values: Mapping[str, Any],
    found: Mapping[str, Tensor],
    tables: Tables,
) -> EagleConfig:
    """The head's config. Norm flags and windows are honoured as engines do.

    A window counts positions, as in serving; speculators' own training lets the window of drafted
    rows stand where their root had it, and so sees up to a draft's length more.
    """
    kind = values["speculators_model_type"]
    if kind != "eagle3":
        raise ValueError(f"speculators_model_type is {kind!r}; only 'eagle3' heads can be read")
    if "norm_before_residual" not in values:
        raise ValueError(
            "norm_before_residual is not in config.json and readers assume different values; "
            "add the one the head was trained with"
        )
    layer = values["transformer_layer_config"]
    _check_layer(layer)
    rows, width = tables.output_VH.shape
    layers = values.get(LAYER_IDS) or default_aux_layers(tables.num_layers)
    flags: dict[str, Any] = {name: bool(values.get(name, False)) for name in FLAGS}
    return EagleConfig(
        kind="eagle3",
        **geometry(layer),
        vocab_size=rows,
        tokenizer_size=tables.tokenizer_size,
        draft_vocab_size=int(values["draft_vocab_size"]),
        target_hidden_size=int(values.get("target_hidden_size") or width),
        num_target_layers=tables.num_layers,
        aux_layers=tuple(layers),
        own_embedding="embed_tokens.weight" in found,
        **stack(layer),
        **flags,
    )


def _check_layer(layer: Mapping[str, Any]) -> None:
    wanted = {"model_type": "llama", "hidden_act": "silu"}
    for key, value in wanted.items():
        if layer.get(key, value) != value:
            raise ValueError(
                f"transformer_layer_config.{key} is {layer[key]!r}; only {value!r} can be read"
            )
    for key in ("attention_bias", "mlp_bias"):
        if layer.get(key):
            raise ValueError(
                f"transformer_layer_config.{key} is {layer[key]!r}; draft layers have no biases"
            )
