"""What every kind of head is trained to predict, from conversations to pairs, in plain Python."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.batches import Batch, Batches
from outrider.data.rows import Reading, read_rows
from outrider.data.states import OnlineFeatures
from outrider.data.target import Target
from outrider.eval.link import tables
from outrider.heads import CONFIGS, HEADS, DraftHead
from outrider.train.kinds import EagleObjective
from outrider.train.objectives import DraftTask, DraftWork, task_of

STEPS, SIZE = 3, 40
TEMPLATE = (
    "{% for m in messages %}{{ 'w6' if m.role == 'assistant' else 'w5' }} {{ m.content }} </s> "
    "{% endfor %}{% if add_generation_prompt %}w6 {% endif %}"
)
# Words by turn: user, assistant, user, ... Several turns, answers of one word, the shortest rows.
TALKS = {
    "multi": [[10, 11], [12, 13, 14], [15], [16], [17, 18, 19], [20, 21]],
    "single": [[22], [23, 24, 25, 26, 27, 28, 29, 30]],
    "short": [[31], [32]],
    "long": [[33] * 9, [34, 35], [36] * 4, [37, 38, 39, 40, 41]],
    "bare": [[42], [43, 44]],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "eagle3"},
    "eagle1": {"kind": "eagle1"},
    "medusa": {"kind": "medusa", "num_draft_heads": STEPS},
    "hydra": {"kind": "hydra", "num_draft_heads": STEPS},
    "hydra_prefix": {"kind": "hydra", "num_draft_heads": STEPS, "prefix_layer": True},
    "mtp": {"kind": "mtp"},
}
Pairs = set[tuple[str, int, int, int, int]]
"""(row, root, step, position of the label, label)."""


@pytest.fixture
def target(target_folder: Path) -> Target:
    target = Target.load(str(target_folder))
    assert target.tokenizer is not None
    target.tokenizer.chat_template = TEMPLATE
    return target


def batches(target: Target, folder: Path) -> list[Batch]:
    """The conversations as training sees them, packed."""
    lines = []
    for name, turns in TALKS.items():
        messages = [
            {
                "role": "user" if index % 2 == 0 else "assistant",
                "content": " ".join(f"w{word}" for word in turn),
            }
            for index, turn in enumerate(turns)
        ]
        lines.append(json.dumps({"id": name, "messages": messages}))
    path = folder / "talks.jsonl"
    path.write_text("\n".join(lines))
    rows, _ = read_rows(str(path), target, Reading(max_length=SIZE))
    assert [row.row_id for row in rows] == list(TALKS)
    source = OnlineFeatures(target, rows, layers=(2, 4, 5))
    made = Batches(source, size=SIZE, batch_size=2, seed=0)
    found = [made.batch(0, index) for index in range(made.epoch_length())]
    assert any(len(pack) > 1 for batch in found for pack in batch.row_ids)  # packed for real
    return found


def make_task(name: str, target: Target, *, reduced: bool = False) -> DraftTask:
    kind, sizes = SETTINGS[name]["kind"], dict(SETTINGS[name])
    ids = None
    if reduced and kind != "eagle1":
        ids = torch.tensor([token for token in range(target.tokenizer_size) if token % 3])
        sizes["draft_vocab_size"] = len(ids)
    head: DraftHead = HEADS[kind](CONFIGS[kind].from_target(target.config, **sizes), ids)
    steps = 1 if kind == "eagle1" else STEPS
    return task_of(head.attach(tables(target)), EagleObjective(), num_steps=steps)


def expected(task: DraftTask) -> Pairs:
    """From the words alone: turns are marker, words, end; answers and their ends are supervised."""
    known = set(task.head.draft_ids_W.tolist())
    pairs: Pairs = set()
    for name, turns in TALKS.items():
        ids: list[int] = []
        answers: set[int] = set()
        for index, turn in enumerate(turns):
            start = len(ids) + 1
            ids += [6 if index % 2 else 5, *turn, 1]
            if index % 2:
                answers |= set(range(start, len(ids)))
        for label in answers:
            for step in range(task.num_steps):
                root = label - 2 - step
                if root >= 0 and ids[label] in known:
                    pairs.add((name, root, step, label, ids[label]))
    return pairs


def trained(work: DraftWork) -> Pairs:
    """From the plan that the head runs."""
    batch, plan = work.batch, work.plan
    width = batch.ids_BT.shape[1]

    def place(flat: int) -> tuple[str, int]:
        pack, column = divmod(flat, width)
        number = int(batch.document_BT[pack, column])
        return batch.row_ids[pack][number - 1], int(batch.position_BT[pack, column])

    pairs: Pairs = set()
    for index, flat in enumerate(plan.predicted_P.tolist()):
        row, label = place(flat)
        for step in range(plan.num_steps):
            if plan.valid_PK[index, step]:
                assert float(work.weight_PK[index, step]) > 0
                root_row, root = place(int(plan.row_N[plan.pair_PK[index, step]]))
                assert root_row == row
                pairs.add((row, root, step, label, int(batch.ids_BT.flatten()[flat])))
            else:
                assert float(work.weight_PK[index, step]) == 0
    return pairs


def found(task: DraftTask, made: list[Batch]) -> Pairs:
    parts = [trained(task.prepare(batch)) for batch in made]
    assert sum(map(len, parts)) == len(set().union(*parts))
    return set().union(*parts)


@pytest.mark.parametrize("reduced", [False, True], ids=["full", "reduced"])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_pairs_are_those_of_the_conversations(
    name: str, reduced: bool, target: Target, tmp_path: Path
) -> None:
    task = make_task(name, target, reduced=reduced)
    pairs = found(task, batches(target, tmp_path))
    assert pairs == expected(task)
    assert {row for row, *_ in pairs} == set(TALKS)
    assert {step for _, _, step, _, _ in pairs} == set(range(task.num_steps))


@pytest.mark.parametrize("fault", ["mask", "documents", "labels"])
@pytest.mark.parametrize("name", ["medusa", "hydra", "mtp"])
def test_wrong_batches_are_seen(name: str, fault: str, target: Target, tmp_path: Path) -> None:
    task = make_task(name, target)
    made = batches(target, tmp_path)
    for batch in made:
        if fault == "mask":  # inputs instead of labels
            batch.mask_BT.copy_(batch.mask_BT.roll(-1, 1))
        elif fault == "labels":
            batch.ids_BT.copy_(batch.ids_BT.roll(1, 1))
        else:  # packed rows run into each other
            batch.document_BT.clamp_(max=1)
    try:
        pairs = found(task, made)
    except AssertionError:  # rows mixed, or pairs counted twice
        return
    assert pairs != expected(task)
