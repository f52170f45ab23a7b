"""The exact output law of a verification rule: every coin and draw becomes a branch.

The production rules run unchanged on a replayed script of choices, with Fractions for weights, so
a certificate holds without statistics: equality of two laws, or the first text that differs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, TypeAlias, TypeVar

import numpy as np

from outrider.eval.rules import Randomness, Verdict, Weights
from outrider.eval.tree import Tree

T = TypeVar("T")
Text: TypeAlias = tuple[int, ...]
Law: TypeAlias = Mapping[Text, Fraction]


@dataclass(frozen=True, kw_only=True)
class Language:
    """A target and a draft: text so far to a vector of Fractions that sums to one."""

    target: Callable[[Text], np.ndarray]
    draft: Callable[[Text], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A drafted tree and, where its tokens were drawn, the law of each node's token."""

    tree: Tree
    laws: tuple[Weights, ...] = ()


class Branching:
    """Randomness that follows a script, then takes first options, and notes what it left out."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.script = list(script)
        self.weight = Fraction(1)
        self.alternatives: list[list[int]] = []
        self._num_read = 0

    def coin(self, depth: int, slot: int, probability: Any) -> bool:  # noqa: ANN401, ARG002
        """Both sides of a coin, but for those of probability zero."""
        chance = _fraction(probability)
        if not 0 <= chance <= 1:
            raise ValueError(f"a coin has probability {chance}; it must lie in [0, 1]")
        return bool(self._choose([1 - chance, chance]))

    def draw(self, depth: int, weights: Weights) -> int:  # noqa: ARG002
        """Every token of positive weight."""
        return self._choose([_fraction(weight) for weight in weights])

    draw_rest = draw

    def _choose(self, weights: list[Fraction]) -> int:
        if self._num_read == len(self.script):
            first, *others = [option for option, weight in enumerate(weights) if weight > 0]
            self.alternatives += [[*self.script, other] for other in others]
            self.script.append(first)
        option = self.script[self._num_read]
        self._num_read += 1
        self.weight *= weights[option] / sum(weights)
        return option


def _fraction(number: Any) -> Fraction:  # noqa: ANN401 (torch scalars know no Fraction)
    return Fraction(number if isinstance(number, int | Fraction) else float(number))


def outcomes(process: Callable[[Branching], T]) -> Iterator[tuple[Fraction, T]]:
    """Every way a random process can go, each with its exact probability."""
    scripts: list[list[int]] = [[]]
    while scripts:
        random = Branching(scripts.pop())
        result = process(random)
        scripts += random.alternatives
        yield random.weight, result


Round: TypeAlias = Callable[[Text, Branching], Text]
"""One target call: the text so far and noise to the tokens it emits."""


def speculative_round(
    language: Language,
    propose: Callable[[Text, Branching], Proposal],
    verify: Callable[[Tree, Any, Randomness], Verdict],
) -> Round:
    """A round that drafts with `propose` and judges with a production rule."""

    def run(text: Text, random: Branching) -> Text:
        proposal = propose(text, random)
        verdict = verify(proposal.tree, _NodeLaws(language, text, proposal), random)
        return (*(proposal.tree.tokens[node] for node in verdict.path), verdict.token)

    return run


class _NodeLaws:
    def __init__(self, language: Language, text: Text, proposal: Proposal) -> None:
        self._language, self._text, self._proposal = language, text, proposal

    def target(self, node: int) -> Weights:
        tree = self._proposal.tree
        return self._language.target(self._text + tuple(tree.tokens[n] for n in tree.path(node)))

    def draft(self, node: int) -> Weights:
        return self._proposal.laws[node]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What enumeration found; the rule is exact on this language iff `distance` is zero."""

    distance: Fraction
    """Total variation between the emitted law and the target's, over texts of equal length."""
    calls: Fraction
    """Expected target calls to emit such a text."""
    emitted: Fraction
    """Expected tokens of the first call."""
    worst: Text
    """A text with the largest difference."""
    num_texts: int


def emitted_law(
    run: Round, num_tokens: int, start: Text = (), order: int | None = None
) -> tuple[Law, Fraction]:
    """The exact law of the first `num_tokens` after `start`, and the expected calls for them.

    With `order`, a round is enumerated once per last `order` tokens instead of once per text.
    """

    @cache
    def branches(text: Text) -> list[tuple[Fraction, Text]]:
        return list(outcomes(lambda random: run(text, random)))

    waiting: dict[Text, Fraction] = {start: Fraction(1)}
    law: dict[Text, Fraction] = defaultdict(Fraction)
    calls = Fraction(0)
    while waiting:
        # Shortest first: a text is expanded once all ways to it have been added up.
        text = min(waiting, key=len)
        chance = waiting.pop(text)
        calls += chance
        for weight, tokens in branches(text if order is None else text[-order:]):
            longer = (text + tokens)[: len(start) + num_tokens]
            if len(longer) == len(start) + num_tokens:
                law[longer[len(start) :]] += chance * weight
            else:
                waiting[longer] = waiting.get(longer, Fraction(0)) + chance * weight
    return dict(law), calls


def target_law(language: Language, num_tokens: int, start: Text = ()) -> Law:
    """The law of the target's own text."""
    law: dict[Text, Fraction] = {(): Fraction(1)}
    for _ in range(num_tokens):
        law = {
            (*text, token): chance * Fraction(weight)
            for text, chance in law.items()
            for token, weight in enumerate(language.target(start + text))
            if weight > 0
        }
    return law


def distance(one: Law, other: Law) -> Fraction:
    """Total variation: half the summed absolute differences."""
    zero = Fraction(0)
    texts = one.keys() | other.keys()
    return sum((abs(one.get(t, zero) - other.get(t, zero)) for t in texts), zero) / 2


def certify(
    language: Language, run: Round, num_tokens: int, start: Text = (), order: int | None = None
) -> Certificate:
    """Compare the law that rounds emit with the target's own, exactly; `order`: `emitted_law`'s."""
    found, calls = emitted_law(run, num_tokens, start, order)
    wanted = target_law(language, num_tokens, start)
    first_call = outcomes(lambda random: run(start, random))
    return Certificate(
        distance=distance(found, wanted),
        calls=calls,
        emitted=sum((weight * len(tokens) for weight, tokens in first_call), Fraction(0)),
        worst=max(wanted, key=lambda text: abs(wanted[text] - found.get(text, 0))),
        num_texts=len(wanted),
    )


def propose_chain(language: Language, length: int) -> Callable[[Text, Branching], Proposal]:
    """Draft a chain, every token drawn from q."""

    def propose(text: Text, random: Branching) -> Proposal:
        tokens, laws = [0], [np.empty(0)]
        for depth in range(length):
            laws.append(language.draft(text + tuple(tokens[1:])))
            tokens.append(random.draw(depth, laws[-1]))
        return Proposal(tree=Tree(tuple(tokens), tuple(range(-1, length))), laws=tuple(laws))

    return propose


def propose_likeliest(
    language: Language, parents: Sequence[int]
) -> Callable[[Text, Branching], Proposal]:
    """Draft a fixed shape with every node's likeliest children, without noise."""

    def propose(text: Text, random: Branching) -> Proposal:  # noqa: ARG001
        tree = Tree((0,) * len(parents), tuple(parents))
        tokens = [0] * len(parents)
        for node, children in enumerate(tree.children):
            path = tuple(tokens[n] for n in tree.path(node))
            order = sorted(enumerate(language.draft(text + path)), key=lambda item: -item[1])
            for child, (token, _) in zip(children, order[: len(children)], strict=True):
                tokens[child] = token
        return Proposal(tree=Tree(tuple(tokens), tuple(parents)))

    return propose
