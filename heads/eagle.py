"""EAGLE heads: fuse features with the next token's embedding, run one layer, predict.

EAGLE-1 and EAGLE-3 (with the 3.1 norms) are settings of one class, read top to bottom.

The alignment rule: row t holds the target's state at position t and the token x_{t+1}; its output
predicts x_{t+2} and stands in for the state at t+1. Drafting feeds it back with the drafted token.

Letters: B rows, T positions, N any positions, F fused feature inputs, H target hidden size,
D draft hidden size, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.heads.cache import HeadCache
from outrider.heads.config import EagleConfig
from outrider.heads.layers import Layer, Norm, Weights, attend, mlp, rms_norm, split_heads
from outrider.heads.rope import cos_sin, rotary, rotate
from outrider.heads.tables import START_NORM, Tables, bend, leading_directions, to_device
from outrider.heads.vocab import check_draft_ids, offsets, selected


class EagleHead(nn.Module):
    """A draft head. Parameters bear the published names; `attach` lends it the target's tables."""

    def __init__(self, config: EagleConfig, draft_ids_W: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        width, num_layers = config.hidden_size, len(config.aux_layers)
        self.tables: Tables | None = None
        self._rotary = rotary(config.rope, config.head_dim)
        self._cast: dict[torch.dtype, Tensor] = {}
        self._add_vocabulary(draft_ids_W)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
            self.embed_tokens.requires_grad_(width != config.target_hidden_size)
        if config.kind == "eagle1":
            self.fc = nn.Linear(2 * width, width, bias=False)
            self.layers = nn.ModuleList([Layer(config)])
        else:
            self.fc = nn.Linear(num_layers * config.target_hidden_size, width, bias=False)
            self.midlayer = Layer(config)
            self.norm = Norm(width)
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = Norm(num_layers * config.target_hidden_size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(config.target_hidden_size) for _ in config.aux_layers)
        self.reset()

    def _add_vocabulary(self, draft_ids_W: Tensor | None) -> None:
        config = self.config
        if not config.is_reduced:
            if draft_ids_W is not None:
                raise ValueError("draft ids given for a full draft vocabulary; leave them out")
            self._all_ids = nn.Buffer(torch.arange(config.vocab_size), persistent=False)
            return
        if draft_ids_W is None:
            raise ValueError(
                f"draft_vocab_size is {config.draft_vocab_size} of {config.vocab_size} and no "
                "draft ids are given; choose them with outrider.heads.vocab.choose"
            )
        check_draft_ids(draft_ids_W, config)
        self.d2t = nn.Buffer(offsets(draft_ids_W))
        self.t2d = nn.Buffer(selected(draft_ids_W, config.vocab_size))

    @torch.no_grad()
    def reset(self) -> None:
        """Fresh weights: projections normal(0, 0.02), norms one."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, Norm):
                nn.init.ones_(module.weight)

    @torch.no_grad()
    def start_from_target(self) -> Self:
        """Begin a new EAGLE-3 head near its target; heads/tables.py says why."""
        if self.config.kind == "eagle1":
            return self
        tables, width = self.lent(), self.config.hidden_size
        rows = tables.output_VH[self.draft_ids_W].to(self.lm_head.weight.dtype)
        if width != self.config.target_hidden_size:
            basis_HD = leading_directions(tables.embedding_VH, width)
            self.embed_tokens.weight.copy_(tables.embedding_VH.to(basis_HD.dtype) @ basis_HD)
            rows = rows.to(basis_HD.dtype) @ leading_directions(tables.output_VH, width)
        else:
            if tables.norm_H is not None:
                self.norm.weight.copy_(tables.norm_H * START_NORM)
            self.fc.weight.zero_()[:, -width:].fill_diagonal_(1)
        self.lm_head.weight.copy_(rows)
        return self

    # Tables of the target

    def attach(self, tables: Tables) -> Self:
        """Lend the target's tables. They are not parameters and never in the state dict."""
        rows, width = tables.output_VH.shape
        wanted = (self.config.vocab_size, self.config.target_hidden_size)
        if (rows, width) != wanted:
            raise ValueError(
                f"the target's output head is {rows} x {width} but this head was made for "
                f"{wanted[0]} x {wanted[1]}; pair it with its own target"
            )
        self.tables = to_device(tables, self.fc.weight.device)
        self._cast = {}
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.tables is not None:
            self.attach(self.tables)
        return self

    def lent(self) -> Tables:
        """The tables, or an error that says how to lend them."""
        if self.tables is None:
            raise ValueError("the head has no target tables; call head.attach(tables) first")
        return self.tables

    def teacher_rows(self, dtype: torch.dtype) -> Tensor:
        """Rows of the target's output head for every proposable draft id, in this dtype; cached."""
        if dtype not in self._cast:
            ids_W = self.draft_ids_W[: self.config.num_proposable]
            table_VH = self.lent().output_VH
            whole = ids_W.shape[0] == table_VH.shape[0]
            self._cast[dtype] = (table_VH if whole else table_VH[ids_W]).to(dtype)
        return self._cast[dtype]

    # Arithmetic

    def weights(self, dtype: torch.dtype | None = None) -> Weights:
        """The layer's weights, cast if asked: once per training step, never for inference."""
        layer = self.layer
        attention, gated = layer.self_attn, layer.mlp
        raw: list[Tensor] = [
            self.fc.weight,
            attention.q_proj.weight,
            attention.k_proj.weight,
            attention.v_proj.weight,
            attention.o_proj.weight,
            gated.gate_proj.weight,
            gated.up_proj.weight,
            gated.down_proj.weight,
            layer.post_attention_layernorm.weight,
        ]
        if self.config.kind == "eagle3":
            raw += [layer.input_layernorm.weight, layer.hidden_norm.weight, self.norm.weight]
        return Weights(*(raw if dtype is None else [weight.to(dtype) for weight in raw]))

    @property
    def layer(self) -> Layer:
        """The one decoder layer, whatever its published name."""
        layer = self.midlayer if self.config.kind == "eagle3" else self.layers[0]
        assert isinstance(layer, Layer)
        return layer

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Embedding rows: the target's, or the head's own."""
        own = self.config.own_embedding
        table = self.embed_tokens.weight if own else self.lent().embedding_VH
        return F.embedding(ids, table).to(dtype)

    def project(
        self, aux_BTF: Tensor | None, last_BTH: Tensor | None, weights: Weights | None = None
    ) -> Tensor:
        """Features the first step consumes: fused layers (eagle3), or the last state (eagle1)."""
        weights = weights or self.weights()
        dtype, eps = weights.fc.dtype, self.config.rms_norm_eps
        if self.config.kind == "eagle1":
            assert last_BTH is not None
            return last_BTH.to(dtype)
        assert aux_BTF is not None
        x = aux_BTF.to(dtype)
        if self.config.norm_before_fc:
            x = rms_norm(x, self.input_norm.weight.to(dtype), eps)
        if self.config.fc_norm:
            parts = x.split(self.config.target_hidden_size, dim=-1)
            norms = [norm.get_parameter("weight").to(dtype) for norm in self.fc_norm]
            x = torch.cat([rms_norm(*pair, eps) for pair in zip(parts, norms, strict=True)], dim=-1)
        return F.linear(x, weights.fc)

    def enter(self, feature: Tensor, ids: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """Attention input and residual from features and next tokens."""
        embed = self.embed(ids, feature.dtype)
        if self.config.kind == "eagle1":
            fused = F.linear(torch.cat([embed, feature], dim=-1), weights.fc)
            return fused, fused
        assert weights.input_norm is not None
        assert weights.hidden_norm is not None
        eps = self.config.rms_norm_eps
        normed = rms_norm(feature, weights.hidden_norm, eps)
        x = torch.cat([rms_norm(embed, weights.input_norm, eps), normed], dim=-1)
        return x, (normed if self.config.norm_before_residual else feature)

    def leave(self, residual: Tensor, attended: Tensor, weights: Weights) -> Tensor:
        """Output of a step from residual and attention: what the next step takes as feature."""
        hidden = residual + F.linear(attended, weights.o)
        hidden = hidden + mlp(
            rms_norm(hidden, weights.post_norm, self.config.rms_norm_eps), weights
        )
        if self.config.norm_output:
            assert weights.norm is not None
            hidden = rms_norm(hidden, weights.norm, self.config.rms_norm_eps)
        return hidden

    def queries(self, x: Tensor, position: Tensor, weights: Weights) -> Tensor:
        """Rotated queries [..., A, E]."""
        cos, sin = cos_sin(self._rotary, position, x.dtype)
        return rotate(split_heads(F.linear(x, weights.q), self.config.head_dim), cos, sin)

    def keys_values(self, x: Tensor, position: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values [..., K, E]."""
        cos, sin = cos_sin(self._rotary, position, x.dtype)
        key = rotate(split_heads(F.linear(x, weights.k), self.config.head_dim), cos, sin)
        return key, split_heads(F.linear(x, weights.v), self.config.head_dim)

    def step(
        self,
        feature_BTD: Tensor,
        ids_BT: Tensor,
        position_BT: Tensor,
        cache: HeadCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Run T new rows over the cache and themselves; returns hidden_BTD.

        ids are the tokens that FOLLOW the features, positions those of the features. mask is
        bool [B, 1, T, S] with S cached plus new entries; None is causal.
        """
        weights = self.weights()
        x, residual = self.enter(feature_BTD, ids_BT, weights)
        q_BTAE = self.queries(x, position_BT, weights)
        key, value = self.keys_values(x, position_BT, weights)
        if cache is None:
            keys, values = key.transpose(1, 2), value.transpose(1, 2)
        else:
            keys, values = cache.append(key, value)
        return self.leave(residual, attend(q_BTAE, keys, values, mask), weights)

    # Output

    @property
    def draft_ids_W(self) -> Tensor:  # noqa: N802 - a dimension suffix
        """Target id of every draft id; the identity when the vocabulary is full."""
        if not self.config.is_reduced:
            return self._all_ids
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def output_input(self, hidden: Tensor, weights: Weights | None = None) -> Tensor:
        """What the output head multiplies: the final norm where there is one still to apply."""
        if self.config.kind == "eagle1" or self.config.norm_output:
            return hidden
        weight = self.norm.weight.to(hidden.dtype) if weights is None else weights.norm
        assert weight is not None
        return rms_norm(hidden, weight, self.config.rms_norm_eps)

    def output_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Rows of the output head for proposable draft ids.

        For EAGLE-3 a view of the parameter, for EAGLE-1 the target's frozen rows in this dtype.
        """
        if self.config.kind == "eagle1":
            return self.teacher_rows(dtype or self.fc.weight.dtype)
        weight, size = self.lm_head.weight, self.config.num_proposable
        return weight if size == weight.shape[0] else weight[:size]

    def draft_logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits over the draft vocabulary, fp32 or better; ids that do not exist get -inf."""
        logits = F.linear(self.output_input(hidden_ND), self.output_weight(hidden_ND.dtype))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.config.kind == "eagle1":
            logits = bend(logits, self.lent())
        missing = self.config.draft_vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def draft_probs(self, hidden_ND: Tensor, temperature: float = 1.0) -> Tensor:
        """The draft's law over the draft vocabulary; a point mass at temperature 0."""
        logits_NW = self.draft_logits(hidden_ND)
        if temperature == 0:
            return F.one_hot(logits_NW.argmax(-1), logits_NW.shape[-1]).to(logits_NW.dtype)
        return (logits_NW / temperature).softmax(-1)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return self.draft_ids_W[draft_ids]

    def scatter(self, probs_NW: Tensor) -> Tensor:
        """Probabilities over the target vocabulary, zero outside the draft's."""
        if not self.config.is_reduced:
            return probs_NW
        probs_NV = probs_NW.new_zeros((*probs_NW.shape[:-1], self.config.vocab_size))
        probs_NV[..., self.draft_ids_W] = probs_NW
        return probs_NV
