"""Planted faults that the certificate must reject, and how many of them it does reject.

A certificate is worth what its negative controls are: each mutant is a fault that some published
verifier has shipped, or one that a reader of the rules might make.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing import get_context
from typing import TypeAlias

from outrider.eval.certificate import mutant_drafts as drafts
from outrider.eval.certificate import mutant_inputs as inputs
from outrider.eval.certificate import mutant_noise as noise
from outrider.eval.certificate import mutant_rules as rules
from outrider.eval.certificate.languages import cases
from outrider.eval.certificate.law import (
    Language,
    Propose,
    Round,
    round_distance,
    speculative_round,
)
from outrider.eval.certificate.lazy_tree import Width, fixed, propose_tree
from outrider.eval.rules import RULES
from outrider.eval.rules.verdict import Siblings, Verify
from outrider.eval.rules.walk import greedy

OnLanguage: TypeAlias = Callable[[Language], Propose]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A planted fault."""

    what: str
    """What it does wrong, and where that was seen."""
    rule: str
    """The rule it is a fault of."""
    run: Callable[[Language], Round]


@dataclass(frozen=True, kw_only=True)
class Killed:
    """How a mutant fared; alive when nothing differed."""

    name: str
    rule: str
    where: str
    """The first language and prefix whose law differs; empty for a survivor."""
    distance: Fraction

    @property
    def is_alive(self) -> bool:
        """Whether no law differed."""
        return self.distance == 0


def judge(name: str) -> Killed:
    """Try the languages in turn and stop at the first law that differs."""
    mutant = MUTANTS[name]
    for case in cases(3):
        run = mutant.run(case.language)
        for prefix in case.prefixes:
            distance = round_distance(case.language, run, prefix)
            if distance > 0:
                where = f"{case.name}, after {list(prefix)}"
                return Killed(name=name, rule=mutant.rule, where=where, distance=distance)
    return Killed(name=name, rule=mutant.rule, where="", distance=Fraction(0))


def judge_all(names: Iterable[str], *, processes: int = 2) -> Iterator[Killed]:
    """Judge mutants in parallel, in order."""
    if processes == 1:
        yield from map(judge, names)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(judge, names)


def _of_rule(rule: str, siblings: Siblings, width: Width, verify: Verify) -> Mutant:
    def run(language: Language) -> Round:
        return speculative_round(language, propose_tree(language, width, siblings), verify)

    return Mutant(what=_summary(verify), rule=rule, run=run)


def _of_drafts(rule: str, propose: OnLanguage, what: str = "") -> Mutant:
    def run(language: Language) -> Round:
        return speculative_round(language, propose(language), RULES[rule].verify)

    return Mutant(what=what or _summary(propose), rule=rule, run=run)


def _pruned(rule: str, keep: drafts.Keep, *widths: int) -> Mutant:
    return _of_drafts(rule, drafts.pruned(keep, *widths), _summary(keep))


def _summary(what: object) -> str:
    return (what.__doc__ or "").strip().splitlines()[0]


_ONE, _ALIKE, _APART = Siblings.SINGLE, Siblings.IID, Siblings.WITHOUT
_LIKELY, _MIXED = Siblings.CHOSEN, Siblings.HYBRID
_PAIR, _TREE, _CHAIN = fixed(2), fixed(2, 1), fixed(1, 1)

MUTANTS = {
    # Drafts are honest, the rule is not.
    "draws from p after a refusal": _of_rule(
        "rejection", _ONE, _CHAIN, inputs.draws_from_p_after_refusal
    ),
    "residual after full acceptance": _of_rule(
        "rejection", _ONE, _CHAIN, inputs.residual_after_full_acceptance
    ),
    "bonus from raw logits": _of_rule("rejection", _ONE, _CHAIN, inputs.bonus_from_raw_logits),
    "judges by raw logits": _of_rule("rejection", _ONE, _CHAIN, inputs.judges_by_raw_logits),
    "accepts with p alone": _of_rule("rejection", _ONE, _CHAIN, inputs.accepts_with_p_alone),
    "loosened threshold": _of_rule("rejection", _ONE, _CHAIN, inputs.loosened),
    "draft laws off by one": _of_rule("rejection", _ONE, _CHAIN, inputs.draft_laws_off_by_one),
    "q at another temperature": _of_rule("rejection", _ONE, _CHAIN, inputs.flattened_draft_laws),
    "root law at every node": _of_rule("without", _APART, _TREE, inputs.root_laws_everywhere),
    "without, judged alike": _of_rule("without", _APART, _PAIR, inputs.judges_siblings_alike),
    "subtracts the token only": _of_rule("without", _APART, _PAIR, rules.subtracts_the_token_only),
    "siblings share a coin": _of_rule("iid", _ALIKE, _PAIR, inputs.siblings_share_a_coin),
    "forgets the first refusal": _of_rule("iid", _ALIKE, _PAIR, rules.forgets_the_first_refusal),
    "K-SEQ divisor too small": _of_rule("k_sequential", _ALIKE, _PAIR, rules.divisor_too_small),
    "K-SEQ residual of one draft": _of_rule(
        "k_sequential", _ALIKE, _PAIR, rules.k_sequential_without_scale
    ),
    "hybrid forgets the refusal": _of_rule(
        "hybrid", _MIXED, _PAIR, rules.hybrid_forgets_the_refusal
    ),
    "keeps the refused mass": _of_rule("point_mass", _LIKELY, _PAIR, inputs.keeps_the_refused_mass),
    "does not renormalise": _of_rule("point_mass", _LIKELY, _PAIR, rules.does_not_renormalise),
    "one coin, used twice": _of_rule("one_coin", _LIKELY, _CHAIN, inputs.one_coin_used_twice),
    "one coin, duplicates": _of_rule("one_coin", _ALIKE, _PAIR, rules.one_coin_with_duplicates),
    "nucleus: draws twice": _of_rule("match", _LIKELY, _PAIR, inputs.tries_twice),
    "wrong node's law": _of_rule("match", _LIKELY, _TREE, inputs.ends_on_the_deepest_law),
    "typical acceptance": _of_rule("match", _LIKELY, _TREE, rules.typical),
    "accepts all above a threshold": _of_rule("match", _LIKELY, _TREE, rules.accepts_all_above),
    "greedy at a soft target": _of_rule("greedy", _LIKELY, _PAIR, greedy),
    "block: first failure ends": _of_rule("block", _ONE, _CHAIN, rules.first_failure_ends),
    "block: residual not scaled": _of_rule("block", _ONE, _CHAIN, rules.unscaled_residual),
    "block: no vocabulary sum": _of_rule("block", _ONE, _CHAIN, rules.no_vocabulary_sum),
    "traversal: no vocabulary sum": _of_rule("traversal", _APART, _TREE, rules.no_vocabulary_sum),
    "traversal: sum after update": _of_rule("traversal", _APART, _TREE, rules.sum_after_update),
    "traversal: forgives S = 0": _of_rule("traversal", _APART, _TREE, rules.forgives_empty_sums),
    # The rule is honest, drafts are not what they are said to be.
    "argmax drafts, soft q": _of_drafts("rejection", drafts.argmax_with_soft_law),
    "top drafts as if drawn": _of_drafts("without", drafts.top_as_if_drawn),
    "q filtered after drawing": _of_drafts("rejection", drafts.filtered_after_drawing),
    "better of two": _pruned("without", drafts.keep_better_of_two, 2),
    "reversed siblings": _pruned("without", drafts.in_reverse, 2),
    "reversed siblings, traversal": _pruned("traversal", drafts.in_reverse, 2),
    "tree scored by drawn q": _pruned("without", drafts.keep_likeliest_drawn, 2, 1),
    "kept by a later sibling": _pruned("without", drafts.keep_by_later_sibling, 2),
    "kept by its continuation": _pruned("without", drafts.keep_by_continuation, 1),
    "second sibling as first": _pruned("without", drafts.keep_second_as_first, 2),
    "stop drops its trigger": _pruned("rejection", drafts.keep_above_threshold, 1, 1),
    "padded with token 0": _pruned("rejection", drafts.padded, 1, 1),
    # One uniform where two are needed.
    "draft and coin share noise": Mutant(
        what=_summary(noise.shared_draft_and_coin),
        rule="rejection",
        run=noise.shared_draft_and_coin,
    ),
    "draft and residual share noise": Mutant(
        what=_summary(noise.shared_draft_and_residual),
        rule="rejection",
        run=noise.shared_draft_and_residual,
    ),
    "coin and residual share noise": Mutant(
        what=_summary(noise.shared_coin_and_residual),
        rule="rejection",
        run=noise.shared_coin_and_residual,
    ),
}
