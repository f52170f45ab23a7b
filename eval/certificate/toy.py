"""A language of four tokens on which every figure of speculative decoding is known exactly.

The last token alone decides the next one's law. Target rows are Dirichlet; each draft row is 0.55
of the target's blurred with 0.45 of another Dirichlet row. Figures by enumeration run the
production rule. Dimensions: S contexts (the last token), V vocabulary (S = V = 4, in
`tokens_per_call` and `call_starts` any size).
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from outrider.eval.certificate.law import (
    Branching,
    Language,
    Law,
    Round,
    Text,
    certify,
    outcomes,
    speculative_round,
    target_law,
)
from outrider.eval.certificate.lazy_tree import propose_chain
from outrider.eval.rules import Laws, Randomness, Verdict, Weights, rejection
from outrider.eval.trees.tree import Tree

NUM_TOKENS = 4
LENGTHS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, kw_only=True)
class Toy:
    """The two tables, rows summing to one."""

    target_SV: np.ndarray
    draft_SV: np.ndarray

    def language(self) -> Language:
        """The same language in rational arithmetic; an empty text counts as token 0."""
        p, q = _rational(self.target_SV), _rational(self.draft_SV)
        return Language(
            target=lambda text: p[text[-1] if text else 0],
            draft=lambda text: q[text[-1] if text else 0],
        )


def make_toy(seed: int = 2) -> Toy:
    """The toy of this seed."""
    rng = np.random.default_rng(seed)
    target_SV = rng.dirichlet(np.ones(NUM_TOKENS), size=NUM_TOKENS)
    blur_SV = rng.dirichlet(np.ones(NUM_TOKENS), size=NUM_TOKENS)
    return Toy(target_SV=target_SV, draft_SV=0.55 * target_SV + 0.45 * blur_SV)


def alpha(toy: Toy) -> np.ndarray:
    """Chance that a drawn draft is accepted by rejection, per context: 1 - TV(p, q)."""
    return np.minimum(toy.target_SV, toy.draft_SV).sum(axis=1)


def agreement(toy: Toy) -> np.ndarray:
    """Chance that a drawn draft is accepted by sample-and-match, per context."""
    return (toy.target_SV * toy.draft_SV).sum(axis=1)


def tokens_per_call(toy: Toy, length: int) -> float:
    """Long-run tokens per target call of rejection on drawn chains."""
    accept_SV = np.minimum(toy.target_SV, toy.draft_SV)
    reach_SS = np.eye(len(accept_SV))  # from a call's start to its i-th draft, all accepted
    emitted_S = np.ones(len(accept_SV))
    for _ in range(length):
        reach_SS = reach_SS @ accept_SV
        emitted_S += reach_SS.sum(axis=1)
    return float(call_starts(toy, length) @ emitted_S)


def call_starts(toy: Toy, length: int) -> np.ndarray:
    """Long-run law of the context a call starts in, [S].

    Calls start at contexts that earlier calls end on, which is not how contexts are spread over
    the text.
    """
    accept_SV = np.minimum(toy.target_SV, toy.draft_SV)
    reject_SV = toy.target_SV - accept_SV  # [p - q]+, whose mass is the chance to refuse
    reach_SS = np.eye(len(accept_SV))
    end_SS = np.zeros_like(accept_SV)
    for _ in range(length):
        end_SS += reach_SS @ reject_SV
        reach_SS = reach_SS @ accept_SV
    end_SS += reach_SS @ toy.target_SV
    return stationary(end_SS)


def rejection_round(toy: Toy, length: int) -> Round:
    """One target call of the production rule on a drawn chain."""
    language = toy.language()
    return speculative_round(language, propose_chain(language, length), rejection)


def faulty_round(toy: Toy, length: int) -> Round:
    """The same with a planted fault: after a refusal it draws from p, not from [p - q]+."""
    language = toy.language()

    def verify(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
        return rejection(tree, laws, _ForgetsTheResidual(laws, random))

    return speculative_round(language, propose_chain(language, length), verify)


class _ForgetsTheResidual:
    def __init__(self, laws: Laws, random: Randomness) -> None:
        self._laws, self._random = laws, random
        self.coin, self.pick, self.draw = random.coin, random.pick, random.draw

    def draw_rest(self, depth: int, weights: Weights) -> int:  # noqa: ARG002 (that is the fault)
        return self._random.draw_rest(depth, self._laws.target(depth))


def exact_distance(toy: Toy, run: Round, num_tokens: int = 4) -> Fraction:
    """TV between the law that rounds emit after token 0 and the target's, by enumeration."""
    return certify(toy.language(), run, num_tokens, order=1).distance


def simulated_distance(
    toy: Toy, run: Round, *, num_texts: int, num_tokens: int = 4, seed: int = 0
) -> float:
    """The same distance for texts that are sampled."""
    found = sample_texts(run, num_texts=num_texts, num_tokens=num_tokens, seed=seed)
    law = {text: count / num_texts for text, count in found.items()}
    return _float_distance(law, target_law(toy.language(), num_tokens))


def sample_texts(
    run: Round, *, num_texts: int, num_tokens: int = 4, seed: int = 0
) -> dict[Text, int]:
    """How often each text after token 0 came up, all texts sampled in step.

    A call's outcomes are enumerated once per context and then drawn by their probabilities.
    """
    rng = np.random.default_rng(seed)
    tables = [_outcome_table(run, context) for context in range(NUM_TOKENS)]
    texts = np.zeros((num_texts, num_tokens + tables[0].longest), dtype=np.int64)
    lengths = np.zeros(num_texts, dtype=np.int64)
    last = np.zeros(num_texts, dtype=np.int64)
    while (waiting := np.flatnonzero(lengths < num_tokens)).size:
        for context, table in enumerate(tables):
            rows = waiting[last[waiting] == context]
            drawn = np.searchsorted(table.cumulative, rng.random(rows.size), side="right")
            columns = lengths[rows, None] + np.arange(table.longest)
            texts[rows[:, None], columns] = table.tokens[drawn]
            lengths[rows] += table.lengths[drawn]
            last[rows] = table.tokens[drawn, table.lengths[drawn] - 1]
            # A text that left its context is handled once more only in the next sweep.
            waiting = np.setdiff1d(waiting, rows, assume_unique=True)
    found, counts = np.unique(texts[:, :num_tokens], axis=0, return_counts=True)
    return {tuple(map(int, text)): int(n) for text, n in zip(found, counts, strict=True)}


@dataclass(frozen=True, kw_only=True)
class _Outcomes:
    cumulative: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray

    @property
    def longest(self) -> int:
        return self.tokens.shape[1]


def _outcome_table(run: Callable[[Text, Branching], Text], context: int) -> _Outcomes:
    pairs = list(outcomes(lambda random: run((context,), random)))
    lengths = np.array([len(tokens) for _, tokens in pairs])
    tokens = np.zeros((len(pairs), lengths.max()), dtype=np.int64)
    for row, (_, text) in enumerate(pairs):
        tokens[row, : len(text)] = text
    cumulative = np.cumsum([float(weight) for weight, _ in pairs])
    cumulative[-1] = 1.0
    return _Outcomes(cumulative=cumulative, tokens=tokens, lengths=lengths)


def _float_distance(found: dict[Text, float], law: Law) -> float:
    return sum(abs(float(chance) - found.get(text, 0.0)) for text, chance in law.items()) / 2


def stationary(step_SS: np.ndarray) -> np.ndarray:
    """The row vector that `step_SS` leaves unchanged."""
    equations = np.vstack([step_SS.T - np.eye(len(step_SS)), np.ones(len(step_SS))])
    return np.linalg.lstsq(equations, np.append(np.zeros(len(step_SS)), 1.0), rcond=None)[0]


def _rational(rows_SV: np.ndarray) -> list[np.ndarray]:
    """Rows as Fractions that sum to one exactly, which floats do only nearly."""
    exact = [[Fraction(float(weight)) for weight in row] for row in rows_SV]
    return [np.array([weight / sum(row) for weight in row], dtype=object) for row in exact]
