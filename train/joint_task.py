"""Medusa-2's objective: heads on the states of a target that learns, both aiming at the original.

The target runs in every step, twice: as the original, whose law is the teacher, and as tuned, whose
states the heads read. With D the divergence of a draft from its teacher,

    heads:   sum over tokens and depths of decay^k D(original's law, head k on tuned states)
    target:  kl_weight KL(original, tuned) + lm_weight CE(text, tuned) + head_weight(step) * heads

The paper's Medusa-2 teaches heads by the text and, in self-distillation, holds the target by
KL(original, tuned) (Cai et al. 2024, sections 2.2.2 and 2.3.2). Here heads are taught by the
original's law as well: it is what the tuned target is held to, so that both aim at one fixed thing.
Were the tuned law the teacher, the target could be paid for becoming easy to predict.

head_weight scales what flows from the heads' loss back into the target and not the heads' own
gradients, which Adam and Muon do not feel the scale of: heads learn at full strength from the first
step, and with a target that stands still the run is Medusa-1, bit for bit.

A token's KL weighs as much as its head losses do when every depth can predict it, so that kl_weight
and head_weight compare means per token. The target is held at every supervised token, those outside
the draft vocabulary included.

Letters: B packs, D documents of a pack, T positions, M = B*T, N supervised tokens, P predicted
tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from outrider.data.batches import Batch
from outrider.data.target import Target
from outrider.heads.base import DraftHead, States
from outrider.heads.fused import teacher_of
from outrider.train import optim
from outrider.train.joint import JointSettings, first_joint_step, head_weight
from outrider.train.objective_settings import ObjectiveSettings
from outrider.train.objectives import DraftTask, DraftWork
from outrider.train.optim import OptimSettings
from outrider.train.parts import StepOutput
from outrider.train.tuning import Tuning

CHUNK_LOGITS = 1 << 23
"""Logits of the target formed at a time: 170 contexts of a vocabulary of 49,152."""


class Documents(NamedTuple):
    """The documents of one pack, one a row, as the target reads them."""

    ids_DT: Tensor
    """Padded on the right, where a causal target cannot see it."""
    place_N: Tensor
    """Flat place in ids_DT of every real position of the pack, in order."""


@dataclass(frozen=True, kw_only=True)
class JointWork(DraftWork):
    """A batch with its row plan, its documents apart, and the tokens that hold the target."""

    documents: list[Documents]
    token_N: Tensor
    """Flat positions of the supervised tokens that have one before them."""

    @override
    def to(self, device: torch.device) -> "JointWork":
        if device.type == "cpu":
            return self
        documents = [Documents(*(x.to(device) for x in one)) for one in self.documents]
        return replace(
            self,
            batch=self.batch.to(device),
            plan=self.plan.to(device),
            weight_PK=self.weight_PK.to(device),
            documents=documents,
            token_N=self.token_N.to(device),
        )


class Trained(nn.Module):
    """All that a joint run trains: the head, and what learns of the target."""

    def __init__(self, head: DraftHead, tuning: Tuning) -> None:
        super().__init__()
        self.head = head
        named = {name.replace(".", "/"): value for name, value in tuning.parameters.items()}
        self.target = nn.ParameterDict(named)


class JointTask(DraftTask):
    """Teacher-forced drafting on a target that learns, too."""

    def __init__(
        self,
        head: DraftHead,
        objective: ObjectiveSettings,
        *,
        tuning: Tuning,
        joint: JointSettings,
        num_steps: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(head, objective, num_steps=num_steps, dtype=dtype)
        self.tuning, self.joint = tuning, joint
        self.pair = Trained(head, tuning)
        self.is_alone, self.head_weight = False, joint.head_weight

    @property
    @override
    def trained(self) -> nn.Module:
        return self.pair

    @override
    def optimizers(self, settings: OptimSettings, num_steps: int) -> list[Optimizer]:
        """The heads' own, and AdamW without decay on the target from its first step on."""
        betas = (settings.beta1, settings.beta2)
        rate = self.joint.target_lr
        values = list(self.pair.target.values())
        target = torch.optim.AdamW(values, lr=rate, betas=betas, weight_decay=0.0, fused=True)
        begin = first_joint_step(self.joint, num_steps)
        target.param_groups[0].update(peak=rate, begin=begin)
        return [*optim.build(self.head, settings), target]

    @override
    def begin(self, step: int, num_steps: int) -> None:
        """Whether the heads learn alone in this step, and what they ask of the target."""
        self.is_alone = step < first_joint_step(self.joint, num_steps)
        self.head_weight = head_weight(self.joint, step, num_steps)

    @override
    def prepare(self, batch: Batch) -> JointWork:
        work = super().prepare(batch)
        held_BT = batch.mask_BT & (batch.document_BT > 0) & (batch.position_BT > 0)
        token_N = held_BT.flatten().nonzero().flatten()
        if work.weight == 0:  # nothing for the heads to learn, by which the loss is divided
            token_N = token_N[:0]
        packs = zip(batch.ids_BT, batch.document_BT, batch.position_BT, strict=True)
        documents = [apart(*pack) for pack in packs]
        return JointWork(**vars(work), documents=documents, token_N=token_N)

    @override
    def forward(self, work: DraftWork) -> StepOutput:
        """The heads' loss and, in the second stage, what holds the target beside it."""
        assert isinstance(work, JointWork)
        batch, plan = work.batch, work.plan
        width = batch.ids_BT.shape[1]
        original_BTH = run_apart(work.documents, width, self.tuning.original_states)
        tuned_BTH = original_BTH
        if not self.is_alone:
            tuned_BTH = run_apart(work.documents, width, self.tuning.states)
        read_BTH = lean(tuned_BTH, self.head_weight)
        seen = States(batch.aux_BTF, read_BTH, batch.ids_BT, batch.position_BT)
        made = self.head.predict(seen, plan, self.dtype)
        state_PH = original_BTH.flatten(0, 1).index_select(0, plan.predicted_P - 1)
        out = self.score(made, teacher_of(self.head, state_PH, made.output_PKD.dtype), work)
        if self.is_alone:
            return out
        return self.hold(out, original_BTH, tuned_BTH, work)

    def hold(
        self, out: StepOutput, original_BTH: Tensor, tuned_BTH: Tensor, work: JointWork
    ) -> StepOutput:
        """Add what holds the target to its original and to the text."""
        before_N, label_N = work.token_N - 1, work.batch.ids_BT.flatten()[work.token_N]
        original_NH = original_BTH.flatten(0, 1).index_select(0, before_N)
        tuned_NH = tuned_BTH.flatten(0, 1).index_select(0, before_N)
        kl_N, ce_N = held(self.tuning.target, original_NH, tuned_NH, label_N)
        share = float(self.step_weight_K.sum())
        held_loss = (self.joint.kl_weight * kl_N + self.joint.lm_weight * ce_N).sum()
        count = torch.tensor(len(label_N), device=kl_N.device)
        sums = {"target_kl": kl_N.sum().detach(), "target_ce": ce_N.sum().detach()}
        return StepOutput(
            out.loss + share * held_loss,
            out.sums | sums,
            out.counts | dict.fromkeys(sums, count),
        )


def apart(ids_T: Tensor, document_T: Tensor, position_T: Tensor) -> Documents:
    """The documents of a pack, as rows; one of a single token where there are none."""
    inside_T = document_T > 0
    row_N, column_N = document_T[inside_T] - 1, position_T[inside_T]
    shape = (1, 1) if len(row_N) == 0 else (int(row_N.max()) + 1, int(column_N.max()) + 1)
    place_N = row_N * shape[1] + column_N
    ids_DT = ids_T.new_zeros(shape)
    ids_DT.view(-1)[place_N] = ids_T[inside_T]
    return Documents(ids_DT, place_N)


def run_apart(
    documents: Sequence[Documents], width: int, run: Callable[[Tensor], Tensor]
) -> Tensor:
    """States [B, T, H] of packs whose documents run as rows; zero in the padding.

    One pass a pack, as features computed online are, and so with the same rounding.
    """
    packs = []
    for one in documents:
        states_NH = run(one.ids_DT).flatten(0, 1).index_select(0, one.place_N)
        packs.append(nn.functional.pad(states_NH, (0, 0, 0, width - len(one.place_N))))
    return torch.stack(packs)


def lean(x: Tensor, weight: float) -> Tensor:
    """The same tensor, whose gradient counts `weight`."""
    still = x.detach()
    return still + weight * (x - still)


def held(
    target: Target, original_NH: Tensor, tuned_NH: Tensor, label_N: Tensor
) -> tuple[Tensor, Tensor]:
    """KL(original, tuned) and cross-entropy of the label, [N] each, by last states.

    Logits are made a chunk at a time and again for the gradient: [N, V] is never held. Equal states
    give a divergence of exactly 0.
    """

    def chunk(original: Tensor, tuned: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        log_p, log_q = (_log_law(target, x) for x in (original, tuned))
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        return kl, -log_q.gather(-1, label[:, None])[:, 0]

    size = max(1, CHUNK_LOGITS // target.vocab_size)
    parts = zip(*(x.split(size) for x in (original_NH, tuned_NH, label_N)), strict=True)
    found = [checkpoint(chunk, *part, use_reentrant=False) for part in parts]
    return torch.cat([kl for kl, _ in found]), torch.cat([ce for _, ce in found])


def _log_law(target: Target, state_NH: Tensor) -> Tensor:
    """Log-probabilities over the whole vocabulary, fp32 or better."""
    logits_NV = target.logits(state_NH)
    return logits_NV.log_softmax(-1, dtype=torch.promote_types(logits_NV.dtype, torch.float32))
