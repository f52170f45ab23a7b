"""Geometry that draft heads share: derived from the target's config, checked, saved with weights.

Each head's own config extends one of these and stands beside its network.
"""

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self

from transformers import PreTrainedConfig

from outrider.heads.rope import rope_settings, rotary


@dataclass(frozen=True, kw_only=True)
class HeadConfig(ABC):
    """What fixes the shape and the arithmetic of any head."""

    KINDS: ClassVar[tuple[str, ...]] = ()
    """The kinds that this config describes."""
    kind: str
    """The head's kind, a key of outrider.heads.HEADS."""
    hidden_size: int
    """Width of the head."""
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
    """Features beside the last state: the states entering these decoder layers."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Notes read from a foreign checkpoint that change nothing here."""

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise ValueError(f"kind is {self.kind!r}; choose one of {', '.join(self.KINDS)}")
        self.check_at_least_one("hidden_size")
        self._check_vocabulary()

    def check_at_least_one(self, *names: str) -> None:
        """ValueError for a field below 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def _check_vocabulary(self) -> None:
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

    def check_width(self) -> None:
        """ValueError unless the head is as wide as the target, whose last state it continues."""
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size is {self.hidden_size}; a {self.kind} head continues the target's "
                f"last state, so it must be {self.target_hidden_size}"
            )
        if self.aux_layers:
            raise ValueError(
                f"aux_layers is {self.aux_layers}; a {self.kind} head reads the last state only"
            )

    def check_layers(self) -> None:
        """ValueError unless aux_layers are rising ids of the target."""
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

    @property
    def max_drafts(self) -> int:
        """The most tokens it can draft in a row."""
        return sys.maxsize

    @property
    @abstractmethod
    def activation_width(self) -> int:
        """Numbers kept for the backward pass by one row of one draft step; a rough figure."""

    @classmethod
    @abstractmethod
    def from_target(
        cls,
        target: PreTrainedConfig | Mapping[str, Any],
        **settings: Any,  # noqa: ANN401 - checked by the constructor
    ) -> Self:
        """Geometry for a target given as its transformers config or the dictionary of one."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready copy; `from_dict` reads it back."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of to_dict; unknown or missing keys are refused by name."""
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown head settings {unknown}; known are {sorted(known)}")
        settings: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**settings)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(HeadConfig):
    """A head with a decoder layer like the target's own."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if 2 * len(rotary(self.rope, self.head_dim).inverse_R) > self.head_dim:
            raise ValueError(
                f"head_dim is {self.head_dim}; rotary positions turn pairs of channels, so give an "
                "even number"
            )

    def window(self, layer: int) -> int | None:  # noqa: ARG002 - heads with windows say of which
        """How many positions a row of this layer sees, itself included; None is all before it."""
        return None

    @property
    def activation_width(self) -> int:
        """Numbers kept for the backward pass by one row of one draft step; a rough figure."""
        width = 12 * self.hidden_size + 4 * self.intermediate_size
        return width + 4 * self.num_heads * self.head_dim


def shared_sizes(
    text: Mapping[str, Any],
    *,
    tokenizer_size: int | None = None,
    draft_vocab_size: int | None = None,
    hidden_size: int | None = None,
    max_position_embeddings: int | None = None,
) -> dict[str, Any]:
    """The fields of HeadConfig that follow from a target's text config; what is given wins."""
    vocab_size = int(text["vocab_size"])
    return {
        "hidden_size": hidden_size or int(text["hidden_size"]),
        "max_position_embeddings": max_position_embeddings or int(text["max_position_embeddings"]),
        "vocab_size": vocab_size,
        "tokenizer_size": tokenizer_size or vocab_size,
        "draft_vocab_size": draft_vocab_size or vocab_size,
        "target_hidden_size": int(text["hidden_size"]),
        "num_target_layers": int(text["num_hidden_layers"]),
    }


def decoder_sizes(text: Mapping[str, Any], intermediate_size: int | None = None) -> dict[str, Any]:
    """The fields that DecoderConfig adds, from a target's text config."""
    num_heads = int(text["num_attention_heads"])
    return {
        "intermediate_size": intermediate_size or _intermediate(text),
        "num_heads": num_heads,
        "num_kv_heads": int(text.get("num_key_value_heads") or num_heads),
        "head_dim": int(text.get("head_dim") or int(text["hidden_size"]) // num_heads),
        "rms_norm_eps": float(text.get("rms_norm_eps") or 1e-5),
        "rope": rope_settings(text),
    }


def text_config(target: PreTrainedConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a config, as a dictionary; nested ones are entered."""
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


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's layers: states entering decoder layers 2, n//2 and n-3."""
    layers = (2, num_layers // 2, num_layers - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise ValueError(
            f"num_hidden_layers is {num_layers}; the default feature layers {layers} are not three "
            "rising ids (that needs at least 7 layers); give aux_layers explicitly"
        )
    return layers


def _intermediate(text: Mapping[str, Any]) -> int:
    size = text.get("intermediate_size")
    if not isinstance(size, int):
        raise ValueError(
            f"the target's intermediate_size is {size!r}; give intermediate_size for the draft"
        )
    return size
