"""What every prediction weighs, against a count in plain Python over documents and turns.

Letters: P predicted tokens, K draft steps.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from outrider.data.batches import Batch, Batches, StoredRow
from outrider.heads import EagleConfig, EagleHead, RowPlan, Tables
from outrider.train.kinds import EagleObjective
from outrider.train.objectives import DraftTask, task_of

VOCAB, WIDTH, STEPS = 40, 16, 3
DRAFTED = 30
"""Ids below it can be drafted."""
# Two turns; one long answer; one token; an answer from position 0; three turns; nothing at all.
MASKS = [
    [0, 0, 0, 1, 1, 0, 0, 1, 1, 1],
    [0] * 2 + [1] * 16,
    [0] * 6 + [1],
    [1] * 5,
    [0, 1, 0, 1, 1, 0, 0, 0, 1],
    [0] * 4,
]
Key = tuple[str, int, int]
"""Row, position of the predicted token, step."""


@dataclass
class Rows:
    """Rows with random features, in memory."""

    masks: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        made = torch.Generator().manual_seed(7)
        self.lengths = [len(mask) for mask in self.masks]
        self.row_ids = [f"row{index}" for index in range(len(self.masks))]
        self.stored = [
            StoredRow(
                torch.randint(0, VOCAB, (length,), generator=made),
                torch.tensor(mask).bool(),
                torch.randn(length, 3 * WIDTH, generator=made, dtype=torch.float64),
                torch.randn(length, WIDTH, generator=made, dtype=torch.float64),
            )
            for length, mask in zip(self.lengths, self.masks, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.stored)

    def rows(self, indices: Sequence[int]) -> list[StoredRow]:
        return [self.stored[index] for index in indices]


ROWS = Rows(MASKS)


def make_task(**settings: object) -> DraftTask:
    torch.manual_seed(0)
    target = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config = EagleConfig.from_target(target, kind="eagle3", draft_vocab_size=DRAFTED)
    head = EagleHead(config, torch.arange(DRAFTED)).double()
    table = torch.randn(VOCAB, WIDTH).double()
    head.attach(Tables(embedding_VH=table, output_VH=table, tokenizer_size=VOCAB, num_layers=8))
    return task_of(head, replace(EagleObjective(), **settings), num_steps=STEPS)


def counted(step_weights: Sequence[float], *, by_document: bool) -> dict[Key, float]:
    """Weight of every prediction that there is, row by row."""
    found: dict[Key, float] = {}
    for name, row in zip(ROWS.row_ids, ROWS.stored, strict=True):
        mine: dict[Key, float] = {}
        for label in range(2, len(row.ids_T)):
            if bool(row.mask_T[label]) and int(row.ids_T[label]) < DRAFTED:
                for step in range(min(STEPS, label - 1)):
                    mine[name, label, step] = step_weights[step]
        whole = sum(mine.values()) if by_document else 1.0
        found |= {key: value / whole for key, value in mine.items()}
    return found


def packed(size: int, batch_size: int = 1) -> list[Batch]:
    batches = Batches(ROWS, size=size, batch_size=batch_size, seed=0)
    return [batches.batch(0, index) for index in range(batches.epoch_length())]


def keys(batch: Batch, plan: RowPlan) -> list[tuple[str, int]]:
    """Row and position of every predicted token of a batch."""
    width = batch.ids_BT.shape[1]
    found: list[tuple[str, int]] = []
    for flat in plan.predicted_P.tolist():
        pack, place = divmod(flat, width)
        number = int(batch.document_BT[pack, place])
        found.append((batch.row_ids[pack][number - 1], int(batch.position_BT[pack, place])))
    return found


def planned(task: DraftTask, batches: Sequence[Batch]) -> dict[Key, float]:
    """Weights that the task plans, and their sum compared with what it says they weigh."""
    found: dict[Key, float] = {}
    for batch in batches:
        work = task.prepare(batch)
        for (name, label), weight_K in zip(
            keys(batch, work.plan), work.weight_PK.tolist(), strict=True
        ):
            found |= {(name, label, k): x for k, x in enumerate(weight_K) if x > 0}
        assert work.weight == pytest.approx(float(work.weight_PK.sum()), rel=1e-12)
    return found


PACKINGS = [(18, 1), (30, 1), (18, 3), (60, 1)]
EXPLICIT = (0.51, 0.31, 0.18)


@pytest.mark.parametrize(("size", "batch_size"), PACKINGS)
@pytest.mark.parametrize("normalise", ["token", "document"])
@pytest.mark.parametrize("steps", [None, EXPLICIT])
def test_weights_equal_the_plain_count_however_rows_are_packed(
    size: int, batch_size: int, normalise: str, steps: tuple[float, ...] | None
) -> None:
    task = make_task(normalise=normalise, step_weights=steps, unroll_decay=0.5)
    wanted = counted(steps or (1.0, 0.5, 0.25), by_document=normalise == "document")
    found = planned(task, packed(size, batch_size))
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, rel=1e-12)


def test_every_document_with_a_prediction_weighs_one() -> None:
    by_row: dict[str, float] = defaultdict(float)
    for (name, _, _), weight in planned(make_task(normalise="document"), packed(60)).items():
        by_row[name] += weight
    assert by_row == pytest.approx(dict.fromkeys(by_row, 1.0), rel=1e-12)
    assert len(by_row) == len({name for name, _, _ in counted((1, 1, 1), by_document=False)}) > 3


@pytest.mark.parametrize(
    "fault",
    [
        lambda plan, value_P: value_P.sum().expand(value_P.shape),
        lambda plan, value_P: torch.full_like(value_P, float((value_P > 0).sum())),
    ],
    ids=["a pack weighs one", "tokens are counted instead of their weights"],
)
def test_weights_by_anything_but_documents_would_be_seen(
    fault: Callable[[RowPlan, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowPlan, "by_document", fault)
    found = planned(make_task(normalise="document", step_weights=EXPLICIT), packed(60))
    wanted = counted(EXPLICIT, by_document=True)
    assert any(abs(found[key] - wanted[key]) > 1e-3 for key in wanted)


def test_depth_weights_that_are_off_by_one_would_be_seen() -> None:
    task = make_task(step_weights=EXPLICIT)
    task.step_weight_K = task.step_weight_K.roll(1)
    found, wanted = planned(task, packed(18)), counted(EXPLICIT, by_document=False)
    assert any(abs(found[key] - wanted[key]) > 1e-3 for key in wanted)


@pytest.mark.parametrize("loss", ["soft_ce", "tv:0.9,soft_ce:0.1"])
def test_the_loss_is_the_plain_sum_of_weights_times_losses(loss: str) -> None:
    """Each document alone, its mean loss by depth weights, then the mean of documents."""
    task = make_task(normalise="document", step_weights=EXPLICIT, loss=loss)
    alone = make_task(step_weights=EXPLICIT, loss=loss)
    means: list[float] = []
    for row in ROWS.stored:
        single = Rows([[0]])
        single.stored, single.lengths = [row], [len(row.ids_T)]
        (batch,) = [Batches(single, size=18, batch_size=1, seed=0).batch(0, 0)]
        work = alone.prepare(batch)
        if work.weight:
            means.append(float(alone(work).loss.detach()) / work.weight)
    for size, batch_size in PACKINGS:
        works = [task.prepare(batch) for batch in packed(size, batch_size)]
        total = sum(float(task(work).loss.detach()) for work in works)
        weight = sum(work.weight for work in works)
        assert weight == pytest.approx(len(means), rel=1e-12)
        assert total / weight == pytest.approx(sum(means) / len(means), rel=1e-11)


def test_a_mixture_reports_its_terms_which_add_up_to_the_loss() -> None:
    task = make_task(loss="tv:0.9,soft_ce:0.1", normalise="document")
    (batch,) = packed(60)
    out = task(task.prepare(batch))
    parts = 0.9 * out.sums["loss_tv"] + 0.1 * out.sums["loss_soft_ce"]
    assert float(parts) == pytest.approx(float(out.loss.detach()), rel=1e-12)
    assert float(out.counts["loss_tv"]) == float(out.counts["loss"])
    assert not any(name.startswith("loss_tv") for name in make_task()(task.prepare(batch)).sums)
