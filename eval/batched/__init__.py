"""Verification of a batch of drafted trees at once, on tensors: no branch on what the device holds.

Every rule of `outrider.eval.rules` but optimal transport, deciding as that rule does on the same
laws and noise (`outrider.eval.batched.tie` compares them). A round waits for nothing between its
first and last operation, so it can be compiled, and captured in a CUDA graph; `outrider certify`
prints the comparison. For loops that serve many rows at once, and for replaying one tree often:
`outrider.eval.certificate.eprocess` judges any build of this code by its first tokens, and rejects
one that draws from p after a refusal (six tokens, total variation 0.17) after about 250 to 550
rounds.
`outrider.eval.decode` decodes one row, reads p only where the walk goes, and keeps the rules.
Dimensions: as in `outrider.eval.batched.drafts`.
"""

from collections.abc import Callable
from typing import TypeAlias

from outrider.eval.batched.drafts import Drafts, Noise, Verdicts
from outrider.eval.batched.k_seq import k_sequential
from outrider.eval.batched.path import traversal
from outrider.eval.batched.residuals import hybrid, recursive
from outrider.eval.batched.walk import greedy, match, one_coin, point_mass
from outrider.eval.rules import rule_named

VerifyBatch: TypeAlias = Callable[[Drafts, Noise], Verdicts]

BATCHED: dict[str, VerifyBatch] = {
    "greedy": greedy,
    "rejection": recursive,
    "match": match,
    "point_mass": point_mass,
    "one_coin": one_coin,
    "iid": recursive,
    "without": recursive,
    "k_sequential": k_sequential,
    "hybrid": hybrid,
    "block": traversal,
    "traversal": traversal,
}
"""The batched form of each rule of `outrider.eval.rules.RULES`."""


def verify_batch(name: str, drafts: Drafts, noise: Noise) -> Verdicts:
    """Judge B drafted trees by the rule of this name.

    Raises ValueError for an unknown name, for drafts that the rule is not exact for, and for noise
    of another size than the trees'.
    """
    rule, (num_rounds, num_nodes) = rule_named(name), drafts.tokens_BN.shape
    if drafts.siblings not in rule.drafts:
        raise ValueError(
            f"rule {name!r} judges drafts of kind {' or '.join(sorted(rule.drafts))}, these are "
            f"{drafts.siblings}; draft that way, or use another rule"
        )
    if rule.is_chain_only and not drafts.shapes.is_chain:
        raise ValueError(
            f"rule {name!r} judges chains, these trees branch; for drawn trees use iid, without or "
            "traversal"
        )
    num_draws = len(drafts.shapes.widths) + 1
    wanted = {"coins_BN": num_nodes, "targets_BE": num_draws, "rests_BE": num_draws}
    for field, count in wanted.items():
        shape = tuple(getattr(noise, field).shape)
        if len(shape) != 2 or shape[0] != num_rounds or shape[1] < count:
            raise ValueError(
                f"{field} is {list(shape)}; give [{num_rounds}, {count}], a uniform for each "
                f"{'node' if field == 'coins_BN' else 'depth, the root included'}"
            )
    return BATCHED[name](drafts, noise)
