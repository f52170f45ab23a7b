"""The most that any exact rule can accept at one node: optimal transport, rule R8, for reporting.

Drafts are a random tuple. An exact verifier emits p, and accepts when the token is among the
drafts, so the best is a maximum flow from tuples to tokens, whose minimum cut is
alpha* = 1 + min over sets H of tokens of p(H) - Q(H), Q(H) the chance that all drafts are in H
(Hu et al. 2025; Thomas & Pal 2026). For drafts drawn alike or without replacement H is a prefix of
the tokens sorted by q/p, falling. Dimensions: V vocabulary.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Number = Any
_MAX_SETS = 16


def optimum(p: Sequence[Number], tuples: Mapping[tuple[int, ...], Number]) -> Number:
    """alpha* for any law of draft tuples, by trying every set H; exact on Fractions.

    Raises ValueError for more than 16 tokens: there are 2^V sets.
    """
    _check_size(len(p))
    best = 0 * p[0]
    for size in range(len(p) + 1):
        for chosen in itertools.combinations(range(len(p)), size):
            inside = [chance for drafts, chance in tuples.items() if set(drafts) <= set(chosen)]
            best = min(best, sum(p[token] for token in chosen) - sum(inside))
    return 1 + best


def optimum_chosen(p: np.ndarray, tokens: Sequence[int]) -> Number:
    """alpha* for drafts chosen without noise: their mass."""
    return sum(p[token] for token in set(tokens))


def optimum_iid(p: np.ndarray, q: np.ndarray, num_drafts: int) -> Number:
    """alpha* for drafts drawn from q independently; one draft gives 1 - TV(p, q)."""
    order = _by_ratio(p, q)
    return 1 + min(0, (np.cumsum(p[order]) - np.cumsum(q[order]) ** num_drafts).min())


def optimum_without(p: np.ndarray, q: np.ndarray, num_drafts: int) -> Number:
    """alpha* for drafts drawn from q without replacement.

    Up to two drafts at any size, more up to 16 tokens; ValueError beyond. Where q has no more
    tokens than drafts are wanted, all of them are drafted.
    """
    order = _by_ratio(p, q)
    num_drafts = min(num_drafts, int((q > 0).sum()))
    if num_drafts == 1:
        inside = np.cumsum(q[order])
    elif num_drafts == 2:
        inside = _pairs_inside(q[order])
    else:
        _check_size(len(q))
        sets = draft_sets(q[order], num_drafts)
        prefixes = (2 << np.arange(len(q))) - 1
        is_inside = (np.arange(len(sets)) & ~prefixes[:, None]) == 0
        inside = np.array([sets[row].sum() for row in is_inside])
    return 1 + min(0, (np.cumsum(p[order]) - inside).min())


def _pairs_inside(q: np.ndarray) -> np.ndarray:
    """Chance that two drafts without replacement are both in each prefix.

    sum over i in H of q_i (q(H) - q_i)/(1 - q_i), by running sums.
    """
    odds = q / np.where(q < 1, 1 - q, 1)
    return np.cumsum(q) * np.cumsum(odds) - np.cumsum(q * odds)


def draft_sets(q: np.ndarray, num_drafts: int) -> np.ndarray:
    """Chance of each set of drafts without replacement, indexed by its bits, [2^V]."""
    sets = np.zeros(1 << len(q), dtype=q.dtype)
    sets[0] = 1
    mass = np.array(
        [sum(q[t] for t in range(len(q)) if mask >> t & 1) for mask in range(1 << len(q))]
    )
    for _ in range(num_drafts):
        longer = np.zeros_like(sets)
        for mask in np.flatnonzero(sets):
            for token in np.flatnonzero(q):
                if not mask >> token & 1:
                    longer[mask | 1 << token] += sets[mask] * q[token] / (1 - mass[mask])
        sets = longer
    return sets


def optimum_hybrid(p: np.ndarray, q: np.ndarray, num_drafts: int) -> Number:
    """alpha* for q's likeliest `num_drafts` - 1 tokens and one drawn from the rest of q.

    p(top) + sum outside of min(p, q~); rule R7 reaches it.
    """
    top = np.argsort(-q.astype(float), kind="stable")[: num_drafts - 1]
    rest = q.copy()
    rest[top] = 0
    if rest.sum() > 0:
        rest = rest / rest.sum()
    return p[top].sum() + np.minimum(p, rest).sum()


def _by_ratio(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    p, q = p.astype(float), q.astype(float)
    ratio = np.where(q > 0, np.inf, -np.inf)
    np.divide(q, p, out=ratio, where=(p > 0))
    return np.argsort(-ratio, kind="stable")


def _check_size(num_tokens: int) -> None:
    if num_tokens > _MAX_SETS:
        raise ValueError(
            f"vocabulary has {num_tokens} tokens; sets are tried for at most {_MAX_SETS}, so lump "
            "tokens, or use the closed form for the drafts at hand"
        )
