"""Rules that settle one node after another from the root: R0 to R7 of the field.

Each emits p at every node, so the text is distributed as the target alone would write it.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.eval.rules.verdict import (
    Laws,
    Randomness,
    Site,
    Step,
    Verdict,
    Weights,
    lesser,
    positive,
    walk,
)
from outrider.eval.trees.tree import Tree

_RHO_STEPS, RHO_TICKS = 24, 1 << 16


def greedy(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Rule R0: follow the likeliest token, the lowest id among equals; p may be unnormalised.

    Exact where p is one-hot, for any tree.
    """
    return walk(tree, laws, random, _settle_greedy)


def _settle_greedy(site: Site) -> Step:
    return site.follow(int(site.target().argmax()), site.children)


def match(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Rule R2: draw each token from p and continue while it was drafted.

    Exact for any tree that was fixed before the draws. With noise keyed by position the text is
    that of plain sampling, token for token. Of two siblings with one token the first continues.
    """
    return walk(tree, laws, random, _settle_match)


def _settle_match(site: Site) -> Step:
    return site.follow(site.random.draw(site.depth, site.target()), site.children)


def point_mass(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Rule R3 on a tree chosen without noise: try the children in order, each with what is left.

    EAGLE-2's rule (Li et al. 2024). A child that is refused loses its mass, so a second sibling
    with its token never stands. Exact for any tree that was fixed before the coins.
    """
    return walk(tree, laws, random, _settle_point_mass)


def _settle_point_mass(site: Site) -> Step:
    if not site.children:
        return Step(None, site.random.draw(site.depth, site.target()))
    rest = site.target() + 0  # a copy, whatever the array type
    for slot, child in enumerate(site.children):
        token = site.tree.tokens[child]
        if site.random.coin(site.depth, slot, rest[token] / rest.sum()):
            return Step(child)
        rest[token] = 0
    return Step(None, site.random.draw_rest(site.depth, rest))


def one_coin(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Rule R3': point mass by one coin a node, on the first child whose cumulative p exceeds it.

    After SGLang's TreeSpeculativeSamplingTargetOnly. A failure is drawn with fresh noise from p
    without the children. A second sibling with a token already tried has no share. Exact for any
    tree that was fixed before the coins.
    """
    return walk(tree, laws, random, _settle_one_coin)


def _settle_one_coin(site: Site) -> Step:
    if not site.children:
        return Step(None, site.random.draw(site.depth, site.target()))
    rest = site.target() + 0
    shares = []
    for child in site.children:
        token = site.tree.tokens[child]
        shares.append(rest[token] + 0)
        rest[token] = 0
    outcome = site.random.pick(site.depth, [*shares, rest.sum()])
    if outcome < len(shares):
        return Step(site.children[outcome])
    return Step(None, site.random.draw_rest(site.depth, rest))


def rejection(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Rule R1 on a chain drawn from q: keep with min(1, p/q), else draw from [p - q]+.

    Leviathan et al. 2023 and Chen et al. 2023. Raises ValueError for a tree with branches, and for
    a token that its q cannot produce.
    """
    check_chain(tree, "rejection")
    return recursive(tree, laws, random)


def check_chain(tree: Tree, name: str) -> None:
    """Raises ValueError for a tree with branches."""
    if not tree.is_chain:
        raise ValueError(
            f"the {name} rule judges chains; for a drawn tree use iid, without or traversal, for "
            "a chosen one match or point_mass"
        )


def recursive(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Rules R4, R5 and R7: recursive rejection of the drawn children, then a draw of what is left.

    With R = p, each drawn child x in draw order stands with min(1, R(x)/D(x)), D being the law x
    was drawn from given the siblings before it; a refusal leaves norm([R - D]+). Children drawn
    alike from q give SpecInfer's multi-step rule (R4, Miao et al. 2024), children drawn without
    replacement that of MCSD, RSD, EAGLE-1 and Sequoia (R5). Children chosen without noise are
    judged last, by a draw from what is left: with one drawn child beside q's likeliest this is the
    hybrid rule (R7, Hu et al. 2025; SpecHub for two), which accepts as much as optimal transport
    for its drafts. Raises ValueError for a token that its law cannot produce.
    """
    return walk(tree, laws, random, _settle_recursive)


def _settle_recursive(site: Site) -> Step:
    rest, mass = site.target(), 1
    chosen: list[int] = []
    num_refused = num_degenerate = 0
    for slot, child in enumerate(site.children):
        law, token = site.drawn(child), site.tree.tokens[child]
        if law is None:
            chosen.append(child)
            continue
        if site.random.coin(site.depth, slot, min(1, rest[token] / (mass * law[token]))):
            return Step(child, num_degenerate=num_degenerate)
        num_refused += 1
        left = positive(rest - mass * law)
        if left.sum() == 0:
            num_degenerate += 1
        else:
            rest, mass = left, left.sum()
    draw = site.random.draw_rest if num_refused else site.random.draw
    return site.follow(draw(site.depth, rest), chosen, num_degenerate)


def k_sequential(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Rule R6, SpecTr's K-SEQ (Sun et al. 2023): each child stands with min(1, p/(rho q)).

    The children of a node must be drawn independently from one q. Accepts at least 1 - 1/e of what
    optimal transport would. Raises ValueError for a token that its q cannot produce.
    """
    return walk(tree, laws, random, _settle_k_sequential)


def _settle_k_sequential(site: Site) -> Step:
    p = site.target()
    if not site.children:
        return Step(None, site.random.draw(site.depth, p))
    num_drafts = len(site.children)
    q = site.drawn(site.children[0])
    if q is None:
        raise ValueError("the k_sequential rule judges drawn children; for chosen ones use match")
    rho = k_sequential_rho(p, q, num_drafts)
    for slot, child in enumerate(site.children):
        law, token = site.drawn(child), site.tree.tokens[child]
        assert law is not None
        if site.random.coin(site.depth, slot, min(1, p[token] / (rho * law[token]))):
            return Step(child)
    kept = lesser(p / rho, q)
    beta = kept.sum()
    if beta > 0:
        kept *= (1 - (1 - beta) ** num_drafts) / beta
    rest = positive(p - kept)
    is_degenerate = bool(rest.sum() == 0)
    token = site.random.draw_rest(site.depth, p if is_degenerate else rest)
    return Step(None, token, int(is_degenerate))


def k_sequential_rho(p: Weights, q: Weights, num_drafts: int) -> Any:  # noqa: ANN401 (any number)
    """The divisor of K-SEQ: least rho in [1, K] with 1 - (1 - beta)^K <= rho beta, rounded up.

    beta = sum min(p/rho, q). The root is irrational and any rho above it is exact too, as the
    condition is monotone: it is found in floats, and then moved up to a multiple of 2^-16 at which
    the condition holds in the weights' own arithmetic.
    """
    is_exact = str(getattr(p, "dtype", "")) == "object"
    if num_drafts == 1 or (is_exact and _is_covered(_beta(p, q, 1), 1, num_drafts)):
        return 1
    float_beta = _beta_in_place(p, q)
    own_beta: Callable[[Any], Any] = partial(_beta, p, q) if is_exact else float_beta
    near = _rho_near(float_beta, num_drafts, is_smooth=not is_exact)
    # A root that is a tick itself may come out a little above it: exact weights try from below.
    nearest = math.floor if is_exact else math.ceil
    ticks, step = nearest(near * RHO_TICKS), 1
    while ticks < num_drafts * RHO_TICKS:
        rho = Fraction(ticks, RHO_TICKS) if is_exact else ticks / RHO_TICKS
        if _is_covered(own_beta(rho), rho, num_drafts):
            return rho
        ticks, step = ticks + step, 2 * step
    return num_drafts


def _beta(p: Weights, q: Weights, rho: Any) -> Any:  # noqa: ANN401 (any number)
    return lesser(p / rho, q).sum()


def _beta_in_place(p: Weights, q: Weights) -> Callable[[float], float]:
    """`_beta` in floats, without fresh memory for every rho: that costs more than the sum."""
    p_V, q_V = (
        law if isinstance(law, Tensor) else torch.from_numpy(law.astype(float)) for law in (p, q)
    )
    work_V = torch.empty_like(p_V)

    def beta(rho: float) -> float:
        torch.mul(p_V, 1 / rho, out=work_V)
        return float(torch.minimum(work_V, q_V, out=work_V).sum())

    return beta


def _rho_near(beta_at: Callable[[float], float], num_drafts: int, *, is_smooth: bool) -> float:
    """Where rho = (1 - (1 - beta)^K)/beta, beta = sum min(p/rho, q).

    The right side rises with rho, as beta falls, so that its value at 1 is below the root. The
    search starts at the root of a curve that agrees with beta at 1 and, like beta, falls from 1 at
    rho = 0 as 1/rho in the end: two passes over the laws fewer than from rho = 1.
    """
    first = beta_at(1.0)
    low = _asked(first, num_drafts)
    if not 1 < low < num_drafts:
        return min(max(low, 1.0), float(num_drafts))
    power = math.log(2) / -math.log(first)

    def curve(rho: float) -> float:
        log = power * math.log(rho)
        return math.exp(-(log + math.log1p(math.exp(-log))) / power)  # (1 + rho^power)^(-1/power)

    start = _by_secants(curve, num_drafts, low, low, is_smooth=True)
    return _by_secants(beta_at, num_drafts, low, start, is_smooth=is_smooth)


def _asked(beta: float, num_drafts: int) -> float:
    return (1 - (1 - beta) ** num_drafts) / beta if beta > 0 else float(num_drafts)


def _by_secants(
    beta_at: Callable[[float], float], num_drafts: int, least: float, now: float, *, is_smooth: bool
) -> float:
    """The root from `now` on, `least` being what is asked at 1 and not above it."""
    before, excess_before, low, high = 1.0, least - 1.0, least, float(num_drafts)
    for _ in range(_RHO_STEPS):
        value = _asked(beta_at(now), num_drafts)
        excess = value - now
        # The side that rises is nearer to the root than rho is, from whichever side rho came.
        low, high = (max(low, value), high) if excess >= 0 else (low, min(high, value))
        last, slope = abs(now - before), (excess - excess_before) / (now - before)
        before, excess_before = now, excess
        now = min(max(now - excess / slope if slope else value, low), high)
        # Where beta has no corners, a secant's error is about the product of the two before it.
        error = abs(now - before) * (min(last, 1) if is_smooth else 1)
        if min(error, high - low) < 0.05 / RHO_TICKS:
            break
    return now


def _is_covered(beta: Any, rho: Any, num_drafts: int) -> bool:  # noqa: ANN401 (any number)
    return bool(1 - (1 - beta) ** num_drafts <= rho * beta)
