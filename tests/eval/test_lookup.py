"""Prompt lookup against a search from scratch, offline against the loop, and its commands."""

import random

import pytest

from outrider.data.sampling import Sampling
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.lookup import PromptLookup
from outrider.eval.offline.lookup import score_lookup
from outrider.eval.offline.traces import build_trace
from outrider.eval.trees.plans import LookupPlan, plan_named


def searched(ids, length, ngram):
    """What followed the latest earlier place of the longest suffix, looked for place by place."""
    for size in range(min(ngram, len(ids) - 1), 0, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[-size:]:
                return ids[end : end + length]
    return []


@pytest.mark.parametrize("ngram", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_drafts_are_what_a_search_finds(length, ngram):
    rng = random.Random(0)
    found = 0
    for _ in range(40):
        ids = [rng.randrange(4) for _ in range(rng.randrange(1, 30))]
        drafter = PromptLookup(LookupPlan(length, ngram))
        drafter.start(ids, None)
        for _ in range(6):
            tree = drafter.propose(length, None).tree
            assert tree.tokens[0] == ids[-1]
            assert list(tree.tokens[1:]) == searched(ids, length, ngram)
            found += len(tree) > 1
            more = [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
            ids = ids + more
            drafter.accept(more, None)
    assert found > 100


def test_drafts_stop_at_the_depth_allowed():
    drafter = PromptLookup(LookupPlan(9))
    drafter.start([1, 2, 3, 4, 5, 1, 2], None)
    assert drafter.propose(2, None).tree.tokens == (2, 3, 4)
    assert drafter.propose(0, None).tree.tokens == (2,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_offline_rounds_are_the_loops(tiny_target, make_texts, tmp_path, temperature):
    sampling = Sampling(temperature=temperature)
    texts = make_texts(sampling, 12)
    trace = build_trace(tiny_target, texts, tmp_path / "t", sampling=sampling, layers=(1,))
    plan = LookupPlan(4, 2)
    score = score_lookup(trace, tiny_target, plan)[4]
    accepted = 0
    for index, text in enumerate(texts):
        decoding = Decoding(max_new_tokens=len(text.answer_ids), sampling=sampling, rule="match")
        if sampling.is_greedy:
            decoding = Decoding(max_new_tokens=len(text.answer_ids))
            found = decode(tiny_target, text.prompt_ids, PromptLookup(plan), decoding)
            assert found.ids == text.answer_ids
            assert len(found.rounds) == score.rounds_R[index]
            accepted += sum(one.accepted for one in found.rounds)
    if sampling.is_greedy:
        assert accepted > 0
    assert score.tau > 1
    # A chosen draft is accepted with the mass that the target gives it.
    assert (score.kept_RK <= score.judged_RK).all()


def test_plans_are_read_and_refused():
    assert plan_named("lookup:5") == LookupPlan(5, 3)
    assert plan_named("lookup:5,2") == LookupPlan(5, 2)
    for bad in ("lookup:", "lookup:0", "lookup:3,0", "lookup:1,2,3"):
        with pytest.raises(ValueError, match="lookup"):
            plan_named(bad)
