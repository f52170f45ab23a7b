"""Reader of speculators' EAGLE-3 folders, so that heads trained elsewhere are judged here."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from outrider.heads.config import default_aux_layers
from outrider.heads.eagle import EagleConfig
from outrider.heads.formats.native import FLAGS, LAYER_IDS, geometry
from outrider.heads.tables import Tables


def is_speculators(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is in this layout."""
    return "speculators_model_type" in values


def read_config(
    values: Mapping[str, Any],
    found: Mapping[str, Tensor],
    tables: Tables,
    max_length: int | None = None,
) -> EagleConfig:
    """The head's config. Its norm flags are honoured; a window shorter than the use is refused."""
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
    window = _window(layer, max_length)
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
        **flags,
        extra={} if window is None else {"sliding_window": window},
    )


def _check_layer(layer: Mapping[str, Any]) -> None:
    wanted = {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu"}
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


def _window(layer: Mapping[str, Any], max_length: int | None) -> int | None:
    """The head's sliding window, refused unless the caller vouches for shorter contexts."""
    if "sliding_attention" not in (layer.get("layer_types") or []):
        return None
    window = int(layer["sliding_window"])
    if window >= (max_length or int(layer["max_position_embeddings"])):
        return window
    longest = "of unknown length" if max_length is None else f"of up to {max_length} tokens"
    raise ValueError(
        f"the head has a sliding window of {window} and contexts are {longest}; only full "
        f"attention is computed here, so pass max_length of at most {window}"
    )
