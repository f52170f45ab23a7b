"""The one sampling operator of plain and speculative decoding: from logits to p to a token.

Noise is keyed by (seed, row, position, stream), so a draw does not depend on batch or order.
Dimensions: N rows, V vocabulary.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

# Below this temperature sampling is greedy: dividing by it would overflow fp32 logits to no use.
GREEDY_BELOW = 1e-5

_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the target's logits become the distribution that decoding draws from."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the most likely token, the lowest id among equals."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 drops none."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens already in the row; 1 is off."""

    def __post_init__(self) -> None:
        checks = [
            ("temperature", 0 <= self.temperature < math.inf, "0 or more, 0 meaning greedy"),
            ("top_k", self.top_k >= 0, "0 or more, 0 meaning every token"),
            ("top_p", 0 < self.top_p <= 1, "a value in (0, 1], 1 meaning every token"),
            ("min_p", 0 <= self.min_p <= 1, "a value in [0, 1], 0 meaning every token"),
            (
                "repetition_penalty",
                0 < self.repetition_penalty < math.inf,
                "a value above 0, 1 meaning no penalty",
            ),
        ]
        for name, is_allowed, remedy in checks:
            if not is_allowed:
                raise ValueError(f"{name} is {getattr(self, name)}; pick {remedy}")

    @property
    def is_greedy(self) -> bool:
        """Whether the distribution is one-hot."""
        return self.temperature < GREEDY_BELOW


class Stream(IntEnum):
    """What a coin is for; coins of different streams are independent."""

    TARGET = 0
    """A token from the target: plain decoding, and a round's bonus token."""
    ACCEPT = 1
    """Whether a drafted token is accepted."""
    RESIDUAL = 2
    """A token from what is left of the target after a rejection."""
    DRAFT = 3
    """A token from the draft."""


def process(logits_NV: Tensor, sampling: Sampling, seen_NV: Tensor | None = None) -> Tensor:
    """The distribution decoding draws from: float32 [N, V], rows summing to one.

    Order: repetition penalty, temperature, top-k, top-p, min-p. `seen_NV` (bool) marks the tokens
    on each row's path. Raises ValueError when a repetition penalty has no `seen_NV`.
    """
    logits_NV = logits_NV.float()
    if sampling.repetition_penalty != 1.0:
        if seen_NV is None:
            raise ValueError(
                f"repetition_penalty is {sampling.repetition_penalty} but no seen tokens were "
                "given; pass seen_NV, or set repetition_penalty to 1"
            )
        logits_NV = _penalise(logits_NV, seen_NV, sampling.repetition_penalty)
    if sampling.is_greedy:
        # torch.argmax does not promise the lowest id among equals, so take it over the ids.
        ids_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device)
        is_best_NV = logits_NV == logits_NV.max(dim=-1, keepdim=True).values
        first_N = torch.where(is_best_NV, ids_V, len(ids_V)).min(dim=-1).values
        return torch.zeros_like(logits_NV).scatter_(-1, first_N[:, None], 1.0)
    probs_NV = (logits_NV / sampling.temperature).softmax(dim=-1)
    if 0 < sampling.top_k < probs_NV.shape[-1]:
        probs_NV = _keep_top_k(probs_NV, sampling.top_k)
    if sampling.top_p < 1.0:
        probs_NV = _keep_top_p(probs_NV, sampling.top_p)
    if sampling.min_p > 0.0:
        floor_N1 = sampling.min_p * probs_NV.max(dim=-1, keepdim=True).values
        probs_NV = _renormalise(probs_NV, probs_NV >= floor_N1)
    return probs_NV


def row_key(name: str) -> int:
    """A 64-bit integer that stands for a row's name in `uniform`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def uniform(seed: int, row: int, position: int, stream: Stream, slot: int = 0) -> float:
    """A coin in [0, 1), a pure function of its key (SplitMix64's finaliser chained over it).

    `position` is the place in the row of the token being decided, prompt included; `slot` tells
    apart several coins for one position.
    """
    state = 0
    for part in (seed, row, position, int(stream) | slot << 8):
        state = _mix((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15)
    return (state >> 11) * 2.0**-53


def draw(probs_V: Tensor, coin: float) -> int:
    """The token whose share of [0, total) holds `coin * total`; never one of probability zero.

    Probabilities need not sum to one. Raises ValueError when there is nothing to draw.
    """
    return int(draw_rows(probs_V[None], [coin])[0])


def draw_rows(probs_NV: Tensor, coins_N: Tensor | Sequence[float]) -> Tensor:
    """`draw` for each row: token ids, int64 [N]."""
    cdf_NV = probs_NV.double().cumsum(dim=-1)
    coins_N = torch.as_tensor(coins_N, dtype=torch.float64, device=probs_NV.device)
    total_N = cdf_NV[:, -1]
    if not bool(((total_N > 0) & (total_N < math.inf)).all()):
        raise ValueError(
            f"probabilities sum to {total_N.tolist()}; every row needs a positive, finite sum"
        )
    # A coin close to 1 times the total may round up to the total itself.
    below_N = torch.nextafter(total_N, torch.zeros_like(total_N))
    points_N = torch.minimum(coins_N * total_N, below_N)
    return torch.searchsorted(cdf_NV, points_N[:, None], right=True)[:, 0]


def _penalise(logits_NV: Tensor, seen_NV: Tensor, penalty: float) -> Tensor:
    lowered_NV = torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty)
    return torch.where(seen_NV, lowered_NV, logits_NV)


def _keep_top_k(probs_NV: Tensor, k: int) -> Tensor:
    order_NV = probs_NV.sort(dim=-1, descending=True, stable=True).indices
    is_kept_NV = torch.zeros_like(probs_NV, dtype=torch.bool)
    return _renormalise(probs_NV, is_kept_NV.scatter_(-1, order_NV[:, :k], True))


def _keep_top_p(probs_NV: Tensor, top_p: float) -> Tensor:
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    before_NV = sorted_NV.double().cumsum(dim=-1) - sorted_NV.double()
    # The most likely token is always kept: nothing comes before it.
    is_kept_NV = torch.zeros_like(probs_NV, dtype=torch.bool)
    return _renormalise(probs_NV, is_kept_NV.scatter(-1, order_NV, before_NV < top_p))


def _renormalise(probs_NV: Tensor, is_kept_NV: Tensor) -> Tensor:
    kept_NV = torch.where(is_kept_NV, probs_NV, torch.zeros_like(probs_NV))
    return kept_NV / kept_NV.sum(dim=-1, keepdim=True)


def _mix(state: int) -> int:
    state &= _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
