"""Offline acceptance as sums per prompt: every figure is a quotient of two sums over prompts.

R prompts, K depths of a draft, P bins of places in the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.eval.stats import Interval, ratio, ratio_difference

Floats = NDArray[np.float64]

PLACE_BIN = 16
"""Answer tokens per bin of the acceptance-by-place curve."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Expected counts of decoding each prompt's own text; sums over what decoding would visit."""

    draft: str
    """The draft plan, such as chain:3."""
    rule: str
    """The verification rule."""
    row_ids: tuple[str, ...]
    """Names of the prompts."""
    kinds: tuple[str, ...]
    """Kind of each prompt."""
    tokens_R: Floats
    """Answer tokens after the prefill's own."""
    rounds_R: Floats
    """Target calls after the prefill."""
    drafted_R: Floats
    """Draft tokens sent to the target."""
    judged_RK: Floats
    """Contexts in which the draft of depth k was judged."""
    kept_RK: Floats
    """Chance of acceptance under the target's law, summed over those contexts (Rao-Blackwell)."""
    hit_RK: Floats
    """Drafts that the text itself accepted: noisier than kept_RK, equal in expectation."""
    best_RK: Floats
    """What the best exact rule would accept with the same draft law, over those contexts."""
    inside_RK: Floats
    """The target's mass inside the draft vocabulary, over those contexts."""
    top_inside_RK: Floats
    """Contexts whose likeliest token is inside the draft vocabulary."""
    tokens_RP: Floats
    """Tokens by bin of place in the answer."""
    starts_RP: Floats
    """Round starts by bin of place in the answer."""

    @property
    def tau(self) -> float:
        """Tokens per target call, pooled."""
        return float(self.tokens_R.sum() / self.rounds_R.sum())

    @property
    def alpha(self) -> float:
        """Mean chance of acceptance over judged contexts."""
        return _quotient(self.kept_RK.sum(), self.judged_RK.sum())

    @property
    def survival(self) -> tuple[float, ...]:
        """Chance that a round accepts at least k drafts, k = 1, 2, ..."""
        return tuple(_quotient(kept, self.rounds_R.sum()) for kept in self.kept_RK.sum(0))

    def subset(self, kind: str) -> "Score":
        """The same sums for the prompts of one kind."""
        chosen = [i for i, one in enumerate(self.kinds) if one == kind]
        if not chosen:
            raise ValueError(f"no prompt of kind {kind!r}; kinds are {sorted(set(self.kinds))}")
        return self.take(chosen)

    def take(self, indices: Sequence[int]) -> "Score":
        """The same sums for some of the prompts, in the order given."""
        columns = {
            field.name: getattr(self, field.name)[list(indices)]
            for field in fields(self)
            if isinstance(getattr(self, field.name), np.ndarray)
        }
        return replace(
            self,
            row_ids=tuple(self.row_ids[i] for i in indices),
            kinds=tuple(self.kinds[i] for i in indices),
            **columns,
        )


def join(parts: Sequence[Score]) -> Score:
    """Scores of the same draft over different prompts, as one."""
    first = parts[0]
    bins = max(part.tokens_RP.shape[1] for part in parts)
    columns: dict[str, Any] = {}
    for field in fields(Score):
        values = [getattr(part, field.name) for part in parts]
        if field.name in ("tokens_RP", "starts_RP"):
            values = [np.pad(v, ((0, 0), (0, bins - v.shape[1]))) for v in values]
        if isinstance(values[0], np.ndarray):
            columns[field.name] = np.concatenate(values)
    return replace(
        first,
        row_ids=tuple(name for part in parts for name in part.row_ids),
        kinds=tuple(kind for part in parts for kind in part.kinds),
        **columns,
    )


def summary(score: Score, *, seed: int = 0, by_kind: bool = True) -> dict[str, Any]:
    """Every figure of a score with 95% intervals by prompt, ready for JSON."""
    rounds_R, judged_R = score.rounds_R, score.judged_RK.sum(1)
    judged = score.judged_RK.sum(0)
    figures: dict[str, Any] = {
        "draft": score.draft,
        "rule": score.rule,
        "prompts": len(score.row_ids),
        "tokens": int(score.tokens_R.sum()),
        "rounds": float(rounds_R.sum()),
        "drafted_per_round": _quotient(score.drafted_R.sum(), rounds_R.sum()),
        "tau": _interval(ratio(score.tokens_R, rounds_R, seed=seed)),
        "tau_macro": _macro(score),
        "alpha": _interval(ratio(score.kept_RK.sum(1), judged_R, seed=seed)),
        "alpha_star": _interval(ratio(score.best_RK.sum(1), judged_R, seed=seed)),
        "survival": [_interval(ratio(kept_R, rounds_R, seed=seed)) for kept_R in score.kept_RK.T],
        "survival_by_text": [_quotient(hit, rounds_R.sum()) for hit in score.hit_RK.sum(0)],
        "alpha_by_depth": _quotients(score.kept_RK.sum(0), judged),
        "alpha_star_by_depth": _quotients(score.best_RK.sum(0), judged),
        "conditional": _conditional(score),
        "ceiling": _quotient(score.inside_RK.sum(), judged.sum()),
        "ceiling_top": _quotient(score.top_inside_RK.sum(), judged.sum()),
        "by_place": _by_place(score),
        "spread": spread(score),
    }
    if by_kind:
        kinds = sorted(set(score.kinds))
        figures["by_kind"] = {
            kind: summary(score.subset(kind), seed=seed, by_kind=False) for kind in kinds
        }
    return figures


def spread(score: Score) -> dict[str, Any]:
    """How acceptance varies from prompt to prompt: what a test against other counts needs.

    `depths` has, for each depth, judged contexts and accepted ones (under the law, and by the
    text), the squares of judged summed over prompts, and the squares of a prompt's accepted less
    what the pooled rate gives it. `calls` has the same of accepted drafts over target calls.
    """
    kept_R, rounds_R = score.kept_RK.sum(1), score.rounds_R
    columns = zip(score.judged_RK.T, score.kept_RK.T, score.hit_RK.T, strict=True)
    return {
        "prompts": len(score.row_ids),
        "calls": {"kept": float(kept_R.sum()), **_squares(kept_R, rounds_R)},
        "depths": [
            {
                "judged": float(judged_R.sum()),
                "kept": float(by_law_R.sum()),
                "hit": float(hit_R.sum()),
                **_squares(by_law_R, judged_R),
            }
            for judged_R, by_law_R, hit_R in columns
        ],
    }


def _squares(top_R: Floats, bottom_R: Floats) -> dict[str, float]:
    rate = _quotient(top_R.sum(), bottom_R.sum())
    off_R = np.zeros_like(top_R) if np.isnan(rate) else top_R - rate * bottom_R
    return {"squares": float((bottom_R**2).sum()), "off_squares": float((off_R**2).sum())}


def difference(a: Score, b: Score, *, seed: int = 0) -> Interval:
    """Tau of `a` less tau of `b`, paired by prompt."""
    if a.row_ids != b.row_ids:
        raise ValueError(
            "the two scores are of different prompts; score both heads on the same trace"
        )
    return ratio_difference((a.tokens_R, a.rounds_R), (b.tokens_R, b.rounds_R), seed=seed)


def _macro(score: Score) -> float:
    some_R = score.rounds_R > 0
    return float((score.tokens_R[some_R] / score.rounds_R[some_R]).mean())


def _conditional(score: Score) -> list[float]:
    """Share of the rounds that accepted k - 1 drafts which accept the k-th too."""
    kept = score.kept_RK.sum(0)
    before = np.concatenate([[score.rounds_R.sum()], kept[:-1]])
    return _quotients(kept, before)


def _by_place(score: Score) -> list[dict[str, float]]:
    tokens_P, starts_P = score.tokens_RP.sum(0), score.starts_RP.sum(0)
    return [
        {"from": 1 + PLACE_BIN * i, "tokens": float(tokens), "tau": _quotient(tokens, starts)}
        for i, (tokens, starts) in enumerate(zip(tokens_P, starts_P, strict=True))
        if tokens > 0
    ]


def _interval(interval: Interval) -> dict[str, float]:
    return interval._asdict()


def _quotients(top: Floats, bottom: Floats) -> list[float]:
    return [_quotient(a, b) for a, b in zip(top, bottom, strict=True)]


def _quotient(top: float, bottom: float) -> float:
    return float(top / bottom) if bottom else float("nan")
