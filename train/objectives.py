"""What an EAGLE head optimises: a batch becomes row plan and weights, then loss and measures.

Every supervised token that some row can predict counts decay^k at unroll step k, whatever the row,
pack or batch it stands in; the loop divides by the weights of the whole accumulation window.
A supervised token outside the draft vocabulary leaves the loss. For text that the target wrote
greedily these are the positions whose likeliest token cannot be drafted, which EAGLE-3 drops; for
sampled text a position stays with the chance that its law lies inside, so that the loss is, in
expectation, the cross-entropy against the target's law before it is renormalised.

Letters: B packs, T positions, P predicted tokens, K unroll steps, V target vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from typing_extensions import override

from outrider.data.batches import Batch
from outrider.heads.eagle import EagleHead
from outrider.heads.fused import Teacher, score_pairs, teacher_of
from outrider.heads.layers import Weights
from outrider.heads.losses import feature_noise, smooth_l1
from outrider.heads.plan import RowPlan
from outrider.heads.unroll import unroll
from outrider.train.parts import StepOutput
from outrider.train.settings import ObjectiveSettings


@dataclass(frozen=True, kw_only=True)
class EagleWork:
    """A batch with its row plan."""

    batch: Batch
    plan: RowPlan
    weight_PK: Tensor
    weight: float
    num_tokens: int

    @property
    def row_ids(self) -> list[str]:
        """Names of the rows."""
        return [name for pack in self.batch.row_ids for name in pack]

    def to(self, device: torch.device) -> "EagleWork":
        """The same on a device."""
        if device.type == "cpu":
            return self
        moved = (self.batch.to(device), self.plan.to(device), self.weight_PK.to(device))
        return replace(self, batch=moved[0], plan=moved[1], weight_PK=moved[2])


class EagleTask(nn.Module):
    """Unrolled training of an EAGLE head against the frozen target's laws and states."""

    def __init__(
        self,
        head: EagleHead,
        objective: ObjectiveSettings,
        *,
        num_steps: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is the precision of computation over the head's own weights; None is theirs."""
        super().__init__()
        self.head = head
        self.objective = objective
        self.num_steps = num_steps
        self.dtype = dtype
        self.step_weight_K = objective.unroll_decay ** torch.arange(num_steps, dtype=torch.float64)
        draft_ids = head.draft_ids_W[: head.config.num_proposable].cpu()
        self.is_inside_V = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        self.is_inside_V[draft_ids] = True

    def prepare(self, batch: Batch) -> EagleWork:
        """Row plan and weights of a batch."""
        mask_BT = batch.mask_BT & self.is_inside_V[batch.ids_BT]
        plan = RowPlan.from_mask(mask_BT, batch.document_BT, self.num_steps)
        weight_PK = plan.valid_PK * self.step_weight_K
        return EagleWork(
            batch=batch,
            plan=plan,
            weight_PK=weight_PK,
            weight=float(weight_PK.sum()),
            num_tokens=batch.num_tokens,
        )

    @override
    def forward(self, work: EagleWork) -> StepOutput:
        """Weighted loss of all predictions, and mean loss and acceptance by unroll step."""
        batch, plan = work.batch, work.plan
        weights = self.head.weights(self.dtype)
        dtype = weights.fc.dtype
        last_BTH = batch.last_BTH
        is_noisy = self.head.config.kind == "eagle1" and self.objective.feature_noise
        seen_BTH = feature_noise(last_BTH) if is_noisy and self.training else last_BTH
        feature_BTD = self.head.project(batch.aux_BTF, seen_BTH, weights)
        hidden = unroll(self.head, feature_BTD, batch.ids_BT, batch.position_BT, plan, weights)
        hidden_PKD = plan.pairs(hidden)
        state_PH = last_BTH.flatten(0, 1).index_select(0, plan.predicted_P - 1)
        teacher = teacher_of(self.head, state_PH, dtype)
        return self._score(hidden_PKD, teacher, work, weights)

    def _score(
        self, hidden_PKD: Tensor, teacher: Teacher, work: EagleWork, weights: Weights
    ) -> StepOutput:
        head, objective = self.head, self.objective
        is_eagle1 = head.config.kind == "eagle1"
        weight_PK = work.weight_PK * objective.token_weight if is_eagle1 else work.weight_PK
        scored = score_pairs(
            head.output_input(hidden_PKD, weights),
            head.output_weight(hidden_PKD.dtype),
            teacher,
            weight_PK,
            objective.loss,
        )
        valid_PK = work.plan.valid_PK
        count_K = valid_PK.sum(0)
        sums = {
            "loss": scored.loss.detach(),
            "loss_by_step": (scored.loss_PK * valid_PK).sum(0),
            "accept": (scored.accept_PK * valid_PK).sum(0),
        }
        counts = {"loss": work.weight_PK.sum(), "loss_by_step": count_K, "accept": count_K}
        loss = scored.loss
        if is_eagle1:
            feature_loss_P = smooth_l1(hidden_PKD[:, 0], teacher.state_PH) * valid_PK[:, 0]
            loss = loss + objective.feature_weight * feature_loss_P.sum()
            sums |= {"loss": loss.detach(), "feature_loss": feature_loss_P.sum().detach()}
            counts["feature_loss"] = count_K[0]
        return StepOutput(loss=loss, sums=sums, counts=counts)
