"""Where nothing can be known, nothing is: heads of every kind stay at chance at every depth.

Rows of random tokens over random states: the target's law after a position follows from the state
there, which no draft may have seen. A head that beats the best constant law has looked ahead.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from outrider.data.batches import Batch
from outrider.heads import CONFIGS, HEADS, DraftHead, Tables
from outrider.train.kinds import EagleObjective
from outrider.train.objectives import DraftTask, task_of

VOCAB, WIDTH, STEPS, ROWS, LENGTH = 20, 16, 3, 8, 24
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "eagle3"},
    "eagle3_deep": {"kind": "eagle3", "num_layers": 2, "sliding_window": 4},
    "eagle1": {"kind": "eagle1"},
    "medusa": {"kind": "medusa", "num_draft_heads": STEPS},
    "hydra": {"kind": "hydra", "num_draft_heads": STEPS},
    "hydra_prefix": {"kind": "hydra", "num_draft_heads": STEPS, "prefix_layer": True},
    "mtp": {"kind": "mtp"},
}
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=24,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def make_head(name: str) -> DraftHead:
    torch.manual_seed(0)
    kind = SETTINGS[name]["kind"]
    head = HEADS[kind](CONFIGS[kind].from_target(CONFIG, **SETTINGS[name]))
    tables = Tables(
        embedding_VH=torch.randn(VOCAB, WIDTH),
        output_VH=torch.randn(VOCAB, WIDTH),
        tokenizer_size=VOCAB,
        num_layers=8,
    )
    return head.attach(tables)


def random_batch(shift: int) -> Batch:
    """Two documents a row; `shift` is how far ahead of their rows the features are."""
    last_BTH = torch.randn(ROWS, LENGTH, WIDTH)
    half = torch.arange(LENGTH) % (LENGTH // 2)
    return Batch(
        ids_BT=torch.randint(0, VOCAB, (ROWS, LENGTH)),
        mask_BT=torch.ones(ROWS, LENGTH, dtype=torch.bool),
        document_BT=(1 + torch.arange(LENGTH) // (LENGTH // 2)).expand(ROWS, -1),
        position_BT=half.expand(ROWS, -1),
        aux_BTF=last_BTH.roll(-shift, 1).repeat(1, 1, 3),
        last_BTH=last_BTH,
        row_ids=[["a", "b"]] * ROWS,
    )


class Ahead(DraftTask):
    """A planted fault: the head reads states one position ahead of its rows."""

    def seen(self, batch: Batch) -> Any:
        states = super().seen(batch)
        return states._replace(last_BTH=batch.last_BTH.roll(-1, 1))


def above_chance(task: DraftTask, shift: int = 0) -> Tensor:
    """Acceptance at every depth after training on fresh rows, less that of the mean law."""
    optimizer = torch.optim.Adam(task.head.parameters(), lr=1e-2)
    for _ in range(100):
        work = task.prepare(random_batch(shift))
        (task(work).loss / work.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    batches = [random_batch(shift) for _ in range(8)]
    with torch.no_grad():
        outs = [task.eval()(task.prepare(batch)) for batch in batches]
        accept = sum(out.sums["accept"] for out in outs) / sum(out.counts["accept"] for out in outs)
        states = torch.cat([batch.last_BTH for batch in batches]).flatten(0, 1)
        laws = (states @ task.head.lent().output_VH.T).softmax(-1)
        chance = torch.minimum(laws, laws.mean(0)).sum(-1).mean()
    return accept - chance


@pytest.mark.parametrize("name", list(SETTINGS))
def test_random_rows_stay_at_chance_at_every_depth(name: str) -> None:
    num_steps = 1 if name == "eagle1" else STEPS
    task = task_of(make_head(name), EagleObjective(unroll_decay=1.0), num_steps=num_steps)
    found = above_chance(task)
    assert len(found) == num_steps
    assert float(found.max()) < 0.02


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_look_at_the_next_state_is_seen(name: str) -> None:
    num_steps = 1 if name == "eagle1" else STEPS
    task = Ahead(make_head(name), EagleObjective(unroll_decay=1.0), num_steps=num_steps)
    found = above_chance(task, shift=1)
    assert float(found[0]) > 0.1
    assert float(found[1:].max() if num_steps > 1 else 0.0) < 0.02
