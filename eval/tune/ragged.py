"""Batches of requests that accept unlike numbers of drafts: exact times from the law of a round.

Rounds of a batch are synchronous, so a batch costs what its slowest rows need, while a row that has
written all it was asked for leaves (a closed batch) or gives its slot away (a full one). Letters:
l tokens that a round emits, N tokens of a request, r rounds, B rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_NEGLIGIBLE = 1e-12


class Progress(NamedTuple):
    """How far one request has come after 0, 1, ... rounds."""

    active_R: Floats
    """Chance that it still writes, so that round r + 1 has it."""
    written_R: Floats
    """Tokens that it has written by then if it still writes; 0 where it cannot."""


class Batch(NamedTuple):
    """A closed batch, in expectation."""

    seconds: float
    rounds: float
    """Rounds until its last row is done."""
    tokens: int
    mean_rows: float
    """Rows at work, a round."""


def progress(emitted: Sequence[float], num_tokens: int) -> Progress:
    """The law of a request of `num_tokens` tokens, by the renewal recursion.

    Args:
        emitted: Chance that a round emits l tokens, l = 1, 2, ...; sums to 1.
        num_tokens: Tokens after the prefill's own; the last round is cut there.
    """
    law = _checked(emitted)
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}; a request writes at least 1")
    at_N = np.zeros(num_tokens)
    at_N[0] = 1.0
    active: list[float] = []
    written: list[float] = []
    places_N = np.arange(num_tokens)
    while len(active) < num_tokens:  # every round emits at least one
        share = float(at_N.sum())
        if share < _NEGLIGIBLE:
            break
        active.append(share)
        written.append(float(at_N @ places_N) / share)
        later_N = np.zeros(num_tokens)
        for size, chance in enumerate(law, start=1):
            if size < num_tokens:
                later_N[size:] += chance * at_N[:-size]
        at_N = later_N
    return Progress(np.array(active), np.array(written))


def rounds_of(emitted: Sequence[float], num_tokens: int) -> float:
    """Expected rounds of a request of `num_tokens` tokens."""
    return float(progress(emitted, num_tokens).active_R.sum())


def closed_batch(
    emitted: Sequence[float],
    lengths: Sequence[int],
    seconds: Callable[[int, float], float],
    *,
    context: float = 0.0,
) -> Batch:
    """Expected time of requests that start together and leave as they end.

    Args:
        emitted: Law of a round, alike for all rows and independent between them.
        lengths: Tokens of each request.
        seconds: Of a round by its rows and their mean context. Exact where the context adds a cost
            for every row and position, as reading keys and values does.
        context: Positions of every request at its start.
    """
    if not lengths:
        raise ValueError("lengths is empty; give the tokens of at least one request")
    steps = [progress(emitted, length) for length in lengths]
    longest = max(len(step.active_R) for step in steps)
    total, rounds, row_rounds = 0.0, 0.0, 0.0
    for r in range(longest):
        rows = [(s.active_R[r], s.written_R[r]) for s in steps if r < len(s.active_R)]
        count_B = _number_active([chance for chance, _ in rows])
        share = sum(chance for chance, _ in rows)
        if share <= 0:
            break
        grown = context + sum(chance * written for chance, written in rows) / share
        # Index 0: all are done, and no round is run.
        total += sum(
            float(chance) * seconds(num_rows, grown)
            for num_rows, chance in enumerate(count_B)
            if num_rows and chance > 0
        )
        rounds += 1 - float(count_B[0])
        row_rounds += share
    return Batch(total, rounds, sum(lengths), row_rounds / rounds)


def plain_batch(
    lengths: Sequence[int], seconds: Callable[[int, float], float], *, context: float = 0.0
) -> Batch:
    """The same requests without drafts: a token a round."""
    return closed_batch((1.0,), lengths, seconds, context=context)


def _number_active(chances: Sequence[float]) -> Floats:
    """The law of how many of independent rows are at work, 0 to B."""
    law_B = np.ones(1)
    for chance in chances:
        law_B = np.convolve(law_B, [1 - chance, chance])
    return law_B


def _checked(emitted: Sequence[float]) -> list[float]:
    law = [float(chance) for chance in emitted]
    if not law or min(law) < 0 or abs(sum(law) - 1) > 1e-6:
        raise ValueError(
            f"emitted is {law[:9]}, which sums to {sum(law):.6g}; give the chances that a round "
            "emits 1, 2, ... tokens, none negative, 1 in all"
        )
    return law
