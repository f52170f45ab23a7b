"""The noise of decoding: coins that are functions of their keys alone, whatever the batch.

The coin that draws a token from the target is keyed by the token's position, so that drafts cannot
move it: sample-and-match then writes what plain decoding writes. All other coins are keyed by the
round too. Rules that judge from the leaf up end a round for what its later drafts were, so the next
round must not draw those again from the same coins; `eval/certificate/keyed.py` proves the keys.

Dimensions: V vocabulary.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from outrider.data.sampling import Stream, draw, uniform

# SplitMix64's constants, as the signed integers that torch has.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


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
    return int(race_times(weights_V, coin).div_(weights_V).argmin())


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


@lru_cache(maxsize=4)
def _ranks(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device).mul_(_STEP)


def _shifted(state_V: Tensor, bits: int, out_V: Tensor) -> Tensor:
    """Shift right as an unsigned integer would, into `out_V`."""
    torch.bitwise_right_shift(state_V, bits, out=out_V)
    return out_V.bitwise_and_((1 << (64 - bits)) - 1)
