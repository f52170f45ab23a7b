"""Several heads, several traces, several drafts: one table of exact offline figures."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.drafters.model import DraftModel
from outrider.eval.offline.drafted import is_text_draft, score_drafts, some_rows
from outrider.eval.offline.scores import Score, as_json, differences
from outrider.eval.offline.summary import summary
from outrider.eval.offline.traces import Trace
from outrider.eval.packing import packed
from outrider.heads import DraftHead

TEXT = "text alone"
"""Name of the drafter that reads the text alone, by prompt lookup or suffix."""


def evaluate(
    target: Target,
    heads: Mapping[str, DraftHead | DraftModel],
    traces: Mapping[str, Trace],
    drafts: Sequence[str],
    *,
    rule: str | None = None,
    seed: int = 0,
    tree_texts: int | None = None,
) -> dict[str, Any]:
    """Score every drafter with its drafts on every trace; ready for JSON and for the report.

    Args:
        target: The target that the traces are of.
        heads: Heads, attached to the target's tables, and draft models, by display name.
        traces: Traces by display name.
        drafts: Draft plans, such as chain:3 or tree:4,4,16; lookups and suffixes are scored once,
            as those of `TEXT`.
        rule: Verification rule for sampled text; by default rejection for chains and match for
            trees. Greedy text is always judged by the greedy rule.
        seed: Of the bootstrap, and of the choice of `tree_texts`.
        tree_texts: Score trees on so many whole texts, drawn at random; all by default.

    Results on off-policy text, where a trace was opened with leave to be so, say so. Raises
    ValueError where nothing drafts and for drafts without an offline score.
    """
    results: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    drafters: dict[str, DraftHead | DraftModel | None] = dict(heads)
    if any(is_text_draft(draft) for draft in drafts):
        drafters[TEXT] = None
    if not drafters:
        raise ValueError("nothing drafts: give a head, a draft model, or a draft of the text alone")
    words = [sampling_text(trace.sampling) for trace in traces.values()]
    with packed(target, *drafters.values()):
        for trace_name, trace in traces.items():
            is_alone = words.count(sampling_text(trace.sampling)) == 1
            tree_rows = some_rows(trace, tree_texts, seed)
            scored: dict[str, dict[str, Score]] = {}
            for name, drafter in drafters.items():
                begun = time.perf_counter()
                scored[name] = score_drafts(
                    drafter, trace, target, drafts, rule=rule, tree_rows=tree_rows
                )
                seconds = (time.perf_counter() - begun) / max(1, len(scored[name]))
                results += [
                    {
                        "head": name,
                        "trace": trace_name,
                        "sampling": sampling_text(trace.sampling),
                        "text": None if is_alone else trace_name,
                        "off_policy": trace.policy.is_off,
                        "subset": _subset(score, trace, seed),
                        "seconds": seconds,
                        **summary(score, seed=seed),
                    }
                    for score in scored[name].values()
                ]
            found += _differences(trace_name, scored, seed)
    return {
        "traces": {name: describe(trace) for name, trace in traces.items()},
        "results": results,
        "differences": found,
    }


def _subset(score: Score, trace: Trace, seed: int) -> dict[str, int] | None:
    """Which part of the trace was scored; None for all of it."""
    if len(score.row_ids) == len(trace):
        return None
    return {"texts": len(score.row_ids), "of": len(trace), "seed": seed}


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
        "off_policy": trace.policy.is_off,
    }


def _differences(
    trace: str, scored: Mapping[str, Mapping[str, Score]], seed: int
) -> list[dict[str, Any]]:
    """Every later drafter against the first, draft by draft and kind by kind, paired by prompt."""
    first, *others = scored
    return [
        {
            "trace": trace,
            "draft": draft,
            "head": other,
            "against": first,
            **_difference(scored[other][draft], scored[first][draft], seed),
            "by_kind": {
                kind: _difference(
                    scored[other][draft].subset(kind), scored[first][draft].subset(kind), seed
                )
                for kind in sorted(set(scored[first][draft].kinds))
            },
        }
        for other in others
        for draft in scored[other]
        if draft in scored[first]
    ]


def _difference(a: Score, b: Score, seed: int) -> dict[str, Any]:
    return {name: as_json(one) for name, one in differences(a, b, seed=seed).items()}
