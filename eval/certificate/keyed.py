"""The exact law of whole texts under the decoder's noise keys: what rounds alone do not show.

A certificate gives every round fresh branches. The decoder reads coins by key, and a coin read in
two rounds ties them: block verification decides from the leaf up, so that where a round ends
tells something of the drafts behind its end, and drafting those again from the same coins would
not follow q. Here every key stands for one exact uniform in [0, 1), cut finer with each reading.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import override

from outrider.data.sampling import Stream
from outrider.eval.certificate.languages import bigram
from outrider.eval.certificate.law import (
    Branching,
    Language,
    NodeLaws,
    Proposal,
    Text,
    distance,
    outcomes,
    target_law,
)
from outrider.eval.noise import KeyedNoise
from outrider.eval.rules import RULES
from outrider.eval.rules.verdict import Weights
from outrider.eval.trees.growth import DrawnGrowth
from outrider.eval.trees.plans import ChainPlan, DrawnPlan, plan_named
from outrider.eval.trees.tree import chain

Key: TypeAlias = tuple[int, ...]
Part: TypeAlias = tuple[Fraction, Fraction]


@dataclass
class ExactNoise:
    """The decoder's noise with exact coins: one round's view of those of a whole text."""

    random: Branching
    keys: KeyedNoise
    known: dict[Key, Part] = field(default_factory=dict)
    """Where each coin read so far is known to lie."""

    def coin(self, depth: int, slot: int, probability: Any) -> bool:  # noqa: ANN401 (a number)
        """True with this probability."""
        chance = Fraction(probability)
        return self._cut((depth, Stream.ACCEPT, slot), [chance, 1 - chance]) == 0

    def pick(self, depth: int, shares: Any) -> int:  # noqa: ANN401 (numbers)
        """An outcome by its share."""
        return self._cut((depth, Stream.ACCEPT, 0), shares)

    def draw(self, depth: int, weights: Weights) -> int:
        """A token from p."""
        return self._cut((depth, Stream.TARGET, 0), weights)

    def draw_rest(self, depth: int, weights: Weights) -> int:
        """A token from what a rejection left."""
        return self._cut((depth, Stream.RESIDUAL, 0), weights)

    def draft(self, depth: int, slot: int, weights: Weights) -> int:
        """A drafted token."""
        return self._cut((depth, Stream.DRAFT, slot), weights)

    def _cut(self, read: tuple[int, Stream, int], weights: Any) -> int:  # noqa: ANN401
        """On whose share of [0, 1) the coin falls, given where it is known to lie."""
        key = tuple(int(part) for part in self.keys.key(*read))
        low, high = self.known.get(key, (Fraction(0), Fraction(1)))
        total, edges = sum(weights), [Fraction(0)]
        for weight in weights:
            edges.append(edges[-1] + Fraction(weight) / total)
        parts = [(max(low, a), min(high, b)) for a, b in pairwise(edges)]
        option = self.random.pick(0, [max(Fraction(0), b - a) for a, b in parts])
        self.known[key] = parts[option]
        return option


class KeyedByPosition(KeyedNoise):
    """A planted fault: all coins keyed by position, so that rounds share those of stale drafts."""

    @override
    def key(self, depth: int, stream: Stream, slot: int = 0) -> tuple[int, int, int, Stream, int]:
        return self._seed, self._row, self._position + depth, stream, slot


Draw: TypeAlias = Callable[[Language, Text, ExactNoise], Proposal]


def text_law(
    language: Language,
    draft: Draw,
    rule: str,
    num_tokens: int,
    keyed: Callable[[int, int, int], KeyedNoise] = KeyedNoise,
) -> dict[Text, Fraction]:
    """The law of `num_tokens` that rounds emit with coins keyed as `keyed` does."""

    def run(random: Branching) -> Text:
        text: Text = ()
        known: dict[Key, Part] = {}
        while len(text) < num_tokens:
            noise = ExactNoise(random, keyed(0, 0, len(text)), known)
            proposal = draft(language, text, noise)
            laws = NodeLaws(language, text, proposal)
            verdict = RULES[rule].verify(proposal.tree, laws, noise)
            tokens = proposal.tree.tokens
            text += (*(tokens[node] for node in verdict.path), verdict.token)
        return text[:num_tokens]

    found: dict[Text, Fraction] = {}
    for weight, text in outcomes(run):
        found[text] = found.get(text, Fraction(0)) + weight
    return found


def draft_by(plan_name: str) -> Draw:
    """Draws drafts as the head's drafter does, by the same plan and keys."""
    plan = plan_named(plan_name)
    if isinstance(plan, ChainPlan):
        return lambda language, text, noise: _chain(language, text, noise, plan.length)
    assert isinstance(plan, DrawnPlan)
    return lambda language, text, noise: _drawn(language, text, noise, plan)


def _chain(language: Language, text: Text, noise: ExactNoise, length: int) -> Proposal:
    tokens: Text = ()
    laws: list[Weights] = []
    for step in range(length):
        laws.append(language.draft(text + tokens))
        tokens = (*tokens, noise.draft(step, 0, laws[-1]))
    return Proposal(tree=chain(0, tokens), laws=(None, *laws))


def _drawn(language: Language, text: Text, noise: ExactNoise, plan: DrawnPlan) -> Proposal:
    growth = DrawnGrowth(0, lambda law, level, slot: noise.draft(level, slot, law))
    for _ in range(plan.depth):
        laws = [language.draft(text + _path(growth, node)) for node in growth.frontier]
        shares = [sorted((share for share in law if share > 0), reverse=True) for law in laws]
        logs = [[math.log(share) for share in row[: plan.width]] for row in shares]
        growth.add_level(laws, logs, plan.width)
    tree, laws = growth.select(plan.nodes)
    return Proposal(tree=tree, laws=laws)


def _path(growth: DrawnGrowth, node: int) -> Text:
    return (*_path(growth, growth.parents[node]), growth.tokens[node]) if node else ()


def _languages(vocab: int) -> list[Language]:
    """Languages in which reading a coin twice is seen, and random ones."""
    rng = np.random.default_rng(vocab)
    found = [
        bigram("random", *(rng.integers(1, 10, size=(vocab, vocab)).tolist() for _ in "pq"))
        for _ in range(4 if vocab == 2 else 1)
    ]
    if vocab == 3:
        # A sure draft and then an unsure one: an early leaf, and next round a node of its number.
        p, q = [[4, 4, 2], [3, 4, 3], [6, 2, 2]], [[8, 1, 1], [10, 9, 8], [10, 9, 8]]
        found.append(bigram("sure, then unsure", p, q))
    return [case.language for case in found]


@dataclass(frozen=True, kw_only=True)
class Keyed:
    """How the keys fared with a rule and plan."""

    rule: str
    plan: str
    num_tokens: int
    distance: Fraction
    """The largest total variation between the emitted and the target's law of texts."""


SETTINGS = (
    ("rejection", "chain:2", 2, 4),
    ("match", "chain:2", 2, 3),
    ("block", "chain:2", 2, 4),
    ("block", "chain:3", 2, 4),
    ("without", "drawn:2,2,2", 3, 2),
    ("traversal", "drawn:2,2,2", 3, 2),
)
"""Rule, plan, vocabulary and length of text."""


def judge_keys(keyed: Callable[[int, int, int], KeyedNoise] = KeyedNoise) -> Iterator[Keyed]:
    """The law of each setting's texts against the target's."""
    for rule, plan, vocab, num_tokens in SETTINGS:
        worst = Fraction(0)
        for language in _languages(vocab):
            found = text_law(language, draft_by(plan), rule, num_tokens, keyed)
            worst = max(worst, distance(found, target_law(language, num_tokens)))
        yield Keyed(rule=rule, plan=plan, num_tokens=num_tokens, distance=worst)
