"""Packed batches as a pure function of (seed, epoch, index): which rows, which order, which rank.

Letters: B packed rows, T positions of a pack, F captured layers times hidden size, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.data.laws import TopLaw
from outrider.data.packing import shuffled_packs


class StoredRow(NamedTuple):
    """A row and the target's states on it."""

    ids_T: Tensor
    mask_T: Tensor
    aux_TF: Tensor
    last_TH: Tensor
    law: TopLaw | None = None
    """The target's laws by position, where they are stored; else they follow from the last state.
    """


class Features(Protocol):
    """Rows with their features, from the disk or from the target itself."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        ...

    @property
    def row_ids(self) -> list[str]:
        """Name of each row."""
        ...

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def rows(self, indices: Sequence[int]) -> list[StoredRow]:
        """The named rows, in that order."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Packed rows; documents are numbered from 1 in each pack, padding is document 0."""

    ids_BT: Tensor
    mask_BT: Tensor
    """True where the token is supervised (the label, not the position that predicts it)."""
    document_BT: Tensor
    position_BT: Tensor
    """Restarts at 0 in every document."""
    aux_BTF: Tensor
    """F is 0 where no layers were captured."""
    last_BTH: Tensor
    """H is 0 where the last state was not stored."""
    row_ids: list[list[str]]
    """Names of the documents of each pack, in order."""
    law: TopLaw | None = None
    """The target's laws [B, T, ...], where they are stored."""

    def to(self, device: str | torch.device) -> "Batch":
        """The same batch with its tensors on `device`."""
        names = ("ids_BT", "mask_BT", "document_BT", "position_BT", "aux_BTF", "last_BTH")
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        law = self.law and self.law.map(lambda tensor: tensor.to(device, non_blocking=True))
        return replace(self, **moved, law=law)

    @property
    def kept_BT(self) -> Tensor:  # noqa: N802 - a dimension suffix
        """Where a token has states: a packed store keeps none that no loss reads, and gives zeros.

        True nowhere when states have no width.
        """
        has_states_BT = self.aux_BTF.any(-1) | self.last_BTH.any(-1)
        return (self.document_BT > 0) & has_states_BT

    @property
    def num_tokens(self) -> int:
        """Real tokens: padding is not counted."""
        return int((self.document_BT > 0).sum())


class Batches:
    """Rows packed once per seed; each epoch shuffles the packs anew.

    The packs of global batch `index` are dealt to the ranks in turn, so the union over ranks does
    not depend on how many there are. The last batch of an epoch may be smaller.
    """

    def __init__(self, source: Features, *, size: int, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; a batch needs at least 1 pack")
        if len(source) == 0:
            raise ValueError("the source has no rows; nothing to train on")
        self.source = source
        self.size = size
        self.batch_size = batch_size
        self.seed = seed
        self.packs = shuffled_packs(source.lengths, size, seed)

    def epoch_length(self) -> int:
        """Global batches in an epoch."""
        return -(-len(self.packs) // self.batch_size)

    def fill(self) -> float:
        """Share of positions that hold a token."""
        return sum(self.source.lengths) / (len(self.packs) * self.size)

    def batch(self, epoch: int, index: int, rank: int = 0, world: int = 1) -> Batch:
        """This rank's part of global batch `index`; every rank's part has the same shape."""
        if not 0 <= index < self.epoch_length():
            raise ValueError(
                f"index is {index}; an epoch has batches 0 to {self.epoch_length() - 1}"
            )
        if not 0 <= rank < world:
            raise ValueError(f"rank is {rank} of world {world}; ranks count from 0")
        order = _generator(self.seed, 1 + epoch).permutation(len(self.packs))
        chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
        mine = [self.packs[pack] for pack in chosen[rank::world]]
        return self._collate(mine, num_packs=-(-len(chosen) // world))

    def _collate(self, packs: list[list[int]], *, num_packs: int) -> Batch:
        """Lay rows end to end; packs that are missing are all padding."""
        loaded = [self.source.rows(rows) for rows in packs]
        example = loaded[0][0] if loaded else self.source.rows([0])[0]
        shape = (num_packs, self.size)
        ids_BT = torch.zeros(shape, dtype=torch.int64)
        mask_BT = torch.zeros(shape, dtype=torch.bool)
        document_BT = torch.zeros(shape, dtype=torch.int64)
        position_BT = torch.zeros(shape, dtype=torch.int64)
        aux_BTF = example.aux_TF.new_zeros(*shape, example.aux_TF.shape[-1])
        last_BTH = example.last_TH.new_zeros(*shape, example.last_TH.shape[-1])
        law = example.law and example.law.map(lambda x: x.new_zeros(*shape, *x.shape[1:]))
        for row, documents in enumerate(loaded):
            start = 0
            for number, document in enumerate(documents, start=1):
                span = (row, slice(start, start + len(document.ids_T)))
                ids_BT[span] = document.ids_T
                mask_BT[span] = document.mask_T
                document_BT[span] = number
                position_BT[span] = torch.arange(len(document.ids_T))
                aux_BTF[span] = document.aux_TF
                last_BTH[span] = document.last_TH
                if law is not None and document.law is not None:
                    for whole, part in zip(law.tensors, document.law.tensors, strict=True):
                        whole[span] = part
                start += len(document.ids_T)
        return Batch(
            ids_BT=ids_BT,
            mask_BT=mask_BT,
            document_BT=document_BT,
            position_BT=position_BT,
            aux_BTF=aux_BTF,
            last_BTH=last_BTH,
            row_ids=[[self.source.row_ids[row] for row in rows] for rows in packs]
            + [[] for _ in range(num_packs - len(packs))],
            law=law,
        )


def _generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.default_rng([seed, stream])
