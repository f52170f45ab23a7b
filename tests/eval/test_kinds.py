"""Every kind of head drafts, is scored offline and decodes as the loop does: equal rounds."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.cost import cost
from outrider.eval.decode import Decoding
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.metrics import count
from outrider.eval.noise import KeyedNoise
from outrider.eval.offline.texts import Text
from outrider.eval.offline.traces import build_trace
from outrider.eval.stats import ratio
from outrider.eval.trees.calibrate import text_ranks
from outrider.eval.trees.plans import ChainPlan, DrawnPlan, StaticPlan, TreePlan, plan_named
from outrider.heads import DraftHead

LENGTH, NUM_EXACT, NUM_CHANCE = 24, 8, 24
SETTINGS: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa", "num_draft_heads": 3, "draft_vocab_size": 48},
    "medusa_shared": {"kind": "medusa", "num_draft_heads": 3, "shared_output": True},
    "hydra": {"kind": "hydra", "num_draft_heads": 3, "shared_output": True},
    "hydra_prefix": {"kind": "hydra", "prefix_layer": True, "draft_vocab_size": 48},
    "mtp": {"kind": "mtp", "draft_vocab_size": 48},
    "eagle3_deep": {
        "kind": "eagle3",
        "aux_layers": (1, 3, 5),
        "draft_vocab_size": 48,
        "num_layers": 2,
        "sliding_window": 6,
    },
    "eagle3_narrow": {
        "kind": "eagle3",
        "aux_layers": (0, 1, 3, 4, 6),
        "hidden_size": 24,
        "fc_norm": True,
        "norm_output": True,
    },
}
MakeHead = Callable[[str], DraftHead]
WARM = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def make_head(
    tiny_target: Target,
    make_texts: Callable[..., list[Text]],
    train_head: Callable[..., DraftHead],
) -> MakeHead:
    """A head of each kind that has learned the target's own text, made when first asked for."""
    texts = make_texts(WARM, 120, seed=8)

    @cache
    def make(name: str) -> DraftHead:
        ids_W = torch.arange(3, 51)
        settings = SETTINGS[name]
        return train_head(tiny_target, texts, settings, ids_W, num_steps=60, rows_a_step=30)

    return make


# Medusa's three heads are fewer than the longest of these ask for.
@pytest.mark.parametrize("draft", ["chain:1", "chain:3", "chain:5", "tree:3,4,9", "tree:5,3,12"])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_greedy_output_is_plain_decodings_and_rounds_are_the_offline_ones(
    name: str,
    draft: str,
    tiny_target: Target,
    make_head: MakeHead,
    greedy_texts: list[Text],
    tmp_path: Path,
    loop: Callable[..., Any],
    offline: Callable[..., Any],
) -> None:
    head, texts = make_head(name), greedy_texts[:NUM_EXACT]
    trace = build_trace(
        tiny_target, texts, tmp_path, sampling=Sampling(), layers=head.config.aux_layers
    )
    score = offline(head, trace, tiny_target, draft, "greedy")
    decoded = loop(tiny_target, head, texts, draft, Decoding(max_new_tokens=LENGTH))
    assert [one.ids for one in decoded] == [text.answer_ids for text in texts]
    assert [len(one.rounds) for one in decoded] == score.rounds_R.tolist()
    assert score.tau > 1.15
    depth = min(plan_named(draft).depth, head.config.max_drafts)
    counts = count([one.rounds for one in decoded], depth=depth)
    assert counts.survival == pytest.approx(score.survival[:depth])
    assert not any(score.survival[depth:])
    assert score.draft == draft


@pytest.mark.parametrize("name", list(SETTINGS))
def test_sampled_tau_lies_in_the_loops_interval(
    name: str,
    tiny_target: Target,
    make_head: MakeHead,
    sampled_texts: list[Text],
    tmp_path: Path,
    loop: Callable[..., Any],
    offline: Callable[..., Any],
) -> None:
    head, texts = make_head(name), sampled_texts[:NUM_CHANCE]
    trace = build_trace(tiny_target, texts, tmp_path, sampling=WARM, layers=head.config.aux_layers)
    score = offline(head, trace, tiny_target, "chain:3", "rejection")
    decoding = Decoding(max_new_tokens=LENGTH, sampling=WARM, rule="rejection", seed=11)
    decoded = loop(tiny_target, head, texts, "chain:3", decoding)
    emitted = [float(sum(one.emitted for one in run.rounds)) for run in decoded]
    interval = ratio(emitted, [float(len(run.rounds)) for run in decoded], confidence=0.99)
    spread = ratio(score.tokens_R, score.rounds_R, confidence=0.99)
    room = spread.high - spread.low
    assert interval.low - room <= score.tau <= interval.high + room


@pytest.mark.parametrize("name", list(SETTINGS))
def test_match_with_the_same_noise_takes_the_same_rounds(
    name: str,
    tiny_target: Target,
    make_head: MakeHead,
    sampled_texts: list[Text],
    tmp_path: Path,
    loop: Callable[..., Any],
    offline: Callable[..., Any],
) -> None:
    head, texts = make_head(name), sampled_texts[:NUM_EXACT]
    trace = build_trace(tiny_target, texts, tmp_path, sampling=WARM, layers=head.config.aux_layers)
    score = offline(head, trace, tiny_target, "tree:3,4,9", "match")
    decoding = Decoding(max_new_tokens=LENGTH, sampling=WARM, rule="match")
    decoded = loop(tiny_target, head, texts, "tree:3,4,9", decoding)
    assert [one.ids for one in decoded] == [text.answer_ids for text in texts]
    assert [len(one.rounds) for one in decoded] == score.rounds_R.tolist()


def test_medusas_children_are_its_heads_likeliest_whatever_the_parent(
    tiny_target: Target, make_head: MakeHead, greedy_texts: list[Text]
) -> None:
    """A tree is the Cartesian product of the heads' likeliest tokens, pruned by joint probability.

    Against brute force over all paths.
    """
    head, text = make_head("medusa"), greedy_texts[0]
    drafter = HeadDrafter(head, TreePlan(3, 4, 9))
    ids = torch.tensor([text.prompt_ids + text.answer_ids[:1]])
    captured = tiny_target.run(ids[:, :-1])
    drafter.start(ids[0].tolist(), captured)
    tree = drafter.propose(99, KeyedNoise(0, 0, ids.shape[1])).tree
    laws = [head.draft_probs(captured.last_BTH[0, -1:], 1.0, depth)[0] for depth in range(3)]
    tops = [law.topk(4) for law in laws]
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    grown: dict[tuple[int, ...], float] = {}
    for top in tops:
        level = {
            (*path, int(head.draft_ids_W[index])): share * float(value)
            for path, share in paths.items()
            for value, index in zip(top.values, top.indices, strict=True)
        }
        grown |= level
        paths = dict(sorted(level.items(), key=lambda item: -item[1])[:4])
    wanted = set(sorted(grown, key=lambda path: -grown[path])[:9])
    found = {tuple(tree.tokens[step] for step in tree.path(node)) for node in range(1, len(tree))}
    assert found == wanted


@pytest.mark.parametrize("name", list(SETTINGS))
def test_no_tree_is_deeper_than_the_head(
    name: str, tiny_target: Target, make_head: MakeHead, greedy_texts: list[Text]
) -> None:
    head, text = make_head(name), greedy_texts[0]
    limit = min(head.config.max_drafts, 6)
    ids = torch.tensor([text.prompt_ids + text.answer_ids[:2]])
    captured = tiny_target.run(ids[:, :-1], layers=head.config.aux_layers)
    static = StaticPlan(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1,), (1, 0)))
    for plan, temperature in (
        (ChainPlan(6), 0.0),
        (TreePlan(6, 2, 22), 0.0),  # all that grows
        (DrawnPlan(6, 3, 48), 1.0),
        (static, 0.0),
    ):
        drafter = HeadDrafter(head, plan, temperature=temperature)
        drafter.start(ids[0].tolist(), captured)
        tree = drafter.propose(99, KeyedNoise(0, 0, ids.shape[1])).tree
        assert max(tree.depths) == min(limit, plan.depth)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_head_has_a_cost_and_ranks(
    name: str,
    tiny_target: Target,
    make_head: MakeHead,
    greedy_texts: list[Text],
    tmp_path: Path,
) -> None:
    head = make_head(name)
    assert cost(tiny_target, head, sizes=(1, 2), context=8, repeats=2)["c"] > 0
    trace = build_trace(
        tiny_target, greedy_texts[:4], tmp_path, sampling=Sampling(), layers=head.config.aux_layers
    )
    ranks = text_ranks(head, trace, tiny_target, depth=5, width=4)
    limit = min(head.config.max_drafts, 5)
    assert (ranks.ranks_NK[:, 0] == 0).mean() > 0.1
    assert (ranks.ranks_NK[:, limit:] == ranks.width).all()
