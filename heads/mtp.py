"""MTP: a multi-token-prediction module beside a frozen target, fed back to draft further.

The alignment rule: row t holds the target's last state at position t and the token x_{t+1}; its
output predicts x_{t+2} and stands in for the state at t+1. Norms of embedding and state, one
projection of both, one decoder layer, then the norm before the target's output head (DeepSeek-V3,
section 2.2, the module of depth 1). Later drafts feed the layer's output back in place of the
state, as engines do with a single module; in training the steps are unrolled the same way.

The flags of MtpConfig are what families that ship such modules do differently; a new module has
none of them. The state is the target's after its final norm, in every family. The embedding and
the output head are the target's. Engines also zero the embedding at position 0 in some families
(vllm/model_executor/models/deepseek_mtp.py); here that row is like any other.

Letters: B rows, T positions, A query heads, E head size, H target hidden size, D draft hidden size
(the target's).
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
from outrider.heads.layers import AttentionForm, Layer, Norm, Weights, rms_norm
from outrider.heads.tables import START_NORM

NAMES = ("deepseek", "qwen", "mimo")
"""The families whose tensor names a module can bear: heads/formats/mtp.py."""


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DecoderConfig):
    """Everything that fixes the shape and the arithmetic of an MTP module."""

    KINDS: ClassVar[tuple[str, ...]] = ("mtp",)
    FLAGS: ClassVar[tuple[str, ...]] = (
        "names",
        "hidden_first",
        "norm_output",
        "norm_offset",
        "attention_bias",
        "qk_norm",
        "output_gate",
        "extra",
    )
    """What may be given to from_target beside sizes."""

    kind: str = "mtp"
    names: str = "deepseek"
    """Whose tensor names its files bear."""
    hidden_first: bool = False
    """The projection reads [state | embedding] (MiMo), not [embedding | state]."""
    norm_output: bool = False
    """What is fed back has passed the last norm (Qwen3-Next, MiMo)."""
    norm_offset: float = 0.0
    """Added to every norm's weight: 1 where a family stores weights less one (Qwen3-Next)."""
    attention_bias: bool = False
    """Biases on queries, keys and values (MiMo)."""
    qk_norm: bool = False
    """Norms on queries and keys (Qwen3)."""
    output_gate: bool = False
    """A gate on attention's output (Qwen3-Next)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_width()
        if self.names not in NAMES:
            raise ValueError(f"names is {self.names!r}; choose one of {', '.join(NAMES)}")

    @classmethod
    @override
    def from_target(
        cls,
        target: PreTrainedConfig | Mapping[str, Any],
        *,
        kind: str = "mtp",
        intermediate_size: int | None = None,
        **settings: Any,
    ) -> Self:
        """Geometry for a target; settings are those of `shared_sizes` and FLAGS.

        Sizes that are left out are the target's.
        """
        text = text_config(target)
        flags = {name: settings.pop(name) for name in cls.FLAGS if name in settings}
        sizes = shared_sizes(text, **settings) | decoder_sizes(text, intermediate_size)
        return cls(kind=kind, **sizes, **flags)


class MtpHead(RecurrentHead):
    """An MTP module."""

    config: MtpConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: MtpConfig, draft_ids_W: Tensor | None = None) -> None:
        super().__init__(config, draft_ids_W)
        width = config.hidden_size
        form = AttentionForm(config.attention_bias, config.qk_norm, config.output_gate)
        self.enorm = Norm(width)
        self.hnorm = Norm(width)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.mtp_block = Layer(config, width, ("input_layernorm",), form)
        self.shared_head = nn.ModuleDict({"norm": Norm(width)})
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    @override
    @torch.no_grad()
    def start_from_target(self) -> Self:
        """Pass the state on, so that the output head speaks of it, unsure (heads/tables.py).

        The last norm is one number, not the target's weights: the state bears those already, and
        so what is fed back is a state like the target's.
        """
        width = self.config.hidden_size
        states = slice(0, width) if self.config.hidden_first else slice(width, None)
        self.eh_proj.weight.zero_()[:, states].fill_diagonal_(1)
        norm_H = self.lent().norm_H
        if norm_H is not None:
            size = float(norm_H.double().square().mean().sqrt())
            self._last_norm.fill_(size * START_NORM - self.config.norm_offset)
        return self

    @property
    def _last_norm(self) -> Tensor:
        return self.shared_head.get_parameter("norm.weight")

    @override
    def weights(self, dtype: torch.dtype | None = None) -> Weights:
        layer, attention = self.mtp_block, self.mtp_block.self_attn
        offset = self.config.norm_offset
        q, k, v, o, gate, up, down, post_norm = layer_weights(layer)
        norms = {
            "post_norm": post_norm,
            "input_norm": self.enorm.weight,
            "hidden_norm": self.hnorm.weight,
            "norm": self._last_norm,
            "layer_norm": layer.norm("input_layernorm"),
        }
        if self.config.qk_norm:
            norms |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}
        # Any: the type of every field fits, but one of them (`rest`) is no tensor.
        raw: dict[str, Any] = {
            name: norm + offset if offset else norm for name, norm in norms.items()
        }
        raw |= {"fc": self.eh_proj.weight, "o": o, "gate": gate, "up": up, "down": down}
        raw |= {"q": q, "k": k, "v": v}
        if self.config.attention_bias:
            raw |= {f"{name}_bias": getattr(attention, f"{name}_proj").bias for name in "qkv"}
        if self.config.output_gate:
            raw["q"], raw["out_gate"] = self._halves(q)
            if self.config.attention_bias:
                raw["q_bias"], raw["gate_bias"] = self._halves(raw["q_bias"])
        return Weights(**(raw if dtype is None else {k: w.to(dtype) for k, w in raw.items()}))

    def _halves(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of queries and of gates, which alternate head by head."""
        both = rows.unflatten(0, (self.config.num_heads, 2, self.config.head_dim))
        return both[:, 0].flatten(0, 1), both[:, 1].flatten(0, 1)

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
        pair = [state, embed] if self.config.hidden_first else [embed, state]
        fused = F.linear(torch.cat(pair, dim=-1), weights.fc)
        return rms_norm(fused, weights.layer_norm, eps), fused

    @override
    def leave(self, residual: Tensor, attended: Tensor, weights: Weights) -> Tensor:
        eps = self.config.rms_norm_eps
        if weights.out_gate is not None:
            assert weights.layer_norm is not None
            x = rms_norm(residual, weights.layer_norm, eps)
            attended = attended * F.linear(x, weights.out_gate, weights.gate_bias).sigmoid()
        hidden = super().leave(residual, attended, weights)
        if self.config.norm_output:
            assert weights.norm is not None
            hidden = rms_norm(hidden, weights.norm, eps)
        return hidden

    @override
    def output_input(
        self, hidden: Tensor, depth: int = 0, weights: Weights | None = None
    ) -> Tensor:
        """What the output head multiplies: the last norm where there is one still to apply."""
        if self.config.norm_output:
            return hidden
        norm = self._last_norm + self.config.norm_offset if weights is None else weights.norm
        assert norm is not None
        return rms_norm(hidden, norm.to(hidden.dtype), self.config.rms_norm_eps)
