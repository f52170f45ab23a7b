"""Attention of unrolled draft steps as one FlexAttention call, for GPUs.

Keys are the step-0 keys of all positions followed by the own keys of each later step; the mask is
causal inside a document on the first part and diagonal on the others. It computes what
heads/attention.py computes, which the tests check.

Letters: M positions, N rows, A query heads, K key-value heads, E head size, S all keys.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from outrider.heads.plan import RowPlan


def flex_chain_attention(
    q_NAE: Tensor,
    key_MKE: Tensor,
    value_MKE: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    plan: RowPlan,
) -> Tensor:
    """Attention output [N, A * E]; see heads/attention.py for the arguments."""
    keys_SKE = torch.cat([key_MKE, *own_keys])
    values_SKE = torch.cat([value_MKE, *own_values])
    attend, build = _functions(q_NAE.device.type)
    mask = build(
        _visible(plan),
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


def _visible(plan: RowPlan) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask: which keys a row sees."""
    document_M, row_N = plan.document_M, plan.row_N
    num_positions, num_rows = document_M.shape[0], row_N.shape[0]

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = row_N[query]
        place = key.clamp(max=num_positions - 1)
        context = (place <= row) & (document_M[place] == document_M[row])
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
