"""The decoder layer that draft heads share: published parameter names, plain arithmetic.

Letters: B rows, T new positions, S positions seen, D hidden size, C attention input (D or 2D),
A query heads, K key-value heads, G query heads per key-value head, E head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.heads.config import DecoderConfig

QUERY_CHUNK = 512


class Norm(nn.Module):
    """Holds the weight of an RMS norm; `rms_norm` does the arithmetic."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class AttentionForm(NamedTuple):
    """What a family's attention has that Llama's has not."""

    bias: bool = False
    """Biases on queries, keys and values (Qwen2)."""
    qk_norm: bool = False
    """RMS norms on every head's queries and keys, before they are rotated (Qwen3)."""
    gate: bool = False
    """A sigmoid gate on the output, made beside each head's queries (Qwen3-Next)."""


LLAMA = AttentionForm()


class Attention(nn.Module):
    """Projections of the attention block."""

    def __init__(self, config: DecoderConfig, width: int, form: AttentionForm = LLAMA) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries * (2 if form.gate else 1), bias=form.bias)
        self.k_proj = nn.Linear(width, keys, bias=form.bias)
        self.v_proj = nn.Linear(width, keys, bias=form.bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        if form.qk_norm:
            self.q_norm = Norm(config.head_dim)
            self.k_norm = Norm(config.head_dim)


class Mlp(nn.Module):
    """Projections of the gated MLP."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class Layer(nn.Module):
    """One decoder layer whose attention reads `width` channels, with these norms before it."""

    def __init__(
        self,
        config: DecoderConfig,
        width: int,
        norms: Sequence[str] = (),
        form: AttentionForm = LLAMA,
    ) -> None:
        super().__init__()
        self.self_attn = Attention(config, width, form)
        self.mlp = Mlp(config)
        self.post_attention_layernorm = Norm(config.hidden_size)
        for name in norms:
            self.add_module(name, Norm(config.hidden_size))

    def norm(self, name: str) -> Tensor:
        """The weight of one of the norms before attention."""
        return self.get_parameter(f"{name}.weight")


@dataclass(frozen=True)
class Weights:
    """The weights of a layer and what is around it, in the dtype of computation, cast once."""

    fc: Tensor | None
    """Fuses what the layer reads."""
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    post_norm: Tensor
    input_norm: Tensor | None = None
    """On the embedding."""
    hidden_norm: Tensor | None = None
    """On the feature."""
    norm: Tensor | None = None
    """Before the output head."""
    layer_norm: Tensor | None = None
    """On the fused input, before attention."""
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    out_gate: Tensor | None = None
    """Rows that make the gate on attention's output."""
    gate_bias: Tensor | None = None
    rest: "tuple[Weights, ...]" = field(default=(), kw_only=True)
    """Those of the layers after the first, whose layer_norm is on what the layer before put out."""


class Nearness(NamedTuple):
    """Which keys are near enough to be seen: those less than `window` positions before the query.

    The query counts, so that `window` keys are seen at most, as in the engines' kernels
    (vllm/v1/attention/backends/flash_attn.py turns a window of w into w - 1 keys before the query).
    """

    query_BT: Tensor
    """Positions of the queries."""
    key_BS: Tensor
    """Positions of all keys."""
    window: int

    def part(self, start: int, stop: int, seen: int) -> Tensor:
        """Bool [B, 1, T, S] of the queries from `start` to `stop` and the first `seen` keys."""
        query_BT1 = self.query_BT[:, start:stop, None]
        return (query_BT1 - self.key_BS[:, None, :seen] < self.window)[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension, statistics in fp32 or better."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def mlp(x: Tensor, weights: Weights, dropout: float = 0.0) -> Tensor:
    """The gated MLP, whose channels are zero with the chance `dropout`."""
    gated = F.silu(F.linear(x, weights.gate)) * F.linear(x, weights.up)
    return F.linear(F.dropout(gated, dropout) if dropout else gated, weights.down)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[..., A * E] to [..., A, E]."""
    return x.unflatten(-1, (-1, head_dim))


def attend(
    q_BTAE: Tensor,
    key_BKSE: Tensor,
    value_BKSE: Tensor,
    mask: Tensor | None,
    near: Nearness | None = None,
) -> Tensor:
    """Grouped attention of new queries over all keys; returns [B, T, A * E].

    mask is bool, broadcastable to [B, 1, T, S]; None is causal with the queries last. Of what it
    lets through only what is near counts. Queries go in chunks, so memory grows with the length
    and not with its square.
    """
    num_new, num_all = q_BTAE.shape[1], key_BKSE.shape[2]
    out = []
    for start in range(0, num_new, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, num_new)
        seen = num_all - num_new + stop if mask is None else num_all
        if mask is not None:
            part = mask[..., start:stop, :] if mask.shape[-2] > 1 else mask
        else:
            part = q_BTAE.new_ones((stop - start, seen), dtype=torch.bool)
            part = part.tril(seen - (stop - start))
        if near is not None:
            part = part & near.part(start, stop, seen)
        keys, values = key_BKSE[:, :, :seen], value_BKSE[:, :, :seen]
        out.append(_attend_chunk(q_BTAE[:, start:stop], keys, values, part))
    return torch.cat(out, dim=1) if len(out) > 1 else out[0]


def _attend_chunk(q_BTAE: Tensor, key_BKSE: Tensor, value_BKSE: Tensor, mask: Tensor) -> Tensor:
    rows, num_new, num_heads, size = q_BTAE.shape
    num_kv = key_BKSE.shape[1]
    q = (q_BTAE * size**-0.5).unflatten(2, (num_kv, num_heads // num_kv))
    q_BKXE = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = (q_BKXE @ key_BKSE.transpose(2, 3)).unflatten(2, (-1, num_new))
    wide = mask if mask.dim() == 2 else mask.unsqueeze(1)
    scores = scores.masked_fill(~wide, float("-inf"))
    exact = torch.promote_types(scores.dtype, torch.float32)
    probs = scores.softmax(-1, dtype=exact).to(q.dtype).flatten(2, 3)
    out = (probs @ value_BKSE).unflatten(2, (-1, num_new))
    return out.permute(0, 3, 1, 2, 4).reshape(rows, num_new, num_heads * size)
