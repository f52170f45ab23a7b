"""The training loss and its gradients against brute force: real drafting, one prediction at a time.

Everything in float64. Letters: T positions, F features, H target hidden size, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from outrider.data.batches import Batch, Batches, StoredRow
from outrider.heads import CONFIGS, HEADS, DraftHead, EagleHead, Tables
from outrider.heads.decoder import RecurrentHead
from outrider.heads.losses import OBJECTIVES
from outrider.train.kinds import EagleObjective
from outrider.train.objectives import DraftTask, task_of

VOCAB, WIDTH = 61, 16
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=24,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


@dataclass
class Memory:
    """Rows with random features, in memory."""

    stored: list[StoredRow]

    def __post_init__(self) -> None:
        self.lengths = [len(row.ids_T) for row in self.stored]
        self.row_ids = [f"row{index}" for index in range(len(self.stored))]

    def __len__(self) -> int:
        return len(self.stored)

    def rows(self, indices: Sequence[int]) -> list[StoredRow]:
        return [self.stored[index] for index in indices]


def memory(masks: list[list[int]], *, fused: int = 3) -> Memory:
    made = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    return Memory(
        [
            StoredRow(
                torch.randint(0, VOCAB, (len(mask),), generator=made),
                torch.tensor(mask).bool(),
                normal(len(mask), fused * WIDTH),
                normal(len(mask), WIDTH),
            )
            for mask in masks
        ]
    )


def make_head(kind: str, draft_vocab: int | None = None, **settings: Any) -> DraftHead:
    torch.manual_seed(3)
    draft_ids = None if draft_vocab is None else torch.arange(draft_vocab) * 2
    sizes = {"draft_vocab_size": draft_vocab, **settings}
    config = CONFIGS[kind].from_target(CONFIG, kind=kind, **sizes)
    head = HEADS[kind](config, draft_ids).double()
    for value in head.parameters():
        torch.nn.init.normal_(value, std=0.3)
    tables = Tables(
        embedding_VH=torch.randn(VOCAB, WIDTH).double(),
        output_VH=torch.randn(VOCAB, WIDTH).double(),
        tokenizer_size=VOCAB,
        num_layers=8,
    )
    return head.attach(tables)


KINDS: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa", "num_draft_heads": 3},
    "medusa_shared": {"kind": "medusa", "num_draft_heads": 3, "shared_output": True},
    "hydra": {"kind": "hydra", "num_draft_heads": 3},
    "hydra_prefix": {
        "kind": "hydra",
        "num_draft_heads": 3,
        "prefix_layer": True,
        "shared_output": True,
    },
    "mtp": {"kind": "mtp"},
}


def make_task(kind: str, **changes: Any) -> DraftTask:
    head = make_head(
        **KINDS.get(kind, {"kind": kind}), draft_vocab=None if kind == "eagle1" else 25
    )
    settings = replace(EagleObjective(feature_noise=False), **changes)
    return task_of(head, settings, num_steps=1 if kind == "eagle1" else 3)


def predictions(row: StoredRow, num_steps: int, is_inside_V: Tensor) -> Iterator[tuple[int, int]]:
    """(root, step) of every supervised prediction, from the written alignment rule."""
    for label in range(len(row.ids_T)):
        if row.mask_T[label] and is_inside_V[row.ids_T[label]]:
            for step in range(num_steps):
                if label - step - 2 >= 0:
                    yield label - step - 2, step


def drafted(head: DraftHead, row: StoredRow, root: int, step: int) -> Tensor:
    """What the head carries after the step-th draft from `root`, from scratch each time."""
    feature = head.project(row.aux_TF[None, : root + 1], row.last_TH[None, : root + 1])
    if not isinstance(head, RecurrentHead):
        carried = head.step(feature, row.ids_T[None, 1 : root + 2], torch.arange(root + 1)[None])
        carried = carried[:, -1:]
        for k in range(1, step + 1):
            token = row.ids_T[None, root + 1 + k : root + 2 + k]
            carried = head.step(carried, token, torch.tensor([[root + k]]), depth=k)
        return carried[0, -1]
    for k in range(step + 1):
        length = root + 1 + k
        hidden = head.step(feature, row.ids_T[None, 1 : length + 1], torch.arange(length)[None])
        feature = torch.cat([feature, hidden[:, -1:]], dim=1)
    return feature[0, -1]


def brute_force(task: DraftTask, rows: list[StoredRow]) -> tuple[Tensor, int]:
    """Loss summed over predictions, and how many there are, in plain autograd."""
    head, settings = task.head, task.objective
    ids_W = head.draft_ids_W
    is_inside_V = torch.zeros(VOCAB, dtype=torch.bool)
    is_inside_V[ids_W] = True
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        for root, step in predictions(row, task.num_steps, is_inside_V):
            hidden = drafted(head, row, root, step)
            state = row.last_TH[root + step + 1]
            teacher = (head.lent().output_VH[ids_W] @ state).softmax(-1)
            loss = -(teacher * head.draft_logits(hidden, step).log_softmax(-1)).sum()
            if head.config.kind == "eagle1":
                distance = F.smooth_l1_loss(hidden, state)
                loss = settings.token_weight * loss + settings.feature_weight * distance
            total = total + settings.unroll_decay**step * loss
            count += 1
    return total, count


def gradients(head: DraftHead) -> dict[str, Tensor]:
    found = {k: v.grad.clone() for k, v in head.named_parameters() if v.grad is not None}
    head.zero_grad(set_to_none=True)
    return found


def packed(source: Memory, size: int, batch_size: int = 1) -> list[Batch]:
    batches = Batches(source, size=size, batch_size=batch_size, seed=0)
    return [batches.batch(0, index) for index in range(batches.epoch_length())]


def losses(task: DraftTask, batches: list[Batch]) -> Tensor:
    work = [task.prepare(batch) for batch in batches]
    return sum((task(one).loss for one in work), start=torch.zeros((), dtype=torch.float64))


# An answer of one token, an answer from position 0, an answer to the last position.
C05 = [[0, 0, 0, 0, 0, 1, 0, 0], [1] * 5 + [0] * 4, [0] * 6 + [1] * 4]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", *KINDS])
def test_c05_loss_and_gradients_equal_brute_force(kind: str) -> None:
    task = make_task(kind)
    source = memory(C05)
    total, count = brute_force(task, source.stored)
    total.backward()
    theirs = gradients(task.head)
    ours = losses(task, packed(source, 12))
    ours.backward()
    found = gradients(task.head)
    assert count == sum(
        int(task.prepare(batch).plan.valid_PK.sum()) for batch in packed(source, 12)
    )
    torch.testing.assert_close(ours, total, rtol=1e-12, atol=0)
    assert found.keys() == theirs.keys()
    assert len(theirs) == len(dict(task.head.named_parameters()))
    for name, value in theirs.items():
        assert value.abs().max() > 0, name
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_c05_predictions_are_the_supervised_positions_and_nothing_after() -> None:
    task = make_task("eagle1")
    (batch,) = packed(memory(C05), 27)
    plan = task.prepare(batch).plan
    labels = batch.document_BT[0][plan.predicted_P] * 100 + batch.position_BT[0][plan.predicted_P]
    lengths = [int((batch.document_BT == n).sum()) for n in (1, 2, 3)]
    want = {8: [5], 9: [2, 3, 4], 10: [6, 7, 8, 9]}  # positions 0 and 1 have no row before them
    expected = [(n + 1) * 100 + m for n, length in enumerate(lengths) for m in want[length]]
    assert sorted(labels.tolist()) == expected


@pytest.mark.parametrize("kind", ["eagle1", *KINDS])
@pytest.mark.parametrize("shift", [-1, 1])
def test_c05_a_mask_that_is_off_by_one_is_seen(shift: int, kind: str) -> None:
    task = make_task(kind)
    source = memory(C05)
    total, _ = brute_force(task, source.stored)
    moved = [row._replace(mask_T=row.mask_T.roll(shift)) for row in source.stored]
    difference = losses(task, packed(Memory(moved), 12)) - total
    assert abs(float(difference.detach())) > 1e-3


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "hydra_prefix", "mtp"])
@pytest.mark.parametrize("loss", [*OBJECTIVES, "tv:0.9,soft_ce:0.1"])
def test_every_loss_halves_add_up_and_gradients_are_finite(loss: str, kind: str) -> None:
    task = make_task(kind, loss=loss)
    source = memory([[0] * 4 + [1] * 8, [0] * 3 + [1] * 5, [1] * 7, [0] * 9 + [1]])
    whole = losses(task, packed(source, 30))
    whole.backward()
    one = gradients(task.head)
    parts = losses(task, packed(source, 12))
    parts.backward()
    many = gradients(task.head)
    torch.testing.assert_close(whole, parts, rtol=1e-12, atol=0)
    for name, value in one.items():
        assert bool(torch.isfinite(value).all())
        torch.testing.assert_close(value, many[name], rtol=1e-8, atol=1e-12)


def test_a_batch_without_supervised_tokens_has_zero_loss_and_zero_gradients() -> None:
    task = make_task("eagle3")
    (batch,) = packed(memory([[0] * 6]), 8)
    out = task(task.prepare(batch))
    out.loss.backward()
    found = gradients(task.head)
    assert float(out.loss.detach()) == 0
    assert task.prepare(batch).weight == 0
    assert found.keys() == dict(task.head.named_parameters()).keys()
    assert all(float(value.abs().max()) == 0 for value in found.values())


def test_tokens_outside_the_draft_vocabulary_leave_the_loss() -> None:
    task = make_task("eagle3")
    source = memory([[0, 0, 1, 1, 1, 1]])
    source.stored[0].ids_T[:] = torch.tensor([4, 4, 2, 3, 8, 59])  # 3 and 59 cannot be drafted
    (batch,) = packed(source, 6)
    assert task.prepare(batch).plan.predicted_P.tolist() == [2, 4]


def test_weights_decay_with_the_step() -> None:
    task = make_task("eagle3", unroll_decay=0.5)
    (batch,) = packed(memory([[0] * 6 + [1]]), 8)
    batch.ids_BT[0, 6] = 2
    work = task.prepare(batch)
    assert work.weight_PK.tolist() == [[1.0, 0.5, 0.25]]
    assert work.weight == 1.75


def test_measures_are_means_over_predictions() -> None:
    task = make_task("eagle3")
    source = memory([[0] * 4 + [1] * 8, [1] * 7])
    (batch,) = packed(source, 20)
    out = task(task.prepare(batch))
    by_step = out.sums["loss_by_step"]
    weights = 0.8 ** torch.arange(3)
    assert float((by_step * weights).sum()) == pytest.approx(float(out.loss.detach()), rel=1e-6)
    accept = out.sums["accept"] / out.counts["accept"]
    assert bool(((accept > 0) & (accept < 1)).all())


def test_noise_disturbs_training_only() -> None:
    head = make_head("eagle1")
    (batch,) = packed(memory([[1] * 9]), 9)

    def value(task: DraftTask) -> float:
        return float(task(task.prepare(batch)).loss.detach())

    noisy = task_of(head, EagleObjective(), num_steps=1)
    quiet = task_of(head, EagleObjective(feature_noise=False), num_steps=1)
    assert value(noisy) != value(noisy)
    assert value(noisy.eval()) == value(quiet) == value(quiet)


def test_the_layer_is_disturbed_in_training_only_and_the_same_for_the_same_seed() -> None:
    head = make_head("eagle3", 25)
    (batch,) = packed(memory([[0] * 4 + [1] * 8, [1] * 7]), 20)

    def loss(task: DraftTask, seed: int = 0) -> Tensor:
        torch.manual_seed(seed)
        return task(task.prepare(batch)).loss.detach()

    task = task_of(head, EagleObjective(layer_dropout=0.3), num_steps=3)
    plain = task_of(head, EagleObjective(), num_steps=3)
    assert torch.equal(loss(task), loss(task))
    assert not torch.equal(loss(task), loss(task, 1))
    assert not torch.equal(loss(task), loss(plain))
    assert torch.equal(loss(task.eval()), loss(plain))


@torch.no_grad()
def test_dropped_channels_keep_the_mean_of_what_the_layer_puts_out() -> None:
    """Given one row, the mean over draws of attention's part is the part itself, in float64."""
    head = make_head("eagle3", 25).double()
    assert isinstance(head, EagleHead)
    weights, size = head.weights(), head.config.num_heads * head.config.head_dim
    rows = 200_000
    attended = torch.randn(1, size, dtype=torch.float64).expand(rows, size)
    residual = torch.zeros(rows, head.config.hidden_size, dtype=torch.float64)
    silent = replace(weights, down=torch.zeros_like(weights.down))
    wanted = head.leave(residual[:1], attended[:1], silent)
    with head.dropping(0.25):
        drawn = head.leave(residual, attended, silent)
    spread = drawn.std(0) / rows**0.5
    assert bool((spread > 0).all())
    assert float(((drawn.mean(0) - wanted[0]) / spread).abs().max()) < 5.0
    # Each channel of both adds p / (1 - p) of its square: the law of an independent coin.
    law = (weights.o.square() @ attended[0].square()) * 0.25 / 0.75
    assert drawn.var(0) == pytest.approx(law, rel=0.05)
    assert torch.equal(head.leave(residual[:1], attended[:1], silent), wanted)


@pytest.mark.parametrize("flag", ["feature_noise_std", "feature_dropout"])
def test_fused_features_are_disturbed_in_training_only_and_the_same_for_the_same_seed(
    flag: str,
) -> None:
    head = make_head("eagle3", 25)
    (batch,) = packed(memory([[0] * 4 + [1] * 8, [1] * 7]), 20)

    def seen(task: DraftTask, seed: int = 0) -> Tensor:
        torch.manual_seed(seed)
        return task.seen(batch).aux_BTF

    task = task_of(head, EagleObjective(**{flag: 0.3}), num_steps=3)  # pyrefly: ignore
    plain = task_of(head, EagleObjective(), num_steps=3)
    assert torch.equal(seen(task), seen(task))
    assert not torch.equal(seen(task), seen(task, 1))
    assert not torch.equal(seen(task), batch.aux_BTF)
    assert torch.equal(seen(plain), batch.aux_BTF)
    assert torch.equal(seen(task.eval()), batch.aux_BTF)
    teacher = task.train()(task.prepare(batch)).loss
    assert not torch.equal(teacher, plain(plain.prepare(batch)).loss)


def test_noise_is_measured_where_states_are_kept() -> None:
    """Zeros, which a packed store gives for what it does not keep, would make it smaller."""
    head = make_head("eagle3", 25)
    (batch,) = packed(memory([[0] * 4 + [1] * 8, [1] * 7]), 20)
    is_cut_T = batch.position_BT[0] >= 5
    batch.aux_BTF[0, is_cut_T] = 0
    batch.last_BTH[0, is_cut_T] = 0
    task = task_of(head, EagleObjective(feature_noise_std=0.3), num_steps=3)  # pyrefly: ignore
    torch.manual_seed(0)
    noise_TF = (task.seen(batch).aux_BTF - batch.aux_BTF)[0]
    kept_T = (batch.position_BT[0] > 0) & ~is_cut_T
    torch.manual_seed(0)
    normal_TF = torch.randn(batch.aux_BTF.shape, dtype=noise_TF.dtype)[0]
    spread_F = batch.aux_BTF[0, kept_T].std(0, correction=0)
    torch.testing.assert_close(noise_TF, normal_TF * 0.3 * spread_F)


@pytest.mark.parametrize("kind", ["eagle3", *KINDS])
def test_bf16_computes_near_fp32_and_gives_fp32_gradients(kind: str) -> None:
    head = make_task(kind).head.float()
    settings = EagleObjective()
    exact = task_of(head, settings, num_steps=3)
    rough = task_of(head, settings, num_steps=3, dtype=torch.bfloat16)
    (batch,) = packed(memory([[0] * 4 + [1] * 20]), 24)
    values: list[float] = []
    norms: list[Tensor] = []
    for task in (exact, rough):
        out = task(task.prepare(batch))
        out.loss.backward()
        found = gradients(head)
        assert {value.dtype for value in found.values()} == {torch.float32}
        values.append(float(out.loss.detach()))
        norms.append(torch.cat([value.flatten() for value in found.values()]))
    assert values[1] == pytest.approx(values[0], rel=0.02)
    assert float(F.cosine_similarity(*norms, dim=0)) > 0.99
