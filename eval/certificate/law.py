"""The exact output law of a verification rule: every coin and draw becomes a branch.

The production rules run unchanged on a replayed script of choices, with Fractions for weights, so
a certificate holds without statistics: equality of two laws, or the first text that differs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np

from outrider.eval.rules.verdict import Randomness, Verdict, Weights

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

    tree: Any
    """A `Tree`, or what reads like one."""
    laws: Any = ()
    """Indexed by node: the law its token was drawn from, None for one that was chosen."""


MOST_READS = 10_000
"""Coins and draws of one process; a rule that asks for more is taken to never end."""


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

    def pick(self, depth: int, shares: Sequence[Any]) -> int:  # noqa: ARG002
        """Every outcome of positive share."""
        return self.branch(shares)

    def branch(self, shares: Sequence[Any]) -> int:
        """Every outcome of positive share, of a choice that no key names."""
        return self._choose([_fraction(share) for share in shares])

    def draw(self, depth: int, weights: Weights) -> int:  # noqa: ARG002
        """Every token of positive weight."""
        return self._choose([_fraction(weight) for weight in weights])

    draw_rest = draw

    def _choose(self, weights: list[Fraction]) -> int:
        if self._num_read >= MOST_READS:
            raise ValueError(
                f"a round read more than {MOST_READS} coins; a rule must end, and a certificate "
                "takes trees of a few nodes"
            )
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

Propose: TypeAlias = Callable[[Text, Branching], Proposal]
"""How a round drafts: the text so far and noise to a tree."""


def speculative_round(
    language: Language, propose: Propose, verify: Callable[[Any, Any, Randomness], Verdict]
) -> Round:
    """A round that drafts with `propose` and judges with a production rule."""

    def run(text: Text, random: Branching) -> Text:
        proposal = propose(text, random)
        verdict = verify(proposal.tree, NodeLaws(language, text, proposal), Reads(random))
        return (*(proposal.tree.tokens[node] for node in verdict.path), verdict.token)

    return run


class Reads:
    """A round's noise as a rule sees it: what it reads twice is one coin, as in decoding.

    Coins and picks have a coin for each depth and slot (a pick's is slot 0), draws from p and from
    what a rejection left one for each depth: see `outrider.eval.noise.KeyedNoise`.
    """

    def __init__(self, random: Branching) -> None:
        self._random = random
        self._known: dict[tuple[str, int, int], tuple[list[Fraction], int, Part]] = {}

    def coin(self, depth: int, slot: int, probability: Any) -> bool:  # noqa: ANN401 (any number)
        """Both sides of a coin, but for those of probability zero."""
        chance = _fraction(probability)
        if not 0 <= chance <= 1:
            raise ValueError(f"a coin has probability {chance}; it must lie in [0, 1]")
        return self._read(("accept", depth, slot), [chance, 1 - chance]) == 0

    def pick(self, depth: int, shares: Sequence[Any]) -> int:
        """Every outcome of positive share."""
        return self._read(("accept", depth, 0), shares)

    def draw(self, depth: int, weights: Weights) -> int:
        """Every token of positive weight."""
        return self._read(("target", depth, 0), weights)

    def draw_rest(self, depth: int, weights: Weights) -> int:
        """Every token of positive weight."""
        return self._read(("rest", depth, 0), weights)

    def _read(self, key: tuple[str, int, int], weights: Any) -> int:  # noqa: ANN401
        shares = [_fraction(weight) for weight in weights]
        whole = (Fraction(0), Fraction(1))
        if key not in self._known:
            option = self._random.branch(shares)
            self._known[key] = (shares, option, whole)
            return option
        before, option, within = self._known[key]
        low, high = _parts(before, within)[option]
        parts = _parts(shares, (low, high))
        option = self._random.branch([last - first for first, last in parts])
        self._known[key] = (shares, option, (low, high))
        return option


Part: TypeAlias = tuple[Fraction, Fraction]


def _parts(shares: Sequence[Fraction], within: Part) -> list[Part]:
    """The pieces of [0, 1) that outcomes of these shares get, as far as they lie within one."""
    low, high = within
    total, edges = sum(shares), [Fraction(0)]
    for share in shares:
        edges.append(edges[-1] + share / total)
    pieces = [(max(low, first), min(high, last)) for first, last in pairwise(edges)]
    return [(first, max(first, last)) for first, last in pieces]


class NodeLaws:
    """The laws of a language at a drafted tree's nodes, as rules ask for them."""

    def __init__(self, language: Language, text: Text, proposal: Proposal) -> None:
        self._language, self._text, self._proposal = language, text, proposal

    def target(self, node: int) -> Weights:
        """The target's law after a node."""
        tree = self._proposal.tree
        return self._language.target(self._text + tuple(tree.tokens[n] for n in tree.path(node)))

    def draft(self, node: int) -> Weights | None:
        """The law that a node's token was drawn from, None for one that was chosen."""
        return self._proposal.laws[node] if self._proposal.laws else None


def round_distance(language: Language, run: Round, prefix: Text = ()) -> Fraction:
    """Total variation between one round, continued by the target alone, and the target's own text.

    Zero at every prefix is the node condition: by induction on length, rounds then emit texts of
    the target's law however many they are. A language whose laws look at the last m tokens has
    only so many prefixes to try, and zero at those proves the rule on texts of every length.
    """
    emitted: dict[Text, Fraction] = defaultdict(Fraction)
    for weight, tokens in outcomes(lambda random: run(prefix, random)):
        emitted[tokens] += weight
    inner = {text[:length] for text in emitted for length in range(len(text))}

    def differ(text: Text, wanted: Fraction, found: Fraction) -> Fraction:
        found += emitted.get(text, Fraction(0))
        if text not in inner:  # from here on both go on by p
            return abs(found - wanted) / 2
        law = enumerate(language.target(prefix + text))
        return sum(
            (differ((*text, token), wanted * chance, found * chance) for token, chance in law),
            Fraction(0),
        )

    return differ((), Fraction(1), Fraction(0))


def ended(run: Round, end: int | None = None, limit: int | None = None) -> Round:
    """Rounds cut after the end token, and where the whole text has `limit` tokens."""

    def cut(text: Text, random: Branching) -> Text:
        tokens = run(text, random)[: None if limit is None else limit - len(text)]
        return tokens[: tokens.index(end) + 1] if end in tokens else tokens

    return cut


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
    run: Round,
    num_tokens: int,
    start: Text = (),
    order: int | None = None,
    end: int | None = None,
) -> tuple[Law, Fraction]:
    """The exact law of the first `num_tokens` after `start`, and the expected calls for them.

    With `order`, a round is enumerated once per last `order` tokens instead of once per text.
    Texts are complete after the token `end`, too; rounds must then be cut there, see `ended`.
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
            if len(longer) == len(start) + num_tokens or longer[-1] == end:
                law[longer[len(start) :]] += chance * weight
            else:
                waiting[longer] = waiting.get(longer, Fraction(0)) + chance * weight
    return dict(law), calls


def target_law(
    language: Language, num_tokens: int, start: Text = (), end: int | None = None
) -> Law:
    """The law of the target's own text, up to the token `end` where there is one."""
    law: dict[Text, Fraction] = {(): Fraction(1)}
    for _ in range(num_tokens):
        law = {
            longer: chance * Fraction(weight)
            for text, chance in law.items()
            for longer, weight in _continued(language, start, text, end)
            if weight > 0
        }
    return law


def _continued(
    language: Language, start: Text, text: Text, end: int | None
) -> list[tuple[Text, Any]]:
    if text and text[-1] == end:
        return [(text, 1)]
    return [((*text, token), chance) for token, chance in enumerate(language.target(start + text))]


def distance(one: Law, other: Law) -> Fraction:
    """Total variation: half the summed absolute differences."""
    zero = Fraction(0)
    texts = one.keys() | other.keys()
    return sum((abs(one.get(t, zero) - other.get(t, zero)) for t in texts), zero) / 2


def certify(
    language: Language,
    run: Round,
    num_tokens: int,
    start: Text = (),
    order: int | None = None,
    end: int | None = None,
) -> Certificate:
    """Compare the law that rounds emit with the target's own, exactly.

    `order` and `end` are those of `emitted_law`.
    """
    found, calls = emitted_law(run, num_tokens, start, order, end)
    wanted = target_law(language, num_tokens, start, end)
    first_call = outcomes(lambda random: run(start, random))
    return Certificate(
        distance=distance(found, wanted),
        calls=calls,
        emitted=sum((weight * len(tokens) for weight, tokens in first_call), Fraction(0)),
        worst=max(wanted, key=lambda text: abs(wanted[text] - found.get(text, 0))),
        num_texts=len(wanted),
    )
