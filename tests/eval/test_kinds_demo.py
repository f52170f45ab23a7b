"""On the real target: every kind of head decodes as plainly, in the rounds scored offline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.offline.chain import score_chain
from outrider.eval.offline.texts import read_texts
from outrider.eval.offline.traces import build_trace
from outrider.eval.offline.tree import score_tree
from outrider.eval.trees.plans import TreePlan, plan_named
from outrider.heads import DraftHead

pytestmark = pytest.mark.slow

LENGTH, SIZE, NUM_TEXTS = 24, 4096, 6
SETTINGS: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa", "num_draft_heads": 3, "shared_output": True},
    "hydra": {"kind": "hydra", "num_draft_heads": 3, "shared_output": True, "prefix_layer": True},
    "mtp": {"kind": "mtp"},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("smollm2-demo")


@pytest.mark.parametrize("kind", list(SETTINGS))
def test_greedy_rounds_are_the_loops(
    kind: str, target: Target, train_head: Callable[..., DraftHead], tmp_path: Path
) -> None:
    texts = read_texts("demo", Sampling(), per_kind=4)
    ids = torch.tensor([token for text in texts for token in text.answer_ids])
    counts = torch.bincount(ids, minlength=target.vocab_size)
    ids_W = counts.argsort(descending=True, stable=True)[:SIZE].sort().values
    settings = SETTINGS[kind] | {"draft_vocab_size": SIZE}
    head = train_head(target, texts, settings, ids_W, num_steps=12, rows_a_step=4, lr=3e-3)
    texts = [
        text._replace(answer_ids=text.answer_ids[:LENGTH])
        for text in read_texts("demo:heldout", Sampling(), per_kind=1)[:NUM_TEXTS]
    ]
    trace = build_trace(target, texts, tmp_path, sampling=Sampling(), layers=())
    for draft in ("chain:3", "tree:4,4,16"):
        plan = plan_named(draft)
        if isinstance(plan, TreePlan):
            score = score_tree(head, trace, target, plan)
        else:
            score = score_chain(head, trace, target, lengths=[3])[3]
        decoded = [
            decode(
                target, text.prompt_ids, HeadDrafter(head, plan), Decoding(max_new_tokens=LENGTH)
            )
            for text in texts
        ]
        assert [one.ids for one in decoded] == [text.answer_ids for text in texts]
        assert [len(one.rounds) for one in decoded] == score.rounds_R.tolist()
        assert score.tau > 1.0
