"""Heads with a decoder layer: its arithmetic, and drafting by feeding a row's output back.

Letters: B rows, T positions, N any positions, P predicted tokens, K steps, A query heads,
E head size, D draft hidden size.
"""

from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from outrider.heads.base import DraftHead, Predicted, States
from outrider.heads.cache import Entries, HeadCache
from outrider.heads.config import DecoderConfig
from outrider.heads.layers import (
    Layer,
    Nearness,
    Weights,
    attend,
    mlp,
    rms_norm,
    split_heads,
)
from outrider.heads.plan import RowPlan
from outrider.heads.rope import cos_sin, rotary, rotate
from outrider.heads.unroll import unroll


class DecoderHead(DraftHead):
    """A head with decoder layers like the target's own."""

    config: DecoderConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: DecoderConfig, draft_ids_W: Tensor | None = None) -> None:
        super().__init__(config, draft_ids_W)
        self._rotary = rotary(config.rope, config.head_dim)
        self._dropout = 0.0

    @contextmanager
    def dropping(self, chance: float) -> Generator[None]:
        """Within, a channel of attention's or the MLP's inside is zero with this chance.

        Drawn anew for every row and step; the other channels grow to keep the mean (Srivastava et
        al. 2014, "Dropout"). Random numbers come from the global generator.
        """
        self._dropout = chance
        try:
            yield
        finally:
            self._dropout = 0.0

    def queries(self, x: Tensor, position: Tensor, weights: Weights) -> Tensor:
        """Rotated queries [..., A, E]."""
        cos, sin = cos_sin(self._rotary, position, x.dtype)
        query = split_heads(F.linear(x, weights.q, weights.q_bias), self.config.head_dim)
        if weights.q_norm is not None:
            query = rms_norm(query, weights.q_norm, self.config.rms_norm_eps)
        return rotate(query, cos, sin)

    def keys_values(self, x: Tensor, position: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values [..., K, E]."""
        cos, sin = cos_sin(self._rotary, position, x.dtype)
        key = split_heads(F.linear(x, weights.k, weights.k_bias), self.config.head_dim)
        if weights.k_norm is not None:
            key = rms_norm(key, weights.k_norm, self.config.rms_norm_eps)
        value = split_heads(F.linear(x, weights.v, weights.v_bias), self.config.head_dim)
        return rotate(key, cos, sin), value

    def attend(
        self,
        x_BTD: Tensor,
        position_BT: Tensor,
        weights: Weights,
        cache: HeadCache | None,
        mask: Tensor | None,
        layer: int = 0,
    ) -> Tensor:
        """Attention of T new rows over the cache and themselves, [B, T, A * E]."""
        window = self.config.window(layer)
        q_BTAE = self.queries(x_BTD, position_BT, weights)
        key, value = self.keys_values(x_BTD, position_BT, weights)
        if cache is None:
            seen = Entries(key.transpose(1, 2), value.transpose(1, 2), position_BT)
        else:
            seen = cache.append(key, value, None if window is None else position_BT, layer)
        near = None
        if window is not None:
            assert seen.position_BS is not None
            near = Nearness(position_BT, seen.position_BS, window)
        return attend(q_BTAE, seen.key_BASE, seen.value_BASE, mask, near)

    def leave(self, residual: Tensor, attended: Tensor, weights: Weights) -> Tensor:
        """Output of the layer from residual and attention."""
        if self._dropout:
            attended = F.dropout(attended, self._dropout)
        hidden = residual + F.linear(attended, weights.o)
        normed = rms_norm(hidden, weights.post_norm, self.config.rms_norm_eps)
        return hidden + mlp(normed, weights, self._dropout)


class RecurrentHead(DecoderHead):
    """A head whose output stands in for the next state: EAGLE and MTP."""

    @abstractmethod
    def weights(self, dtype: torch.dtype | None = None) -> Weights:
        """The layer's weights, cast if asked: once per training step, never for inference."""

    @override
    @abstractmethod
    def project(
        self, aux_BTF: Tensor | None, last_BTH: Tensor | None, weights: Weights | None = None
    ) -> Tensor: ...

    @abstractmethod
    def enter(self, feature: Tensor, ids: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """Attention input and residual of the first layer, from features and next tokens."""

    def go_on(self, hidden: Tensor, weights: Weights) -> Tensor:
        """Attention input of a later layer, whose residual is what the one before put out."""
        assert weights.layer_norm is not None
        return rms_norm(hidden, weights.layer_norm, self.config.rms_norm_eps)

    def finish(self, hidden: Tensor, weights: Weights) -> Tensor:  # noqa: ARG002 - EAGLE-3.1 does
        """What the next step takes in, from what the last layer put out."""
        return hidden

    @override
    @abstractmethod
    def output_input(
        self, hidden: Tensor, depth: int = 0, weights: Weights | None = None
    ) -> Tensor: ...

    @override
    def step(
        self,
        feature_BTD: Tensor,
        ids_BT: Tensor,
        position_BT: Tensor,
        cache: HeadCache | None = None,
        mask: Tensor | None = None,
        depth: int = 0,
    ) -> Tensor:
        weights = self.weights()
        x, residual = self.enter(feature_BTD, ids_BT, weights)
        hidden = self.leave(residual, self.attend(x, position_BT, weights, cache, mask), weights)
        for layer, later in enumerate(weights.rest, start=1):
            x = self.go_on(hidden, later)
            attended = self.attend(x, position_BT, later, cache, mask, layer)
            hidden = self.leave(hidden, attended, later)
        return self.finish(hidden, weights)

    @override
    def unroll(
        self, feature_BTD: Tensor, ids_BT: Tensor, position_BT: Tensor, plan: RowPlan
    ) -> list[Tensor]:
        return unroll(self, feature_BTD, ids_BT, position_BT, plan)

    @override
    def predict(self, states: States, plan: RowPlan, dtype: torch.dtype | None = None) -> Predicted:
        weights = self.weights(dtype)
        feature_BTD = self.project(states.aux_BTF, states.last_BTH, weights)
        hidden = unroll(self, feature_BTD, states.ids_BT, states.position_BT, plan, weights)
        hidden_PKD = plan.pairs(hidden)
        return Predicted(hidden_PKD.unbind(1), self.output_input(hidden_PKD, weights=weights))


def layer_weights(layer: Layer) -> Sequence[Tensor]:
    """Weights of attention, MLP and the norm between them, in the order of `Weights` after fc."""
    attention, gated = layer.self_attn, layer.mlp
    return (
        attention.q_proj.weight,
        attention.k_proj.weight,
        attention.v_proj.weight,
        attention.o_proj.weight,
        gated.gate_proj.weight,
        gated.up_proj.weight,
        gated.down_proj.weight,
        layer.post_attention_layernorm.weight,
    )


def plain_weights(layer: nn.Module, dtype: torch.dtype | None = None) -> Weights:
    """Weights of an ordinary decoder layer with its input_layernorm, cast if asked."""
    assert isinstance(layer, Layer)
    raw = [*layer_weights(layer), layer.norm("input_layernorm")]
    *parts, norm = [weight.to(dtype or weight.dtype) for weight in raw]
    return Weights(None, *parts, layer_norm=norm)
