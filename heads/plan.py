"""Which rows an unrolled pass runs, what each step of them reads, and which pairs are in the loss.

Row t at step k (from 0) reads token t+k+1 and predicts token t+k+2; it is in the loss when that
token is supervised and lies in the document of t. The teacher of a predicted token m is the
target's state at m-1, one row for all steps that predict m.

Letters: B rows of the batch, T positions, M = B*T flat positions, N rows run, K steps,
P predicted (supervised) tokens.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from outrider.heads.attention import Block

BLOCK_ROWS = 256


@dataclass(frozen=True)
class RowPlan:
    """Index tensors of one batch; build it where the batch is made, on the CPU."""

    num_steps: int
    row_N: Tensor
    """Flat positions of the rows, rising."""
    next_M: Tensor
    """Flat position of the token after every position, held inside the document."""
    token_KN: Tensor
    """Flat position of each row's input token at each step, held inside the document."""
    inside_KN: Tensor
    """Whether that token really exists in the document."""
    document_M: Tensor
    """Document number of every position, different across batch rows; 0 is padding."""
    predicted_P: Tensor
    """Flat positions of the supervised tokens that some row can predict."""
    pair_PK: Tensor
    """Index into row_N of the row that predicts token P at step K (0 where there is none)."""
    valid_PK: Tensor
    """Whether there is such a row."""
    blocks: tuple[Block, ...]

    @classmethod
    def from_mask(cls, mask_BT: Tensor, document_BT: Tensor, num_steps: int) -> "RowPlan":
        """Rows that predict a supervised token at some step; nothing else is computed."""
        document_M, start_M, _ = _documents(document_BT)
        position_M = torch.arange(document_M.shape[0])
        root_MK = position_M[:, None] - 2 - torch.arange(num_steps)
        good = mask_BT.flatten().bool() & (document_M > 0) & (root_MK[:, 0] >= start_M)
        predicted_P = good.nonzero().flatten()
        root_PK = root_MK[predicted_P]
        valid_PK = root_PK >= start_M[predicted_P, None]
        row_N = root_PK[valid_PK].unique()
        pair_PK = torch.searchsorted(row_N, root_PK.clamp(min=0)).where(valid_PK, 0)
        plan = cls.from_rows(row_N, document_BT, num_steps)
        return replace(plan, predicted_P=predicted_P, pair_PK=pair_PK, valid_PK=valid_PK)

    @classmethod
    def from_rows(cls, row_N: Tensor, document_BT: Tensor, num_steps: int) -> "RowPlan":
        """Given rows (flat positions b*T + t, rising), all steps, no loss pairs."""
        if num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}; a draft has at least 1 step")
        document_M, start_M, end_M = _documents(document_BT)
        if bool((row_N[1:] <= row_N[:-1]).any()) or bool((document_M[row_N] == 0).any()):
            raise ValueError("rows must rise strictly and lie in documents (number above 0)")
        token_KN = row_N + 1 + torch.arange(num_steps)[:, None]
        last_N = end_M[row_N]
        empty = torch.zeros((0, num_steps), dtype=torch.int64)
        return cls(
            num_steps=num_steps,
            row_N=row_N,
            next_M=torch.minimum(torch.arange(document_M.shape[0]) + 1, end_M),
            token_KN=torch.minimum(token_KN, last_N),
            inside_KN=token_KN <= last_N,
            document_M=document_M,
            predicted_P=empty[:, 0],
            pair_PK=empty,
            valid_PK=empty.bool(),
            blocks=_blocks(row_N, start_M),
        )

    @cached_property
    def everywhere(self) -> tuple[Block, ...]:
        """Blocks of a pass over all positions as rows, which layers before the last one need.

        Padding comes as documents of its own, whose outputs no row sees.
        """
        document_M = self.document_M.cpu()
        first = torch.ones(document_M.shape[0], dtype=torch.bool)
        first[1:] = document_M[1:] != document_M[:-1]
        start_M = first.nonzero().flatten()[first.cumsum(0) - 1]
        return _on(self.document_M.device, _blocks(torch.arange(document_M.shape[0]), start_M))

    def to(self, device: torch.device | str) -> "RowPlan":
        """A copy on another device."""
        tensors = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors, blocks=_on(device, self.blocks))

    def by_document(self, value_P: Tensor) -> Tensor:
        """For every predicted token the sum of the values of all those in its document."""
        number_P = self.document_M[self.predicted_P]
        sums = value_P.new_zeros(int(self.document_M.max()) + 1).index_add(0, number_P, value_P)
        return sums[number_P]

    def pairs(self, hidden: list[Tensor]) -> Tensor:
        """Hidden states of the loss pairs [P, K, D]; rows without a pair are arbitrary."""
        return torch.stack(self.columns(hidden), dim=1)

    def columns(self, hidden: list[Tensor]) -> list[Tensor]:
        """The same step by step, K of [P, D], whose widths may differ."""
        return [x.index_select(0, self.pair_PK[:, k]) for k, x in enumerate(hidden)]


def _documents(document_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flat document numbers, and first and last flat position of the document of each position."""
    width = document_BT.shape[1]
    flat = document_BT.flatten()
    position_M = torch.arange(flat.shape[0])
    first = torch.ones(flat.shape[0], dtype=torch.bool)
    first[1:] = (flat[1:] != flat[:-1]) | (position_M[1:] % width == 0)
    number_M = first.cumsum(0)
    starts = first.nonzero().flatten()
    ends = torch.cat([starts[1:], position_M.new_tensor([flat.shape[0]])]) - 1
    return number_M * (flat > 0), starts[number_M - 1], ends[number_M - 1]


def _on(device: torch.device | str, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    return tuple(block._replace(hidden=block.hidden.to(device)) for block in blocks)


def _blocks(row_N: Tensor, start_M: Tensor) -> tuple[Block, ...]:
    """Rows of one document at a time, at most BLOCK_ROWS of them."""
    start_N = start_M[row_N]
    _, counts = torch.unique_consecutive(start_N, return_counts=True)
    blocks: list[Block] = []
    begin = 0
    for count in counts.tolist():
        for first in range(begin, begin + count, BLOCK_ROWS):
            last = min(first + BLOCK_ROWS, begin + count)
            low, high = int(row_N[first]), int(row_N[last - 1])
            hidden = torch.arange(low + 1, high + 1)[None] > row_N[first:last, None]
            blocks.append(Block(first, last, int(start_N[first]), high + 1, hidden))
        begin += count
    return tuple(blocks)
