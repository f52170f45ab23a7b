"""Several heads, several traces, several drafts: one table of exact offline figures."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.metrics import refuse_lossy
from outrider.eval.offline.chain import score_chain
from outrider.eval.offline.lookup import score_lookup
from outrider.eval.offline.scores import Score, difference, summary
from outrider.eval.offline.traces import Trace
from outrider.eval.offline.tree import score_tree
from outrider.eval.trees.plans import ChainPlan, DrawnPlan, LookupPlan, plan_named
from outrider.heads import DraftHead


def evaluate(
    target: Target,
    heads: Mapping[str, DraftHead],
    traces: Mapping[str, Trace],
    drafts: Sequence[str],
    *,
    rule: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Score every head with every draft on every trace; ready for JSON and for the report.

    Args:
        target: The target that the traces are of.
        heads: Heads by display name, attached to the target's tables.
        traces: Traces by display name.
        drafts: Draft plans, such as chain:3 or tree:4,4,16.
        rule: Verification rule for sampled text; by default rejection for chains and point_mass
            for trees. Greedy text is always judged by the greedy rule.
        seed: Of the bootstrap.
    """
    results: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for trace_name, trace in traces.items():
        scored: dict[str, dict[str, Score]] = {}
        for name, head in heads.items():
            begun = time.perf_counter()
            scored[name] = _score_all(head, trace, target, drafts, rule)
            seconds = time.perf_counter() - begun
            results += [
                {
                    "head": name,
                    "trace": trace_name,
                    "sampling": sampling_text(trace.sampling),
                    "seconds": seconds / len(drafts),
                    **summary(score, seed=seed),
                }
                for score in scored[name].values()
            ]
        differences += _differences(trace_name, scored, seed)
    return {
        "traces": {name: describe(trace) for name, trace in traces.items()},
        "results": results,
        "differences": differences,
    }


def sampling_text(sampling: Sampling) -> str:
    """The settings that are not at their defaults, in words."""
    if sampling.is_greedy:
        words = ["greedy"]
    else:
        words = [f"T={sampling.temperature:g}"]
        words += [f"top-k {sampling.top_k}"] if sampling.top_k else []
        words += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
        words += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
        words += ["joint filters"] if sampling.filters == "joint" else []
    off = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    for name, default in off.items():
        penalty = getattr(sampling, f"{name}_penalty")
        words += [f"{name} penalty {penalty:g}"] if penalty != default else []
    words += [f"{len(sampling.logit_bias)} biased tokens"] if sampling.logit_bias else []
    words += [f"{len(sampling.bad_words)} bad words"] if sampling.bad_words else []
    return ", ".join(words)


def describe(trace: Trace) -> dict[str, Any]:
    """Where a trace came from and what it holds."""
    return {
        "target": trace.info.target,
        "fingerprint": trace.info.fingerprint,
        "text": trace.info.text,
        "sampling": trace.info.sampling,
        "seed": trace.info.seed,
        "dtype": trace.info.dtype,
        "prompts": len(trace),
        "kinds": {kind: trace.kinds.count(kind) for kind in sorted(set(trace.kinds))},
        "on_policy": trace.policy.text(),
    }


def table(evaluation: Mapping[str, Any]) -> str:
    """The results as lines of text, a row per head, trace and draft."""
    columns = ("head", "text", "draft", "tau [95%]", "alpha", "alpha*", "survival by position")
    rows = [columns]
    refuse_lossy(evaluation["results"])
    for result in evaluation["results"]:
        tau = result["tau"]
        rows.append(
            (
                result["head"],
                result["sampling"],
                result["draft"],
                f"{tau['value']:.3f} [{tau['low']:.3f}, {tau['high']:.3f}]",
                f"{result['alpha']['value']:.3f}",
                f"{result['alpha_star']['value']:.3f}",
                " ".join(f"{depth['value']:.3f}" for depth in result["survival"]),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _score_all(
    head: DraftHead, trace: Trace, target: Target, drafts: Sequence[str], rule: str | None
) -> dict[str, Score]:
    plans = {draft: plan_named(draft) for draft in drafts}
    lengths = [plan.length for plan in plans.values() if isinstance(plan, ChainPlan)]
    rule = None if trace.sampling.is_greedy else rule
    scored: dict[str, Score] = {}
    if lengths:
        chains = score_chain(head, trace, target, lengths=lengths, rule=rule)
        scored = {score.draft: score for score in chains.values()}
    for draft, plan in plans.items():
        if isinstance(plan, DrawnPlan):
            raise ValueError(
                f"draft is {draft!r}; drawn trees are measured by decoding, with outrider decode "
                "or bench: score a chain, a tree or a static tree here"
            )
        if isinstance(plan, LookupPlan):
            lookup_rule = None if rule == "rejection" else rule
            scored[draft] = score_lookup(trace, target, plan, rule=lookup_rule)
        elif not isinstance(plan, ChainPlan):
            tree_rule = None if rule == "rejection" else rule
            scored[draft] = score_tree(head, trace, target, plan, rule=tree_rule)
    return {draft: scored[draft] for draft in drafts}


def _differences(
    trace: str, scored: Mapping[str, Mapping[str, Score]], seed: int
) -> list[dict[str, Any]]:
    """Every later head against the first, draft by draft, paired by prompt."""
    first, *others = scored
    return [
        {
            "trace": trace,
            "draft": draft,
            "head": other,
            "against": first,
            "tau": difference(scored[other][draft], scored[first][draft], seed=seed)._asdict(),
        }
        for other in others
        for draft in scored[other]
    ]
