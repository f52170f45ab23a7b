"""What a pass of a target or a draft head reads and computes, counted from its shapes.

Nothing need be loaded: shapes on the meta device do. Letters: E experts of a layer, n tokens.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from outrider.data.target import Target
from outrider.heads import DraftHead


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    """A target, in numbers that a roofline needs; bytes are those of all devices together."""

    name: str
    parameters: float
    """Of all weights that lie in memory."""
    dense: float
    """Parameters that every step reads: all but the embedding rows and the experts."""
    expert: float = 0.0
    """Parameters of one expert in one layer."""
    experts: int = 0
    """Experts of a layer of experts."""
    experts_per_token: int = 0
    """Experts that a token is sent to."""
    expert_layers: int = 0
    """Layers of experts."""
    kv_numbers: float
    """Numbers that a layer-by-layer cache keeps for one position, in all layers it grows in."""
    window: int | None = None
    """Positions that layers with a sliding window keep."""
    window_numbers: float = 0.0
    """As `kv_numbers`, of layers with a window."""
    score_ops: float = 0.0
    """Operations of attention for one new token and one position that it sees."""
    num_layers: int = 0
    """Decoder layers, each with two sums over devices under tensor parallelism."""
    hidden_size: int = 0
    """Width of the states."""

    def __post_init__(self) -> None:
        for name in ("parameters", "dense", "kv_numbers"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} is {getattr(self, name)}; give a number above 0")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token is {self.experts_per_token} of {self.experts}; a token goes to "
                "1 up to all of them"
            )

    def read(self, tokens: float) -> float:
        """Parameters that a pass over so many tokens reads: experts only where one is touched."""
        touched = touched_experts(self.experts, self.experts_per_token, tokens)
        return self.dense + self.expert_layers * self.expert * touched

    @property
    def active(self) -> float:
        """Parameters that one token is multiplied by."""
        return self.dense + self.expert_layers * self.expert * self.experts_per_token

    def kept(self, context: float) -> float:
        """Numbers of a row's keys and values at so many positions."""
        near = context if self.window is None else min(context, self.window)
        return self.kv_numbers * context + self.window_numbers * near


def touched_experts(experts: int, per_token: int, tokens: float) -> float:
    """Expected distinct experts of a layer that n tokens touch: E (1 - (1 - k/E)^n).

    For tokens that choose alike often and independently; real routers repeat themselves within a
    text, so that this is the most that is read.
    """
    if not experts:
        return 0.0
    return experts * (1 - (1 - per_token / experts) ** tokens)


@dataclass(frozen=True, kw_only=True)
class DraftSizes:
    """A draft head, in the same numbers."""

    name: str
    parameters: float
    """Of its own weights, which lie in memory beside the target's."""
    step: float
    """Parameters that one step reads, its output rows included, the target's where it shares."""
    kv_numbers: float = 0.0
    """Numbers that its cache keeps for one position."""
    is_parallel: bool = False
    """Whether one step drafts all depths (Medusa)."""

    def __post_init__(self) -> None:
        for name in ("parameters", "step"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; give 0 or more, finite")


def target_sizes(target: Target) -> TargetSizes:
    """Counts a target's tensors; those of an outline do."""
    config = target.config
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts") or 0
    per_token = _first(config, "num_experts_per_tok", "num_experts_per_token") or 0
    routed = [
        (name, value)
        for name, value in target.blocks.named_parameters()
        if "experts" in name and "shared" not in name and value.ndim > 1
    ]
    layers = {name.split(".")[0] for name, _ in routed}
    in_experts = float(sum(value.numel() for _, value in routed))
    total = float(sum(value.numel() for value in target.model.parameters()))
    is_tied = target.embedding_VH is target.output_VH or bool(config.tie_word_embeddings)
    embedding = 0 if is_tied else target.embedding_VH.numel()
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    full, windowed = _layers_by_kind(config, target.num_layers)
    per_layer = _kv_numbers(config, heads, size)
    return TargetSizes(
        name=target.name,
        parameters=total,
        dense=total - in_experts - embedding,
        expert=in_experts / (len(layers) * experts) if layers and experts else 0.0,
        experts=experts if layers else 0,
        experts_per_token=per_token if layers else 0,
        expert_layers=len(layers),
        kv_numbers=per_layer * full if full else per_layer * 1e-9,
        window=getattr(config, "sliding_window", None) if windowed else None,
        window_numbers=per_layer * windowed,
        score_ops=4.0 * target.num_layers * heads * size,
        num_layers=target.num_layers,
        hidden_size=target.hidden_size,
    )


def _first(config: Any, *names: str) -> int | None:  # noqa: ANN401 - any family's config
    return next((int(v) for n in names if (v := getattr(config, n, None)) is not None), None)


def _layers_by_kind(config: Any, num_layers: int) -> tuple[int, int]:  # noqa: ANN401
    """Layers that see everything, and layers with a window."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return (0, num_layers) if getattr(config, "sliding_window", None) else (num_layers, 0)
    windowed = sum(kind == "sliding_attention" for kind in types)
    return num_layers - windowed, windowed


def _kv_numbers(config: Any, heads: int, size: int) -> float:  # noqa: ANN401
    """Numbers of one layer's cache for one position; latent attention keeps one small vector."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        return float(rank + (getattr(config, "qk_rope_head_dim", None) or 0))
    return 2.0 * int(getattr(config, "num_key_value_heads", None) or heads) * size


def draft_sizes(head: DraftHead, name: str) -> DraftSizes:
    """Counts a head's tensors."""
    config = head.config
    own = float(sum(value.numel() for value in head.parameters()))
    tables = [p for n, p in head.named_parameters() if n.startswith("embed_tokens")]
    rows = config.num_proposable * config.hidden_size
    shared = 0 if head.own_outputs else rows
    is_parallel = config.kind == "medusa"
    kv_heads, head_dim = getattr(config, "num_kv_heads", 0), getattr(config, "head_dim", 0)
    num_layers = getattr(config, "num_layers", 1) if hasattr(config, "num_kv_heads") else 0
    if config.kind == "hydra" and not getattr(config, "prefix_layer", False):
        num_layers = 0
    return DraftSizes(
        name=name,
        parameters=own,
        step=own - sum(table.numel() for table in tables) + shared,
        kv_numbers=2.0 * num_layers * kv_heads * head_dim,
        is_parallel=is_parallel,
    )


def bytes_of(dtype: str) -> float:
    """Bytes of a number of this precision."""
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype is {dtype!r}; choose float32, bfloat16 or float16")
    return getattr(torch, dtype).itemsize
