"""The recursion and its shortcuts in the long run, on languages whose last token decides the law.

B texts, T tokens of a text, K drafts at most, S contexts (the last token), V vocabulary (S = V).
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from outrider.eval.certificate.toy import Toy, alpha, stationary, tokens_per_call
from outrider.eval.offline.renewal import renewal

NUM_TEXTS = 8
"""Texts that the recursion reads: few and long, so that their ends count little."""


class LongRun(NamedTuple):
    """Tokens per target call of drawn chains under rejection."""

    seed: int
    exact: float
    """From the stationary law of where calls start."""
    estimates: Mapping[str, float]
    """By estimator: of the recursion on sampled text, of the others in the limit."""


def long_run(seed: int, *, vocab: int = 12, length: int = 6, tokens: int = 64_000) -> LongRun:
    """One language of `vocab` tokens, drafted by chains of `length`; texts of `tokens` in all.

    Raises ValueError for too few of anything.
    """
    for name, value, least in (("vocab", vocab, 2), ("length", length, 1), ("tokens", tokens, 80)):
        if value < least:
            raise ValueError(f"{name} is {value}; give {least} or more")
    toy = uneven_toy(seed, vocab)
    accept_SV = np.minimum(toy.target_SV, toy.draft_SV)
    place_S, mean = stationary(toy.target_SV), alpha(toy)
    judged_SS = mean[:, None] * toy.target_SV
    one = float(place_S @ mean)
    return LongRun(
        seed=seed,
        exact=tokens_per_call(toy, length),
        estimates={
            "recursion": _by_recursion(toy, length, tokens, seed),
            "uniform": _powers(place_S, accept_SV, np.ones(vocab), length),
            "1 - TV": _powers(place_S, judged_SS, np.ones(vocab), length),
            "one alpha": sum(one**power for power in range(length + 1)),
        },
    )


def uneven_toy(seed: int, vocab: int) -> Toy:
    """Peaked laws, and drafts that are good after some tokens and bad after others."""
    rng = np.random.default_rng(seed)
    target_SV, noise_SV = (rng.dirichlet(np.full(vocab, 0.3), size=vocab) for _ in range(2))
    blur_S1 = rng.random((vocab, 1))
    return Toy(target_SV=target_SV, draft_SV=(1 - blur_S1) * target_SV + blur_S1 * noise_SV)


def _powers(start_S: np.ndarray, step_SS: np.ndarray, end_S: np.ndarray, length: int) -> float:
    """The sum of start, step to the power l, and end, over l from 0 to `length`."""
    total, reach_S = 0.0, start_S
    for _ in range(length + 1):
        total += float(reach_S @ end_S)
        reach_S = reach_S @ step_SS
    return total


def _by_recursion(toy: Toy, length: int, tokens: int, seed: int) -> float:
    """Tokens per call of sampled text: what the recursion says of it."""
    rng = np.random.default_rng(seed + 1)
    num_places = tokens // NUM_TEXTS + 1
    text_BT = np.zeros((NUM_TEXTS, num_places), dtype=np.int64)
    edges_SV = toy.target_SV.cumsum(1)
    for place in range(1, num_places):
        coin_B1 = rng.random((NUM_TEXTS, 1))
        drawn_B = (edges_SV[text_BT[:, place - 1]] <= coin_B1).sum(1)
        text_BT[:, place] = drawn_B.clip(max=len(edges_SV) - 1)
    before_BT, here_BT = text_BT[:, :-1], text_BT[:, 1:]
    p, q = toy.target_SV[before_BT, here_BT], toy.draft_SV[before_BT, here_BT]
    accept_BTK = np.zeros((NUM_TEXTS, num_places, length))
    for step in range(length):
        accept_BTK[:, 1 : num_places - step, step] = np.minimum(1, q / p)[:, step:]
    tokens_B = torch.full((NUM_TEXTS,), num_places)
    rounds_B = renewal(torch.from_numpy(accept_BTK), tokens_B).rounds_BL[:, length]
    return NUM_TEXTS * (num_places - 1) / float(rounds_B.sum())
