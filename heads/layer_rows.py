"""What the first layer of a head puts together for each supervised token, step by step.

Letters: N rows, F fused feature inputs, H target hidden size, D draft hidden size, X attention
width, P predicted tokens, B packs, T positions.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from outrider.heads.base import States
from outrider.heads.decoder import RecurrentHead
from outrider.heads.eagle import EagleHead
from outrider.heads.layers import Weights
from outrider.heads.plan import RowPlan
from outrider.heads.unroll import unroll


class Pack(NamedTuple):
    """Packed text with the target's states, and what a loss would supervise."""

    states: States
    mask_BT: Tensor
    document_BT: Tensor


Packs = Callable[[], Iterable[Pack]]
"""The same packs at every call."""


class Rows(NamedTuple):
    """Inputs and output of the layer for the supervised tokens of a step."""

    fused_NF: Tensor
    ids_N: Tensor
    next_N: Tensor
    position_N: Tensor
    residual_ND: Tensor
    attended_NX: Tensor
    out_ND: Tensor
    last_NH: Tensor
    """The state that the output stands in for."""


def layer_rows(head: EagleHead, packs: Packs, num_steps: int) -> Iterator[tuple[int, Rows]]:
    """Rows of each pack and step that predict a supervised token, teacher-forced.

    Rows at the first position of a text, whose states are unlike all others, are left out.
    """
    for states, mask_BT, document_BT in packs():
        plan = RowPlan.from_mask(mask_BT.cpu(), document_BT.cpu(), num_steps).to(head.device)
        if not len(plan.predicted_P):
            continue
        watched = _Watched(head)
        feature_BTD = head.project(states.aux_BTF, None)
        outputs = unroll(
            cast(RecurrentHead, watched), feature_BTD, states.ids_BT, states.position_BT, plan
        )
        fused_MF = head.fused(states.aux_BTF, torch.float32).flatten(0, 1)
        ids_M, position_M = states.ids_BT.flatten(), states.position_BT.flatten()
        last_MH = states.last_BTH.flatten(0, 1)
        for step, (residual_ND, attended_NX) in enumerate(watched.seen):
            first_P = position_M[plan.row_N[plan.pair_PK[:, step]]] == 0
            valid_P = plan.valid_PK[:, step] & ~first_P
            pair_N = plan.pair_PK[:, step][valid_P]
            row_N = plan.row_N[pair_N]
            at_N = row_N if step == 0 and head.config.num_layers > 1 else pair_N
            yield (
                step,
                Rows(
                    fused_MF[row_N],
                    ids_M[row_N],
                    ids_M[plan.next_M[row_N]],
                    position_M[row_N],
                    residual_ND[at_N].float(),
                    attended_NX[at_N].float(),
                    outputs[step][pair_N].float(),
                    last_MH[plan.predicted_P[valid_P] - 1].float(),
                ),
            )


class _Watched:
    """A head whose first layer shows what it puts together, once for each step."""

    def __init__(self, head: EagleHead) -> None:
        self._head = head
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the head has
        return getattr(self._head, name)

    def leave(self, residual: Tensor, attended: Tensor, weights: Weights) -> Tensor:
        if weights.fc is not None:
            self.seen.append((residual, attended))
        return self._head.leave(residual, attended, weights)
