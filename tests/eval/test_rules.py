"""The rules on real arrays: float law at vocabulary size, strictness, refusals, laziness."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from outrider.eval import rules
from outrider.eval.certificate.law import outcomes
from outrider.eval.rules import walk as rules_walk
from outrider.eval.trees.tree import Tree, chain, shape_from_counts


class NodeLaws:
    def __init__(self, target, draft=()):
        self._target, self._draft, self.asked = target, draft, []

    def target(self, node):
        self.asked.append(node)
        return self._target[node]

    def draft(self, node):
        return self._draft[node]


class Scripted:
    """Coins compare fixed uniforms; draws invert the cumulative weights."""

    def __init__(self, *uniforms):
        self.uniforms = list(uniforms)

    def coin(self, depth, slot, probability):
        return self.uniforms.pop(0) < float(probability)

    def draw(self, depth, weights):
        cdf = np.cumsum(np.asarray(weights, dtype=np.float64))
        return int(np.searchsorted(cdf, self.uniforms.pop(0) * cdf[-1], side="right"))

    draw_rest = draw


def random_laws(num_nodes, vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_nodes, vocab, generator=generator).mul(2).double().softmax(-1)


@pytest.mark.parametrize("convert", [lambda t: t, lambda t: t.numpy()], ids=["torch", "numpy"])
def test_rejection_at_vocabulary_size_returns_p_in_closed_form(convert):
    vocab = 50
    p_V, q_V = random_laws(2, vocab)
    law_V = torch.zeros(vocab, dtype=torch.float64)
    for token in range(vocab):
        laws = NodeLaws([convert(p_V), convert(p_V)], [None, convert(q_V)])
        tree = chain(0, [token])
        for weight, verdict in outcomes(
            lambda random, tree=tree, laws=laws: rules.rejection(tree, laws, OneDraw(random))
        ):
            first = token if verdict.path else verdict.token
            law_V[first] += float(weight) * q_V[token]
    # OneDraw replaces the bonus draw, which does not touch the first token.
    assert (law_V - p_V).abs().max() < 1e-12


class OneDraw:
    """Branches on coins and on the residual; the bonus token is of no interest."""

    def __init__(self, random):
        self.coin, self.draw_rest = random.coin, random.draw_rest

    def draw(self, depth, weights):
        return 0


@pytest.mark.parametrize("convert", [lambda t: t, lambda t: t.numpy()], ids=["torch", "numpy"])
def test_point_mass_at_vocabulary_size_returns_p_in_closed_form(convert):
    vocab = 400
    p_V = random_laws(1, vocab, seed=1)[0]
    tree = Tree((0, 7, 3, 9, 7), (-1, 0, 0, 0, 0))
    laws = NodeLaws([convert(p_V)] * 5)
    law_V = torch.zeros(vocab, dtype=torch.float64)
    for weight, verdict in outcomes(lambda random: rules.point_mass(tree, laws, OneDraw(random))):
        first = tree.tokens[verdict.path[0]] if verdict.path else verdict.token
        law_V[first] += float(weight)
    assert (law_V - p_V).abs().max() < 1e-12


def test_rejection_never_accepts_what_the_target_cannot_say():
    p, q = np.array([0.0, 1.0]), np.array([0.5, 0.5])
    verdict = rules.rejection(chain(0, [0]), NodeLaws([p, p], [None, q]), Scripted(0.0, 0.0))
    assert verdict == rules.Verdict(path=(), token=1)


def test_a_token_its_law_cannot_produce_is_a_defect():
    p, q = np.array([0.5, 0.5]), np.array([0.0, 1.0])
    with pytest.raises(ValueError, match="drafted token 0 has probability 0 under its own draft"):
        rules.rejection(chain(0, [0]), NodeLaws([p, p], [None, q]), Scripted(0.0, 0.0))


def test_rejection_refuses_a_branching_tree():
    with pytest.raises(ValueError, match="judges chains; for a drawn tree use iid, without"):
        rules.rejection(Tree((0, 1, 2), (-1, 0, 0)), NodeLaws([]), Scripted())


def test_a_residual_of_nothing_falls_back_to_p_and_is_counted():
    class AlwaysRefuses(Scripted):
        def coin(self, depth, slot, probability):
            return False

    p = np.array([0.25, 0.75])
    verdict = rules.rejection(chain(0, [0]), NodeLaws([p, p], [None, p]), AlwaysRefuses(0.5))
    assert verdict == rules.Verdict(path=(), token=1, num_degenerate=1)


def test_p_is_asked_for_only_where_the_walk_goes():
    tree = Tree((0, 1, 2, 3, 4), (-1, 0, 0, 1, 2))
    hot = np.eye(5)
    laws = NodeLaws([hot[2], hot[0], hot[3], hot[0], hot[0]])
    assert rules.greedy(tree, laws, Scripted()) == rules.Verdict(path=(2,), token=3)
    assert laws.asked == [0, 2]
    laws.asked.clear()
    assert rules.point_mass(tree, laws, Scripted(0.5, 0.5, 0.5, 0.5)).path == (2,)
    assert laws.asked == [0, 2]


def test_of_two_siblings_with_one_token_the_first_continues():
    tree = Tree((0, 2, 2, 1, 1), (-1, 0, 0, 1, 2))
    hot = np.eye(3)
    laws = NodeLaws([hot[2], hot[1], hot[1], hot[0], hot[0]])
    for rule, uniforms in ((rules.greedy, 0), (rules.match, 3), (rules.point_mass, 4)):
        verdict = rule(tree, laws, Scripted(*[0.5] * uniforms))
        assert verdict == rules.Verdict(path=(1, 3), token=0), rule


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_id_among_equals(dtype):
    row_V = torch.zeros(49152, dtype=dtype)
    for ids in ([40000, 12345, 12346], [1, 49151], [31, 33, 47]):
        row_V.zero_()[ids] = 1.0
        verdict = rules.greedy(chain(0, []), NodeLaws([row_V]), Scripted())
        assert verdict.token == min(ids)


def test_greedy_does_not_mind_logits_instead_of_probabilities():
    logits_V = np.array([-3.0, -1.0, -2.0])
    assert rules.greedy(chain(0, [1]), NodeLaws([logits_V] * 2), Scripted()).path == (1,)


def test_point_mass_leaves_the_given_law_unchanged():
    p = torch.tensor([0.5, 0.25, 0.25])
    tree = Tree((0, 0, 1), shape_from_counts([2]))
    rules.point_mass(tree, NodeLaws([p] * 3), Scripted(0.9, 0.9, 0.5))
    assert p.tolist() == [0.5, 0.25, 0.25]


def test_a_last_child_with_all_remaining_mass_always_stands():
    p = torch.tensor([0.3, 0.7], dtype=torch.float32)
    tree = Tree((0, 0, 1), (-1, 0, 0))
    coins = Scripted(1 - 2**-53, 1 - 2**-53, 0.0)
    assert rules.point_mass(tree, NodeLaws([p] * 3), coins).path == (2,)


def test_only_exact_rules_are_offered():
    drawn = {"rejection", "iid", "without", "k_sequential", "hybrid", "block", "traversal"}
    assert set(rules.RULES) == {"greedy", "match", "point_mass", "one_coin"} | drawn
    with pytest.raises(ValueError, match=r"'typical'; choose one of greedy, rejection, match, poi"):
        rules.rule_named("typical")


def test_rational_weights_stay_rational():
    p = np.array([Fraction(1, 3), Fraction(2, 3)], dtype=object)
    q = np.array([Fraction(2, 3), Fraction(1, 3)], dtype=object)
    seen = []

    class Notes(Scripted):
        def coin(self, depth, slot, probability):
            seen.append(probability)
            return False

        def draw_rest(self, depth, weights):
            seen.append(list(weights))
            return 1

    rules.rejection(chain(0, [0]), NodeLaws([p, p], [None, q]), Notes())
    assert seen == [Fraction(1, 2), [0, Fraction(1, 3)]]


def test_the_divisor_of_k_sequential_is_the_least_tick_at_which_it_is_exact():
    rng = np.random.default_rng(0)

    def law():
        counts = rng.multinomial(16, rng.dirichlet(np.full(6, 0.7)))
        return np.array([Fraction(int(count), 16) for count in counts], dtype=object)

    def is_exact(p, q, rho, count):
        beta = sum(min(one / rho, other) for one, other in zip(p, q, strict=True))
        return 1 - (1 - beta) ** count <= rho * beta

    searched = 0
    for _ in range(1500):
        p, q, count = law(), law(), int(rng.integers(2, 6))
        rho = Fraction(rules_walk.k_sequential_rho(p, q, count))
        assert is_exact(p, q, rho, count)
        if 1 < rho < count:
            searched += 1
            assert not is_exact(p, q, rho - Fraction(1, rules_walk.RHO_TICKS), count)
    assert searched > 500
