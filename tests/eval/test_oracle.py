"""Drafts from the answer itself: a ceiling, and any acceptance that is asked for."""

import pytest

from outrider.data.sampling import Sampling
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.oracle import OracleDrafter
from outrider.eval.metrics import count
from outrider.eval.noise import KeyedNoise
from outrider.eval.trees.loop_plans import OraclePlan
from outrider.scripts.decode_command import Settings

PROMPT = [5, 9, 14, 22]


def test_the_oracle_is_always_right(tiny_target):
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        decoding = Decoding(
            max_new_tokens=31,
            sampling=sampling,
            rule="greedy" if sampling.is_greedy else "match",
            ignore_eos=True,
        )
        plain = decode(tiny_target, PROMPT, None, decoding)
        drafter = OracleDrafter(OraclePlan(4))
        drafter.learn(PROMPT, plain.ids)
        found = decode(tiny_target, PROMPT, drafter, decoding)
        assert found.ids == plain.ids
        assert [(one.drafted, one.accepted) for one in found.rounds] == [(4, 4)] * 6


def test_drafts_are_right_as_often_as_asked_depth_by_depth():
    """Counted over rounds of a made-up answer, each within four standard errors."""
    plan, total = OraclePlan(4, (0.8, 0.3)), 4000
    drafter = OracleDrafter(plan)
    answer = [token % 7 for token in range(total + 8)]
    drafter.learn([1], answer)
    drafter.start([1, answer[0]], None)
    right = [0] * 4
    for place in range(1, total):
        tokens = drafter.propose(99, KeyedNoise(3, 0, place)).tree.tokens
        assert tokens[0] == answer[place - 1]
        for depth, token in enumerate(tokens[1:]):
            assert token >= 0
            right[depth] += token == answer[place + depth]
        drafter.accept([answer[place]], None)
    for depth, alpha in enumerate((0.8, 0.3, 0.3, 0.3)):
        spread = (alpha * (1 - alpha) / total) ** 0.5
        assert abs(right[depth] / total - alpha) < 4 * spread


def test_tokens_a_call_follow_from_the_chances(tiny_target):
    """tau = 1 + a + ab + ..., with rounds that the text's end cuts left out."""
    decoding = Decoding(max_new_tokens=200, ignore_eos=True)
    plain = decode(tiny_target, PROMPT, None, decoding)
    rounds = []
    for seed in range(12):
        drafter = OracleDrafter(OraclePlan(3, (0.8, 0.5)))
        drafter.learn(PROMPT, plain.ids)
        again = Decoding(max_new_tokens=200, ignore_eos=True, seed=seed)
        found = decode(tiny_target, PROMPT, drafter, again)
        assert found.ids == plain.ids
        rounds.append(found.rounds[:-2])
    assert count(rounds).tau == pytest.approx(1 + 0.8 + 0.4 + 0.2, abs=0.1)


def test_the_answers_end_is_not_drafted_beyond():
    drafter = OracleDrafter(OraclePlan(4))
    drafter.learn([1, 2], [3, 4, 5])
    drafter.start([1, 2, 3], None)
    assert drafter.propose(99, KeyedNoise(0, 0, 3)).tree.tokens == (3, 4, 5)
    assert drafter.propose(1, KeyedNoise(0, 0, 3)).tree.tokens == (3, 4)
    drafter.accept([4, 5], None)
    assert drafter.propose(99, KeyedNoise(0, 0, 5)).tree.tokens == (5,)


def test_an_unknown_prompt_is_refused():
    drafter = OracleDrafter(OraclePlan(4))
    drafter.learn([1, 2], [3, 4, 5])
    with pytest.raises(ValueError, match="oracle:4 has no answer to this prompt of 1 tokens"):
        drafter.start([1, 3], None)


def test_rules_with_coins_of_their_own_are_refused():
    for draft in ("oracle:3", "synthetic:3,0.5"):
        decoding = Decoding(sampling=Sampling(temperature=1.0), rule="point_mass")
        with pytest.raises(ValueError, match=r"judge these by greedy, or above .* by match"):
            Settings(target="", prompt=("hi",), draft=draft, decoding=decoding)
        for rule in (None, "match"):
            decoding = Decoding(sampling=Sampling(temperature=1.0), rule=rule)
            Settings(target="", prompt=("hi",), draft=draft, decoding=decoding)
