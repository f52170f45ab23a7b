"""Acceptance at a node: rules at vocabulary size, closed forms, and the best possible."""

from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from outrider.eval.certificate import contest
from outrider.eval.certificate.mutant_inputs import draws_from_p_after_refusal
from outrider.eval.certificate.node_law import node_law
from outrider.eval.certificate.pairs import SETTINGS, make_pairs, mean_acceptance
from outrider.eval.rules import RULES, acceptance, transport
from outrider.eval.rules.verdict import Siblings

# verification.md's table of means, by column.
TABLE = {
    (0.6, 0.5, 1): (0.585, 0.585, 0.847, 0.847, 0.847, 0.847, 0.847, 0.667, 0.847),
    (0.6, 0.5, 2): (0.717, 0.809, 0.894, 0.909, 0.943, 0.942, 0.987, 0.857, 0.978),
    (0.6, 0.5, 4): (0.816, 0.959, 0.931, 0.953, 0.984, 0.991, 1.0, 0.974, 1.0),
    (1.0, 0.5, 1): (0.400, 0.400, 0.862, 0.862, 0.862, 0.862, 0.862, 0.518, 0.862),
    (1.0, 0.5, 2): (0.566, 0.638, 0.912, 0.934, 0.981, 0.940, 0.996, 0.737, 0.985),
    (1.0, 1.0, 2): (0.549, 0.630, 0.824, 0.844, 0.889, 0.881, 0.955, 0.707, 0.933),
    (1.0, 1.0, 4): (0.681, 0.867, 0.881, 0.912, 0.961, 0.965, 0.999, 0.902, 0.995),
}
CLOSED = {
    ("iid", Siblings.IID): acceptance.accepted_iid,
    ("without", Siblings.WITHOUT): acceptance.accepted_without,
    ("k_sequential", Siblings.IID): acceptance.accepted_k_sequential,
    ("hybrid", Siblings.HYBRID): acceptance.accepted_hybrid,
    ("match", Siblings.CHOSEN): acceptance.accepted_chosen,
    ("point_mass", Siblings.CHOSEN): acceptance.accepted_chosen,
    ("one_coin", Siblings.CHOSEN): acceptance.accepted_chosen,
}


def peaked(vocab, support, seed=0):
    """p everywhere, q on a few tokens, p's likeliest among them; float64 sums to one."""
    rng = np.random.default_rng(seed)
    logits = 3 * rng.standard_normal(vocab)
    p = np.exp(logits - logits.max())
    q = np.zeros(vocab)
    chosen = np.argsort(-p)[:support]
    q[chosen] = p[chosen] * np.exp(rng.standard_normal(support))
    return p / p.sum(), q / q.sum()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("rule", "siblings"), CLOSED)
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_a_node_at_vocabulary_size_returns_p_and_accepts_the_closed_form(
    rule, siblings, count, convert
):
    p, q = peaked(128_000, 4)
    found = node_law(RULES[rule].verify, siblings, convert(p), convert(q), count)
    assert np.abs(found.total_V - p).max() < 1e-12
    wanted = CLOSED[rule, siblings](p, q, count)
    assert np.abs(found.accepted_V - wanted).max() < 1e-12


def test_a_node_law_sees_a_fault():
    p, q = peaked(1000, 4)
    found = node_law(RULES["iid"].verify, Siblings.CHOSEN, p, q, 2)
    assert np.abs(found.total_V - p).max() < 1e-12
    found = node_law(draws_from_p_after_refusal, Siblings.WITHOUT, p, q, 2)
    assert np.abs(found.total_V - p).max() > 1e-4


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_mean_acceptance_is_the_published_table(setting):
    found = list(mean_acceptance(*setting, num_pairs=1000).values())
    assert found[:9] == pytest.approx(TABLE[setting], abs=0.03)
    assert found[8] == pytest.approx(found[9], abs=1e-12)  # R7 is the best for its drafts


def tuples(q, num_drafts, siblings):
    """The law of draft tuples, by listing them."""
    tokens = [token for token, chance in enumerate(q) if chance]
    if siblings is Siblings.IID:
        return {
            drafts: np.prod([q[token] for token in drafts])
            for drafts in product(tokens, repeat=num_drafts)
        }
    if siblings is Siblings.HYBRID:
        top = tuple(sorted(range(len(q)), key=lambda token: -q[token])[: num_drafts - 1])
        rest = sum(q[token] for token in tokens if token not in top)
        return {(*top, token): q[token] / rest for token in tokens if token not in top}
    found = {}
    for drafts in permutations(tokens, num_drafts):
        chance, left = 1, 1
        for token in drafts:
            chance, left = chance * q[token] / left, left - q[token]
        found[drafts] = chance
    return found


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
@pytest.mark.parametrize(
    ("siblings", "closed"),
    [
        (Siblings.IID, transport.optimum_iid),
        (Siblings.WITHOUT, transport.optimum_without),
        (Siblings.HYBRID, transport.optimum_hybrid),
    ],
)
def test_the_best_acceptance_is_the_minimum_over_all_sets(siblings, closed, num_drafts):
    rng = np.random.default_rng(1)
    for _ in range(5):
        p, q = (np.array([Fraction(int(w)) for w in rng.integers(1, 9, 5)]) for _ in "pq")
        p, q = p / p.sum(), q / q.sum()
        assert closed(p, q, num_drafts) == transport.optimum(p, tuples(q, num_drafts, siblings))


def test_the_minimum_cut_is_the_best_transport_plan():
    rng = np.random.default_rng(2)
    p, q = rng.dirichlet(np.ones(4)), rng.dirichlet(np.ones(4))
    law = tuples(q, 2, Siblings.WITHOUT)
    # One variable for each (tuple, token): mass sent; kept mass is where the token was drafted.
    gains = np.array([[-(token in drafts) for token in range(4)] for drafts in law]).ravel()
    rows = np.kron(np.eye(len(law)), np.ones(4))
    columns = np.kron(np.ones(len(law)), np.eye(4))
    equal = np.concatenate([list(law.values()), p])
    plan = linprog(gains, A_eq=np.vstack([rows, columns]), b_eq=equal)
    assert -plan.fun == pytest.approx(transport.optimum(p, law), abs=1e-9)


def test_no_rule_accepts_more_than_the_best():
    for pair in make_pairs(1.0, 1.0, 100):
        for n in (1, 2, 3):
            best = transport.optimum_iid(pair.p_V, pair.q_V, n)
            k_sequential = acceptance.accepted_k_sequential(pair.p_V, pair.q_V, n).sum()
            assert acceptance.accepted_iid(pair.p_V, pair.q_V, n).sum() <= best + 1e-12
            assert (1 - np.exp(-1)) * best - 1e-9 <= k_sequential <= best + 1e-12
            assert (
                acceptance.accepted_without(pair.p_V, pair.q_V, n).sum()
                <= transport.optimum_without(pair.p_V, pair.q_V, n) + 1e-12
            )


def test_too_many_sets_are_refused():
    with pytest.raises(ValueError, match="vocabulary has 17 tokens; sets are tried for at most 16"):
        transport.optimum([Fraction(1, 17)] * 17, {})


def test_block_never_gets_fewer_tokens_than_rejection():
    found = contest.block_against_rejection(1000)
    assert found.num_lost == 0
    assert found.mean_new > found.mean_old
    assert found.where == ""


def test_traversal_does_not_lose_where_only_the_root_branches():
    found = contest.traversal_against_recursive((2, 1), 30)
    assert found.num_lost == 0
    assert found.mean_new > found.mean_old


def test_a_loss_is_counted_and_named():
    rules = (RULES["traversal"].verify, RULES["match"].verify)
    found = contest.compare("backwards", rules, Siblings.WITHOUT, (2, 1), 5)
    assert found.num_lost > 0
    assert found.largest_loss > 0
    assert found.where.startswith("seed")
