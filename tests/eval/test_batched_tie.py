"""Batched verification decides as the certified rules do, and the tie catches planted faults."""

import pytest
import torch

from outrider.eval.batched import BATCHED, rows
from outrider.eval.batched import k_seq as batched_k_sequential
from outrider.eval.batched import path as path_rules
from outrider.eval.batched import reach as traversal
from outrider.eval.batched import residuals as batched_recursive
from outrider.eval.batched import walk as batched_walk
from outrider.eval.batched.tie import tie
from outrider.eval.rules import RULES

SPREAD = (3, 511, 512, 700, 1023, 1300)
"""Six tokens in three blocks of a vocabulary that ends within one."""


def test_every_rule_has_a_batched_form():
    assert BATCHED.keys() == RULES.keys()


@pytest.mark.parametrize("ids", [range(6), SPREAD], ids=["small", "several blocks"])
@pytest.mark.parametrize("rule", BATCHED)
def test_a_batch_decides_as_the_rule(rule, ids):
    found = tie(rule, 500, ids=ids)
    assert found.differences == ()
    assert found.num_decisions > 600


@pytest.mark.parametrize("rule", BATCHED)
def test_rounds_one_at_a_time_decide_alike(rule):
    assert tie(rule, 60, seed=1, at_once=1).differences == ()


@pytest.mark.parametrize("rule", BATCHED)
def test_few_rows_at_a_time_decide_alike(rule, monkeypatch):
    monkeypatch.setattr(rows, "rows_at_once", lambda p_BNV: 1)
    assert tie(rule, 100, seed=2).differences == ()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rule", BATCHED)
def test_thousands_of_rounds_decide_alike(rule, dtype):
    found = tie(rule, 4000, seed=3, dtype=dtype, ids=SPREAD)
    assert found.differences == ()
    assert found.num_decisions > 5000


def ends_at_the_root(*args):
    path = walk(*args)
    return path._replace(last_B=torch.zeros_like(path.last_B))


def ends_one_too_high(*args):
    path = walk(*args)
    before = torch.cat([torch.zeros_like(path.nodes_BD[:, :1]), path.nodes_BD], 1)
    return path._replace(last_B=rows.at(before, (path.lengths_B - 1).clamp(min=0)))


def last_standing(drafts, is_on_BN):
    ranks_BN = drafts.shapes.ranks_BN
    is_on_BN = is_on_BN | (torch.arange(ranks_BN.shape[1]) == 0)
    return torch.where(is_on_BN, ranks_BN, -1).argmax(-1)


def edge_belongs_below(weights, coins):
    return draw(weights, torch.nextafter(coins, torch.zeros_like(coins)))


draw = rows.draw
walk = batched_walk.walk
judge_one = batched_recursive.judge_one
reach = traversal.reach
rest_weights = batched_k_sequential.rest_weights


def forgets_the_refusal(drafts, one):
    return judge_one(drafts, one)._replace(factor_X=torch.zeros_like(one.p_XK[:, 0]))


FAULTS = {
    "last of two siblings continues": (
        "match",
        batched_walk,
        "_first_child",
        lambda drafts, is_it: (
            torch.where(is_it, drafts.shapes.children_BNK, -1)
            .amax(-1)
            .masked_fill(~is_it.any(-1), drafts.tokens_BN.shape[1])
        ),
    ),
    "greedy ends on the root's token": ("greedy", batched_walk, "walk", ends_at_the_root),
    "bonus from the root's row": ("match", batched_walk, "walk", ends_at_the_root),
    "coin on an edge falls below": ("match", rows, "draw", edge_belongs_below),
    "draw after a refusal by plain noise": (
        "point_mass",
        batched_walk,
        "last_coin",
        lambda noise, round_X, depth_X, _: noise.targets_BE[round_X, depth_X],
    ),
    "residual draw by plain noise": (
        "rejection",
        batched_recursive,
        "last_coin",
        lambda noise, round_X, depth_X, _: noise.targets_BE[round_X, depth_X],
    ),
    "refused mass is not lost": (
        "point_mass",
        batched_walk,
        "_left",
        lambda shares_BNK, outside_BN: torch.ones_like(shares_BNK),
    ),
    "duplicates keep a share": (
        "one_coin",
        rows,
        "is_repeated",
        lambda tokens, is_there: torch.zeros_like(is_there),
    ),
    "children stay in the last draw": (
        "one_coin",
        rows,
        "without",
        lambda weights, tokens, is_there: weights,
    ),
    "residual of the parent": ("rejection", batched_recursive, "walk", ends_one_too_high),
    "equality accepts": (
        "rejection",
        batched_recursive,
        "stands",
        lambda coin, share, mass, q, left: coin * mass * q <= share * left,
    ),
    "residual not normalised": (
        "iid",
        batched_recursive,
        "stands",
        lambda coin, share, mass, q, left: coin * q < share * left,
    ),
    "forgets the first refusal": (
        "iid",
        batched_recursive,
        "reduced_factor",
        lambda factor, mass, left: mass / left,
    ),
    "sibling leaves, law not normalised": (
        "without",
        batched_recursive,
        "left_masses",
        lambda q_XK, outside_X: torch.ones_like(q_XK),
    ),
    "divisor of one": (
        "k_sequential",
        batched_k_sequential,
        "divisor",
        lambda p_BV, q_BV, *_: torch.ones(len(p_BV), dtype=torch.float64),
    ),
    "residual of one draft": (
        "k_sequential",
        batched_k_sequential,
        "rest_weights",
        lambda p, q, rho, count: rest_weights(p, q, rho, count.clamp(max=1)),
    ),
    "chosen siblings lose mass": (
        "hybrid",
        batched_recursive,
        "rest_weights",
        lambda drafts, one, factor_X, p_XV, q_XV: rows.excess(p_XV, q_XV, factor_X),
    ),
    "hybrid forgets the refusal": ("hybrid", batched_recursive, "judge_one", forgets_the_refusal),
    "first failure ends": ("block", path_rules, "first_standing", last_standing),
    "no vocabulary sum": ("block", path_rules, "weight_after", lambda sums, weights: weights),
    "longest is not preferred": ("traversal", path_rules, "first_standing", last_standing),
    "weight is not updated": (
        "traversal",
        traversal,
        "weight_after",
        lambda sums, weights: weights,
    ),
    "weight does not carry down": (
        "traversal",
        traversal,
        "reach",
        lambda weight, *rest: reach(torch.ones_like(weight), *rest),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    rule, module, name, replacement = FAULTS[fault]
    assert tie(rule, 1000, seed=4).differences == ()
    monkeypatch.setattr(module, name, replacement)
    assert tie(rule, 1000, seed=4).differences != ()


def test_every_rule_has_a_planted_fault():
    untested = {"greedy"}  # what it shares with match is planted there
    assert {rule for rule, *_ in FAULTS.values()} | untested == BATCHED.keys() | untested
