"""The unrolled (training-time-test) pass: every row drafts num_steps tokens, teacher-forced.

Only rows that a loss or a measurement needs get queries, MLP and output; every position gives the
step-0 keys and values, and later steps' keys are seen by their own row alone. The result equals
step-by-step drafting with caches, which the tests prove in float64.

Letters: B rows of the batch, T positions, M = B*T, N rows of the plan, D draft hidden size.
"""

from typing import Protocol

import torch
from torch import Tensor

from outrider.heads.attention import chain_attention
from outrider.heads.flex import flex_chain_attention
from outrider.heads.layers import Weights
from outrider.heads.plan import RowPlan


class Recurrent(Protocol):
    """A head with one decoder layer whose output it takes back in: heads/decoder.py."""

    def weights(self, dtype: torch.dtype | None = None) -> Weights: ...

    def enter(self, feature: Tensor, ids: Tensor, weights: Weights) -> tuple[Tensor, Tensor]: ...

    def queries(self, x: Tensor, position: Tensor, weights: Weights) -> Tensor: ...

    def keys_values(
        self, x: Tensor, position: Tensor, weights: Weights
    ) -> tuple[Tensor, Tensor]: ...

    def leave(self, residual: Tensor, attended: Tensor, weights: Weights) -> Tensor: ...


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
    feature_MD, ids_M = feature_BTD.flatten(0, 1), ids_BT.flatten()
    x, residual = head.enter(feature_MD, ids_M[plan.next_M], weights)
    key_MKE, value_MKE = head.keys_values(x, position_BT.flatten(), weights)
    x, residual = x.index_select(0, plan.row_N), residual.index_select(0, plan.row_N)
    position_N = position_BT.flatten()[plan.row_N]
    outputs: list[Tensor] = []
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for step in range(plan.num_steps):
        if step:
            x, residual = head.enter(outputs[-1], ids_M[plan.token_KN[step]], weights)
            key, value = head.keys_values(x, position_N + step, weights)
            own_keys.append(key)
            own_values.append(value)
        q_NAE = head.queries(x, position_N + step, weights)
        inputs = (q_NAE, key_MKE, value_MKE, own_keys, own_values)
        if attention == "flex" and plan.row_N.shape[0]:
            attended = flex_chain_attention(*inputs, plan)
        else:
            attended = chain_attention(*inputs, plan.blocks)
        outputs.append(head.leave(residual, attended, weights))
    return outputs
