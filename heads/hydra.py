"""Hydra: Medusa's heads, told the tokens drafted so far; Hydra++ with a prefix layer before them.

The alignment rule: row t holds the target's last state h at position t and the token x_{t+1}; head
i predicts x_{t+2+i} from [h | e(x_{t+1}) | ... | e(x_{t+1+i})], the state beside the embeddings of
all tokens since (Ankner et al. 2024, and hydra/model/hydra_heads of their code). So what is carried
from draft to draft is that row of vectors, one longer each time, and nothing enters a cache.
Embeddings are raised to the size of states first (embed_gain). With a prefix layer (Hydra++) h is
first run through one decoder layer over the text's states up to t, and a norm.

A head is a residual block that narrows the row, r(row) + silu(w(row)), and further ones that do
not, x + silu(w(x)). Blocks start at zero and r picks the state, so a new head says what the
target's own head says of the state, as Medusa's do.

Letters: B rows, T positions, M = B*T, N rows of a plan, D hidden size, C carried (a multiple of D),
W draft vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from typing_extensions import override

from outrider.heads.attention import chain_attention
from outrider.heads.base import DraftHead
from outrider.heads.cache import HeadCache
from outrider.heads.config import DecoderConfig, decoder_sizes, shared_sizes, text_config
from outrider.heads.decoder import DecoderHead, layer_weights
from outrider.heads.layers import Layer, Norm, Weights, rms_norm
from outrider.heads.plan import RowPlan


@dataclass(frozen=True, kw_only=True)
class HydraConfig(DecoderConfig):
    """Everything that fixes the shape and the arithmetic of Hydra heads."""

    KINDS: ClassVar[tuple[str, ...]] = ("hydra",)
    kind: str = "hydra"
    num_draft_heads: int = 4
    """Heads, which is tokens drafted ahead."""
    num_draft_layers: int = 2
    """Residual blocks of each head; the first narrows."""
    prefix_layer: bool = False
    """A decoder layer over the text's states comes first (Hydra++)."""
    shared_output: bool = False
    """Heads use the target's output rows as they are, instead of rows of their own."""
    embed_gain: float = 1.0
    """Embeddings are raised by this power of two before heads read them. Files hold the weights
    that need no gain, so that others read the same heads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_width()
        self.check_at_least_one("num_draft_heads", "num_draft_layers")
        if self.embed_gain <= 0 or math.frexp(self.embed_gain)[0] != 0.5:
            raise ValueError(
                f"embed_gain is {self.embed_gain}; give a power of two, which weights take exactly"
            )

    @property
    @override
    def max_drafts(self) -> int:
        return self.num_draft_heads

    @property
    @override
    def activation_width(self) -> int:
        carried = self.num_draft_heads // 2 + 3
        own = (carried + 3 * self.num_draft_layers + 2) * self.hidden_size
        return own + (super().activation_width // self.num_draft_heads if self.prefix_layer else 0)

    @classmethod
    @override
    def from_target(
        cls,
        target: PreTrainedConfig | Mapping[str, Any],
        *,
        kind: str = "hydra",
        num_draft_heads: int = 4,
        num_draft_layers: int = 2,
        prefix_layer: bool = False,
        shared_output: bool = False,
        embed_gain: float = 1.0,
        **sizes: Any,
    ) -> Self:
        """Geometry for a target; `sizes` are those of `shared_sizes`, the target's if left out."""
        text = text_config(target)
        return cls(
            kind=kind,
            num_draft_heads=num_draft_heads,
            num_draft_layers=num_draft_layers,
            prefix_layer=prefix_layer,
            shared_output=shared_output,
            embed_gain=embed_gain,
            **shared_sizes(text, **sizes),
            **decoder_sizes(text),
        )


class HydraBlock(nn.Module):
    """A residual block that reads `num_vectors` vectors; its parts bear the original's names."""

    def __init__(self, width: int, num_vectors: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_vectors * width, width)
        for value in self.linear.parameters():
            nn.init.zeros_(value)
        self.res_connection: nn.Linear | None = None
        if num_vectors > 1:
            self.res_connection = nn.Linear(num_vectors * width, width)
            nn.init.zeros_(self.res_connection.bias)
            nn.init.eye_(self.res_connection.weight)  # ones where the state is, zeros elsewhere

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[..., C] to [..., D], in the input's own dtype."""
        kept = x if self.res_connection is None else _apply(self.res_connection, x)
        return kept + F.silu(_apply(self.linear, x))


def _rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())


def _apply(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, linear.weight.to(x.dtype), linear.bias.to(x.dtype))


class HydraHead(DecoderHead):
    """Hydra heads."""

    config: HydraConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: HydraConfig, draft_ids_W: Tensor | None = None) -> None:
        super().__init__(config, draft_ids_W)
        width, num_heads = config.hidden_size, config.num_draft_heads
        if config.prefix_layer:
            self.prefix_layer = Layer(config, width, ("input_layernorm",))
            self.prefix_norm = Norm(width)
            for module in self.prefix_layer.modules():
                if isinstance(module, nn.Linear):
                    nn.init.normal_(module.weight, std=0.02)
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(
                HydraBlock(width, depth + 2),
                *(HydraBlock(width, 1) for _ in range(config.num_draft_layers - 1)),
            )
            for depth in range(num_heads)
        )
        self.hydra_lm_head = nn.ModuleList(
            nn.Linear(width, config.draft_vocab_size, bias=False)
            for _ in range(0 if config.shared_output else num_heads)
        )

    @override
    @torch.no_grad()
    def start_from_target(self) -> Self:
        rows_WH = self.lent().output_VH[self.draft_ids_W]
        for weight in self.own_outputs:
            weight.copy_(rows_WH)
        norm_H = self.lent().norm_H
        if norm_H is None:
            return self
        size = _rms(norm_H)
        # Beside states of this size, embeddings of a tied target are a whisper (a fourteenth in
        # SmolLM2), and heads that start from nothing learn next to nothing from them.
        gain = 2.0 ** round(math.log2(size / _rms(self.lent().embedding_VH)))
        self.config = replace(self.config, embed_gain=gain)
        if self.config.prefix_layer:
            # One number, since the state bears the target's norm already: what comes out of the
            # prefix layer is then a state of the target's own size.
            self.prefix_norm.weight.fill_(size)
        return self

    @override
    def follow(self, old: DraftHead) -> None:
        assert isinstance(old, HydraHead)
        self.config = replace(self.config, embed_gain=old.config.embed_gain)

    @property
    @override
    def own_outputs(self) -> list[nn.Parameter]:
        return [output.get_parameter("weight") for output in self.hydra_lm_head]

    def _weights(self, dtype: torch.dtype) -> Weights:
        """Weights of the prefix layer."""
        layer = self.prefix_layer
        raw = [weight.to(dtype) for weight in layer_weights(layer)]
        norm, layer_norm = self.prefix_norm.weight.to(dtype), layer.norm("input_layernorm")
        return Weights(None, *raw, norm=norm, layer_norm=layer_norm.to(dtype))

    @override
    def project(self, aux_BTF: Tensor | None, last_BTH: Tensor | None) -> Tensor:
        assert last_BTH is not None
        return last_BTH.to(self.dtype)

    def _carry(self, state: Tensor, ids: Tensor) -> Tensor:
        return torch.cat([state, self.embed(ids, state.dtype)], dim=-1)

    @override
    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return super().embed(ids, dtype) * self.config.embed_gain

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
        """Put the tokens' embeddings behind what is carried; the prefix layer sees depth 0 only."""
        if depth or not self.config.prefix_layer:
            if cache is not None:
                cache.skip(ids_BT.shape[1])
            return self._carry(feature_BTD, ids_BT)
        weights = self._weights(feature_BTD.dtype)
        x = self._enter(feature_BTD, weights)
        attended = self.attend(x, position_BT, weights, cache, mask)
        return self._carry(self._prefix(feature_BTD, attended, weights), ids_BT)

    def _enter(self, state: Tensor, weights: Weights) -> Tensor:
        assert weights.layer_norm is not None
        return rms_norm(state, weights.layer_norm, self.config.rms_norm_eps)

    def _prefix(self, state: Tensor, attended: Tensor, weights: Weights) -> Tensor:
        assert weights.norm is not None
        hidden = self.leave(state, attended, weights)
        return rms_norm(hidden, weights.norm, self.config.rms_norm_eps)

    @override
    def unroll(
        self, feature_BTD: Tensor, ids_BT: Tensor, position_BT: Tensor, plan: RowPlan
    ) -> list[Tensor]:
        state_MD, ids_M = feature_BTD.flatten(0, 1), ids_BT.flatten()
        carried = state_MD.index_select(0, plan.row_N)
        if self.config.prefix_layer:
            weights, position_M = self._weights(state_MD.dtype), position_BT.flatten()
            x_MD = self._enter(state_MD, weights)
            key_MKE, value_MKE = self.keys_values(x_MD, position_M, weights)
            x_ND = x_MD.index_select(0, plan.row_N)
            q_NAE = self.queries(x_ND, position_M[plan.row_N], weights)
            attended = chain_attention(q_NAE, key_MKE, value_MKE, (), (), plan.blocks)
            carried = self._prefix(carried, attended, weights)
        found: list[Tensor] = []
        for step in range(plan.num_steps):
            carried = self._carry(carried, ids_M[plan.token_KN[step]])
            found.append(carried)
        return found

    @override
    def output_input(self, hidden: Tensor, depth: int = 0) -> Tensor:
        mlp = self.hydra_mlp[depth]
        return mlp(hidden)
