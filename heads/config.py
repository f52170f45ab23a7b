"""Geometry of an EAGLE head, derived from its target's config, checked, saved with the weights."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from transformers import PreTrainedConfig

from outrider.heads.rope import rope_settings, rotary

KINDS = ("eagle3", "eagle1")


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's layers: states entering decoder layers 2, n//2 and n-3."""
    layers = (2, num_layers // 2, num_layers - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise ValueError(
            f"num_hidden_layers is {num_layers}; the default feature layers {layers} are not three "
            "rising ids (that needs at least 7 layers); give aux_layers explicitly"
        )
    return layers


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Everything that fixes the shape and the arithmetic of an EAGLE head."""

    kind: str = "eagle3"
    """eagle3 (fused layers, own output head) or eagle1 (last state, the target's output head)."""
    hidden_size: int
    """Width of the draft layer."""
    intermediate_size: int
    """Width of the draft's MLP."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Channels of one head; never derived from hidden_size / num_heads when the target says."""
    rms_norm_eps: float
    """Epsilon of every norm."""
    rope: Mapping[str, Any]
    """Flat rotary settings: rope_type, rope_theta, partial_rotary_factor and the scaling's own."""
    max_position_embeddings: int
    """Position limit that engines read from the exported head."""
    vocab_size: int
    """Rows of the target's output head, padding included."""
    tokenizer_size: int
    """Ids below it exist; the rest are padding rows."""
    draft_vocab_size: int
    """Ids the head can propose; equal to vocab_size when not reduced."""
    target_hidden_size: int
    """Width of the target's states."""
    num_target_layers: int
    """Decoder layers of the target."""
    aux_layers: tuple[int, ...] = ()
    """EAGLE-3 features: the states entering these decoder layers (hidden_states indices)."""
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
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Notes read from a foreign checkpoint that change nothing here."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_kind()
        rotary(self.rope, self.head_dim)

    def _check_sizes(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.max_position_embeddings < 1:
            raise ValueError(
                f"max_position_embeddings is {self.max_position_embeddings}; give the longest "
                "context the head will serve"
            )
        if not 0 < self.tokenizer_size <= self.vocab_size:
            raise ValueError(
                f"tokenizer_size is {self.tokenizer_size}; it must be in 1..{self.vocab_size}, the "
                "rows of the target's output head"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; it must be in 1..{self.vocab_size}, "
                "the target's vocabulary"
            )
        if self.is_reduced and self.draft_vocab_size > self.tokenizer_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size} but only {self.tokenizer_size} ids "
                "exist; lower it, or leave it out for the full vocabulary"
            )

    def _check_kind(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; choose one of {', '.join(KINDS)}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both set; choose one of them")
        differs = self.hidden_size != self.target_hidden_size
        if self.kind == "eagle3":
            self._check_layers()
            if differs and not self.own_embedding:
                raise ValueError(
                    f"hidden_size is {self.hidden_size} but the target's is "
                    f"{self.target_hidden_size}; engines then need own_embedding=True"
                )
            return
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        wrong = [name for name in flags if getattr(self, name)]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} set for an eagle1 head; those are eagle3 flags")
        if differs or self.is_reduced or self.aux_layers:
            raise ValueError(
                "an eagle1 head shares the target's output head and last state, so its "
                f"hidden_size must be {self.target_hidden_size} (is {self.hidden_size}), its "
                f"draft_vocab_size {self.vocab_size} (is {self.draft_vocab_size}) and its "
                f"aux_layers empty (are {self.aux_layers}); use kind='eagle3' to choose them"
            )

    def _check_layers(self) -> None:
        layers = self.aux_layers
        rising = all(a < b for a, b in itertools.pairwise(layers))
        if not layers or not rising or layers[0] < 0 or layers[-1] > self.num_target_layers:
            raise ValueError(
                f"aux_layers is {layers}; give rising ids in 0..{self.num_target_layers} (engines "
                "sort and de-duplicate them), where id i is the state entering decoder layer i"
            )

    @property
    def is_reduced(self) -> bool:
        """Whether draft ids need a map to target ids."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def num_proposable(self) -> int:
        """Draft ids that exist: a full vocabulary loses the target's padding rows."""
        return self.draft_vocab_size if self.is_reduced else self.tokenizer_size

    @classmethod
    def from_target(  # noqa: PLR0913 - one keyword per choice a user makes
        cls,
        target: PreTrainedConfig | Mapping[str, Any],
        *,
        kind: str = "eagle3",
        tokenizer_size: int | None = None,
        draft_vocab_size: int | None = None,
        aux_layers: Sequence[int] | None = None,
        hidden_size: int | None = None,
        intermediate_size: int | None = None,
        max_position_embeddings: int | None = None,
        **flags: Any,  # noqa: ANN401 - checked by the constructor
    ) -> "EagleConfig":
        """Geometry for a target given as its transformers config or the dictionary of one.

        Nested multimodal configs are entered. `flags` are the norm flags and own_embedding.
        """
        text = text_config(target)
        width = int(text["hidden_size"])
        num_layers = int(text["num_hidden_layers"])
        num_heads = int(text["num_attention_heads"])
        vocab_size = int(text["vocab_size"])
        if aux_layers is None:
            aux_layers = default_aux_layers(num_layers) if kind == "eagle3" else ()
        flags.setdefault("own_embedding", kind == "eagle3" and hidden_size not in (None, width))
        return cls(
            kind=kind,
            hidden_size=hidden_size or width,
            intermediate_size=intermediate_size or _intermediate(text),
            num_heads=num_heads,
            num_kv_heads=int(text.get("num_key_value_heads") or num_heads),
            head_dim=int(text.get("head_dim") or width // num_heads),
            rms_norm_eps=float(text.get("rms_norm_eps") or 1e-5),
            rope=rope_settings(text),
            max_position_embeddings=max_position_embeddings or int(text["max_position_embeddings"]),
            vocab_size=vocab_size,
            tokenizer_size=tokenizer_size or vocab_size,
            draft_vocab_size=draft_vocab_size or vocab_size,
            target_hidden_size=width,
            num_target_layers=num_layers,
            aux_layers=tuple(aux_layers),
            **flags,
        )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy; `from_dict` reads it back."""
        values = asdict(self)
        return {**values, "aux_layers": list(self.aux_layers), "rope": dict(self.rope)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "EagleConfig":
        """The inverse of to_dict; unknown or missing keys are refused by name."""
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown head settings {unknown}; known are {sorted(known)}")
        settings: dict[str, Any] = {**values, "aux_layers": tuple(values.get("aux_layers", ()))}
        return cls(**settings)


def text_config(target: PreTrainedConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config, as a dictionary."""
    values = target if isinstance(target, Mapping) else target.to_dict()
    for name in ("text_config", "language_config", "llm_config"):
        if isinstance(values.get(name), Mapping):
            return text_config(values[name])
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if values.get(name) is None]
    if missing:
        raise ValueError(
            f"the target's config lacks {', '.join(missing)}; give the config of a decoder-only "
            "language model, or of a model that nests one under text_config"
        )
    return dict(values)


def _intermediate(text: Mapping[str, Any]) -> int:
    size = text.get("intermediate_size")
    if not isinstance(size, int):
        raise ValueError(
            f"the target's intermediate_size is {size!r}; give intermediate_size for the draft"
        )
    return size
