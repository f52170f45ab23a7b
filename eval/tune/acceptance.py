"""How many tokens a round of a draft emits: from an `outrider eval` report, or one alpha."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from outrider.eval.metrics import refuse_lossy
from outrider.eval.offline.evaluate import TEXT
from outrider.eval.trees.plans import ChainPlan, DrawnPlan, LookupPlan, Plan, SuffixPlan, plan_named
from outrider.eval.tune.formula import check_alpha

_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The acceptance of one draft on some text."""

    draft: str
    """The draft plan, such as chain:3."""
    tokens: int
    """Tokens of a verify call for one row: the drafted ones and the root."""
    survival: tuple[float, ...]
    """Chance that a round accepts at least i drafts, i = 1, 2, ..."""
    tau: float
    """Tokens per target call, as measured; 1 + sum of survival where only that is known."""
    tau_low: float
    tau_high: float
    """95% interval of tau by prompt; tau itself where there is none."""
    source: str
    """The text it was measured on, or the alpha it follows from."""

    def __post_init__(self) -> None:
        before = 1.0
        for depth, chance in enumerate(self.survival, start=1):
            if not -_ROUNDING <= chance <= before + _ROUNDING:
                raise ValueError(
                    f"survival of {self.draft} at depth {depth} is {chance}; give chances from 0 "
                    f"to 1 that never rise with the depth (before it: {before})"
                )
            before = chance
        if not 1 <= self.tau <= len(self.survival) + 1 + _ROUNDING:
            raise ValueError(
                f"tau of {self.draft} is {self.tau}; a round of {len(self.survival)} drafts in a "
                f"row emits 1 to {len(self.survival) + 1} tokens"
            )
        if self.tokens < 1:
            raise ValueError(f"tokens of {self.draft} is {self.tokens}; a call has at least 1")

    @property
    def plan(self) -> Plan:
        """The plan by name."""
        return plan_named(self.draft)

    @property
    def emitted(self) -> tuple[float, ...]:
        """Chance that a round emits l tokens, l = 1, 2, ...: differences of the survival."""
        reached = (1.0, *self.survival, 0.0)
        return tuple(max(0.0, now - later) for now, later in pairwise(reached))


def from_alpha(alpha: float, lengths: Sequence[int]) -> list[Acceptance]:
    """Chains whose every draft is accepted with the same chance (Leviathan et al. 2023)."""
    check_alpha(alpha)
    if not lengths:
        raise ValueError("lengths is empty; give at least one chain length, such as 3")
    found: list[Acceptance] = []
    for length in lengths:
        survival = tuple(alpha**i for i in range(1, ChainPlan(length).length + 1))
        tau = 1 + sum(survival)
        found.append(
            Acceptance(
                draft=f"chain:{length}",
                tokens=length + 1,
                survival=survival,
                tau=tau,
                tau_low=tau,
                tau_high=tau,
                source=f"alpha = {alpha:g}",
            )
        )
    return found


def read_acceptances(
    path: Path, *, head: str | None = None, trace: str | None = None, kind: str | None = None
) -> list[Acceptance]:
    """The drafts of one head on one trace of a report that `outrider eval --out` wrote.

    Drafts of the text alone, lookups and suffixes, go with any head.

    `head`, `trace` and `kind` (of prompt) choose where the report has several. Raises ValueError
    for another file, and where the choice is open.
    """
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        results: list[dict[str, Any]] = report["evaluation"]["results"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ValueError(
            f"acceptance {path} is not a report of outrider eval ({type(problem).__name__}: "
            f"{problem}); write one with outrider eval --out FILE.json"
        ) from problem
    refuse_lossy(results)
    alone = [one for one in results if one["head"] == TEXT]
    if len(alone) < len(results) and head != TEXT:
        results = _chosen([one for one in results if one["head"] != TEXT], "head", head, path)
        results = [*results, *alone]
    results = _chosen(results, "trace", trace, path)
    return [_from_result(result, kind, path) for result in results]


def _chosen(
    results: Sequence[dict[str, Any]], name: str, wanted: str | None, path: Path
) -> list[dict[str, Any]]:
    known = list(dict.fromkeys(result[name] for result in results))
    if (wanted is None and len(known) > 1) or (wanted is not None and wanted not in known):
        raise ValueError(
            f"{name} is {wanted!r} and {path} has {', '.join(map(repr, known))}; choose one of "
            "them, as acceptance belongs to a head and its traffic"
        )
    return [result for result in results if wanted in (None, result[name])]


def _from_result(result: Mapping[str, Any], kind: str | None, path: Path) -> Acceptance:
    figures = result
    if kind is not None:
        parts = result.get("by_kind") or {}
        if kind not in parts:
            raise ValueError(
                f"kind is {kind!r} and {path} has {', '.join(sorted(parts)) or 'none'}; choose one "
                "of them, or leave it out for all prompts"
            )
        figures = parts[kind]
    tau = figures["tau"]
    value = float(tau["value"])
    survival = [float(one["value"]) for one in figures["survival"]]
    drafted = _drafted(plan_named(result["draft"]), figures)
    return Acceptance(
        draft=result["draft"],
        tokens=1 + drafted,
        survival=tuple(survival),
        tau=value,
        tau_low=value if tau["low"] is None else float(tau["low"]),
        tau_high=value if tau["high"] is None else float(tau["high"]),
        source=f"{result['head']} on {kind + ' of ' if kind else ''}{result['trace']}",
    )


def _drafted(plan: Plan, figures: Mapping[str, Any]) -> int:
    """Draft tokens of a whole round; near the end of a text rounds may draft fewer."""
    if isinstance(plan, ChainPlan):
        return plan.length
    if isinstance(plan, LookupPlan | SuffixPlan):
        # Where nothing matches it drafts nothing; the mean is what a batch's call has of it.
        return math.ceil(float(figures["drafted_per_round"]))
    if isinstance(plan, DrawnPlan):
        return plan.nodes
    return max(plan.nodes, plan.depth)
