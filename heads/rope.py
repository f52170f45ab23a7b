"""Rotary positions of a draft head, taken from its target's config in any of the styles in use.

Letters: B rows, T positions, A attention heads, E head size, R half of the rotated channels.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SCALED_TYPES = ("linear", "dynamic", "yarn", "llama3")
# A text-only draft gives all three multimodal axes the same position, which is plain rotary.
PLAIN_TYPES = ("default", "mrope")
IGNORED_KEYS = ("type", "mrope_section", "mrope_interleaved")


class Rotary(NamedTuple):
    """Inverse frequencies of the rotated channels and the factor on cosine and sine."""

    inverse_R: Tensor
    factor: float


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """One flat rotary dictionary from a model config.

    Reads `rope_parameters` (new style, also nested by layer type), or `rope_theta` beside
    `rope_scaling` (old style), and a partial factor in either place.
    """
    nested = dict(config.get("rope_parameters") or {})
    for layer_type in ("full_attention", "sliding_attention"):
        if isinstance(nested.get(layer_type), Mapping):
            nested = dict(nested[layer_type])
            break
    scaling = dict(config.get("rope_scaling") or {})
    rope = {**scaling, **nested}
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    rope["partial_rotary_factor"] = float(partial or config.get("rotary_pct") or 1.0)
    _check_type(rope["rope_type"])
    if rope["rope_type"] in PLAIN_TYPES:
        rope["rope_type"] = "default"
    elif not rope.get("original_max_position_embeddings"):
        original = config.get("original_max_position_embeddings")
        original = original or config.get("max_position_embeddings")
        if not original:
            raise ValueError(
                f"rope_type {rope['rope_type']!r} needs original_max_position_embeddings or "
                "max_position_embeddings, and the target's config has neither; add one to it"
            )
        rope["original_max_position_embeddings"] = original
    return {key: value for key, value in rope.items() if key not in IGNORED_KEYS}


def _check_type(kind: str) -> None:
    if kind not in PLAIN_TYPES + SCALED_TYPES:
        allowed = ", ".join(PLAIN_TYPES + SCALED_TYPES)
        raise ValueError(
            f"the target's rope_type is {kind!r}, and a draft head can follow {allowed}; choose "
            "another target, or report the type that is missing"
        )


def rotary(rope: Mapping[str, Any], head_dim: int) -> Rotary:
    """Inverse frequencies for rotary settings as `rope_settings` returns them."""
    _check_type(rope["rope_type"])
    if rope["rope_type"] == "default":
        size = int(head_dim * rope["partial_rotary_factor"])
        exponent_R = torch.arange(0, size, 2, dtype=torch.float32) / size
        return Rotary(1.0 / (rope["rope_theta"] ** exponent_R), 1.0)
    try:
        shim = _shim(rope, head_dim)
        inverse_R, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](shim, torch.device("cpu"))
    except KeyError as error:
        raise ValueError(
            f"rope_type {rope['rope_type']!r} lacks {error}; copy the target's rope settings whole"
        ) from error
    except TypeError as error:
        raise ValueError(
            f"rope settings {dict(rope)} do not compute ({error}); scaling values must be numbers"
        ) from error
    return Rotary(inverse_R.float(), float(factor))


def _shim(rope: Mapping[str, Any], head_dim: int) -> LlamaConfig:
    """The few config fields that transformers' rotary functions read."""
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim)
    config.max_position_embeddings = int(rope["original_max_position_embeddings"])
    config.rope_parameters = {**rope}
    return config


def cos_sin(rotary: Rotary, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, angles in fp32 (fp64 for an fp64 head)."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    angle = position.to(exact)[..., None] * rotary.inverse_R.to(position.device, exact)
    return (angle.cos() * rotary.factor).to(dtype), (angle.sin() * rotary.factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first 2R channels of x [..., A, E] by angles [..., R]; the rest pass through."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*parts, rest] if rest.shape[-1] else parts, dim=-1)
