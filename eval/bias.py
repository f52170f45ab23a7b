"""How far a lossy rule's text is from the target's: bias a step, and how long the two agree.

Expected divergence length: of a text of the rule and one of the target, drawn so as to agree as
long as step-by-step coupling can make them, the tokens before they part. The chance of agreeing
through k tokens is E[prod min(1, p / v)] over the rule's own text, v its law at each step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode_by
from outrider.eval.drafters import Drafter
from outrider.eval.lossy import LossyRule, distance
from outrider.eval.metrics import Lossy, LossyRound
from outrider.eval.rules import Laws, Randomness, Siblings, Verdict, Weights
from outrider.eval.trees.tree import Tree


class Step(NamedTuple):
    """One emitted token."""

    distance: float
    """TV(p, v) at its context."""
    agreement: float
    """min(1, p / v) at the token."""
    closed_form: float | None
    """What the rule's formula says of `distance`."""


@dataclass(frozen=True, kw_only=True)
class LossyText(Lossy):
    """A text that an inexact rule wrote, and its bias at every token."""

    new_ids: list[int]
    lossy_rounds: list[LossyRound]
    steps: list[Step]


@dataclass(frozen=True, kw_only=True)
class Bias(Lossy):
    """The bias of a rule over several texts; `row` is marked inexact."""

    rule: str
    formula: str
    texts: int
    tokens: int
    tokens_a_call: float
    """Emitted tokens over rounds: the speed that was bought, not a tau."""
    tv_per_step: float
    """Mean over emitted tokens."""
    largest_tv: float
    closed_form_tv: float | None
    """Mean of the formula's figure; None where the rule has none."""
    divergence_length: float
    """Expected tokens before the coupled texts part, cut at the end of each text."""
    longest: int
    """Tokens of the longest text: what the divergence length is cut at."""

    def row(self) -> dict[str, Any]:
        """For JSON; `exact` keeps it out of other tables."""
        return {"exact": False, **vars(self)}


def decode_lossy(
    rule: LossyRule,
    target: Target,
    prompt_ids: Sequence[int],
    drafter: Drafter,
    decoding: Decoding,
    *,
    row: int = 0,
) -> LossyText:
    """Continue a prompt by an inexact rule, its bias noted at every token.

    Raises ValueError for greedy sampling, where p is one-hot and there is nothing to measure, and
    for drafts that the rule cannot judge.
    """
    if decoding.sampling.is_greedy:
        raise ValueError(
            f"temperature is {decoding.sampling.temperature}; a lossy rule is measured above 0"
        )
    if rule.draws_drafts and drafter.siblings not in (Siblings.NONE, Siblings.SINGLE):
        raise ValueError("this lossy rule needs a drawn chain; draft a chain, such as chain:3")
    steps: list[Step] = []

    def verify(tree: Tree, once: Laws, random: Randomness) -> Verdict:
        laws = _Kept(once)
        verdict = rule.verify(tree, laws, random)
        tokens = [*(tree.tokens[node] for node in verdict.path), verdict.token]
        for node, token in zip((0, *verdict.path), tokens, strict=True):
            p, v = laws.target(node), rule.law(tree, laws, node)
            formula = rule.closed_form
            steps.append(
                Step(
                    float(distance(p, v)),
                    min(1.0, float(p[token]) / max(float(v[token]), 1e-30)),
                    None if formula is None else float(formula(tree, laws, node)),
                )
            )
        return verdict

    found = decode_by(verify, target, prompt_ids, drafter, decoding, row=row)
    return LossyText(
        new_ids=found.new_ids,
        lossy_rounds=found.lossy_rounds,
        # What an end token or the limit cut off was never emitted.
        steps=steps[: len(found.new_ids)],
    )


class _Kept:
    """Laws computed once a node: walk, law and formula all ask for them."""

    def __init__(self, laws: Laws) -> None:
        self._target, self._draft = cache(laws.target), cache(laws.draft)

    def target(self, node: int) -> Weights:
        """The law p after this node's path."""
        return self._target(node)

    def draft(self, node: int) -> Weights:
        """The law q that this node's token was drawn from."""
        return self._draft(node)


def bias(name: str, rule: LossyRule, texts: Sequence[LossyText]) -> Bias:
    """Pool the texts of a rule. Raises ValueError when there are none."""
    if not texts:
        raise ValueError("no texts to measure a bias on; decode at least one")
    steps = [step for text in texts for step in text.steps]
    rounds = [one for text in texts for one in text.lossy_rounds]
    formula = [step.closed_form for step in steps if step.closed_form is not None]
    return Bias(
        rule=name,
        formula=rule.bias,
        texts=len(texts),
        tokens=len(steps),
        tokens_a_call=sum(one.written for one in rounds) / max(1, len(rounds)),
        tv_per_step=sum(step.distance for step in steps) / len(steps),
        largest_tv=max(step.distance for step in steps),
        closed_form_tv=sum(formula) / len(formula) if formula else None,
        divergence_length=sum(_agreed(text.steps) for text in texts) / len(texts),
        longest=max(len(text.steps) for text in texts),
    )


def _agreed(steps: Sequence[Step]) -> float:
    """Sum over k of the chance of agreeing through k tokens, the k-th averaged over its law."""
    total, through = 0.0, 1.0
    for step in steps:
        total += through * (1 - step.distance)
        through *= step.agreement
    return total
