"""The noise of decoding: coins that are functions of their keys alone, whatever the batch.

The coin that draws a token from the target is keyed by the token's position, so that drafts cannot
move it: sample-and-match then writes what plain decoding writes. All other coins are keyed by the
round too. Rules that judge from the leaf up end a round for what its later drafts were, so the next
round must not draw those again from the same coins; `eval/certificate/keyed.py` proves the keys.

Dimensions: V vocabulary, N some of its tokens, G blocks of tokens.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.data.draws import BLOCK
from outrider.data.sampling import Stream, draw, uniform

# SplitMix64's constants, as the signed integers that torch has.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_AT_ONCE = 64 * BLOCK
# What 1 - u is at least: a bound of zero over no weight would be not a number.
_LEAST_LEFT = 2.0**-53
# Bounds are rounded to 24 bits a few times, and none above the other is told from infinity.
_SLACK, _MOST = 1 + 2.0**-20, 1e38
# How many blocks to look into at first: of 128,000 tokens the winner is nearly always in these.
_BLOCKS = 4


class KeyedNoise:
    """A round's coins; `position` is that of the token after the root, another in each round."""

    def __init__(self, seed: int, row: int, position: int) -> None:
        self._seed, self._row, self._position = seed, row, position

    def coin(self, depth: int, slot: int, probability: Tensor | float) -> bool:
        """True with this probability."""
        return self._uniform(depth, Stream.ACCEPT, slot) < float(probability)

    def pick(self, depth: int, shares: Sequence[Tensor | float]) -> int:
        """The outcome on whose share of [0, total) the depth's first coin falls."""
        shares_N = torch.tensor([float(share) for share in shares], dtype=torch.float64)
        return draw(shares_N, self._uniform(depth, Stream.ACCEPT))

    def draw(self, depth: int, weights: Tensor) -> int:
        """A token from p, by the coin of plain decoding."""
        return race(weights, self._uniform(depth, Stream.TARGET))

    def draw_rest(self, depth: int, weights: Tensor) -> int:
        """A token from what a rejection left."""
        return draw(weights, self._uniform(depth, Stream.RESIDUAL))

    def draft(self, depth: int, slot: int = 0) -> float:
        """The coin of a drawn draft; `slot` numbers those of one depth."""
        return self._uniform(depth, Stream.DRAFT, slot)

    def key(self, depth: int, stream: Stream, slot: int = 0) -> tuple[int, int, int, Stream, int]:
        """What `uniform` makes the coin from: equal keys are one coin."""
        if stream is Stream.TARGET:
            return self._seed, self._row, self._position + depth, stream, slot
        return self._seed, self._row, self._position, stream, depth << 32 | slot

    def _uniform(self, depth: int, stream: Stream, slot: int = 0) -> float:
        return uniform(*self.key(depth, stream, slot))


def race(weights_V: Tensor, coin: float) -> int:
    """The token with the least exponential time over its weight: a draw that rounding hardly moves.

    The times are a function of the coin. Passes of unlike shapes round p differently by about 1e-6
    of each weight; only two tokens that close to a tie may then change places, while a draw from
    the cumulative law has thousands of edges to fall off.
    """
    if weights_V.device.type != "cpu" or len(weights_V) <= _AT_ONCE:
        return int(race_times(weights_V, coin).div_(weights_V).argmin())
    # On a CPU the logarithms cost more than all else: take them where a bound says one may win.
    weights = weights_V.numpy()
    least_G, count = _least_times(weights_V.float().numpy(), coin), _BLOCKS
    while count < len(least_G):
        likely_G = least_G.argpartition(count)
        winner = _race_among(weights, coin, np.sort(likely_G[:count]))
        if winner.time * _SLACK < min(float(least_G[likely_G[count]]), _MOST):
            return winner.token
        count *= 8
    return _race_among(weights, coin, np.arange(len(least_G))).token


def race_times(weights_V: Tensor, coin: float) -> Tensor:
    """The race's exponential times [V], float64, before they are divided by the weights."""
    state_V = _ranks(len(weights_V), weights_V.device) + int(coin * 2**53)
    shifted_V = torch.empty_like(state_V)
    state_V = state_V.bitwise_xor_(_shifted(state_V, 30, shifted_V)).mul_(_FIRST)
    state_V = state_V.bitwise_xor_(_shifted(state_V, 27, shifted_V)).mul_(_SECOND)
    state_V = state_V.bitwise_xor_(_shifted(state_V, 31, shifted_V))
    # Half a step keeps the uniforms inside (0, 1).
    uniform_V = _shifted(state_V, 12, shifted_V).double().add_(0.5).mul_(2.0**-52)
    return uniform_V.log_().neg_()


class _Winner(NamedTuple):
    token: int
    time: float


def _race_among(weights: NDArray[Any], coin: float, blocks_X: NDArray[np.int64]) -> _Winner:
    """The race between the tokens of these blocks; of equals the first."""
    ids_N = (blocks_X[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    np.minimum(ids_N, len(weights) - 1, out=ids_N)  # beyond the last token that token again
    state_N = ids_N.view(np.uint64) * _unsigned(_STEP) + _unsigned(int(coin * 2**53))
    shifted_N = np.empty_like(state_N)
    _mix(state_N, shifted_N)
    state_N ^= np.right_shift(state_N, 31, out=shifted_N)
    uniform_N = ((state_N >> 12).astype(float) + 0.5) * 2.0**-52
    # By torch, for other libraries round logarithms otherwise.
    times_N = -torch.from_numpy(uniform_N).log_().numpy()
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        times_N /= weights[ids_N]
    place = times_N.argmin()
    return _Winner(int(ids_N[place]), float(times_N[place]))


def _least_times(weights_V: NDArray[np.float32], coin: float) -> NDArray[np.float32]:
    """By block of tokens, a time over weight below which none of them is: [G].

    In pieces that stay in the cache, and by numpy, whose integers may be unsigned: that takes half
    of torch's time.
    """
    least: list[NDArray[np.float32]] = []
    state_N, shifted_N = np.empty((2, _AT_ONCE), np.uint64)
    for first in range(0, len(weights_V), _AT_ONCE):
        weights_N = weights_V[first : first + _AT_ONCE]
        count = len(weights_N)
        left_N = _least_left(state_N[:count], shifted_N[:count], coin, first)
        with np.errstate(divide="ignore", over="ignore"):
            left_N /= weights_N
        least.append(np.minimum.reduceat(left_N, np.arange(0, count, BLOCK)))
    return np.concatenate(least)


def _least_left(
    state_N: NDArray[np.uint64], shifted_N: NDArray[np.uint64], coin: float, first: int
) -> NDArray[np.float32]:
    """1 - u <= -log u of tokens from `first` on, u rounded up to 31 bits; overwrites the others."""
    ranks_N = _ranks(_AT_ONCE, torch.device("cpu")).numpy().view(np.uint64)
    start = _unsigned(int(coin * 2**53) + first * _STEP)
    np.add(ranks_N[: len(state_N)], start, out=state_N)
    _mix(state_N, shifted_N)
    # The last step leaves the upper 31 bits as they are.
    np.right_shift(np.invert(state_N, out=state_N), 33, out=state_N)
    left_N = state_N.view(np.int64).astype(np.float32)
    left_N *= 2.0**-31
    left_N += _LEAST_LEFT
    return left_N


def _mix(state_N: NDArray[np.uint64], shifted_N: NDArray[np.uint64]) -> None:
    """All of SplitMix64 but its last step, in place; `shifted_N` is overwritten."""
    for bits, factor in ((30, _FIRST), (27, _SECOND)):
        np.right_shift(state_N, bits, out=shifted_N)
        np.bitwise_xor(state_N, shifted_N, out=state_N)
        np.multiply(state_N, _unsigned(factor), out=state_N)


def _unsigned(number: int) -> np.uint64:
    return np.uint64(number % 2**64)


@lru_cache(maxsize=4)
def _ranks(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device).mul_(_STEP)


def _shifted(state_V: Tensor, bits: int, out_V: Tensor) -> Tensor:
    """Shift right as an unsigned integer would, into `out_V`."""
    torch.bitwise_right_shift(state_V, bits, out=out_V)
    return out_V.bitwise_and_((1 << (64 - bits)) - 1)
