"""Replayed policies against the full law of decoding with the policy in it, enumerated.

The reference drafts every chain, tosses every coin and carries the policy's state through every
text of a toy language in float64; it shares no code with the replay but the policies themselves.
"""

import itertools
import math

import numpy as np
import pytest

from outrider.eval.policies.figures import Costs, compare, play, policy_figures
from outrider.eval.policies.named import policy_named
from outrider.eval.policies.policy import Ahead, Judged, Policy, best_threshold
from outrider.eval.policies.replay import Path, replay, replay_oracle

VOCAB, BUDGET, EOS, START = 3, 5, 0, (1, 1)
POLICIES = (
    "fixed:1",
    "fixed:3",
    "confidence:0.55,3",
    "kept:0.5,3",
    "entropy:0.75,3",
    "heuristic:2,3",
    "transient:1,3",
    "table:1=3,4=2,8=0@5",
)
COUNTS = ("mass", "rounds", "drafted", "laws", "kept", "judged")
ZERO = np.zeros(len(COUNTS))
MASS, ROUNDS, DRAFTED, LAWS, KEPT, JUDGED = np.eye(len(COUNTS))


class Toy:
    """Laws that depend on the last two tokens; a draft's also on its depth in the round."""

    def __init__(self, seed: int, *, is_drawn: bool) -> None:
        rng = np.random.default_rng(seed)
        self.p_table = rng.dirichlet(np.full(VOCAB, 0.7), size=(VOCAB, VOCAB))
        noise = rng.dirichlet(np.full(VOCAB, 0.7), size=(4, VOCAB, VOCAB))
        self.q_table = 0.6 * self.p_table[None] + 0.4 * noise
        self.is_drawn = is_drawn

    def p(self, text):
        return self.p_table[text[-2], text[-1]]

    def q(self, text, depth):
        return self.q_table[depth, text[-2], text[-1]]

    def picks(self, text, depth):
        """Drafted tokens and their chances."""
        q = self.q(text, depth)
        return list(enumerate(q)) if self.is_drawn else [(int(q.argmax()), 1.0)]

    def verdicts(self, text, depth, drafted):
        """(chance, token, accepted) once this token is judged."""
        p, q = self.p(text), self.q(text, depth)
        if not self.is_drawn:
            return [(p[t], t, t == drafted) for t in range(VOCAB)]
        yes = min(1.0, p[drafted] / q[drafted])
        left = np.maximum(p - q, 0)
        left = left / left.sum() if left.sum() else p
        rest = [((1 - yes) * left[t], t, False) for t in range(VOCAB)]
        return [(yes, drafted, True), *rest]


def ahead(q):
    return Ahead(float(q.max()), float(-(q * np.log(q)).sum()))


def has_ended(text):
    return len(text) - 2 >= BUDGET or (len(text) > 2 and text[-1] == EOS)


class Enumeration:
    """Decoding of one toy under one policy, every way it can go.

    `drops_last` plants a fault: the token that was too unlikely is not verified.
    """

    def __init__(self, toy, policy, *, drops_last=False):
        self.toy, self.policy, self.drops_last = toy, policy, drops_last
        self.known = {}

    def chains(self, text, state, chain=(1.0, (), (), 0)):
        """Every chain the policy may draft: chance, tokens, probabilities, laws computed."""
        chance, tokens, own, laws = chain
        if not self.policy.steps(state, len(tokens), own[-1] if own else 0.0):
            if self.drops_last and len(tokens) < self.policy.most:
                tokens, own = tokens[:-1], own[:-1]
            yield chance, tokens, own, laws
            return
        here = (*text, *tokens)
        q = self.toy.q(here, len(tokens))
        if not self.policy.draws(state, ahead(q)):
            yield chance, tokens, own, laws + 1
            return
        for token, share in self.toy.picks(here, len(tokens)):
            longer = (chance * share, (*tokens, token), (*own, float(q[token])), laws + 1)
            yield from self.chains(text, state, longer)

    def rounds(self, text, state):
        """The law from the start of a round."""
        if (text, state) not in self.known:
            law = self.known[text, state] = {}
            for chance, tokens, own, laws in self.chains(text, state):
                counts = ROUNDS + len(tokens) * DRAFTED + laws * LAWS
                add(law, self.judge(text, state, (tokens, own), 0, counts), chance)
        return self.known[text, state]

    def judge(self, text, state, drafted, depth, counts):
        """Go on behind `depth` accepted drafts; `text` holds them."""
        if has_ended(text):
            return {(text, state): MASS + counts}
        tokens, own = drafted
        if depth == len(tokens):
            steps = [(chance, t, False) for t, chance in enumerate(self.toy.p(text))]
        else:
            steps = self.toy.verdicts(text, depth, tokens[depth])
            counts = counts + JUDGED
        law = {}
        for chance, token, accepted in steps:
            longer = (*text, token)
            if accepted:
                rest = self.judge(longer, state, drafted, depth + 1, counts + KEPT)
            elif has_ended(longer):
                rest = {(longer, state): MASS + counts}
            else:
                judged = Judged(own[: depth + 1], depth, depth == len(tokens))
                later = self.rounds(longer, self.policy.after(state, judged))
                rest = {key: value + value[0] * counts for key, value in later.items()}
            add(law, rest, chance)
        return law


def add(law, more, chance):
    for key, value in more.items():
        law[key] = law.get(key, ZERO) + chance * value


def decode_law(toy, policy, *, drops_last=False):
    """(text, state at its end) -> mass, and mass times each count."""
    return Enumeration(toy, policy, drops_last=drops_last).rounds(START, policy.begin())


class ToyRow:
    """One text of the toy as a row to replay on; place 0 is the second token of START."""

    def __init__(self, toy, text, most):
        self.toy, self.text, self.most = toy, text, most
        self.num_tokens = len(text) - 1

    def prefix(self, place):
        return self.text[: place + 1]

    def accept(self, place):
        found = []
        for depth, token in enumerate(self.text[place + 1 : place + 1 + self.most]):
            context = self.prefix(place + depth)
            p, q = self.toy.p(context), self.toy.q(context, depth)
            hit = float(token == q.argmax())
            found.append(min(1.0, q[token] / p[token]) if self.toy.is_drawn else hit)
        return found

    def on_text(self, place):
        if not self.toy.is_drawn:
            return self.drafted(place)[0][1]
        tokens = self.text[place + 1 : place + 1 + self.most]
        return self.path(self.prefix(place), tokens)

    def path(self, prefix, tokens):
        laws = [self.toy.q((*prefix, *tokens[:i]), i) for i in range(len(tokens))]
        own = [float(q[token]) for q, token in zip(laws, tokens, strict=True)]
        return Path(own, [ahead(q) for q in laws])

    def drafted(self, place):
        prefix = self.prefix(place)
        ways = [(1.0, ())]
        for depth in range(self.most):
            ways = [
                (chance * share, (*tokens, token))
                for chance, tokens in ways
                for token, share in self.toy.picks((*prefix, *tokens), depth)
            ]
        return [(chance, self.path(prefix, tokens)) for chance, tokens in ways]


def by_text(law):
    texts = {}
    for (text, state), value in law.items():
        texts.setdefault(text, {})[state] = value
    return {text: states for text, states in texts.items() if sum(states.values())[0] > 0}


@pytest.mark.parametrize(
    ("name", "is_drawn"),
    # A dynamic threshold reads rejected tokens: for drawn drafts the text does not decide it.
    [*itertools.product(POLICIES, (True, False)), ("dynamic:0.5,3", False)],
)
def test_every_text_replays_as_enumerated(name, is_drawn):
    policy, toy = policy_named(name), Toy(0, is_drawn=is_drawn)
    law = by_text(decode_law(toy, policy))
    expected, found = dict.fromkeys(("drafted", "laws"), 0.0), {"drafted": 0.0, "laws": 0.0}
    for text, states in law.items():
        mass, rounds, drafted, laws, kept, judged = sum(states.values())
        assert mass == pytest.approx(chance_of(toy, text), abs=1e-12)  # the law is the target's
        one = replay(policy, ToyRow(toy, text, policy.most))
        assert one.rounds == pytest.approx(rounds / mass, abs=1e-9)
        assert one.kept == pytest.approx(kept / mass, abs=1e-9)
        assert one.judged == pytest.approx(judged / mass, abs=1e-9)
        ends = {state: value[0] / mass for state, value in states.items() if value[0] > 0}
        assert {state: one.ends.get(state) for state in ends} == pytest.approx(ends, abs=1e-9)
        assert sum(one.ends.values()) == pytest.approx(1)
        if not is_drawn:
            assert one.drafted == pytest.approx(drafted / mass, abs=1e-9)
        expected["drafted"] += drafted
        expected["laws"] += laws
        found["drafted"] += mass * one.drafted
        found["laws"] += mass * (one.drafted + one.idle)
    assert found == pytest.approx(expected, abs=1e-9)


def chance_of(toy, text):
    return math.prod(toy.p(text[:i])[text[i]] for i in range(2, len(text)))


def test_dropping_the_token_that_was_too_unlikely_is_seen_to_change_the_law():
    toy, policy = Toy(0, is_drawn=True), policy_named("kept:0.5,3")
    law = by_text(decode_law(toy, policy, drops_last=True))
    off = [abs(sum(s.values())[0] - chance_of(toy, text)) for text, s in law.items()]
    assert sum(off) / 2 > 0.01


def test_uniform_starts_misjudge_a_policy_with_a_state():
    toy, policy = Toy(1, is_drawn=True), policy_named("heuristic:1,3")
    law = by_text(decode_law(toy, policy))
    emitted = sum(sum(s.values())[0] * (len(text) - 2) for text, s in law.items())
    true_tau = emitted / sum(sum(s.values())[1] for s in law.values())
    uniform = 0.0
    for text, states in law.items():
        row = ToyRow(toy, text, 1)  # every round as its first length says
        uniform += sum(states.values())[0] * sum(
            np.cumprod(row.accept(place)).sum() for place in range(1, row.num_tokens)
        )
    assert abs(1 + uniform / emitted - true_tau) > 0.02


def test_a_state_that_persists_goes_on_to_the_next_answer():
    toy, policy = Toy(2, is_drawn=True), policy_named("heuristic:2,3")
    texts = [text for text in by_text(decode_law(toy, policy)) if len(text) == 7][:2]
    rows = [ToyRow(toy, text, 3) for text in texts]
    (both,) = play([policy], zip(("a", "b"), rows, strict=True), Costs(c=0.1))
    first = replay(policy, rows[0])
    parts = [
        chance * replay(policy, rows[1], {state: 1.0}).rounds
        for state, chance in first.ends.items()
    ]
    assert len(first.ends) > 1
    assert both.rounds_R.tolist() == pytest.approx([first.rounds, sum(parts)])
    (alone,) = play([policy_named("transient:2,3")], [("b", rows[1])], Costs(c=0.1))
    assert alone.rounds_R[0] == pytest.approx(replay(policy, rows[1]).rounds)
    assert abs(alone.rounds_R[0] - both.rounds_R[1]) > 1e-3


@pytest.mark.parametrize("is_drawn", [True, False])
def test_the_oracle_is_the_best_over_all_coins_and_no_policy_beats_it(is_drawn):
    toy, costs = Toy(3, is_drawn=is_drawn), Costs(c=0.2, verify=((1, 1.0), (4, 1.3)))
    texts = list(by_text(decode_law(toy, policy_named("fixed:1"))))
    policies = [policy_named(name) for name in POLICIES]
    for text in texts[:40]:
        row = ToyRow(toy, text, 3)
        one = replay_oracle(row, 3, c=costs.c, verify=costs.call)
        spent = costs.c * one.drafted
        spent += sum(n * costs.call(1 + k) for k, n in one.lengths.items())
        assert spent == pytest.approx(least_time(row, 3, costs, 1), abs=1e-9)
        assert one.rounds + one.kept >= row.num_tokens - 1 - 1e-9
        for outcome in play(policies, [("row", row)], costs):
            assert outcome.time_R[0] >= spent - 1e-9


def least_time(row, most, costs, place):
    """By every outcome of every coin, each with its own best length."""
    if place >= row.num_tokens:
        return 0.0
    accept = [*row.accept(place), 0.0, 0.0, 0.0][:most]
    later = [least_time(row, most, costs, place + i + 1) for i in range(most + 1)]
    total = 0.0
    for coins in itertools.product((True, False), repeat=most):
        chances = (a if coin else 1 - a for a, coin in zip(accept, coins, strict=True))
        run = next((i for i, coin in enumerate(coins) if not coin), most)
        total += math.prod(chances) * min(
            costs.c * k + costs.call(1 + k) + later[min(k, run)] for k in range(most + 1)
        )
    return total


def test_figures_are_those_of_the_counts():
    toy = Toy(4, is_drawn=True)
    texts = [text for text in by_text(decode_law(toy, policy_named("fixed:1"))) if len(text) == 7]
    rows = [(str(i), ToyRow(toy, text, 3)) for i, text in enumerate(texts)]
    names = ("fixed:2", "confidence:0.55,3", "oracle:3")
    outcomes = play(
        [policy_named(name) for name in names], rows, Costs(c=0.1, verify=((1, 1), (3, 1.2)))
    )
    fixed, sure, best = outcomes
    figures = policy_figures(fixed)
    assert figures["tau"]["value"] == pytest.approx(fixed.tokens_R.sum() / fixed.rounds_R.sum())
    assert figures["tau"]["low"] < figures["tau"]["value"] < figures["tau"]["high"]
    assert figures["drafted"] == pytest.approx(2 * figures["target_calls"])
    # Every round drafts 2 and calls the target on 3 tokens.
    assert figures["speedup"]["value"] == pytest.approx(figures["tau"]["value"] / (0.2 + 1.2))
    assert (sure.laws_R > sure.drafted_R).any()
    assert best.time_R.sum() < min(fixed.time_R.sum(), sure.time_R.sum())
    assert [one["policy"] for one in compare(outcomes)] == [*names[1:]]
    assert compare(outcomes)[1]["speedup"]["low"] > 0


def test_the_threshold_is_the_cheapest_point_of_the_roc_curve():
    rng = np.random.default_rng(5)
    for _ in range(200):
        own = rng.integers(1, 8, size=12) / 8
        match = rng.random(12) < 0.5
        if match.all() or not match.any():
            continue

        def cost(least, own=own, match=match):
            said = own >= least
            return (said & ~match).sum() / (~match).sum() + 3 * (~said & match).sum() / match.sum()

        found = best_threshold(own.tolist(), match.tolist())
        cheapest = min(cost(least) for least in own)
        assert cost(found) == pytest.approx(cheapest)
        # scikit-learn's curve runs from the highest threshold down, and the first minimum counts.
        assert found == max(one for one in own if cost(one) == pytest.approx(cheapest))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fixed", "write fixed:K"),
        ("confidence:2,3", "probability is 2"),
        ("heuristic:9,3", "starts at 9 of at most 3"),
        ("heuristic:1.5,3", "give a whole number"),
        ("heuristic:inf,3", "give a whole number"),
        ("heuristic:nan,3", "give a whole number"),
        ("entropy:nan,3", "entropy is nan"),
        ("table:2=3@1", "write fixed:K"),
        ("table:1=3", "write fixed:K"),
        ("oracle:0", "longest chain of a policy is 0"),
    ],
)
def test_bad_policies_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        policy_named(name)


@pytest.mark.parametrize("name", [*POLICIES, "dynamic:0.5,3", "oracle:4"])
def test_a_policy_reads_as_it_is_written(name):
    policy = policy_named(name)
    assert isinstance(policy, Policy)
    assert policy.label == name


def test_bad_costs_are_refused():
    with pytest.raises(ValueError, match="rising token numbers"):
        Costs(c=0.1, verify=((4, 1.0), (1, 1.0)))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="give c of 0 or more"):
            Costs(c=bad)
        with pytest.raises(ValueError, match="ratios above 0"):
            Costs(c=0.1, verify=((1, bad),))
    with pytest.raises(ValueError, match="numbers from 1"):
        Costs(c=0.1, verify=((0, 1.0),))
    with pytest.raises(ValueError, match="c = -1"):
        Costs(c=-1)
    assert Costs(c=0, verify=((1, 1.0), (2, 1.4), (3, 1.2), (4, 1.8))).call(3) == 1.4
