"""One joint step against the mathematics written out in plain PyTorch, in float64, and its faults.

The reference runs every document alone through a model whose weights are W + alpha/r B A, and loops
over tokens and depths.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import LlamaForCausalLM

from outrider.data.batches import Batch, Batches
from outrider.data.rows import Row
from outrider.data.states import BareRows
from outrider.data.target import Target
from outrider.eval.link import tables
from outrider.heads import MedusaConfig, MedusaHead
from outrider.heads.fused import Teacher, teacher_of
from outrider.train import joint_task
from outrider.train.joint import JointSettings, first_joint_step, head_weight
from outrider.train.joint_task import JointTask, JointWork, held, run_apart
from outrider.train.objective_settings import ObjectiveSettings
from outrider.train.optim import OptimSettings, set_rate
from outrider.train.schedule import ScheduleSettings, rate
from outrider.train.tuning import LoraTuning, tune

DECAY, PULL, KL, LM, DEPTHS = 0.7, 0.3, 0.9, 0.4, 3
DRAFT_IDS = torch.arange(2, 60, 2)
Faulty = Callable[[JointTask, JointWork, pytest.MonkeyPatch], JointWork]


def rows() -> list[Row]:
    made = torch.Generator().manual_seed(4)
    found = []
    for number, length in enumerate((9, 6, 11, 3, 2)):
        ids = torch.randint(2, 60, (length,), generator=made)
        mask = torch.rand(length, generator=made) < 0.7
        mask[-1] = True
        found.append(Row(ids=ids, mask=mask, row_id=f"r{number}", kind="all", prompt_length=1))
    return found


def task_on(folder: Path, mode: Any = "lora", dtype: torch.dtype = torch.float64) -> JointTask:
    """A task whose head and target are both away from where they start."""
    target = Target.load(str(folder), dtype=dtype)
    config = MedusaConfig.from_target(
        target.config,
        tokenizer_size=target.tokenizer_size,
        draft_vocab_size=len(DRAFT_IDS),
        num_draft_heads=DEPTHS,
    )
    head = MedusaHead(config, DRAFT_IDS).to(dtype)
    head.attach(tables(target))
    joint = JointSettings(joint=mode, kl_weight=KL, lm_weight=LM)
    tuning = tune(target, joint, 0)
    task = JointTask(
        head,
        ObjectiveSettings(unroll_decay=DECAY),
        tuning=tuning,
        joint=joint,
        num_steps=DEPTHS,
    )
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in task.trained.parameters():
            value += 0.1 * torch.randn(value.shape, generator=noise, dtype=torch.float64)
    task.head_weight = PULL
    return task


def batch_of(size: int = 20) -> Batch:
    batches = Batches(BareRows(rows(), dtype=torch.float64), size=size, batch_size=2, seed=0)
    return batches.batch(0, 0)


def gradients(task: JointTask) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(value) if value.grad is None else value.grad
        for name, value in task.trained.named_parameters()
    }


class Reference:
    """The loss of all documents and its gradients, by the names of `Trained`."""

    def __init__(self, folder: Path, task: JointTask) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        self.leaves = {
            name: value.detach().clone().requires_grad_()
            for name, value in task.trained.named_parameters()
        }
        self.weights = self.tuned_weights(task)

    def tuned_weights(self, task: JointTask) -> dict[str, Tensor]:
        known = dict(self.model.named_parameters())
        found = {}
        for name, leaf in self.leaves.items():
            plain = name.removeprefix("target.").replace("/", ".")
            if name.startswith("head."):
                continue
            if "lora_A" not in plain:
                if "lora_B" not in plain:
                    found[plain] = leaf
                continue
            other = self.leaves[name.replace("lora_A", "lora_B")]
            plain = plain.removeprefix("base_model.model.").replace(".lora_A.default", "")
            scale = task.joint.lora_alpha / task.joint.lora_rank
            found[plain] = known[plain].detach() + scale * (other @ leaf)
        return found

    def states(self, ids_T: Tensor, weights: dict[str, Tensor]) -> Tensor:
        out = functional_call(
            self.model, weights, kwargs={"input_ids": ids_T[None], "output_hidden_states": True}
        )
        return out.hidden_states[-1][0]

    def losses(self) -> tuple[Tensor, Tensor]:
        """What heads learn, and what holds the target; sums over tokens."""
        rows_VH = self.model.lm_head.weight.detach()
        heads, holding = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for row in rows():
            with torch.no_grad():
                before = self.states(row.ids, {})
            after = self.states(row.ids, self.weights)
            for m in range(1, len(row.ids)):
                if not row.mask[m]:
                    continue
                token = int(row.ids[m])
                log_p = (rows_VH @ before[m - 1]).log_softmax(-1)
                log_q = (rows_VH @ after[m - 1]).log_softmax(-1)
                kl = sum(math.exp(a) * (a - b) for a, b in zip(log_p.tolist(), log_q, strict=True))
                share = sum(DECAY**k for k in range(DEPTHS))
                holding = holding + share * (KL * kl - LM * log_q[token])
                teacher = (rows_VH[DRAFT_IDS] @ before[m - 1]).softmax(-1)
                for k in range(DEPTHS if token in DRAFT_IDS else 0):
                    t = m - 2 - k
                    if t >= 0:
                        law = self.draft(after[t], k).log_softmax(-1)
                        heads = heads - DECAY**k * (teacher * law).sum()
        return heads, holding

    def draft(self, state_H: Tensor, depth: int) -> Tensor:
        weight, bias = (
            self.leaves[f"head.blocks.{depth}.layers.0.{part}"] for part in ("weight", "bias")
        )
        moved = weight @ state_H + bias
        return self.leaves[f"head.lm_heads.{depth}.weight"] @ (
            state_H + moved / (1 + (-moved).exp())
        )

    def gradients(self, pull: float = PULL) -> dict[str, Tensor]:
        heads, holding = self.losses()
        own = {name: value for name, value in self.leaves.items() if name.startswith("head.")}
        theirs = {name: value for name, value in self.leaves.items() if name not in own}
        found = torch.autograd.grad(heads, list(own.values()), retain_graph=True)
        moved = torch.autograd.grad(holding + pull * heads, list(theirs.values()))
        return dict(zip([*own, *theirs], [*found, *moved], strict=True))


def assert_equal(task: JointTask, reference: Reference, out_loss: Tensor) -> None:
    heads, holding = reference.losses()
    torch.testing.assert_close(out_loss, heads + holding, rtol=1e-10, atol=1e-10)
    wanted = reference.gradients()
    found = gradients(task)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_joint_step_has_the_gradients_of_the_mathematics(target_folder: Path, mode: str) -> None:
    task = task_on(target_folder, mode)
    work = task.prepare(batch_of())
    assert len(work.documents) == 2
    assert sum(len(one.ids_DT) for one in work.documents) == 5
    out = task(work)
    out.loss.backward()
    assert_equal(task, Reference(target_folder, task), out.loss.detach())
    assert all(float(value.abs().max()) > 1e-6 for value in gradients(task).values())


def tuned_teacher(task: JointTask, work: JointWork, patch: pytest.MonkeyPatch) -> JointWork:
    """Heads are taught by the tuned law."""

    def taught(head: MedusaHead, state_PH: Tensor, dtype: torch.dtype) -> Teacher:
        with torch.no_grad():
            states = run_apart(work.documents, work.batch.ids_BT.shape[1], task.tuning.states)
        state_PH = states.flatten(0, 1).index_select(0, work.plan.predicted_P - 1)
        return teacher_of(head, state_PH, dtype)

    patch.setattr(joint_task, "teacher_of", taught)
    return work


def enabled_adapter(task: JointTask, work: JointWork, patch: pytest.MonkeyPatch) -> JointWork:
    """The adapter stays in while the original should speak."""
    states = task.tuning.states
    patch.setattr(task.tuning, "original_states", lambda ids_DT: states(ids_DT).detach())
    return work


def late_context(task: JointTask, work: JointWork, patch: pytest.MonkeyPatch) -> JointWork:
    """The target is held at the states of the tokens, not at those before them."""
    inside = (work.token_N + 1).clamp(max=work.batch.ids_BT.numel() - 1)
    return replace(work, token_N=inside)


def late_teacher(task: JointTask, work: JointWork, patch: pytest.MonkeyPatch) -> JointWork:
    """The teacher of a token is the law after it."""
    return replace(work, plan=replace(work.plan, predicted_P=work.plan.predicted_P + 1))


def head_pull_missing(task: JointTask, work: JointWork, patch: pytest.MonkeyPatch) -> JointWork:
    """The heads' loss reaches the target at full weight."""
    patch.setattr(joint_task, "lean", lambda x, weight: x)
    return work


def neighbours_seen(task: JointTask, work: JointWork, patch: pytest.MonkeyPatch) -> JointWork:
    """Documents of a pack read each other."""
    ids_BT = work.batch.ids_BT
    packs = [
        joint_task.Documents(ids_T[None], torch.arange(len(one.place_N)))
        for ids_T, one in zip(ids_BT, work.documents, strict=True)
    ]
    return replace(work, documents=packs)


@pytest.mark.parametrize(
    "fault",
    [
        tuned_teacher,
        enabled_adapter,
        late_context,
        late_teacher,
        head_pull_missing,
        neighbours_seen,
    ],
)
def test_planted_faults_are_seen(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch, fault: Faulty
) -> None:
    task = task_on(target_folder)
    work = fault(task, task.prepare(batch_of()), monkeypatch)
    out = task(work)
    out.loss.backward()
    with pytest.raises(AssertionError):
        assert_equal(task, Reference(target_folder, task), out.loss.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_untouched_adapter_diverges_by_exactly_nothing(
    target_folder: Path, dtype: torch.dtype
) -> None:
    target = Target.load(str(target_folder), dtype=dtype)
    tuning = tune(target, JointSettings(joint="lora", lora_rank=4), 0)
    ids_DT = torch.randint(2, 60, (2, 9))
    before, after = tuning.original_states(ids_DT)[0], tuning.states(ids_DT)[0]
    kl_N, _ = held(target, before, after, ids_DT[0])
    assert kl_N.tolist() == [0.0] * 9
    with torch.no_grad():
        next(v for k, v in tuning.parameters.items() if "lora_B" in k).fill_(0.5)
    kl_N, _ = held(target, before, tuning.states(ids_DT)[0], ids_DT[0])
    assert float(kl_N.detach().max()) > 1e-4


def test_chunks_of_the_divergence_change_nothing(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target.load(str(target_folder), dtype=torch.float64)
    noise = torch.Generator().manual_seed(0)
    states = torch.randn(2, 7, target.hidden_size, generator=noise, dtype=torch.float64)
    labels = torch.arange(7)
    found = []
    for size in (1 << 23, 2 * target.vocab_size):
        monkeypatch.setattr(joint_task, "CHUNK_LOGITS", size)
        tuned = states[1].clone().requires_grad_()
        kl_N, ce_N = held(target, states[0], tuned, labels)
        (kl_N.sum() + 0.5 * ce_N.sum()).backward()
        found.append((kl_N.detach(), ce_N.detach(), tuned.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_halves_add_up_to_the_whole(target_folder: Path) -> None:
    task = task_on(target_folder)
    whole = batch_of()
    task(task.prepare(whole)).loss.backward()
    wanted = {name: value.clone() for name, value in gradients(task).items()}
    task.zero_grad()
    names = ("ids_BT", "mask_BT", "document_BT", "position_BT", "aux_BTF", "last_BTH")
    for pack in range(2):
        parts = {name: getattr(whole, name)[pack : pack + 1] for name in names}
        half = replace(whole, **parts, row_ids=whole.row_ids[pack : pack + 1])
        task(task.prepare(half)).loss.backward()
    for name, value in gradients(task).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12, msg=name)


def test_a_pack_without_documents_costs_nothing_and_breaks_nothing(target_folder: Path) -> None:
    task = task_on(target_folder)
    names = ("ids_BT", "mask_BT", "document_BT", "position_BT", "aux_BTF", "last_BTH")
    whole = batch_of()
    empty = replace(whole, **{name: torch.zeros_like(getattr(whole, name)) for name in names})
    out = task(task.prepare(empty))
    out.loss.backward()
    assert float(out.loss.detach()) == 0
    assert all(value.grad is not None for value in task.trained.target.parameters())
    assert all(not bool(value.any()) for value in gradients(task).values())


def test_heads_alone_leave_the_target_without_gradients(target_folder: Path) -> None:
    task = task_on(target_folder)
    task.begin(0, 10)
    assert task.is_alone
    out = task(task.prepare(batch_of()))
    out.loss.backward()
    assert "target_kl" not in out.sums
    assert all(value.grad is None for value in task.tuning.parameters.values())
    assert all(value.grad is not None for value in task.head.parameters())
    task.begin(4, 10)
    assert not task.is_alone


def test_the_second_stage_has_a_course_of_its_own(target_folder: Path) -> None:
    joint = JointSettings(joint="lora", heads_first=0.4, head_weight=0.2, head_rise=0.5)
    assert first_joint_step(joint, 10) == 4
    found = [head_weight(joint, step, 10) for step in range(10)]
    rising = [0.2 * math.sin(math.pi / 2 * part / 3) for part in (1, 2, 3)]
    assert found == pytest.approx([0.0] * 4 + rising + [0.2] * 3)
    flat = replace(joint, head_rise=0.0, heads_first=0.0)
    assert [head_weight(flat, step, 3) for step in range(3)] == [0.2] * 3
    task = task_on(target_folder)
    shape = ScheduleSettings(schedule="cosine", warmup=0.2)
    *heads, target = task.optimizers(OptimSettings(lr=1e-2), 10)
    rates = []
    for step in range(10):
        set_rate([*heads, target], step, 10, shape)
        rates.append(target.param_groups[0]["lr"])
        assert heads[0].param_groups[0]["lr"] == 1e-2 * rate(step, 10, shape)
    assert rates[:4] == [0.0] * 4
    assert rates[4:] == [1e-4 * rate(step, 6, shape) for step in range(6)]


def test_adapters_sit_on_every_inner_linear_layer(target_folder: Path) -> None:
    target = Target.load(str(target_folder))
    tuning = tune(target, JointSettings(joint="lora", lora_rank=3), 0)
    assert isinstance(tuning, LoraTuning)
    sizes = SimpleNamespace(**target.config.to_dict())
    wide, inner = sizes.hidden_size, sizes.intermediate_size
    narrow = wide * sizes.num_key_value_heads // sizes.num_attention_heads
    ends = 2 * (wide + wide) + 2 * (wide + narrow) + 3 * (wide + inner)
    assert sum(x.numel() for x in tuning.parameters.values()) == 3 * sizes.num_hidden_layers * ends
    assert all("lora_" in name for name in tuning.parameters)
