"""Small languages on which verification rules are certified: adversarial pairs of p and q.

The last token decides a law, or, in `penalty`, the last token and the set of those seen. Each
language lists prefixes, one for every state it can be in: exact there, a rule is exact on its texts
of every length.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from outrider.eval.certificate.law import Language, Text


@dataclass(frozen=True, kw_only=True)
class Case:
    """A language and the prefixes that stand for all of its texts."""

    name: str
    language: Language
    prefixes: tuple[Text, ...]


def fractions(weights: Sequence[int | Fraction]) -> np.ndarray:
    """These weights over their sum, as Fractions."""
    total = sum(Fraction(weight) for weight in weights)
    return np.array([Fraction(weight) / total for weight in weights], dtype=object)


def bigram(name: str, p_rows: Sequence[Sequence[int]], q_rows: Sequence[Sequence[int]]) -> Case:
    """The last token alone decides both laws; one row for all tokens, or one for each."""
    p, q = [fractions(row) for row in p_rows], [fractions(row) for row in q_rows]
    return Case(
        name=name,
        language=Language(
            target=lambda text: p[text[-1] % len(p) if text else 0],
            draft=lambda text: q[text[-1] % len(q) if text else 0],
        ),
        prefixes=tuple((token,) for token in range(max(len(p), len(q)))),
    )


def cases(vocab: int, *, greedy: bool = False) -> list[Case]:
    """The adversarial languages over 3 tokens or more; with `greedy` p is one-hot everywhere.

    Raises ValueError for fewer tokens.
    """
    if vocab < 3:
        raise ValueError(f"vocab is {vocab}; the adversarial languages need 3 tokens or more")
    rng = np.random.default_rng(vocab)

    def rows(low: int = 1, holes: float = 0.0) -> list[list[int]]:
        table = rng.integers(low, 10, size=(vocab, vocab)) * (rng.random((vocab, vocab)) >= holes)
        return [list(map(int, row)) if row.any() else [1, *[0] * (vocab - 1)] for row in table]

    def one_hot() -> list[list[int]]:
        return np.eye(vocab, dtype=int)[rng.integers(vocab, size=vocab)].tolist()

    if greedy:
        return [
            bigram("one-hot p", one_hot(), rows()),
            bigram("both one-hot", one_hot(), one_hot()),
        ]
    slope, ends = list(range(1, vocab + 1)), [1, *[0] * (vocab - 2), 1]
    inner = [0, *[1] * (vocab - 2), 0]
    equal = rows()
    return [
        bigram("random", rows(), rows()),
        bigram("equal", equal, equal),
        bigram("zeros", rows(holes=0.4), rows(holes=0.4)),
        bigram("holes in q", rows(), [[*row[:-1], 0] for row in rows()]),
        bigram("one-hot p", [inner[:1] + [1] + [0] * (vocab - 2)], [slope]),
        bigram("one-hot q", [slope], [[0] * (vocab - 1) + [1]]),
        bigram("both one-hot", one_hot(), one_hot()),
        bigram("disjoint", [inner], [ends]),
        bigram("ties", [[1] * vocab], [[1] * vocab]),
        bigram("ties in q", [slope[::-1]], [[2, *[1] * (vocab - 2), 2]]),
        bigram("nearly equal", [[1000 * w for w in slope]], [[1000 * w + (w == 1) for w in slope]]),
        penalty(vocab, rows(), rows()),
    ]


def penalty(vocab: int, p_rows: list[list[int]], q_rows: list[list[int]]) -> Case:
    """P depends on the path: a seen token has half its weight, and none may follow itself.

    It stands for repetition penalties, bad words and filters: rational, and unlike at every node.
    """
    q = [fractions(row) for row in q_rows]

    def target(text: Text) -> np.ndarray:
        last, seen = (text[-1], set(text)) if text else (0, set())
        weights = [Fraction(w, 2 if t in seen else 1) for t, w in enumerate(p_rows[last])]
        if text:
            weights[last] = Fraction(0)
        return fractions(weights)

    states = {
        (seen[-1], frozenset(seen)): seen
        for count in range(1, vocab + 1)
        for seen in itertools.permutations(range(vocab), count)
    }
    return Case(
        name="penalty",
        language=Language(target=_kept(target), draft=lambda text: q[text[-1] if text else 0]),
        prefixes=tuple(states.values()),
    )


def _kept(target: Callable[[Text], np.ndarray]) -> Callable[[Text], np.ndarray]:
    """The same laws, each state's made once."""
    found: dict[tuple[Text, frozenset[int]], np.ndarray] = {}

    def law(text: Text) -> np.ndarray:
        state = (text[-1:], frozenset(text))
        if state not in found:
            found[state] = target(text)
        return found[state]

    return law
