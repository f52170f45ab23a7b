"""The tie between batched verification and the rules: the same laws and noise, the same decisions.

Laws are dyadic, so that sums are exact in float32, and the rules run on Fractions as they do in
the certificate. Dimensions: B rounds, N nodes, R rows of q, V vocabulary.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch

from outrider.eval.batched import BATCHED, VerifyBatch
from outrider.eval.batched.drafts import Drafts, Noise, Verdicts
from outrider.eval.batched.k_seq import k_sequential
from outrider.eval.batched.shapes import shapes_of
from outrider.eval.certificate.children import children
from outrider.eval.rules import RULES
from outrider.eval.rules.verdict import Siblings, Verdict, Weights
from outrider.eval.trees.tree import Tree

_UNITS = 16
"""A law's weights are multiples of one sixteenth."""
_VOCAB = 6
_EDGES, _FINE = 64, 1 << 20
_RHO_STEPS = 40
# Rules whose thresholds are quotients of dyadic numbers get coins that never fall on one.
_DIVIDING = {"without", "k_sequential", "hybrid", "block", "traversal"}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One round to judge: a drafted tree, exact laws at its nodes, and noise."""

    tree: Tree
    siblings: Siblings
    p: Sequence[Weights]
    q: Sequence[Weights]
    """By node, what its children were drawn from."""
    drawn: Sequence[Weights | None]
    """By node, the law of its own token; None where it was chosen."""
    coins: Sequence[Sequence[Fraction]]
    """By depth and slot; the path rules number the coins by node."""
    targets: Sequence[Fraction]
    rests: Sequence[Fraction]

    def target(self, node: int) -> Weights:
        """The law p after a node."""
        return self.p[node]

    def draft(self, node: int) -> Weights | None:
        """The law that a node's token was drawn from."""
        return self.drawn[node]


class Scripted:
    """A problem's noise, for a rule; counts how often it was asked."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.num_asked = 0

    def coin(self, depth: int, slot: int, probability: Any) -> bool:  # noqa: ANN401 (any number)
        """Whether the depth's coin of this slot is below the probability."""
        self.num_asked += 1
        return self._problem.coins[depth][slot] < probability

    def pick(self, depth: int, shares: Sequence[Any]) -> int:
        """The outcome on whose share the depth's first coin falls."""
        return self._draw(self._problem.coins[depth][0], shares)

    def draw(self, depth: int, weights: Weights) -> int:
        """A token from p."""
        return self._draw(self._problem.targets[depth], weights)

    def draw_rest(self, depth: int, weights: Weights) -> int:
        """A token from what a rejection left."""
        return self._draw(self._problem.rests[depth], weights)

    def _draw(self, coin: Fraction, weights: Sequence[Any]) -> int:
        self.num_asked += 1
        point, reached = coin * sum(weights), Fraction(0)
        for outcome, weight in enumerate(weights):
            reached += weight
            if reached > point:
                return outcome
        raise AssertionError("a coin below one falls on some outcome")


def random_law(rng: random.Random) -> Weights:
    """A law in sixteenths: spread, sparse, one-hot, or with equals."""
    support = rng.sample(range(_VOCAB), rng.choice([1, 2, 3, 3, 4, _VOCAB]))
    units = [0] * _VOCAB
    if rng.random() < 0.25:
        support = support[: 1 << (len(support).bit_length() - 1)]
        for token in support:
            units[token] = _UNITS // len(support)
    else:
        for token in rng.choices(support, k=_UNITS):
            units[token] += 1
    return np.array([Fraction(unit, _UNITS) for unit in units], dtype=object)


def _draft_law(rng: random.Random, p: Weights) -> Weights:
    """A draft's law: p, near p, disjoint from p where p leaves room, or any."""
    kind = rng.choice(["equal", "near", "near", "near", "disjoint", "any"])
    room = [token for token in range(_VOCAB) if p[token] == 0]
    if kind == "equal":
        return p
    if kind == "near":
        q = p.copy()
        for _ in range(rng.randint(1, 6)):
            giver = rng.choice([token for token in range(_VOCAB) if q[token] > 0])
            q[giver] -= Fraction(1, _UNITS)
            q[rng.randrange(_VOCAB)] += Fraction(1, _UNITS)
        return q
    if kind == "disjoint" and room:
        q = p * 0
        q[rng.choice(room)] += 1
        return q
    return random_law(rng)


def random_problem(rule: str, siblings: Siblings, rng: random.Random) -> Problem:
    """A tree of up to nine nodes with laws that agree, differ, exclude each other, or have ties."""
    num_nodes = rng.choice([1, 2, 4, 6, 9])
    is_chain = RULES[rule].is_chain_only or siblings in (Siblings.SINGLE, Siblings.NONE)
    laws_p: list[Weights] = []
    laws_q: list[Weights] = []
    drawn: list[Weights | None] = []
    tokens, parents = [0], [-1]
    for node in range(num_nodes):
        p = random_law(rng)
        if RULES[rule].is_greedy:
            p = np.array([Fraction(int(t == p.argmax())) for t in range(_VOCAB)], dtype=object)
        q = _draft_law(rng, p)
        laws_p.append(p)
        laws_q.append(q)
        if node >= len(tokens):
            break
        count = 1 if is_chain else rng.choice([0, 1, 2, 2, 3, 4] if node else [1, 2, 2, 3, 4])
        count = 0 if siblings is Siblings.NONE else min(count, num_nodes - len(tokens))
        for token, law in _drafted(q, count, siblings, rng):
            tokens.append(token)
            parents.append(node)
            drawn.append(law)
    size = len(tokens)
    step = _FINE if rule in _DIVIDING else _EDGES

    def coin() -> Fraction:
        unit = rng.randrange(step)
        return Fraction(2 * unit + 1, 2 * step) if rule in _DIVIDING else Fraction(unit, step)

    return Problem(
        tree=Tree(tuple(tokens), tuple(parents)),
        siblings=siblings,
        p=laws_p[:size] + [random_law(rng) for _ in range(size - len(laws_p))],
        q=laws_q[:size] + [random_law(rng) for _ in range(size - len(laws_q))],
        drawn=[None, *drawn],
        coins=[[coin() for _ in range(size)] for _ in range(size)],
        targets=[coin() for _ in range(size)],
        rests=[coin() for _ in range(size)],
    )


def _drafted(
    q: Weights, count: int, siblings: Siblings, rng: random.Random
) -> Iterator[tuple[int, Weights | None]]:
    if count == 0:
        return

    def draw(_: int, law: Weights) -> int:
        return rng.choices(range(_VOCAB), weights=[float(share) for share in law])[0]

    yield from children(q, count, siblings, draw)


def to_batch(
    problems: Sequence[Problem], rule: str, ids: Sequence[int], vocab: int, dtype: torch.dtype
) -> tuple[Drafts, Noise]:
    """The problems as tensors; token t becomes `ids[t]` in a vocabulary of this size."""
    shapes = shapes_of([one.tree.parents for one in problems])
    num_rounds, num_nodes = shapes.parents_BN.shape
    tokens_BN = torch.zeros(num_rounds, num_nodes, dtype=torch.int64)
    p_BNV = torch.zeros(num_rounds, num_nodes, vocab, dtype=dtype)
    p_BNV[..., ids[0]] = 1
    q_BRV = p_BNV.clone()
    is_drawn_BN = torch.zeros(num_rounds, num_nodes, dtype=torch.bool)
    coins_BN = torch.zeros(num_rounds, num_nodes, dtype=torch.float64)
    num_draws = len(shapes.groups) + 1
    targets_BE = torch.zeros(num_rounds, num_draws, dtype=torch.float64)
    rests_BE = torch.zeros_like(targets_BE)
    for number, one in enumerate(problems):
        size = len(one.tree)
        tokens_BN[number, :size] = torch.tensor([ids[token] for token in one.tree.tokens])
        for node in range(size):
            for law, into in ((one.p[node], p_BNV), (one.q[node], q_BRV)):
                into[number, node, list(ids)] = torch.tensor([float(x) for x in law], dtype=dtype)
            is_drawn_BN[number, node] = one.drawn[node] is not None
            if node:
                depth, slot = one.tree.depths[node], int(shapes.slots_BN[number, node])
                is_path_rule = rule in ("block", "traversal")
                key = node if is_path_rule else slot
                coins_BN[number, node] = float(one.coins[depth - 1][key])
        for depth in range(min(num_draws, size)):
            targets_BE[number, depth] = float(one.targets[depth])
            rests_BE[number, depth] = float(one.rests[depth])
    siblings = problems[0].siblings
    is_chosen = siblings in (Siblings.CHOSEN, Siblings.NONE)
    drafts = Drafts(
        shapes=shapes,
        siblings=siblings,
        tokens_BN=tokens_BN,
        p_BNV=p_BNV,
        q_BRV=None if is_chosen else q_BRV,
        rows_BN=None if is_chosen else torch.arange(num_nodes).repeat(num_rounds, 1),
        is_drawn_BN=is_drawn_BN if siblings is Siblings.HYBRID else None,
    )
    return drafts, Noise(coins_BN=coins_BN, targets_BE=targets_BE, rests_BE=rests_BE)


@dataclass(frozen=True, kw_only=True)
class Tie:
    """What comparing found; the code is tied iff there are no differences."""

    rule: str
    num_rounds: int
    num_decisions: int
    """Coins and draws that the rule took; without noise, the tokens it settled."""
    differences: tuple[str, ...]


def tie(
    rule: str,
    num_rounds: int,
    *,
    seed: int = 0,
    verify: VerifyBatch | None = None,
    ids: Sequence[int] = range(_VOCAB),
    dtype: torch.dtype = torch.float32,
    at_once: int | None = None,
) -> Tie:
    """Judge random problems by the rule and by its batched form, or by `verify`, and compare.

    `ids` are the six tokens of the larger vocabulary, ascending, that take part; `at_once` rounds
    make a batch, by default all with drafts of one kind.
    """
    rng = random.Random(f"{rule} {seed}")
    verify = verify or _converged(rule)
    kinds = sorted(RULES[rule].drafts - {Siblings.NONE})
    num_decisions = 0
    differences: list[str] = []
    for siblings in (Siblings.NONE, *kinds):
        # Little can go wrong without drafts.
        num_drafted = num_rounds - num_rounds // 10
        share = num_rounds // 10 if siblings is Siblings.NONE else num_drafted // len(kinds)
        problems = [random_problem(rule, siblings, rng) for _ in range(share)]
        if not problems:
            continue
        step = at_once or len(problems)
        for first in range(0, len(problems), step):
            batch = problems[first : first + step]
            drafts, noise = to_batch(batch, rule, ids, ids[-1] + 1, dtype)
            for one, found in zip(batch, _found(verify(drafts, noise), ids), strict=True):
                scripted = Scripted(one)
                wanted = RULES[rule].verify(one.tree, one, scripted)
                num_decisions += max(scripted.num_asked, len(wanted.path) + 1)
                if found != wanted:
                    differences.append(f"{siblings} {one.tree}: {found} instead of {wanted}")
    return Tie(
        rule=rule,
        num_rounds=num_rounds,
        num_decisions=num_decisions,
        differences=tuple(differences),
    )


def _converged(rule: str) -> VerifyBatch:
    # Six tokens make a function with corners, on which the search for K-SEQ's rho takes longer.
    return partial(k_sequential, num_steps=_RHO_STEPS) if rule == "k_sequential" else BATCHED[rule]


def _found(verdicts: Verdicts, ids: Sequence[int]) -> Iterator[Verdict | None]:
    """The verdicts with the tokens of the small vocabulary; None for a token outside it."""
    places = {token: place for place, token in enumerate(ids)}
    columns = (verdicts.paths_BD, verdicts.lengths_B, verdicts.tokens_B, verdicts.num_degenerate_B)
    is_defect = verdicts.is_defect_B.tolist()
    for number, (path, length, token, count) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        if is_defect[number] or token not in places:
            yield None
        else:
            yield Verdict(path=tuple(path[:length]), token=places[token], num_degenerate=count)
