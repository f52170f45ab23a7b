"""What chain and tree scoring share: checks of fit, and rows of a trace in padded batches."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.offline.traces import Trace, TraceRow
from outrider.eval.rules import rule_named

_BATCH_TOKENS = 4096
_SCORED = ("greedy", "rejection", "match", "point_mass", "one_coin")
_OF_ONE_DRAFT = {
    "iid": "rejection",
    "without": "rejection",
    "k_sequential": "rejection",
    "hybrid": "rejection",
    "traversal": "block",
}
"""What rules of drawn trees are on a chain, which has one draft a node."""


def check_rule(rule: str | None, sampling: Sampling) -> str:
    """The rule to use; ValueError when it does not fit the sampling."""
    if rule is None:
        return "greedy" if sampling.is_greedy else "rejection"
    if rule_named(rule).is_greedy != sampling.is_greedy:
        raise ValueError(
            f"rule {rule!r} does not fit text of temperature {sampling.temperature}; use greedy at "
            "temperature 0 and rejection, match or point_mass above"
        )
    if rule not in _SCORED:
        raise ValueError(
            f"rule {rule!r} judges drawn siblings or whole drawn chains, whose rounds the text "
            f"alone does not tell here; choose one of {', '.join(_SCORED)} (block for chains "
            "of outrider eval), or measure it with outrider decode"
        )
    return rule


def check_match(trace: Trace, target: Target) -> None:
    """ValueError when the trace is of another target."""
    if trace.info.fingerprint != target.fingerprint():
        raise ValueError(
            f"the trace {trace.folder} is of target {trace.info.target} "
            f"({trace.info.fingerprint[:12]}), this target is {target.name} "
            f"({target.fingerprint()[:12]}); trace this target with outrider trace"
        )


def check_chain_rule(rule: str | None, sampling: Sampling) -> str:
    """The rule to judge a chain by; ValueError when it does not fit the sampling."""
    rule = _OF_ONE_DRAFT.get(rule or "", rule)
    if rule == "block" and not sampling.is_greedy:
        return rule
    return check_rule(rule, sampling)


def check_lengths(lengths: Sequence[int]) -> int:
    """The longest of some chain lengths; ValueError when there is none, or one below 1."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths is {list(lengths)}; give chain lengths of 1 or more")
    return max(lengths)


def batches(
    trace: Trace, layers: Sequence[int], rows: Sequence[int] | None = None
) -> Iterator[list[TraceRow]]:
    """Rows of like length with these layers' states, a few thousand padded tokens at a time."""
    chosen = sorted(range(len(trace)) if rows is None else rows, key=lambda i: trace.lengths[i])
    group: list[int] = []
    for index in [*chosen, None]:
        full = index is None or (len(group) + 1) * trace.lengths[index] > _BATCH_TOKENS
        if group and full:
            yield [trace.row(i, layers) for i in group]
            group = []
        if index is not None:
            group.append(index)


def side_by_side(batch: Sequence[TraceRow], name: str) -> Tensor:
    """One field of every row, padded on the right, where a causal head does not look."""
    parts = [getattr(row, name) for row in batch]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
