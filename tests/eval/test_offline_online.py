"""Offline scores are what the decode loop does: equal rounds where nothing is random, else a CI."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoding
from outrider.eval.metrics import count
from outrider.eval.offline.texts import Text
from outrider.eval.offline.traces import Trace, build_trace
from outrider.eval.stats import ratio
from outrider.eval.trees.plans import plan_named
from outrider.heads import EagleHead

LAYERS, LENGTH = (1, 3, 5), 24
WARM = Sampling(temperature=1.0)


def trace_of(target: Target, texts: list[Text], folder: Path, sampling: Sampling) -> Trace:
    return build_trace(target, texts, folder, sampling=sampling, layers=LAYERS)


# Few and short: decoding is the slow side of these tests.
NUM_EXACT, NUM_CHANCE = 8, 24
DRAFTS = ("chain:1", "chain:4", "tree:4,3,8", "tree:3,5,5", "tree:2,2,6")


@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_round_counts_equal_per_prompt(
    draft: str,
    tiny_target: Target,
    tiny_head: EagleHead,
    greedy_texts: list[Text],
    tmp_path: Path,
    loop: Callable[..., Any],
    offline: Callable[..., Any],
) -> None:
    texts = greedy_texts[:NUM_EXACT]
    trace = trace_of(tiny_target, texts, tmp_path, Sampling())
    score = offline(tiny_head, trace, tiny_target, draft, "greedy")
    decoded = loop(tiny_target, tiny_head, texts, draft, Decoding(max_new_tokens=LENGTH))
    assert [one.ids for one in decoded] == [text.answer_ids for text in texts]
    assert [len(one.rounds) for one in decoded] == score.rounds_R.tolist()
    depth = plan_named(draft).depth
    counts = count([one.rounds for one in decoded], depth=depth)
    assert counts.survival == pytest.approx(score.survival)
    assert counts.tau == pytest.approx(score.tau)
    if draft.startswith("tree"):
        assert counts.drafted == score.drafted_R.sum()


@pytest.mark.parametrize("draft", ["chain:3", "tree:4,4,12"])
def test_match_with_the_same_noise_takes_the_same_rounds(
    draft: str,
    tiny_target: Target,
    tiny_head: EagleHead,
    sampled_texts: list[Text],
    tmp_path: Path,
    loop: Callable[..., Any],
    offline: Callable[..., Any],
) -> None:
    texts = sampled_texts[:NUM_EXACT]
    trace = trace_of(tiny_target, texts, tmp_path, WARM)
    score = offline(tiny_head, trace, tiny_target, draft, "match")
    decoding = Decoding(max_new_tokens=LENGTH, sampling=WARM, rule="match")
    decoded = loop(tiny_target, tiny_head, texts, draft, decoding)
    assert [one.ids for one in decoded] == [text.answer_ids for text in texts]
    assert [len(one.rounds) for one in decoded] == score.rounds_R.tolist()
    hits = score.hit_RK.sum(0) / score.rounds_R.sum()
    depth = plan_named(draft).depth
    assert count([one.rounds for one in decoded], depth=depth).survival == pytest.approx(hits)


@pytest.mark.parametrize(
    ("draft", "rule"), [("chain:3", "rejection"), ("tree:3,3,8", "point_mass")]
)
def test_sampled_tau_lies_in_the_loops_interval(
    draft: str,
    rule: str,
    tiny_target: Target,
    tiny_head: EagleHead,
    sampled_texts: list[Text],
    tmp_path: Path,
    loop: Callable[..., Any],
    offline: Callable[..., Any],
) -> None:
    texts = sampled_texts[:NUM_CHANCE]
    trace = trace_of(tiny_target, texts, tmp_path, WARM)
    score = offline(tiny_head, trace, tiny_target, draft, rule)
    decoding = Decoding(max_new_tokens=LENGTH, sampling=WARM, rule=rule, seed=11)
    decoded = loop(tiny_target, tiny_head, texts, draft, decoding)
    emitted = [float(sum(one.emitted for one in run.rounds)) for run in decoded]
    rounds = [float(len(run.rounds)) for run in decoded]
    interval = ratio(emitted, rounds, confidence=0.99)
    spread = ratio(score.tokens_R, score.rounds_R, confidence=0.99)
    assert (
        interval.low - (spread.high - spread.value)
        <= score.tau
        <= interval.high + (spread.value - spread.low)
    )
    survival = count([run.rounds for run in decoded], depth=3).survival
    assert survival[0] == pytest.approx(score.survival[0], abs=0.1)


def test_a_tree_of_width_one_is_a_chain(
    tiny_target: Target,
    tiny_head: EagleHead,
    sampled_texts: list[Text],
    tmp_path: Path,
    offline: Callable[..., Any],
) -> None:
    trace = trace_of(tiny_target, sampled_texts, tmp_path, WARM)
    chain = offline(tiny_head, trace, tiny_target, "chain:3", "match")
    tree = offline(tiny_head, trace, tiny_target, "tree:3,1,3", "match")
    np.testing.assert_allclose(tree.rounds_R, chain.rounds_R)
    np.testing.assert_allclose(tree.kept_RK, chain.kept_RK, atol=1e-5)
    np.testing.assert_allclose(tree.inside_RK, chain.inside_RK, atol=1e-4)


def test_past_the_heads_positions_nothing_is_drafted(
    tiny_target: Target,
    tiny_head: EagleHead,
    greedy_texts: list[Text],
    tmp_path: Path,
    loop: Callable[..., Any],
    offline: Callable[..., Any],
) -> None:
    texts = greedy_texts[:4]
    trace = trace_of(tiny_target, texts, tmp_path, Sampling())
    whole = tiny_head.config
    try:
        object.__setattr__(whole, "max_position_embeddings", 14)
        for draft in ("chain:3", "tree:3,2,5"):
            score = offline(tiny_head, trace, tiny_target, draft, "greedy")
            decoded = loop(tiny_target, tiny_head, texts, draft, Decoding(max_new_tokens=LENGTH))
            assert [len(one.rounds) for one in decoded] == score.rounds_R.tolist()
    finally:
        object.__setattr__(whole, "max_position_embeddings", 256)


def test_trees_refuse_chain_rules(
    tiny_target: Target,
    tiny_head: EagleHead,
    sampled_texts: list[Text],
    tmp_path: Path,
    offline: Callable[..., Any],
) -> None:
    trace = trace_of(tiny_target, sampled_texts, tmp_path, WARM)
    with pytest.raises(ValueError, match="for a tree use match or point_mass"):
        offline(tiny_head, trace, tiny_target, "tree:3,3,8", "rejection")
