"""Closed forms of what each rule accepts at one node, A(x) = Pr(accepted and the token is x).

In float64, at any vocabulary, for reporting and for scoring text without decoding: the sum of A is
the rule's acceptance, A(x)/p(x) the chance that a given token of the text was accepted.
Dimensions: V vocabulary.
"""

import numpy as np

from outrider.eval.rules.walk import k_sequential_rho


def accepted_match(p_V: np.ndarray, q_V: np.ndarray, num_drafts: int) -> np.ndarray:
    """Rule R2 on drafts drawn alike: p(x) times the chance that x was drafted."""
    return p_V * (1 - (1 - q_V) ** num_drafts)


def accepted_iid(p_V: np.ndarray, q_V: np.ndarray, num_drafts: int) -> np.ndarray:
    """Rule R4: R is a fixed function of p and q, so each draft adds reach * min(R, q)."""
    rest_V, reach, found_V = p_V, 1.0, np.zeros_like(p_V)
    for _ in range(num_drafts):
        found_V = found_V + reach * np.minimum(rest_V, q_V)
        left_V = np.maximum(rest_V - q_V, 0)
        if not left_V.sum():
            break
        reach *= left_V.sum()
        rest_V = left_V / left_V.sum()
    return found_V


def accepted_without(p_V: np.ndarray, q_V: np.ndarray, num_drafts: int) -> np.ndarray:
    """Rule R5: R depends on the number of refusals and on which tokens they took from q.

    Costs the number of ways to refuse, up to V^(num_drafts - 1), on q's support; outside it
    nothing is accepted.
    """
    support = np.flatnonzero(q_V)
    inside_V = np.zeros_like(p_V)
    inside_V[support] = _without(p_V[support], q_V[support], p_V.sum(), num_drafts)
    return inside_V


def _without(rest: np.ndarray, law: np.ndarray, mass: float, num_drafts: int) -> np.ndarray:
    """`rest` on the support of q, `mass` its sum over all tokens, `law` not normalised."""
    if num_drafts == 0 or not law.sum():
        return np.zeros_like(rest)
    rest, outside, law = rest / mass, (mass - rest.sum()) / mass, law / law.sum()
    kept = np.minimum(rest, law)
    left = rest - kept
    found = kept.copy()
    for token in np.flatnonzero(law > kept):
        smaller = law.copy()
        smaller[token] = 0
        chance = law[token] - kept[token]
        found += chance * _without(left, smaller, left.sum() + max(outside, 0.0), num_drafts - 1)
    return found


def accepted_k_sequential(p_V: np.ndarray, q_V: np.ndarray, num_drafts: int) -> np.ndarray:
    """Rule R6: min(p/rho, q) (1 - (1 - beta)^K)/beta."""
    kept_V = np.minimum(p_V / k_sequential_rho(p_V, q_V, num_drafts), q_V)
    beta = kept_V.sum()
    return kept_V * ((1 - (1 - beta) ** num_drafts) / beta) if beta else kept_V


def accepted_hybrid(p_V: np.ndarray, q_V: np.ndarray, num_drafts: int) -> np.ndarray:
    """Rule R7: all of p on the likeliest `num_drafts` - 1 tokens, min(p, q~) elsewhere."""
    top = np.argsort(-q_V, kind="stable")[: num_drafts - 1]
    rest_V = q_V.copy()
    rest_V[top] = 0
    found_V = np.minimum(p_V, rest_V / rest_V.sum()) if rest_V.sum() else np.zeros_like(p_V)
    found_V[top] = p_V[top]
    return found_V


def accepted_chosen(p_V: np.ndarray, q_V: np.ndarray, num_drafts: int) -> np.ndarray:
    """Rules R2, R3 and R3' on q's likeliest tokens: all of their p."""
    top = np.argsort(-q_V, kind="stable")[:num_drafts]
    found_V = np.zeros_like(p_V)
    found_V[top] = p_V[top]
    return found_V
