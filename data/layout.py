"""What the store keeps of a row, and how: all states as they are, or packed states and laws.

Letters: T positions of a row, N positions kept, S supervised positions, F captured layers times H,
H hidden size, M ids kept of a law.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.data.batches import StoredRow
from outrider.data.capture import check_layers
from outrider.data.choices import TOP_K
from outrider.data.laws import TopLaw, Vocabulary
from outrider.data.quantise import CODECS, Codec, Field
from outrider.data.rows import FIRST_LABEL, Row
from outrider.data.target import Target

RAW = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMS = (*RAW, *CODECS)
PACK_VERSION = 1  # raise when the same packed bytes would mean other numbers

Per = Literal["position", "law"]


class Part(NamedTuple):
    """One tensor of a shard: what it has a row for, and the shape and dtype of that row."""

    per: Per
    field: Field


class Layout(Protocol):
    """Which tensors a shard holds."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Captured layers beside the last state."""
        ...

    @property
    def width(self) -> int:
        """Hidden size of the target."""
        ...

    @property
    def parts(self) -> Mapping[str, Part]:
        """The tensors of a shard by name."""
        ...

    def count(self, row: Row, per: Per) -> int:
        """Rows that a document takes in the tensors of a kind."""
        ...

    def key(self, rows: Sequence[Row]) -> dict[str, object]:
        """What else the stored numbers depend on than target, layers and data."""
        ...

    def encode(self, row: Row, aux_TF: Tensor, last_TH: Tensor) -> dict[str, Tensor]:
        """A document's share of every tensor."""
        ...

    def decode(self, rows: Sequence[Row], found: Sequence[Mapping[str, Tensor]]) -> list[StoredRow]:
        """Documents back from their shares; several at once cost less than one by one."""
        ...


def layout_of(
    target: Target,
    layers: Sequence[int],
    form: str,
    *,
    top_k: int = TOP_K,
    draft_ids_W: Tensor | None = None,
) -> Layout:
    """The layout called `form`: bfloat16, float16 or float32 states, or packed int8, fp8 or int4.

    A packed one keeps laws of `top_k` ids over `draft_ids_W`, or over all of the target's ids.
    Raises ValueError for another form, layers out of range, or a top_k below 1.
    """
    if form not in FORMS:
        raise ValueError(f"feature_dtype is {form!r}; choose one of {', '.join(FORMS)}")
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; a law needs at least 1 id")
    layers = check_layers(layers, target.num_layers)
    if form in RAW:
        return Raw(layers=layers, width=target.hidden_size, dtype=RAW[form])
    vocabulary = Vocabulary.of(target, draft_ids_W)
    return Packed(
        layers=layers,
        width=target.hidden_size,
        form=form,
        vocabulary=vocabulary,
        top_k=min(top_k, len(vocabulary)),
    )


@dataclass(frozen=True, kw_only=True)
class Raw:
    """All captured layers and the last state of every position; the law follows from the latter."""

    layers: tuple[int, ...]
    width: int
    dtype: torch.dtype

    @property
    def parts(self) -> Mapping[str, Part]:
        aux = Field((len(self.layers) * self.width,), self.dtype)
        return {
            "aux": Part("position", aux),
            "last": Part("position", Field((self.width,), self.dtype)),
        }

    def count(self, row: Row, per: Per) -> int:  # noqa: ARG002 - of the protocol
        return len(row)

    def key(self, rows: Sequence[Row]) -> dict[str, object]:  # noqa: ARG002 - of the protocol
        return {"dtype": str(self.dtype)}

    def encode(
        self,
        row: Row,  # noqa: ARG002 - of the protocol
        aux_TF: Tensor,
        last_TH: Tensor,
    ) -> dict[str, Tensor]:
        return {"aux": aux_TF.to("cpu", self.dtype), "last": last_TH.to("cpu", self.dtype)}

    def decode(self, rows: Sequence[Row], found: Sequence[Mapping[str, Tensor]]) -> list[StoredRow]:
        return [
            StoredRow(row.ids, row.mask, share["aux"], share["last"])
            for row, share in zip(rows, found, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Rounded states of the positions that matter, and the law before every supervised token.

    The captured layers are kept, or the last state where there are none: a head reads one or the
    other. Nothing is kept from a row's last supervised token on: no loss looks that far. There
    states are zeros, and the last state is zeros (or has no width) everywhere it is not kept.
    """

    layers: tuple[int, ...]
    width: int
    form: str
    vocabulary: Vocabulary
    top_k: int

    @property
    def codec(self) -> Codec:
        """How states are rounded."""
        return CODECS[self.form]

    @property
    def id_dtype(self) -> torch.dtype:
        """uint16 for the ids of a law where they fit."""
        return torch.uint16 if len(self.vocabulary) <= 1 << 16 else torch.int32

    @property
    def parts(self) -> Mapping[str, Part]:
        fields = self.codec.fields(len(self.layers) or 1, self.width)
        law = {
            "law_ids": Field((self.top_k,), self.id_dtype),
            "law_log_probs": Field((self.top_k,), torch.float16),
            "law_sums": Field((2,), torch.float32),
        }
        return {
            **{name: Part("position", field) for name, field in fields.items()},
            **{name: Part("law", field) for name, field in law.items()},
        }

    def count(self, row: Row, per: Per) -> int:
        places_S = law_places(row)
        if per == "law":
            return len(places_S)
        return int(places_S[-1]) + 1 if len(places_S) else 0

    def key(self, rows: Sequence[Row]) -> dict[str, object]:
        ids = self.vocabulary.ids_W.to("cpu", torch.int64).numpy().tobytes()
        names = "\n".join(row.row_id for row in rows).encode()
        return {
            "dtype": self.form,
            "pack_version": PACK_VERSION,
            "top_k": self.top_k,
            "vocabulary": hashlib.sha256(ids).hexdigest(),
            "row_ids": hashlib.sha256(names).hexdigest(),
        }

    def encode(self, row: Row, aux_TF: Tensor, last_TH: Tensor) -> dict[str, Tensor]:
        kept = self.count(row, "position")
        states = aux_TF if self.layers else last_TH
        found = self.codec.encode(states[:kept].float().unflatten(-1, (-1, self.width)))
        law = self.vocabulary.top(last_TH[law_places(row).to(last_TH.device)], self.top_k)
        found |= {
            "law_ids": law.ids.to(self.id_dtype),
            "law_log_probs": law.log_probs.clamp(min=-6e4).half(),
            "law_sums": torch.stack([law.log_normaliser, law.tail], dim=-1),
        }
        return {name: tensor.cpu() for name, tensor in found.items()}

    def decode(self, rows: Sequence[Row], found: Sequence[Mapping[str, Tensor]]) -> list[StoredRow]:
        whole = {name: torch.cat([share[name] for share in found]) for name in self.parts}
        state_NX = self.codec.decode(whole).flatten(1)
        states = state_NX.split([len(one["scale"]) for one in found])
        lengths = [len(row) for row in rows]
        room = state_NX.new_empty(sum(lengths), state_NX.shape[1], dtype=torch.bfloat16)
        sums_S2 = whole["law_sums"]
        law = (
            self.vocabulary.ids_W[whole["law_ids"].long()].int(),
            whole["law_log_probs"].float(),
            sums_S2[:, 0],
            sums_S2[:, 1],
        )
        counts = [len(share["law_sums"]) for share in found]
        laws = zip(*(tensor.split(counts) for tensor in law), strict=True)
        places = room.split(lengths)
        return [self._row(*one) for one in zip(rows, places, states, laws, strict=True)]

    def _row(
        self, row: Row, state_TX: Tensor, state_NX: Tensor, law: tuple[Tensor, ...]
    ) -> StoredRow:
        """States, written into `state_TX`, and laws at their places; zeros elsewhere."""
        kept = len(state_NX)
        state_TX[:kept] = state_NX
        state_TX[kept:] = 0
        nothing = state_TX[:, :0]
        aux_TF, last_TH = (state_TX, nothing) if self.layers else (nothing, state_TX)
        places_S = law_places(row)
        whole = (x.new_zeros(len(row), *x.shape[1:]).index_copy_(0, places_S, x) for x in law)
        ids, log_probs, log_normaliser, tail = whole
        at = TopLaw(ids, log_probs, log_normaliser, tail, len(self.vocabulary) - self.top_k)
        return StoredRow(row.ids, row.mask, aux_TF, last_TH, at)


def law_places(row: Row) -> Tensor:
    """Positions [S] whose next token is supervised and has a row that can predict it."""
    return row.mask[FIRST_LABEL:].nonzero().flatten() + FIRST_LABEL - 1


def needed(layout: Layout, rows: Sequence[Row]) -> dict[str, list[int]]:
    """Shapes of all tensors for these rows end to end."""
    counts: dict[Per, int] = {
        "position": sum(layout.count(row, "position") for row in rows),
        "law": sum(layout.count(row, "law") for row in rows),
    }
    return {name: [counts[part.per], *part.field.shape] for name, part in layout.parts.items()}


def num_bytes(layout: Layout, rows: Sequence[Row]) -> int:
    """Bytes of all tensors for these rows, file headers left out."""
    shapes: dict[str, Any] = needed(layout, rows)
    return sum(shapes[name][0] * part.field.num_bytes for name, part in layout.parts.items())
