"""MTP: a multi-token-prediction module beside a frozen target, fed back to draft further.

The alignment rule: row t holds the target's last state at position t and the token x_{t+1}; its
output predicts x_{t+2} and stands in for the state at t+1. Norms of embedding and state, one
projection of both, one decoder layer, then the norm before the target's output head (DeepSeek-V3,
section 2.2, the module of depth 1). Later drafts feed the layer's output back in place of the
state, as engines do with a single module; in training the steps are unrolled the same way.

The embedding and the output head are the target's. Engines also zero the embedding at position 0
(vllm/model_executor/models/deepseek_mtp.py); here that row is like any other.

Letters: B rows, T positions, H target hidden size, D draft hidden size (the target's).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from typing_extensions import override

from outrider.heads.config import DecoderConfig, decoder_sizes, shared_sizes, text_config
from outrider.heads.decoder import RecurrentHead, layer_weights
from outrider.heads.layers import Layer, Norm, Weights, rms_norm
from outrider.heads.tables import START_NORM


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DecoderConfig):
    """Everything that fixes the shape and the arithmetic of an MTP module."""

    KINDS: ClassVar[tuple[str, ...]] = ("mtp",)
    kind: str = "mtp"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_width()

    @classmethod
    @override
    def from_target(
        cls,
        target: PreTrainedConfig | Mapping[str, Any],
        *,
        kind: str = "mtp",
        intermediate_size: int | None = None,
        **sizes: Any,
    ) -> Self:
        """Geometry for a target; `sizes` are those of `shared_sizes`, the target's if left out."""
        text = text_config(target)
        return cls(
            kind=kind, **shared_sizes(text, **sizes), **decoder_sizes(text, intermediate_size)
        )


class MtpHead(RecurrentHead):
    """An MTP module."""

    config: MtpConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: MtpConfig, draft_ids_W: Tensor | None = None) -> None:
        super().__init__(config, draft_ids_W)
        width = config.hidden_size
        self.enorm = Norm(width)
        self.hnorm = Norm(width)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.mtp_block = Layer(config, width, ("input_layernorm",))
        self.shared_head = nn.ModuleDict({"norm": Norm(width)})
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    @override
    @torch.no_grad()
    def start_from_target(self) -> Self:
        """Pass the state on, so that the output head speaks of it, unsure (heads/tables.py).

        The last norm is one number, not the target's weights: the state bears those already, and
        so what is fed back is a state like the target's.
        """
        self.eh_proj.weight.zero_()[:, self.config.hidden_size :].fill_diagonal_(1)
        norm_H = self.lent().norm_H
        if norm_H is not None:
            size = float(norm_H.double().square().mean().sqrt())
            self.shared_head.get_parameter("norm.weight").fill_(size * START_NORM)
        return self

    @override
    def weights(self, dtype: torch.dtype | None = None) -> Weights:
        raw = [self.eh_proj.weight, *layer_weights(self.mtp_block)]
        raw += [self.enorm.weight, self.hnorm.weight]
        raw += [self.shared_head.get_parameter("norm.weight")]
        raw += [self.mtp_block.norm("input_layernorm")]
        return Weights(*(raw if dtype is None else [weight.to(dtype) for weight in raw]))

    @override
    def project(
        self, aux_BTF: Tensor | None, last_BTH: Tensor | None, weights: Weights | None = None
    ) -> Tensor:
        assert last_BTH is not None
        return last_BTH.to((weights or self.weights()).q.dtype)

    @override
    def enter(self, feature: Tensor, ids: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        assert weights.fc is not None
        assert weights.input_norm is not None
        assert weights.hidden_norm is not None
        assert weights.layer_norm is not None
        eps = self.config.rms_norm_eps
        embed = rms_norm(self.embed(ids, feature.dtype), weights.input_norm, eps)
        state = rms_norm(feature, weights.hidden_norm, eps)
        fused = F.linear(torch.cat([embed, state], dim=-1), weights.fc)
        return rms_norm(fused, weights.layer_norm, eps), fused

    @override
    def output_input(
        self, hidden: Tensor, depth: int = 0, weights: Weights | None = None
    ) -> Tensor:
        norm = self.shared_head.get_parameter("norm.weight") if weights is None else weights.norm
        assert norm is not None
        return rms_norm(hidden, norm.to(hidden.dtype), self.config.rms_norm_eps)
