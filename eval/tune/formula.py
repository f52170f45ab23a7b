"""Speed-up from one acceptance rate and one cost, as in the paper that began it.

Leviathan, Kalman and Matias 2023, theorem 3.8: drafts of `length` tokens, each accepted with chance
alpha whatever came before, each costing c of a target step, verification as dear as a plain step.
"""

from typing import NamedTuple

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
COSTS = (0.05, 0.2)
_LONGEST = 1000


class Best(NamedTuple):
    """The draft length that pays most; 0 where none pays."""

    length: int
    speedup: float


def tokens_per_call(alpha: float, length: int) -> float:
    """(1 - alpha^(k+1)) / (1 - alpha): tokens per target call, bonus included."""
    check_alpha(alpha)
    if length < 0:
        raise ValueError(f"length is {length}; draft 0 tokens or more")
    return sum(alpha**i for i in range(length + 1))


def speedup(alpha: float, length: int, c: float) -> float:
    """Tokens per call over the cost of a call, (1 - alpha^(k+1)) / ((1 - alpha)(k c + 1))."""
    if not c >= 0:
        raise ValueError(f"c is {c}; give the cost of a draft step over a target step, 0 or more")
    return tokens_per_call(alpha, length) / (length * c + 1)


def best_length(alpha: float, c: float) -> Best:
    """The best draft length, the shorter of equals.

    The speed-up rises with the length up to its best and falls after it. Raises ValueError where
    it never falls: alpha of 1, or c of 0.
    """
    check_alpha(alpha)
    if alpha == 1 or c == 0:
        raise ValueError(
            f"alpha is {alpha} and c is {c}; longer drafts pay without end: give alpha below 1 and "
            "c above 0"
        )
    best = Best(0, 1.0)
    for length in range(1, _LONGEST):
        found = speedup(alpha, length, c)
        if found <= best.speedup and best.length < length - 1:
            break
        if found > best.speedup:
            best = Best(length, found)
    return best


def check_alpha(alpha: float) -> None:
    """ValueError for what is no chance."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; give a chance from 0 to 1")


def table() -> str:
    """Best draft length and its speed-up by acceptance, for a cheap and for a dear draft."""
    lines = [
        "speed-up = (1 - alpha^(k+1)) / ((1 - alpha)(k c + 1)), a target call counted as 1",
        "alpha   " + "".join(f"{f'c = {c:g}: best k':<18}{'speed-up':<12}" for c in COSTS).rstrip(),
    ]
    for alpha in ALPHAS:
        cells = (best_length(alpha, c) for c in COSTS)
        row = "".join(f"{best.length:<18}{f'{best.speedup:.2f}x':<12}" for best in cells)
        lines.append(f"{alpha:<8g}{row}".rstrip())
    return "\n".join(lines)
