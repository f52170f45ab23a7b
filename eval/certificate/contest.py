"""Which of two rules gets more tokens from the same drafts, by enumeration.

Block verification never falls below rejection on a chain, a theorem; traversal mostly beats
recursive rejection on trees, which is no theorem.
"""

from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from outrider.eval.certificate.languages import bigram
from outrider.eval.certificate.law import Language, outcomes, speculative_round
from outrider.eval.certificate.lazy_tree import Width, fixed, propose_tree
from outrider.eval.rules.path import block, traversal
from outrider.eval.rules.verdict import Siblings, Verify
from outrider.eval.rules.walk import recursive, rejection


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Two rules on the same drafts of random languages; means are of expected tokens a call."""

    name: str
    mean_old: float
    mean_new: float
    num_pairs: int
    num_lost: int
    """Languages on which the newer rule gets fewer."""
    largest_loss: float
    where: str
    """The language of the largest loss, as the seed it was drawn with; empty if none was lost."""
    is_theorem: bool = False
    """Whether the newer rule must never get fewer."""


def expected_tokens(
    language: Language, verify: Verify, siblings: Siblings, width: Width
) -> Fraction:
    """Tokens of one call after token 0, exactly."""
    run = speculative_round(language, propose_tree(language, width, siblings), verify)
    weighed = (weight * len(tokens) for weight, tokens in outcomes(lambda r: run((0,), r)))
    return sum(weighed, Fraction(0))


def random_language(seed: int, vocab: int = 3) -> Language:
    """Small whole weights, every eighth zero."""
    rng = np.random.default_rng(seed)
    rows = [
        rng.integers(1, 10, (vocab, vocab)) * (rng.random((vocab, vocab)) > 1 / 8) for _ in "pq"
    ]
    for table in rows:
        table[table.sum(1) == 0, 0] = 1
    return bigram(str(seed), *(table.tolist() for table in rows)).language


def block_against_rejection(num_pairs: int) -> Contest:
    """R9 beside R1 on drawn chains of two."""
    name = "block : rejection, chain 2"
    found = compare(name, (rejection, block), Siblings.SINGLE, (1, 1), num_pairs)
    return replace(found, is_theorem=True)


def traversal_against_recursive(widths: tuple[int, ...], num_pairs: int) -> Contest:
    """R10 beside R5 on trees drawn without replacement."""
    name = f"traversal : without, {list(widths)}"
    return compare(name, (recursive, traversal), Siblings.WITHOUT, widths, num_pairs)


def compare(
    name: str,
    rules: tuple[Verify, Verify],
    siblings: Siblings,
    widths: tuple[int, ...],
    num_pairs: int,
) -> Contest:
    """The older and the newer of two rules, in this order, on random languages."""
    tokens = []
    for seed in range(num_pairs):
        language = random_language(seed)
        tokens.append([expected_tokens(language, one, siblings, fixed(*widths)) for one in rules])
    losses = [old - new for old, new in tokens]
    worst = max(range(num_pairs), key=lambda seed: losses[seed])
    return Contest(
        name=name,
        mean_old=float(sum(old for old, _ in tokens) / num_pairs),
        mean_new=float(sum(new for _, new in tokens) / num_pairs),
        num_pairs=num_pairs,
        num_lost=sum(loss > 0 for loss in losses),
        largest_loss=float(max(losses[worst], 0)),
        where=f"seed {worst}" if losses[worst] > 0 else "",
    )
