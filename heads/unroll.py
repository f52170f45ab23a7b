"""The unrolled (training-time-test) pass: every row drafts num_steps tokens, teacher-forced.

Only rows that a loss or a measurement needs get queries, MLP and output; every position gives the
step-0 keys and values, and later steps' keys are seen by their own row alone. With several layers,
step 0 runs all but the last at every position, since the next one's keys come of what they put
out. The result equals step-by-step drafting with caches, which the tests prove in float64.

Letters: B rows of the batch, T positions, M = B*T, N rows of the plan, D draft hidden size.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.heads.attention import Block, chain_attention, narrow, own_in_window
from outrider.heads.config import DecoderConfig
from outrider.heads.flex import Reach, flex_chain_attention
from outrider.heads.layers import Weights
from outrider.heads.plan import RowPlan


class Recurrent(Protocol):
    """A head with decoder layers whose output it takes back in: heads/decoder.py."""

    config: DecoderConfig

    def weights(self, dtype: torch.dtype | None = None) -> Weights: ...

    def enter(self, feature: Tensor, ids: Tensor, weights: Weights) -> tuple[Tensor, Tensor]: ...

    def queries(self, x: Tensor, position: Tensor, weights: Weights) -> Tensor: ...

    def keys_values(
        self, x: Tensor, position: Tensor, weights: Weights
    ) -> tuple[Tensor, Tensor]: ...

    def leave(self, residual: Tensor, attended: Tensor, weights: Weights) -> Tensor: ...

    def go_on(self, hidden: Tensor, weights: Weights) -> Tensor: ...

    def finish(self, hidden: Tensor, weights: Weights) -> Tensor: ...


def unroll(
    head: Recurrent,
    feature_BTD: Tensor,
    ids_BT: Tensor,
    position_BT: Tensor,
    plan: RowPlan,
    weights: Weights | None = None,
    attention: str = "blocks",
) -> list[Tensor]:
    """Outputs [N, D] of every step, for the rows of the plan.

    feature is what head.project returned for the same weights; position restarts per document.
    Pass weights=head.weights(torch.bfloat16) to compute in bf16 over fp32 parameters. attention is
    "blocks" (anywhere) or "flex" (a fused kernel, for GPUs); both give the same numbers.
    """
    if attention not in ("blocks", "flex"):
        raise ValueError(f"attention is {attention!r}; choose blocks or flex")
    weights = weights or head.weights()
    layers = [
        _Layer(head, own, head.config.window(layer), plan, is_flex=attention == "flex")
        for layer, own in enumerate((weights, *weights.rest))
    ]
    feature_MD, ids_M, position_M = (
        feature_BTD.flatten(0, 1),
        ids_BT.flatten(),
        position_BT.flatten(),
    )
    x, residual = head.enter(feature_MD, ids_M[plan.next_M], weights)
    for layer, later in itertools.pairwise(layers):
        layer.set_context(x, position_M)
        residual = layer.everywhere(x, residual, position_M)
        x = head.go_on(residual, later.weights)
    layers[-1].set_context(x, position_M)
    x, residual = x.index_select(0, plan.row_N), residual.index_select(0, plan.row_N)
    position_N = position_M[plan.row_N]
    outputs = [head.finish(layers[-1].rows(x, residual, position_N, 0), weights)]
    for step in range(1, plan.num_steps):
        x, residual = head.enter(outputs[-1], ids_M[plan.token_KN[step]], weights)
        for index, layer in enumerate(layers):
            if index:
                x = head.go_on(residual, layer.weights)
            residual = layer.rows(x, residual, position_N, step)
        outputs.append(head.finish(residual, weights))
    return outputs


class _Layer:
    """A layer's keys and values: step-0 ones of every position, later ones of the plan's rows."""

    def __init__(
        self, head: Recurrent, weights: Weights, window: int | None, plan: RowPlan, *, is_flex: bool
    ) -> None:
        self.weights = weights
        self._head, self._window, self._plan, self._is_flex = head, window, plan, is_flex
        self._own_keys: list[Tensor] = []
        self._own_values: list[Tensor] = []

    def set_context(self, x: Tensor, position_M: Tensor) -> None:
        """Keys and values of step 0 from the attention input at every position."""
        self._key_MKE, self._value_MKE = self._head.keys_values(x, position_M, self.weights)

    def everywhere(self, x: Tensor, residual: Tensor, position_M: Tensor) -> Tensor:
        """What it puts out at step 0 at every position, [M, D]."""
        row_M = torch.arange(x.shape[0], device=x.device)
        q_MAE = self._head.queries(x, position_M, self.weights)
        attended = self._attend(q_MAE, row_M, self._plan.everywhere, 0)
        return self._head.leave(residual, attended, self.weights)

    def rows(self, x: Tensor, residual: Tensor, position_N: Tensor, step: int) -> Tensor:
        """What it puts out at a step for the rows of the plan, [N, D]."""
        position_N = position_N + step
        if step:
            key, value = self._head.keys_values(x, position_N, self.weights)
            self._own_keys.append(key)
            self._own_values.append(value)
        q_NAE = self._head.queries(x, position_N, self.weights)
        attended = self._attend(q_NAE, self._plan.row_N, self._plan.blocks, step)
        return self._head.leave(residual, attended, self.weights)

    def _attend(self, q: Tensor, row: Tensor, blocks: Sequence[Block], step: int) -> Tensor:
        window = self._window
        own_keys = own_in_window(self._own_keys, window, step)
        own_values = own_in_window(self._own_values, window, step)
        inputs = (q, self._key_MKE, self._value_MKE, own_keys, own_values)
        if self._is_flex and row.shape[0]:
            return flex_chain_attention(*inputs, Reach.of(row, self._plan.document_M, window, step))
        return chain_attention(*inputs, narrow(blocks, row, window, step))
