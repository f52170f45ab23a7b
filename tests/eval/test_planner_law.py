"""Planned trees keep the target's exact law; planners that see what they judge do not.

Budgets 2 to 5 on languages of three tokens whose laws depend on the last two. Each prefix is
enumerated once, in Fractions.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from outrider.eval import rules
from outrider.eval.certificate.law import Language, Proposal, certify, speculative_round
from outrider.eval.certificate.proposals import propose_drawn, propose_grown
from outrider.eval.trees.growth import DrawnGrowth, Planner
from outrider.eval.trees.plans import DrawnPlan, StaticPlan, TreePlan
from outrider.eval.trees.tree import Tree

ORDER = 1


def fractions(weights):
    weights = [Fraction(int(weight)) for weight in weights]
    return np.array([weight / sum(weights) for weight in weights], dtype=object)


def language(seed, draft=(1, 9)):
    rng = np.random.default_rng(seed)
    p = [fractions(rng.integers(1, 10, size=3)) for _ in range(3)]
    q = [fractions(rng.integers(*draft, size=3)) for _ in range(3)]
    return Language(
        target=lambda text: p[text[-1] if text else 0],
        draft=lambda text: q[text[-1] if text else 0],
    )


def holes(seed):
    """Draft laws with zeros and equal shares: fewer slots than width, and ties."""
    p = language(seed).target
    q = [fractions([1, 1, 0]), fractions([0, 0, 1]), fractions([1, 1, 1])]
    return Language(target=p, draft=lambda text: q[text[-1] if text else 0])


LANGUAGES = {
    "random 0": language(0),
    "random 1": language(1),
    "holes and ties": holes(2),
    "all ties": language(3, draft=(1, 2)),
}


def found(lang, propose, rule=rules.recursive, num_tokens=2):
    return certify(lang, speculative_round(lang, propose, rule), num_tokens, order=ORDER)


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
@pytest.mark.parametrize("name", LANGUAGES)
def test_drawn_trees_are_exact(name, nodes):
    lang = LANGUAGES[name]
    certificate = found(lang, propose_drawn(lang, DrawnPlan(2, 2, nodes)))
    assert certificate.distance == 0, certificate.worst


@pytest.mark.parametrize("plan", [DrawnPlan(3, 2, 3), DrawnPlan(1, 3, 3), DrawnPlan(2, 3, 4)])
def test_deeper_and_wider_drawn_trees_are_exact(plan):
    lang = LANGUAGES["random 0"]
    assert found(lang, propose_drawn(lang, plan)).distance == 0


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
@pytest.mark.parametrize("rule", [rules.match, rules.point_mass])
@pytest.mark.parametrize("name", LANGUAGES)
def test_dynamic_trees_are_exact(name, rule, nodes):
    lang = LANGUAGES[name]
    assert found(lang, propose_grown(lang, TreePlan(2, 2, nodes)), rule, 3).distance == 0


@pytest.mark.parametrize("rule", [rules.match, rules.point_mass])
@pytest.mark.parametrize(
    "paths", [((0,), (2,), (0, 1)), ((1,),), ((0,), (0, 0), (0, 0, 0), (1,), (1, 0))]
)
def test_static_trees_are_exact(paths, rule):
    for lang in LANGUAGES.values():
        assert found(lang, propose_grown(lang, StaticPlan(paths)), rule, 3).distance == 0


def test_match_is_exact_for_drawn_trees_and_accepts_less():
    lang = LANGUAGES["random 0"]
    propose = propose_drawn(lang, DrawnPlan(2, 2, 4))
    by_match, by_rejection = found(lang, propose, rules.match), found(lang, propose)
    assert by_match.distance == 0
    assert by_match.emitted < by_rejection.emitted


# Early stops: what is already drawn may decide whether drafting goes on, not whether it is kept.


def stops(lang, trigger, *, keeps):
    """A chain of up to three that ends when `trigger(law, token)` holds."""

    def propose(text, random):
        tokens, laws = [0], [None]
        for depth in range(3):
            law = lang.draft(text + tuple(tokens[1:]))
            token = random.draw(depth, law)
            stop = trigger(law, token)
            if keeps or not stop:
                tokens.append(token)
                laws.append(law)
            if stop:
                break
        return Proposal(
            tree=Tree(tuple(tokens), tuple(range(-1, len(tokens) - 1))), laws=tuple(laws)
        )

    return propose


def is_unlikely(law, token):
    return law[token] < Fraction(1, 3)


def is_flat(law, token):
    return max(law) < Fraction(1, 2)


@pytest.mark.parametrize("name", ["random 0", "random 1"])
def test_early_stops_that_see_no_token_they_drop_are_exact(name):
    lang = LANGUAGES[name]
    for trigger, keeps in ((is_unlikely, True), (is_flat, True), (is_flat, False)):
        propose = stops(lang, trigger, keeps=keeps)
        assert found(lang, propose, rules.rejection, 3).distance == 0


# Planted planners. Each looks at a token that it decides about.


def drawn_pool(lang, text, random):
    """Two children drawn under the root and two under each: (path, law, share of the token)."""
    pool = []

    def under(path, depth):
        left = lang.draft(text + path)
        for _ in range(2):
            if not left.sum():
                return
            law = left / left.sum()
            token = random.draw(depth, left)
            pool.append(((*path, token), law, lang.draft(text + path)[token]))
            left = left + 0
            left[token] = 0
            if depth == 0:
                under((*path, token), 1)

    under((), 0)
    return sorted(pool, key=lambda entry: len(entry[0]))


def as_proposal(kept):
    """Kept entries in order of drawing, those whose parent was dropped left out."""
    number, tokens, parents, laws = {(): 0}, [0], [-1], [None]
    for path, law, _ in kept:
        if path[:-1] in number:
            number[path] = len(tokens)
            tokens.append(path[-1])
            parents.append(number[path[:-1]])
            laws.append(law)
    return Proposal(tree=Tree(tuple(tokens), tuple(parents)), laws=tuple(laws))


def score(pool, path):
    share = {entry[0]: entry[2] for entry in pool}
    return math.prod(share[path[: n + 1]] for n in range(len(path)))


def by_drawn_share(lang, budget):
    def propose(text, random):
        pool = drawn_pool(lang, text, random)
        best = sorted(pool, key=lambda entry: -score(pool, entry[0]))[:budget]
        return as_proposal([entry for entry in pool if entry in best])

    return propose


def by_later_sibling(lang, budget):
    """Keeps all or nothing of the root's children, by the second one's share."""

    def propose(text, random):
        pool = drawn_pool(lang, text, random)
        second = [entry for entry in pool if len(entry[0]) == 1][1:]
        is_kept = not second or second[0][2] > Fraction(1, 4)
        return as_proposal([entry for entry in pool if is_kept][:budget])

    return propose


def by_own_descendants(lang, budget):
    """Keeps a child when what follows it looks sure: a schedule by continuation confidence."""

    def propose(text, random):
        pool = drawn_pool(lang, text, random)
        kept = [entry for entry in pool if max(lang.draft(text + entry[0])) > Fraction(1, 2)]
        return as_proposal(kept[:budget])

    return propose


def in_reverse(lang, budget):
    def propose(text, random):
        pool = drawn_pool(lang, text, random)
        backwards = pool[::-1]
        return as_proposal(sorted(backwards, key=lambda entry: len(entry[0]))[:budget])

    return propose


def drops_its_trigger(lang, budget):
    return stops(lang, is_unlikely, keeps=False)


@pytest.mark.parametrize(
    "faulty", [by_drawn_share, by_later_sibling, by_own_descendants, in_reverse, drops_its_trigger]
)
def test_planners_that_look_are_rejected(faulty):
    assert any(
        found(lang, faulty(lang, budget)).distance
        for lang in (language(0), language(1), language(5))
        for budget in (2, 4)
    )


def test_the_pool_of_the_planted_planners_is_sound():
    """Keeping everything, in order of drawing, is exact: the faults above are the planners'."""

    def propose(text, random):
        return as_proposal(drawn_pool(lang, text, random))

    for lang in LANGUAGES.values():
        assert found(lang, propose).distance == 0


def test_ties_broken_for_the_deeper_slot_are_rejected(monkeypatch):
    """With shares of one, a slot competes with descendants that know its token."""

    best = Planner._best

    def deeper_first(self, nodes, count):
        if nodes.start > 1:  # what to expand next is chosen within one level
            return best(self, nodes, count)
        chosen = sorted(nodes, key=lambda node: (-self._scores[node], -node))[:count]
        # The parents of what is kept must be kept too: siblings give way.
        for node in list(chosen):
            while (node := self.parents[node]) > 0:
                chosen.append(node)
        return sorted(set(chosen))

    flat = fractions([1, 1, 1])
    sure = [fractions([1, 0, 0]), fractions([1, 1, 1]), fractions([1, 1, 1])]
    p = language(0).target
    lang = Language(target=p, draft=lambda text: sure[text[-1]] if text else flat)
    assert found(lang, propose_drawn(lang, DrawnPlan(2, 2, 1))).distance == 0
    monkeypatch.setattr(Planner, "_best", deeper_first)
    lone = Language(target=p, draft=lambda text: fractions([1, 1, 1]))
    broken = [
        certify(
            la, speculative_round(la, propose_drawn(la, DrawnPlan(2, 2, n)), rules.recursive), 2
        )
        for la in (lang, lone)
        for n in (1, 2, 3)
    ]
    assert any(one.distance for one in broken)


# What the planner's interface refuses.


def test_shares_of_drawn_tokens_are_refused():
    planner = Planner()
    with pytest.raises(ValueError, match=r"not sorted.*what was drawn must not be known here"):
        planner.add_level([[math.log(0.2), math.log(0.7)]], 2)


def test_a_planner_is_told_nothing_but_sorted_shares():
    """Two growths with other tokens and equal sorted shares are planned alike."""
    shares = [[math.log(0.6), math.log(0.3)]]
    laws = (np.array([0.6, 0.3, 0.1]), np.array([0.1, 0.3, 0.6]))
    kept = []
    for law, picks in itertools.product(laws, ([0, 1], [1, 2], [2, 0])):
        order = iter(picks * 3)
        growth = DrawnGrowth(9, lambda left, depth, slot, order=order: next(order))
        growth.add_level([law], shares, 2)
        growth.add_level([law, law], shares * 2, 2)
        tree, _ = growth.select(3)
        kept.append(tree.parents)
    assert len(set(kept)) == 1


def test_slots_that_are_dropped_are_never_drawn():
    drawn = []

    def draw(left, depth, slot):
        drawn.append(slot)
        return int(np.argmax(left))

    growth = DrawnGrowth(9, draw)
    growth.add_level([np.array([0.6, 0.3, 0.1])], [[math.log(0.6), math.log(0.3)]], 1)
    growth.add_level([np.array([0.9, 0.05, 0.05])], [[math.log(0.9), math.log(0.05)]], 1)
    tree, laws = growth.select(2)
    assert drawn == [1, 3]
    assert tree == Tree((9, 0, 0), (-1, 0, 1))
    assert laws[1].tolist() == pytest.approx([0.6, 0.3, 0.1])
