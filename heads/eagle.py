"""EAGLE heads: fuse features with the next token's embedding, run a decoder layer or more, predict.

EAGLE-1 and EAGLE-3 (with the 3.1 norms) are settings of one class, read top to bottom.

The alignment rule: row t holds the target's state at position t and the token x_{t+1}; its output
predicts x_{t+2} and stands in for the state at t+1. Drafting feeds it back with the drafted token.

The first layer's attention reads embedding and state side by side; further ones are ordinary
decoder layers, of the names and arithmetic of vllm/model_executor/models/llama_eagle3.py.

Letters: B rows, T positions, N any positions, F fused feature inputs, H target hidden size,
D draft hidden size, V target vocabulary, W draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from typing_extensions import override

from outrider.heads.config import (
    DecoderConfig,
    decoder_sizes,
    default_aux_layers,
    shared_sizes,
    text_config,
)
from outrider.heads.decoder import RecurrentHead, layer_weights, plain_weights
from outrider.heads.layers import Layer, Norm, Weights, rms_norm
from outrider.heads.tables import START_NORM, leading_directions


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DecoderConfig):
    """Everything that fixes the shape and the arithmetic of an EAGLE head."""

    KINDS: ClassVar[tuple[str, ...]] = ("eagle3", "eagle1")
    kind: str = "eagle3"
    """eagle3 (fused layers, own output head) or eagle1 (last state, the target's output head)."""
    own_embedding: bool = False
    """The head ships embed_tokens of its own width; needed when hidden sizes differ."""
    norm_before_residual: bool = False
    """The residual is the normalised feature (vLLM only)."""
    norm_before_fc: bool = False
    """One norm over the concatenated features before fc (3.1)."""
    fc_norm: bool = False
    """One norm per feature layer before fc (3.1)."""
    norm_output: bool = False
    """The state handed to the next step is the one after the final norm (3.1)."""
    num_layers: int = 1
    """Decoder layers."""
    sliding_window: int | None = None
    """Positions that a row sees, itself included; None is the whole text before it."""
    full_attention_layers: tuple[int, ...] = ()
    """Layers that see the whole text all the same, counted from 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both set; choose one of them")
        differs = self.hidden_size != self.target_hidden_size
        self._check_own_layers()
        if self.kind == "eagle3":
            self.check_layers()
            if differs and not self.own_embedding:
                raise ValueError(
                    f"hidden_size is {self.hidden_size} but the target's is "
                    f"{self.target_hidden_size}; engines then need own_embedding=True"
                )
            return
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        wrong = [name for name in (*flags, "sliding_window") if getattr(self, name)]
        wrong += ["num_layers"] if self.num_layers != 1 else []
        if wrong:
            raise ValueError(f"{', '.join(wrong)} set for an eagle1 head; those are eagle3 flags")
        if differs or self.is_reduced or self.aux_layers:
            raise ValueError(
                "an eagle1 head shares the target's output head and last state, so its "
                f"hidden_size must be {self.target_hidden_size} (is {self.hidden_size}), its "
                f"draft_vocab_size {self.vocab_size} (is {self.draft_vocab_size}) and its "
                f"aux_layers empty (are {self.aux_layers}); use kind='eagle3' to choose them"
            )

    def _check_own_layers(self) -> None:
        self.check_at_least_one("num_layers")
        if self.sliding_window is not None:
            self.check_at_least_one("sliding_window")
        full = self.full_attention_layers
        if full and (self.sliding_window is None or not set(full) <= set(range(self.num_layers))):
            raise ValueError(
                f"full_attention_layers is {full}; give layers in 0..{self.num_layers - 1} for "
                f"which sliding_window (is {self.sliding_window}) does not hold"
            )

    @override
    def window(self, layer: int) -> int | None:
        return None if layer in self.full_attention_layers else self.sliding_window

    @property
    @override
    def activation_width(self) -> int:
        return self.num_layers * super().activation_width

    @classmethod
    @override
    def from_target(
        cls,
        target: PreTrainedConfig | Mapping[str, Any],
        *,
        kind: str = "eagle3",
        aux_layers: Sequence[int] | None = None,
        hidden_size: int | None = None,
        intermediate_size: int | None = None,
        **settings: Any,
    ) -> Self:
        """Geometry for a target given as its transformers config or the dictionary of one.

        Nested multimodal configs are entered. `settings` are any other fields; those left out or
        None are the target's, or their defaults.
        """
        text = text_config(target)
        is_eagle3 = kind == "eagle3"
        if aux_layers is None:
            aux_layers = default_aux_layers(int(text["num_hidden_layers"])) if is_eagle3 else ()
        is_wide = hidden_size in (None, int(text["hidden_size"]))
        given = {name: value for name, value in settings.items() if value is not None}
        given.setdefault("own_embedding", is_eagle3 and not is_wide)
        names = ("tokenizer_size", "draft_vocab_size", "max_position_embeddings")
        sizes = {name: given.pop(name) for name in names if name in given}
        layer = decoder_sizes(text, intermediate_size)
        layer |= {name: given.pop(name) for name in list(given) if name in layer}
        return cls(
            kind=kind,
            aux_layers=tuple(aux_layers),
            **shared_sizes(text, hidden_size=hidden_size, **sizes),
            **layer,
            **given,
        )


class EagleHead(RecurrentHead):
    """An EAGLE-1 or EAGLE-3 head."""

    config: EagleConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: EagleConfig, draft_ids_W: Tensor | None = None) -> None:
        super().__init__(config, draft_ids_W)
        width, num_layers = config.hidden_size, len(config.aux_layers)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
            self.embed_tokens.requires_grad_(width != config.target_hidden_size)
        if config.kind == "eagle1":
            self.fc = nn.Linear(2 * width, width, bias=False)
            self.layers = nn.ModuleDict({"0": Layer(config, width)})
        else:
            self.fc = nn.Linear(num_layers * config.target_hidden_size, width, bias=False)
            self.midlayer = Layer(config, 2 * width, ("hidden_norm", "input_layernorm"))
            later = range(1, config.num_layers)
            self.layers = nn.ModuleDict(
                {str(i): Layer(config, width, ("input_layernorm",)) for i in later}
            )
            self.norm = Norm(width)
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = Norm(num_layers * config.target_hidden_size)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(config.target_hidden_size) for _ in config.aux_layers)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Fresh weights: projections normal(0, 0.02), norms one."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, Norm):
                nn.init.ones_(module.weight)

    @override
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
            if self.config.own_embedding:
                self.embed_tokens.weight.copy_(tables.embedding_VH)
        self.lm_head.weight.copy_(rows)
        return self

    @property
    @override
    def own_outputs(self) -> list[nn.Parameter]:
        return [] if self.config.kind == "eagle1" else [self.lm_head.get_parameter("weight")]

    @property
    def own_tables(self) -> list[nn.Parameter]:
        """Embeddings of its own [V, D]: one or none."""
        return [self.embed_tokens.get_parameter("weight")] if self.config.own_embedding else []

    @property
    @override
    def is_bent(self) -> bool:
        return self.config.kind == "eagle1"

    @property
    def layer(self) -> Layer:
        """The first decoder layer, whatever its published name."""
        layer = self.midlayer if self.config.kind == "eagle3" else self.layers["0"]
        assert isinstance(layer, Layer)
        return layer

    @override
    def weights(self, dtype: torch.dtype | None = None) -> Weights:
        layer = self.layer
        raw: list[Tensor] = [self.fc.weight, *layer_weights(layer)]
        if self.config.kind == "eagle3":
            raw += [layer.norm("input_layernorm"), layer.norm("hidden_norm"), self.norm.weight]
        later = range(1, self.config.num_layers)
        rest = tuple(plain_weights(self.layers[str(i)], dtype) for i in later)
        return Weights(*(weight.to(dtype or weight.dtype) for weight in raw), rest=rest)

    @override
    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Embedding rows: the target's, or the head's own."""
        own = self.config.own_embedding
        table = self.embed_tokens.weight if own else self.lent().embedding_VH
        return F.embedding(ids, table).to(dtype)

    @override
    def project(
        self, aux_BTF: Tensor | None, last_BTH: Tensor | None, weights: Weights | None = None
    ) -> Tensor:
        """Features the first step consumes: fused layers (eagle3), or the last state (eagle1)."""
        weights = weights or self.weights()
        assert weights.fc is not None
        dtype = weights.fc.dtype
        if self.config.kind == "eagle1":
            assert last_BTH is not None
            return last_BTH.to(dtype)
        assert aux_BTF is not None
        return F.linear(self.fused(aux_BTF, dtype), weights.fc)

    def fused(self, aux_BTF: Tensor, dtype: torch.dtype) -> Tensor:
        """What fc multiplies (eagle3): the layers' states, normalised where the flags say so."""
        x, eps = aux_BTF.to(dtype), self.config.rms_norm_eps
        if self.config.norm_before_fc:
            x = rms_norm(x, self.input_norm.weight.to(dtype), eps)
        if self.config.fc_norm:
            parts = x.split(self.config.target_hidden_size, dim=-1)
            norms = [norm.get_parameter("weight").to(dtype) for norm in self.fc_norm]
            x = torch.cat([rms_norm(*pair, eps) for pair in zip(parts, norms, strict=True)], dim=-1)
        return x

    @override
    def enter(self, feature: Tensor, ids: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        embed = self.embed(ids, feature.dtype)
        if self.config.kind == "eagle1":
            assert weights.fc is not None
            fused = F.linear(torch.cat([embed, feature], dim=-1), weights.fc)
            return fused, fused
        assert weights.input_norm is not None
        assert weights.hidden_norm is not None
        eps = self.config.rms_norm_eps
        normed = rms_norm(feature, weights.hidden_norm, eps)
        x = torch.cat([rms_norm(embed, weights.input_norm, eps), normed], dim=-1)
        return x, (normed if self.config.norm_before_residual else feature)

    @override
    def finish(self, hidden: Tensor, weights: Weights) -> Tensor:
        if not self.config.norm_output:
            return hidden
        assert weights.norm is not None
        return rms_norm(hidden, weights.norm, self.config.rms_norm_eps)

    @override
    def output_input(
        self, hidden: Tensor, depth: int = 0, weights: Weights | None = None
    ) -> Tensor:
        """What the output head multiplies: the final norm where there is one still to apply."""
        if self.config.kind == "eagle1" or self.config.norm_output:
            return hidden
        weight = self.norm.weight.to(hidden.dtype) if weights is None else weights.norm
        assert weight is not None
        return rms_norm(hidden, weight, self.config.rms_norm_eps)
