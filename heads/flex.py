"""Attention of unrolled draft steps as one FlexAttention call, for GPUs.

Keys are the step-0 keys of all positions followed by the own keys of later steps; the mask is
causal inside a document, and a window of it, on the first part and diagonal on the others. It
computes what heads/attention.py computes, which the tests check.

Letters: M positions, N rows, A query heads, K key-value heads, E head size, S all keys.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class Reach(NamedTuple):
    """Which step-0 keys rows see: those of their document from `first` up to their own position."""

    row_N: Tensor
    """Flat positions of the rows."""
    first_N: Tensor
    """Flat position of the first key in each row's window; earlier documents need no care."""
    document_M: Tensor

    @classmethod
    def of(cls, row_N: Tensor, document_M: Tensor, window: int | None, step: int) -> Self:
        """At a step of rows that see `window` positions; all of them for None."""
        first_N = row_N * 0 if window is None else row_N + (step - window + 1)
        return cls(row_N, first_N, document_M)


def flex_chain_attention(
    q_NAE: Tensor,
    key_MKE: Tensor,
    value_MKE: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    reach: Reach,
) -> Tensor:
    """Attention output [N, A * E]; see heads/attention.py for the arguments."""
    keys_SKE = torch.cat([key_MKE, *own_keys])
    values_SKE = torch.cat([value_MKE, *own_values])
    attend, build = _functions(q_NAE.device.type)
    mask = build(
        _visible(reach),
        None,
        None,
        q_NAE.shape[0],
        keys_SKE.shape[0],
        device=q_NAE.device.type,
    )
    out = attend(
        q_NAE.transpose(0, 1)[None],
        keys_SKE.transpose(0, 1)[None],
        values_SKE.transpose(0, 1)[None],
        block_mask=mask,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).flatten(1)


def _visible(reach: Reach) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask: which keys a row sees."""
    row_N, first_N, document_M = reach
    num_positions, num_rows = document_M.shape[0], row_N.shape[0]

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = row_N[query]
        place = key.clamp(max=num_positions - 1)
        context = (place <= row) & (place >= first_N[query])
        context = context & (document_M[place] == document_M[row])
        own = (key - num_positions) % num_rows == query
        return torch.where(key < num_positions, context, own)

    return visible


@functools.cache
def _functions(device: str) -> tuple[Callable[..., Tensor], Callable[..., object]]:
    """Compiled on accelerators, where the fused kernel is the point; eager on the CPU."""
    if device == "cpu":
        return flex_attention, create_block_mask
    compiled = torch.compile(flex_attention, dynamic=True)
    return compiled, torch.compile(create_block_mask, dynamic=True)
