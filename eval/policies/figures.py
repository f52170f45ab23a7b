"""What policies would buy: calls, drafts, acceptance and speed-up, with intervals by prompt.

R prompts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.eval.policies.policy import Oracle, Policy
from outrider.eval.policies.replay import Replayed, Row, States, replay, replay_oracle
from outrider.eval.report.lines import aligned
from outrider.eval.report.tables import interval, number
from outrider.eval.stats import ratio, ratio_difference

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times over that of a plain step of the target; 0 and 1 count target calls alone."""

    c: float
    """A draft step."""
    verify: tuple[tuple[int, float], ...] = ((1, 1.0),)
    """A call on n tokens, at some n; straight lines between them, level outside."""

    def __post_init__(self) -> None:
        sizes, ratios = zip(*self.verify, strict=True) if self.verify else ((), ())
        is_rising = bool(sizes) and list(sizes) == sorted(set(sizes)) and sizes[0] >= 1
        if not (is_rising and 0 <= self.c < math.inf and all(0 < r < math.inf for r in ratios)):
            raise ValueError(
                f"costs are c = {self.c}, verify {list(self.verify)}; give c of 0 or more, and "
                "pairs of rising token numbers from 1 and ratios above 0"
            )

    def call(self, tokens: int) -> float:
        """Time of a call on so many tokens; never less than that of a call on fewer."""
        sizes, ratios = zip(*self.verify, strict=True)
        return float(np.interp(tokens, sizes, np.maximum.accumulate(ratios)))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Expected counts of one policy, by prompt."""

    policy: str
    row_ids: tuple[str, ...]
    tokens_R: Floats
    """Answer tokens after the prefill's own."""
    rounds_R: Floats
    """Target calls after the prefill."""
    drafted_R: Floats
    laws_R: Floats
    """Draft steps, those whose law was not drawn from too."""
    kept_R: Floats
    judged_R: Floats
    time_R: Floats
    """In plain steps."""


def play(
    policies: Sequence[Policy], rows: Iterable[tuple[str, Row]], costs: Costs
) -> list[Outcome]:
    """Replay policies over rows in order; a state that persists goes on from row to row."""
    names: list[str] = []
    tokens: list[float] = []
    found: list[list[tuple[float, ...]]] = [[] for _ in policies]
    states: list[States | None] = [None] * len(policies)
    for name, row in rows:
        names.append(name)
        tokens.append(row.num_tokens - 1)
        for i, policy in enumerate(policies):
            if isinstance(policy, Oracle):
                one = replay_oracle(row, policy.most, c=costs.c, verify=costs.call)
            else:
                one = replay(policy, row, states[i])
                states[i] = one.ends if policy.persists else None
            found[i].append(_sums(one, costs))
    if not names:
        raise ValueError("no rows to replay policies on; give a trace with at least one answer")
    return [
        _outcome(policy.label, names, tokens, sums)
        for policy, sums in zip(policies, found, strict=True)
    ]


def _sums(one: Replayed, costs: Costs) -> tuple[float, ...]:
    laws = one.drafted + one.idle
    calls = sum(chance * costs.call(1 + length) for length, chance in one.lengths.items())
    return one.rounds, one.drafted, laws, one.kept, one.judged, costs.c * laws + calls


def _outcome(
    label: str, names: Sequence[str], tokens: Sequence[float], sums: Sequence[tuple[float, ...]]
) -> Outcome:
    rounds_R, drafted_R, laws_R, kept_R, judged_R, time_R = np.array(sums, dtype=np.float64).T
    return Outcome(
        policy=label,
        row_ids=tuple(names),
        tokens_R=np.array(tokens, dtype=np.float64),
        rounds_R=rounds_R,
        drafted_R=drafted_R,
        laws_R=laws_R,
        kept_R=kept_R,
        judged_R=judged_R,
        time_R=time_R,
    )


def policy_figures(outcome: Outcome, *, seed: int = 0) -> dict[str, Any]:
    """Every figure of a policy, ready for JSON."""

    def quotient(top_R: Floats, bottom_R: Floats) -> dict[str, float]:
        return ratio(top_R, bottom_R, seed=seed)._asdict()

    return {
        "policy": outcome.policy,
        "prompts": len(outcome.row_ids),
        "tokens": float(outcome.tokens_R.sum()),
        "target_calls": float(outcome.rounds_R.sum()),
        "drafted": float(outcome.drafted_R.sum()),
        "draft_steps": float(outcome.laws_R.sum()),
        "tau": quotient(outcome.tokens_R, outcome.rounds_R),
        "drafted_per_call": quotient(outcome.drafted_R, outcome.rounds_R),
        "drafted_rate": quotient(outcome.kept_R, outcome.drafted_R),
        "judged_alpha": quotient(outcome.kept_R, outcome.judged_R),
        "speedup": quotient(outcome.tokens_R, outcome.time_R),
    }


def compare(outcomes: Sequence[Outcome], *, seed: int = 0) -> list[dict[str, Any]]:
    """Speed-up of every later policy less that of the first, paired by prompt."""
    first, *others = outcomes
    return [
        {
            "policy": one.policy,
            "against": first.policy,
            "speedup": ratio_difference(
                (one.tokens_R, one.time_R), (first.tokens_R, first.time_R), seed=seed
            )._asdict(),
        }
        for one in others
    ]


def policy_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Lines of text, a row per head, trace and policy."""
    columns = ("head", "text", "policy", "tau [95%]", "calls", "drafted", "a call", "accepted")
    rows: list[tuple[str, ...]] = [(*columns, "speed-up [95%]")]
    for result in results:
        tau, speed = result["tau"], result["speedup"]
        rows.append(
            (
                result["head"],
                result["sampling"],
                result["policy"],
                interval(tau),
                f"{result['target_calls']:.1f}",
                f"{result['drafted']:.1f}",
                number(result["drafted_per_call"]["value"], 2),
                number(result["drafted_rate"]["value"]),
                interval(speed),
            )
        )
    return "\n".join(aligned(rows))
