"""Random pairs of p and q at one node, and what each rule accepts of what could be accepted.

q = softmax((l + e)/T) with l ~ N(0, 2^2) and e ~ N(0, noise^2). Dimensions: V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from outrider.eval.rules import acceptance, transport

VOCAB = 8
SETTINGS = ((0.6, 0.5, 1), (0.6, 0.5, 2), (0.6, 0.5, 4), (1.0, 0.5, 1), (1.0, 0.5, 2))
SETTINGS += ((1.0, 1.0, 2), (1.0, 1.0, 4))
"""Temperature, noise of the draft's logits, number of drafts."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target's law and a draft's, [V] each."""

    p_V: np.ndarray
    q_V: np.ndarray


def make_pairs(temperature: float, noise: float, count: int, seed: int = 0) -> list[Pair]:
    """Random pairs; the same logits at every temperature."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal((count, VOCAB))
    drafts = logits + noise * rng.standard_normal((count, VOCAB))
    laws = zip(_softmax(logits / temperature), _softmax(drafts / temperature), strict=True)
    return [Pair(p_V=p_V, q_V=q_V) for p_V, q_V in laws]


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _match_without(p_V: np.ndarray, q_V: np.ndarray, num_drafts: int) -> float:
    sets = transport.draft_sets(q_V, num_drafts)
    masks = np.arange(len(sets))
    return sum(p * sets[masks >> token & 1 == 1].sum() for token, p in enumerate(p_V))


COLUMNS: dict[str, Callable[[np.ndarray, np.ndarray, int], float]] = {
    "R2 iid": lambda p, q, n: acceptance.accepted_match(p, q, n).sum(),
    "R2 w/o": _match_without,
    "R4 iid": lambda p, q, n: acceptance.accepted_iid(p, q, n).sum(),
    "K-SEQ": lambda p, q, n: acceptance.accepted_k_sequential(p, q, n).sum(),
    "a* iid": transport.optimum_iid,
    "R5 w/o": lambda p, q, n: acceptance.accepted_without(p, q, n).sum(),
    "a* w/o": transport.optimum_without,
    "R3 top": lambda p, q, n: acceptance.accepted_chosen(p, q, n).sum(),
    "R7": lambda p, q, n: acceptance.accepted_hybrid(p, q, n).sum(),
    "a* R7": transport.optimum_hybrid,
}
"""Acceptance of a rule, or the best for its drafts (a*), by column of the table."""


def mean_acceptance(
    temperature: float, noise: float, num_drafts: int, *, num_pairs: int, seed: int = 0
) -> dict[str, float]:
    """The mean over random pairs of each column."""
    pairs = make_pairs(temperature, noise, num_pairs, seed)
    return {
        name: float(np.mean([column(pair.p_V, pair.q_V, num_drafts) for pair in pairs]))
        for name, column in COLUMNS.items()
    }
