"""The noise of decoding, a function of seed, row and position: batch and drafts cannot move it.

Dimensions: V vocabulary.
"""

from torch import Tensor

from outrider.data.sampling import Stream, draw, uniform


class KeyedNoise:
    """Coins keyed by seed, row and position; `position` is that of the token after the root."""

    def __init__(self, seed: int, row: int, position: int) -> None:
        self._seed, self._row, self._position = seed, row, position

    def coin(self, depth: int, slot: int, probability: Tensor | float) -> bool:
        """True with this probability."""
        return self._uniform(depth, Stream.ACCEPT, slot) < float(probability)

    def draw(self, depth: int, weights: Tensor) -> int:
        """A token from p, by the coin of plain decoding."""
        return draw(weights, self._uniform(depth, Stream.TARGET))

    def draw_rest(self, depth: int, weights: Tensor) -> int:
        """A token from what a rejection left."""
        return draw(weights, self._uniform(depth, Stream.RESIDUAL))

    def draft(self, depth: int) -> float:
        """The coin of a drawn draft."""
        return self._uniform(depth, Stream.DRAFT)

    def _uniform(self, depth: int, stream: Stream, slot: int = 0) -> float:
        return uniform(self._seed, self._row, self._position + depth, stream, slot)
