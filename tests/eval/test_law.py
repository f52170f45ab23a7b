"""Every rule's exact law equals the target's, and every planted fault is found."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from outrider.eval import rules
from outrider.eval.certificate.law import (
    Branching,
    Language,
    Proposal,
    Reads,
    certify,
    distance,
    emitted_law,
    outcomes,
    speculative_round,
    target_law,
)
from outrider.eval.certificate.lazy_tree import fixed, propose_chain, propose_tree, uneven
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.tree import Tree


def fractions(weights):
    weights = [Fraction(weight) for weight in weights]
    return np.array([weight / sum(weights) for weight in weights], dtype=object)


def random_language(seed, vocab=3, order=2, with_zeros=False):
    """p and q depend on the last `order` tokens."""
    rng = np.random.default_rng(seed)
    contexts = [c for n in range(order + 1) for c in itertools.product(range(vocab), repeat=n)]

    def table():
        weights = {c: rng.integers(1, 10, size=vocab) for c in contexts}
        if with_zeros:
            weights = {c: w * (rng.random(vocab) < 0.6) for c, w in weights.items()}
            weights = {c: w if w.sum() else np.eye(vocab, dtype=int)[0] for c, w in weights.items()}
        return {c: fractions(map(int, w)) for c, w in weights.items()}

    p, q = table(), table()
    return Language(target=lambda t: p[t[-order:]], draft=lambda t: q[t[-order:]])


def constant_language(p, q):
    p, q = fractions(p), fractions(q)
    return Language(target=lambda text: p, draft=lambda text: q)


LANGUAGES = {
    "random 0": random_language(0),
    "random 1": random_language(1),
    "zeros 2": random_language(2, with_zeros=True),
    "zeros 3": random_language(3, with_zeros=True),
    "equal": constant_language([1, 2, 3], [1, 2, 3]),
    "one-hot target": constant_language([0, 1, 0], [1, 1, 1]),
    "one-hot draft": constant_language([1, 2, 3], [0, 0, 1]),
    "disjoint": constant_language([0, 1, 1], [1, 0, 0]),
    "ties": constant_language([1, 1, 1], [1, 1, 1]),
    "nearly equal": constant_language([1, 2, 3], [1, 2, Fraction(3001, 1000)]),
}
SHAPES = {
    "one": fixed(1),
    "two then one each": fixed(2, 1),
    "three": fixed(3),
    "uneven": uneven({(): 2, (0,): 2, (1,): 1, (0, 0): 1}),
}


def assert_exact(language, run, num_tokens=3):
    found = certify(language, run, num_tokens)
    assert found.distance == 0, found.worst
    return found


@pytest.mark.parametrize("length", [0, 1, 2, 3])
@pytest.mark.parametrize("name", LANGUAGES)
def test_rejection_on_chains_emits_the_targets_law(name, length):
    language = LANGUAGES[name]
    run = speculative_round(language, propose_chain(language, length), rules.rejection)
    found = assert_exact(language, run)
    assert 1 <= found.emitted <= length + 1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LANGUAGES)
@pytest.mark.parametrize("rule", [rules.match, rules.point_mass])
def test_tree_rules_emit_the_targets_law(rule, name, shape):
    language = LANGUAGES[name]
    assert_exact(language, speculative_round(language, likeliest(language, shape), rule))


def likeliest(language, shape):
    return propose_tree(language, SHAPES[shape], Siblings.CHOSEN)


@pytest.mark.parametrize("name", LANGUAGES)
def test_match_is_exact_for_drawn_drafts_too(name):
    language = LANGUAGES[name]
    assert_exact(language, speculative_round(language, propose_chain(language, 2), rules.match))


@pytest.mark.parametrize("rule", [rules.match, rules.point_mass])
def test_duplicate_siblings_do_no_harm(rule):
    def propose(text, random):
        # Tokens 1 and 1 under the root, a child under each.
        return Proposal(tree=Tree((0, 1, 1, 0, 2), (-1, 0, 0, 1, 2)))

    language = LANGUAGES["random 0"]
    assert_exact(language, speculative_round(language, propose, rule))


def test_match_and_point_mass_accept_alike():
    for name, shape in itertools.product(LANGUAGES, SHAPES):
        language = LANGUAGES[name]
        emitted = {
            certify(
                language, speculative_round(language, likeliest(language, shape), rule), 3
            ).emitted
            for rule in (rules.match, rules.point_mass)
        }
        assert len(emitted) == 1, (name, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_emits_the_argmax_text(shape):
    rng = np.random.default_rng(5)
    hot = {c: fractions(np.eye(3, dtype=int)[rng.integers(3)].tolist()) for c in range(3)}
    soft = {c: fractions(map(int, rng.integers(1, 9, size=3))) for c in range(3)}
    language = Language(
        target=lambda text: hot[text[-1] if text else 0],
        draft=lambda text: soft[text[-1] if text else 0],
    )
    assert_exact(language, speculative_round(language, likeliest(language, shape), rules.greedy), 4)


def test_expected_tokens_of_a_chain_call_are_the_closed_form():
    language = constant_language([1, 2, 5], [3, 2, 1])
    alpha = Fraction(1, 8) + Fraction(2, 8) + Fraction(1, 6)
    run = speculative_round(language, propose_chain(language, 3), rules.rejection)
    assert certify(language, run, 2).emitted == 1 + alpha + alpha**2 + alpha**3


# Planted faults. Each is one that a published decoder has shipped.


def falls_back_to_p(tree, laws, random):
    class Faulty:
        coin, draw = random.coin, random.draw

        def draw_rest(self, depth, weights):
            return random.draw_rest(depth, laws.target(depth))

    return rules.rejection(tree, laws, Faulty())


def uses_the_residual_after_full_acceptance(tree, laws, random):
    class Faulty:
        coin, draw_rest = random.coin, random.draw_rest

        def draw(self, depth, weights):
            rest = np.maximum(laws.target(depth) - laws.draft(depth), 0)
            return random.draw(depth, rest if rest.sum() else weights)

    return rules.rejection(tree, laws, Faulty())


def accepts_with_p_alone(tree, laws, random):
    class Faulty:
        draw, draw_rest = random.draw, random.draw_rest

        def coin(self, depth, slot, probability):
            p = laws.target(depth)[tree.tokens[depth + 1]]
            return random.coin(depth, slot, p)

    return rules.rejection(tree, laws, Faulty())


def believes_drafts_were_drawn(tree, laws, random):
    """A point-mass draft judged with the soft law."""
    return rules.rejection(tree, laws, random)


def keeps_the_refused_mass(tree, laws, random):
    class Faulty:
        coin, draw = random.coin, random.draw

        def draw_rest(self, depth, weights):
            return random.draw_rest(depth, laws.target(0))

    return rules.point_mass(tree, laws, Faulty())


def does_not_renormalise(tree, laws, random):
    class Faulty:
        draw, draw_rest = random.draw, random.draw_rest

        def coin(self, depth, slot, probability):
            # The second child is tried with p instead of p / (1 - p of the first).
            token = tree.tokens[tree.children[0][slot]]
            return random.coin(depth, slot, laws.target(0)[token] if depth == 0 else probability)

    return rules.point_mass(tree, laws, Faulty())


def tries_twice(tree, laws, random):
    """Sample-and-match that draws again, by another coin, when the first was not drafted."""

    class Again:
        draw = staticmethod(random.draw_rest)

    first = rules.match(tree, laws, random)
    return first if first.path else rules.match(tree, laws, Again)


def ends_on_the_deepest_law(tree, laws, random):
    """Takes the next token from the last node's law wherever the walk stopped."""
    verdict = rules.match(tree, laws, random)
    token = random.draw(0, laws.target(len(tree) - 1))
    return rules.Verdict(path=verdict.path, token=token)


def argmax_chain_with_soft_laws(language):
    def propose(text, random):
        tokens, laws = [0], [None]
        for _ in range(2):
            laws.append(language.draft(text + tuple(tokens[1:])))
            tokens.append(int(np.argmax(laws[-1])))
        return Proposal(tree=Tree(tuple(tokens), (-1, 0, 1)), laws=tuple(laws))

    return propose


def better_of_two(language):
    """Drafts two tokens from q and keeps the likelier: the choice looks at the draw."""

    def propose(text, random):
        law = language.draft(text)
        token = max(random.draw(0, law), random.draw(0, law), key=lambda t: law[t])
        return Proposal(tree=Tree((0, token), (-1, 0)), laws=(None, law))

    return propose


MUTANTS = {
    "falls back to p": (falls_back_to_p, lambda la: propose_chain(la, 2)),
    "residual after full acceptance": (
        uses_the_residual_after_full_acceptance,
        lambda la: propose_chain(la, 2),
    ),
    "accepts with p alone": (accepts_with_p_alone, lambda la: propose_chain(la, 2)),
    "argmax drafts, soft q": (believes_drafts_were_drawn, argmax_chain_with_soft_laws),
    "better of two": (rules.rejection, better_of_two),
    "keeps the refused mass": (keeps_the_refused_mass, lambda la: likeliest(la, "three")),
    "does not renormalise": (does_not_renormalise, lambda la: likeliest(la, "uneven")),
    "tries twice": (tries_twice, lambda la: likeliest(la, "uneven")),
    "wrong node's law": (ends_on_the_deepest_law, lambda la: likeliest(la, "uneven")),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_faults_are_found(name):
    verify, propose = MUTANTS[name]
    for seed in range(2):
        language = random_language(seed, vocab=4)
        found = certify(language, speculative_round(language, propose(language), verify), 3)
        assert found.distance > 0, seed


def test_greedy_at_a_soft_target_is_found():
    language = random_language(0)
    run = speculative_round(language, likeliest(language, "one"), rules.greedy)
    assert certify(language, run, 2).distance > 0


def test_outcomes_cover_every_branch_once():
    def process(random):
        return random.coin(0, 0, Fraction(1, 3)), random.draw(0, [1, 0, 3])

    found = list(outcomes(process))
    assert sum(weight for weight, _ in found) == 1
    assert Counter(result for _, result in found) == Counter(
        [(False, 0), (False, 2), (True, 0), (True, 2)]
    )
    assert {result: weight for weight, result in found}[True, 2] == Fraction(1, 4)


def test_calls_match_a_hand_count():
    # Draft always right: two tokens a call; texts of four take two calls.
    language = constant_language([0, 1], [0, 1])
    run = speculative_round(language, propose_chain(language, 1), rules.rejection)
    law, calls = emitted_law(run, 4)
    assert law == {(1, 1, 1, 1): 1}
    assert calls == 2


def test_laws_start_where_asked():
    language = random_language(4, order=1)
    run = speculative_round(language, propose_chain(language, 2), rules.rejection)
    law, _ = emitted_law(run, 2, start=(2,))
    assert distance(law, target_law(language, 2, start=(2,))) == 0
    assert distance(law, target_law(language, 2, start=(1,))) > 0


def test_a_coin_outside_zero_to_one_is_refused():
    with pytest.raises(ValueError, match=r"probability 3/2; it must lie in \[0, 1\]"):
        Branching().coin(0, 0, Fraction(3, 2))


def test_a_coin_read_twice_is_one_coin():
    def run(random):
        noise = Reads(random)
        first = noise.coin(0, 1, Fraction(1, 3))
        again = noise.coin(0, 1, Fraction(1, 2))
        picked = noise.pick(0, [Fraction(1, 4), Fraction(3, 4)])
        coin = noise.coin(0, 0, Fraction(1, 2))  # a pick's coin is that of slot 0
        apart = noise.draw(0, [1, 1]), noise.draw_rest(0, [1, 1])
        return first, again, picked, coin, apart

    found = Counter()
    for weight, outcome in outcomes(run):
        found[outcome] += weight
    assert sum(found.values()) == 1
    # One uniform u: first is u < 1/3, again u < 1/2. Another v: picked is v >= 1/4, coin v < 1/2.
    pairs = {
        (True, True): Fraction(1, 3),
        (False, True): Fraction(1, 6),
        (False, False): Fraction(1, 2),
    }
    others = {(0, True): Fraction(1, 4), (1, True): Fraction(1, 4), (1, False): Fraction(1, 2)}
    expected = {
        (*one, *other, apart): chance * share / 4
        for one, chance in pairs.items()
        for other, share in others.items()
        for apart in itertools.product(range(2), repeat=2)
    }
    assert dict(found) == expected


def test_a_rule_that_never_ends_is_stopped():
    def run(random):
        while random.coin(0, 0, Fraction(1, 2)) or True:
            pass

    with pytest.raises(ValueError, match="more than 10000 coins"):
        list(outcomes(run))
