"""The renewal recursion and what others use in its place, judged by exact laws of small languages.

Every text of a language that ends at an end token or a limit is enumerated with its chance and its
expected target calls, the production rules deciding every round. The recursion sees the text alone
and must find the same calls. The shortcuts average over all places of the text as if rounds started
anywhere. B texts, T places (0 is the prefill's token), K drafts at most, S contexts, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.eval.certificate.law import Language, Round, Text, ended, outcomes, speculative_round
from outrider.eval.certificate.lazy_tree import propose_chain
from outrider.eval.certificate.proposals import propose_grown
from outrider.eval.offline.coins import DRAWN_RULES, block_credit, drawn_chances
from outrider.eval.offline.renewal import renewal
from outrider.eval.offline.traces import TraceRow
from outrider.eval.offline.walks import Drafted, Walk
from outrider.eval.rules import rule_named
from outrider.eval.trees.plans import ChainPlan, LikeliestPlan, TreePlan


class Known(NamedTuple):
    """A text's exact chance, and the expected target calls of decoding it, given that it came."""

    chance: Fraction
    calls: Fraction


def known_texts(run: Round, root: Text, end: int, limit: int) -> dict[Text, Known]:
    """All texts after `root`, of at most `limit` tokens, and cut after the token `end`."""
    cut = ended(run, end, len(root) + limit)
    waiting = {root: Known(Fraction(1), Fraction(0))}
    found: dict[Text, Known] = {}
    while waiting:
        # Shortest first: a text is expanded once all ways to it have been added up.
        text = min(waiting, key=len)
        chance, calls = waiting.pop(text)
        for weight, tokens in outcomes(lambda random, text=text: cut(text, random)):
            longer = text + tokens
            is_whole = longer[-1] == end or len(longer) == len(root) + limit
            into = found if is_whole else waiting
            before = into.get(longer, Known(Fraction(0), Fraction(0)))
            into[longer] = Known(
                before.chance + weight * chance, before.calls + weight * (calls + chance)
            )
    return {text: Known(one.chance, one.calls / one.chance) for text, one in found.items()}


class Table(NamedTuple):
    """Chances along texts, [B, T, K]; zero where the text has ended."""

    accept: Tensor
    """That the text's own token is accepted."""
    alpha: Tensor
    """That a draft is accepted in its place."""
    tokens_B: Tensor
    """Places of each text, the prefill's included."""


def chain_table(
    language: Language, texts: Sequence[Text], num_root: int, length: int, rule: str
) -> Table:
    """The offline tables of a chain: drawn for rejection and block, likeliest tokens otherwise."""
    tokens_B = torch.tensor([len(text) - num_root + 1 for text in texts])
    shape = (len(texts), int(tokens_B.max()), length)
    accept, alpha, ratio = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    for b, text in enumerate(texts):
        for place in range(1, int(tokens_B[b])):
            here = text[: num_root + place - 1]
            token = text[num_root + place - 1]
            p, q = (
                torch.tensor([list(map(float, law(here)))], dtype=torch.float64)
                for law in (language.target, language.draft)
            )
            for step in range(min(length, place)):
                start = place - step
                if rule not in DRAWN_RULES:
                    best = int(q.argmax())
                    accept[b, start, step] = float(best == token)
                    alpha[b, start, step] = p[0, best]
                    continue
                credit = block_credit(ratio[b, start, None, :step]) if rule == "block" else None
                found = drawn_chances(p, q, p[:, token], q[:, token], credit)
                accept[b, start, step] = found.accept_N[0]
                alpha[b, start, step] = found.alpha_N[0]
                ratio[b, start, step] = found.ratio_N[0]
    return Table(accept, alpha, tokens_B)


def walked_calls(language: Language, text: Text, num_root: int, plan: LikeliestPlan) -> int:
    """Target calls of a tree of likeliest tokens, by the production walk."""
    none = torch.empty(0)
    row = TraceRow("text", "all", num_root - 1, torch.tensor(text), *[none] * 7)
    walk, propose = Walk(row, plan.depth), propose_grown(language, plan)
    while not walk.is_done:
        _, proposal = next(
            iter(outcomes(lambda random: propose(text[: num_root + walk.place - 1], random)))
        )
        tree = proposal.tree
        walk.follow(Drafted(tree, ((),) * len(tree)))
    return len(walk.starts)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One language, draft and rule: exact tokens per target call, and what estimators say."""

    case: str
    draft: str
    rule: str
    texts: int
    exact: float
    """From the enumerated law."""
    worst_text: float
    """Largest difference between a text's exact tokens per call and the recursion's."""
    estimates: Mapping[str, float]
    """By estimator, the limit for infinitely many texts; see `ESTIMATORS`."""


ESTIMATORS = {
    "recursion": "renewal recursion over the text",
    "uniform": "path products, every place a start",
    "marginals": "products of the mean acceptance of each depth",
    "one alpha": "(1 - a^(k+1))/(1 - a) with the mean acceptance a",
}


def compare(
    name: str,
    language: Language,
    plan: ChainPlan | TreePlan,
    rule: str,
    *,
    root: Text = (1,),
    end: int = 0,
    limit: int = 5,
) -> Comparison:
    """Enumerate a language under a draft and a rule, and judge the estimators.

    Raises ValueError for a rule that has no offline score with such drafts.
    """
    is_drawn = rule in DRAWN_RULES
    if is_drawn and not isinstance(plan, ChainPlan):
        raise ValueError(f"rule {rule!r} judges drawn chains; give a chain, or match for a tree")
    chosen = TreePlan(plan.length, 1, plan.length) if isinstance(plan, ChainPlan) else plan
    propose = propose_chain(language, plan.depth) if is_drawn else propose_grown(language, chosen)
    known = known_texts(
        speculative_round(language, propose, rule_named(rule).verify), root, end, limit
    )
    texts = list(known)
    chance_B = np.array([float(known[text].chance) for text in texts])
    calls_B = np.array([float(known[text].calls) for text in texts])
    tokens_B = np.array([float(len(text) - len(root)) for text in texts])
    estimates: dict[str, float] = {}
    if isinstance(plan, ChainPlan):
        table = chain_table(language, texts, len(root), plan.length, rule)
        found_B = renewal(table.accept, table.tokens_B).rounds_BL[:, plan.length].numpy()
        estimates = _shortcuts(table, chance_B)
    else:
        found_B = np.array(
            [float(walked_calls(language, text, len(root), chosen)) for text in texts]
        )
    tokens = chance_B @ tokens_B
    return Comparison(
        case=name,
        draft=f"chain:{plan.length}" if isinstance(plan, ChainPlan) else plan.label,
        rule=rule,
        texts=len(texts),
        exact=float(tokens / (chance_B @ calls_B)),
        worst_text=float(np.abs(tokens_B / calls_B - tokens_B / found_B).max()),
        estimates={"recursion": float(tokens / (chance_B @ found_B)), **estimates},
    )


def _shortcuts(table: Table, chance_B: np.ndarray) -> dict[str, float]:
    """What the shortcuts converge to, averaged over texts by their chance."""
    weight_B = torch.from_numpy(chance_B)
    place_TK = torch.arange(table.accept.shape[1])[:, None] + torch.arange(table.accept.shape[2])
    inside_BTK = (place_TK < table.tokens_B[:, None, None]) & (place_TK > 0)
    inside_BTK[:, 0] = False
    starts = float((weight_B * (table.tokens_B - 1)).sum())
    paths_B = table.accept[:, 1:].cumprod(-1).sum((1, 2))
    judged_K = (weight_B[:, None, None] * inside_BTK).sum((0, 1))
    mean_K = (weight_B[:, None, None] * table.alpha * inside_BTK).sum((0, 1)) / judged_K.clamp(
        min=1e-300
    )
    alpha, length = float(mean_K[0]), len(mean_K)
    return {
        "uniform": 1 + float((weight_B * paths_B).sum()) / starts,
        "marginals": 1 + float(mean_K.cumprod(0).sum()),
        "one alpha": sum(alpha**power for power in range(length + 1)),
    }
