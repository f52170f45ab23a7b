"""Attention of unrolled draft steps: one causal block shared by all steps, and own keys after it.

Row t at step k sees the step-0 keys of its document up to t, and its own keys of steps 1..k. With a
window of w it sees, as in drafting, the last w positions up to its own, t + k: the step-0 keys
after t + k - w and the own keys of the steps after k - w (`narrow` and `own_in_window`). The
causal part runs block by block over (rows, keys) of one document, and the backward pass computes
the probabilities again, so memory grows with the length and not with its square.

Letters: M positions, N rows, K key-value heads, G query heads per key-value head, E head size,
S keys of a block, J own keys (steps after the first), X rows times G of a block.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """Rows [row_start, row_stop) see keys [key_start, key_stop); `hidden` masks the last ones."""

    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    hidden: Tensor
    """Bool [rows, last keys]: True where the key comes after the row."""
    early: Tensor | None = None
    """Bool [rows, first keys]: True where the key is before the row's window."""


def narrow(blocks: Sequence[Block], row_N: Tensor, window: int | None, step: int) -> list[Block]:
    """The blocks at a step of rows that see `window` positions; all of them for None."""
    if window is None:
        return list(blocks)
    return [_narrow(block, row_N, step - window) for block in blocks]


def _narrow(block: Block, row_N: Tensor, last: int) -> Block:
    """Row t sees no key up to t + last."""
    tail = block.hidden.shape[1]
    low, high = block.key_stop - 1 - tail, block.key_stop - 1  # first and last row's own position
    start = min(max(block.key_start, low + last + 1), block.key_stop)
    num_early = min(high + last, high) + 1 - start
    early = None
    if num_early > 0:
        key = torch.arange(start, start + num_early, device=row_N.device)
        early = key[None] <= row_N[block.row_start : block.row_stop, None] + last
    hidden = block.hidden[:, max(0, tail - (block.key_stop - start)) :]
    return block._replace(key_start=start, hidden=hidden, early=early)


def own_in_window(own: Sequence[Tensor], window: int | None, step: int) -> Sequence[Tensor]:
    """Of the own keys or values of steps 1 .. `step`, those in the window."""
    return own if window is None else own[max(0, step - window) :]


def chain_attention(
    q_NAE: Tensor,
    key_MKE: Tensor,
    value_MKE: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    blocks: Sequence[Block],
) -> Tensor:
    """Attention output [N, A * E]; own_keys and own_values hold one [N, K, E] per later step."""
    num_kv, size = key_MKE.shape[1:]
    q_NKGE = (q_NAE * size**-0.5).unflatten(1, (num_kv, -1))
    own = (*own_keys, *own_values)
    out_NKGE = _ChainAttention.apply(blocks, q_NKGE, key_MKE, value_MKE, *own)
    return out_NKGE.flatten(1)


def _part(x_NKGE: Tensor, block: Block) -> Tensor:
    """Rows of a block as [K, X, E]."""
    return x_NKGE[block.row_start : block.row_stop].transpose(0, 1).flatten(1, 2)


def _keys(x_MKE: Tensor, block: Block) -> Tensor:
    return x_MKE[block.key_start : block.key_stop].transpose(0, 1)


def _own_scores(q_NKGE: Tensor, own: Sequence[Tensor]) -> Tensor:
    """[N, K, G, J]: every row against its own later keys or values."""
    return torch.stack([(q_NKGE * x[:, :, None]).sum(-1) for x in own], dim=-1)


def _probs(q_KXE: Tensor, keys_KSE: Tensor, own_NKGJ: Tensor | None, block: Block) -> Tensor:
    """Probabilities [K, X, S + J], fp32 or better."""
    scores = q_KXE @ keys_KSE.transpose(1, 2)
    wide = scores.unflatten(1, (block.row_stop - block.row_start, -1))
    if tail := block.hidden.shape[1]:
        wide[..., -tail:].masked_fill_(block.hidden[None, :, None], float("-inf"))
    if block.early is not None:
        first = block.early.shape[1]
        wide[..., :first].masked_fill_(block.early[None, :, None], float("-inf"))
    if own_NKGJ is not None:
        scores = torch.cat([scores, _part(own_NKGJ, block)], dim=-1)
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(*args: Any, **_: Any) -> Tensor:  # noqa: ANN401 - as chain_attention passes them
        ctx, blocks, q_NKGE, key_MKE, value_MKE, *own = args
        ctx.blocks = blocks
        ctx.save_for_backward(q_NKGE, key_MKE, value_MKE, *own)
        half = len(own) // 2
        scores_NKGJ = _own_scores(q_NKGE, own[:half]) if half else None
        out_NKGE = torch.empty_like(q_NKGE)
        for block in blocks:
            keys, values = _keys(key_MKE, block), _keys(value_MKE, block)
            probs = _probs(_part(q_NKGE, block), keys, scores_NKGJ, block).to(q_NKGE.dtype)
            size = keys.shape[1]
            out = (probs[..., :size] @ values).unflatten(1, (-1, q_NKGE.shape[2]))
            for index, value in enumerate(own[half:]):
                weight = probs[..., size + index].unflatten(1, (-1, q_NKGE.shape[2]))
                mine = value[block.row_start : block.row_stop].transpose(0, 1)
                out.addcmul_(weight[..., None], mine[:, :, None])
            out_NKGE[block.row_start : block.row_stop] = out.transpose(0, 1)
        return out_NKGE

    @staticmethod
    def backward(ctx: Any, *grads_out: Any) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (grad_NKGE,) = grads_out
        q_NKGE, key_MKE, value_MKE, *own = ctx.saved_tensors
        half = len(own) // 2
        group = q_NKGE.shape[2]
        scores_NKGJ = _own_scores(q_NKGE, own[:half]) if half else None
        slopes_NKGJ = _own_scores(grad_NKGE, own[half:]) if half else None
        grad_q, grad_key = torch.empty_like(q_NKGE), torch.zeros_like(key_MKE)
        grad_value = torch.zeros_like(value_MKE)
        probs_NKGJ = torch.empty_like(scores_NKGJ) if scores_NKGJ is not None else None
        steps_NKGJ = torch.empty_like(probs_NKGJ) if probs_NKGJ is not None else None
        for block in ctx.blocks:
            rows = slice(block.row_start, block.row_stop)
            keys, values = _keys(key_MKE, block), _keys(value_MKE, block)
            q, grad = _part(q_NKGE, block), _part(grad_NKGE, block)
            probs = _probs(q, keys, scores_NKGJ, block)
            slope = grad @ values.transpose(1, 2)
            if slopes_NKGJ is not None:
                slope = torch.cat([slope, _part(slopes_NKGJ, block)], dim=-1)
            step = _softmax_slope(slope, probs).to(q.dtype)
            probs = probs.to(q.dtype)
            size = keys.shape[1]
            _keys(grad_key, block).add_(step[..., :size].transpose(1, 2) @ q)
            _keys(grad_value, block).add_(probs[..., :size].transpose(1, 2) @ grad)
            grad_q[rows] = (step[..., :size] @ keys).unflatten(1, (-1, group)).transpose(0, 1)
            if probs_NKGJ is not None and steps_NKGJ is not None:
                probs_NKGJ[rows] = probs[..., size:].unflatten(1, (-1, group)).transpose(0, 1)
                steps_NKGJ[rows] = step[..., size:].unflatten(1, (-1, group)).transpose(0, 1)
        grads: list[Tensor] = []
        if probs_NKGJ is not None and steps_NKGJ is not None:
            for index, key in enumerate(own[:half]):
                grad_q.addcmul_(steps_NKGJ[..., index, None], key[:, :, None])
            grads = [(steps_NKGJ[..., j, None] * q_NKGE).sum(2) for j in range(half)]
            grads += [(probs_NKGJ[..., j, None] * grad_NKGE).sum(2) for j in range(half)]
        return None, grad_q, grad_key, grad_value, *grads


def _softmax_slope(slope: Tensor, probs: Tensor) -> Tensor:
    """Gradient of the scores from that of the probabilities."""
    return torch.ops.aten._softmax_backward_data(slope.to(probs.dtype), probs, -1, probs.dtype)
