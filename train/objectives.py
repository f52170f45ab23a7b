"""What a head of any kind optimises: a batch becomes row plan and weights, then loss and measures.

Every supervised token that some row can predict counts the weight of step k at unroll step k,
whatever the row, pack or batch it stands in; or, where documents are to weigh the same, that over
the sum of all such weights in its document, so that every document counts one. The loop divides by
the weights of the whole accumulation window, over all ranks.
A supervised token outside the draft vocabulary leaves the loss. For text that the target wrote
greedily these are the positions whose likeliest token cannot be drafted, which EAGLE-3 drops; for
sampled text a position stays with the chance that its law lies inside, so that the loss is, in
expectation, the cross-entropy against the target's law before it is renormalised.

Letters: B packs, T positions, P predicted tokens, K unroll steps, V target vocabulary.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from outrider.data.batches import Batch
from outrider.heads.base import DraftHead, Predicted, States
from outrider.heads.eagle import EagleHead
from outrider.heads.fused import Teacher, score_pairs, teacher_of
from outrider.heads.losses import channel_noise, feature_noise, smooth_l1
from outrider.heads.plan import RowPlan
from outrider.heads.top_teacher import TopTeacher, top_teacher
from outrider.train import optim
from outrider.train.kinds import EagleObjective
from outrider.train.objective_settings import ObjectiveSettings
from outrider.train.optim import OptimSettings
from outrider.train.parts import StepOutput


@dataclass(frozen=True, kw_only=True)
class DraftWork:
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

    def to(self, device: torch.device) -> "DraftWork":
        """The same on a device."""
        if device.type == "cpu":
            return self
        moved = (self.batch.to(device), self.plan.to(device), self.weight_PK.to(device))
        return replace(self, batch=moved[0], plan=moved[1], weight_PK=moved[2])


class DraftTask(nn.Module):
    """Teacher-forced drafting against the frozen target's laws."""

    def __init__(
        self,
        head: DraftHead,
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
        self.divergence = objective.divergence()
        self.step_weight_K = torch.tensor(objective.weights(num_steps), dtype=torch.float64)
        draft_ids = head.draft_ids_W[: head.config.num_proposable].cpu()
        self.is_inside_V = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        self.is_inside_V[draft_ids] = True

    @property
    def trained(self) -> nn.Module:
        """The head alone: the target is frozen."""
        return self.head

    def optimizers(self, settings: OptimSettings, num_steps: int) -> list[Optimizer]:  # noqa: ARG002
        """Those of the settings, over the head."""
        return optim.build(self.head, settings)

    def begin(self, step: int, num_steps: int) -> None:
        """All steps are alike."""

    def prepare(self, batch: Batch) -> DraftWork:
        """Row plan and weights of a batch."""
        mask_BT = batch.mask_BT & self.is_inside_V[batch.ids_BT]
        plan = RowPlan.from_mask(mask_BT, batch.document_BT, self.num_steps)
        weight_PK = plan.valid_PK * self.step_weight_K
        if self.objective.normalise == "document":
            weight_PK = weight_PK / plan.by_document(weight_PK.sum(1)).unsqueeze(1)
        return DraftWork(
            batch=batch,
            plan=plan,
            weight_PK=weight_PK,
            weight=float(weight_PK.sum()),
            num_tokens=batch.num_tokens,
        )

    @override
    def forward(self, work: DraftWork) -> StepOutput:
        """Weighted loss of all predictions, and mean loss and acceptance by unroll step."""
        batch, plan = work.batch, work.plan
        made = self.head.predict(self.seen(batch), plan, self.dtype)
        return self.score(made, self.teacher(work, made.output_PKD.dtype), work)

    def teacher(self, work: DraftWork, dtype: torch.dtype) -> Teacher | TopTeacher:
        """The laws before the predicted tokens: as stored, or from the target's last states."""
        law, places_P = work.batch.law, work.plan.predicted_P - 1
        if law is None:
            return teacher_of(self.head, states_before(work), dtype)
        at = law.map(lambda tensor: tensor.flatten(0, 1).index_select(0, places_P))
        return top_teacher(self.head, at.ids, at.log_probs, at.tail, at.num_rest)

    def seen(self, batch: Batch) -> States:
        """What the head reads of a batch."""
        return States(batch.aux_BTF, batch.last_BTH, batch.ids_BT, batch.position_BT)

    def weigh(self, weight_PK: Tensor) -> Tensor:
        """Weights of the divergence of every pair."""
        return weight_PK

    def score(self, made: Predicted, teacher: Teacher | TopTeacher, work: DraftWork) -> StepOutput:
        """Loss and measures of the pairs."""
        scored = score_pairs(
            made.output_PKD,
            self.head.output_weights(made.output_PKD.dtype),
            teacher,
            self.weigh(work.weight_PK),
            self.divergence,
        )
        valid_PK = work.plan.valid_PK
        count_K = valid_PK.sum(0)
        sums = {
            "loss": scored.loss.detach(),
            "loss_by_step": (scored.loss_PK * valid_PK).sum(0),
            "accept": (scored.accept_PK * valid_PK).sum(0),
        }
        counts = {"loss": work.weight_PK.sum(), "loss_by_step": count_K, "accept": count_K}
        if len(self.divergence.terms) > 1:
            for name, loss_PK in zip(
                self.divergence.names, scored.each_PKM.unbind(-1), strict=True
            ):
                sums[f"loss_{name}"] = (loss_PK * work.weight_PK).sum()
                counts[f"loss_{name}"] = counts["loss"]
        return StepOutput(loss=scored.loss, sums=sums, counts=counts)


class Eagle3Task(DraftTask):
    """The divergence over features and layers that may be disturbed in training.

    Random numbers come from the global generator, which the loop seeds by seed, step and rank.
    """

    head: EagleHead  # pyrefly: ignore[bad-override-mutable-attribute]
    objective: EagleObjective  # pyrefly: ignore[bad-override-mutable-attribute]

    @override
    def forward(self, work: DraftWork) -> StepOutput:
        with self.head.dropping(self.objective.layer_dropout if self.training else 0.0):
            return super().forward(work)

    @override
    def seen(self, batch: Batch) -> States:
        seen, objective = super().seen(batch), self.objective
        if not self.training:
            return seen
        aux_BTF = seen.aux_BTF
        if objective.feature_noise_std:
            counted_BT = batch.kept_BT & (batch.position_BT > 0)
            aux_BTF = channel_noise(aux_BTF, counted_BT, objective.feature_noise_std)
        return seen._replace(aux_BTF=F.dropout(aux_BTF, objective.feature_dropout))


class Eagle1Task(DraftTask):
    """EAGLE-1's objective: the divergence beside a loss on the next state, over noisy features."""

    objective: EagleObjective  # pyrefly: ignore[bad-override-mutable-attribute]

    @override
    def seen(self, batch: Batch) -> States:
        seen = super().seen(batch)
        if not (self.training and self.objective.feature_noise):
            return seen
        return seen._replace(last_BTH=feature_noise(seen.last_BTH))

    @override
    def weigh(self, weight_PK: Tensor) -> Tensor:
        return weight_PK * self.objective.token_weight

    @override
    def score(self, made: Predicted, teacher: Teacher | TopTeacher, work: DraftWork) -> StepOutput:
        out = super().score(made, teacher, work)
        weight_P = work.weight_PK[:, 0]
        feature_loss = (smooth_l1(made.columns[0], states_before(work)) * weight_P).sum()
        loss = out.loss + self.objective.feature_weight * feature_loss
        sums = out.sums | {"loss": loss.detach(), "feature_loss": feature_loss.detach()}
        return StepOutput(loss, sums, out.counts | {"feature_loss": weight_P.sum()})


def states_before(work: DraftWork) -> Tensor:
    """The target's last states one position before the predicted tokens [P, H]."""
    return work.batch.last_BTH.flatten(0, 1).index_select(0, work.plan.predicted_P - 1)


TASKS: dict[str, type[DraftTask]] = {"eagle1": Eagle1Task, "eagle3": Eagle3Task}
"""Kinds of head whose objective is more than the divergence, or whose features are disturbed."""


def task_of(
    head: DraftHead,
    objective: ObjectiveSettings,
    *,
    num_steps: int,
    dtype: torch.dtype | None = None,
) -> DraftTask:
    """The task that trains a head of this kind."""
    task = TASKS.get(head.config.kind, DraftTask)
    return task(head, objective, num_steps=num_steps, dtype=dtype)
