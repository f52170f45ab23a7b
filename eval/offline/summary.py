"""Every figure of a score with 95% bootstrap intervals by prompt, ready for JSON.

R prompts, K depths of a draft, P buckets of a dimension, Q quantities.
"""

from typing import Any

import numpy as np

from outrider.eval.offline.cells import EDGES, QUANTITIES, bucket_name
from outrider.eval.offline.losses import losses
from outrider.eval.offline.scores import Floats, Score, as_json, quotient, quotients, spread
from outrider.eval.stats import ratios


class _Figures:
    """Quotients asked for one by one and resampled together."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._columns: list[tuple[Floats, Floats]] = []
        self._found: list[dict[str, Any]] = []

    def ratio(self, top_R: Floats, bottom_R: Floats) -> dict[str, Any]:
        """The interval of sum over sum, empty until `solve` is called."""
        self._columns.append((top_R, bottom_R))
        self._found.append({})
        return self._found[-1]

    def solve(self) -> None:
        """Fill all of them in."""
        tops, bottoms = (np.stack(columns, 1) for columns in zip(*self._columns, strict=True))
        for found, interval in zip(
            self._found, ratios(tops, bottoms, seed=self._seed), strict=True
        ):
            found |= as_json(interval)


def summary(score: Score, *, seed: int = 0) -> dict[str, Any]:
    """Every figure of a score, of its kinds of prompts, and of the parts of its text."""
    figures = _whole(score, seed)
    figures["by_kind"] = {
        kind: _whole(score.subset(kind), seed) for kind in sorted(set(score.kinds))
    }
    for dimension in score.cells:
        figures[f"by_{dimension}"] = _buckets(score, dimension, seed)
    return figures


def _whole(score: Score, seed: int) -> dict[str, Any]:
    rounds_R, judged_R = score.rounds_R, score.judged_RK.sum(1)
    judged_K, rounds = score.judged_RK.sum(0), score.rounds_R.sum()
    ask = _Figures(seed)
    found: dict[str, Any] = {
        "draft": score.draft,
        "rule": score.rule,
        "prompts": len(score.row_ids),
        "tokens": int(score.tokens_R.sum()),
        "rounds": float(rounds),
        "judged": float(judged_R.sum()),
        "drafted_per_round": quotient(score.drafted_R.sum(), rounds),
        "tau": ask.ratio(score.tokens_R, rounds_R),
        "tau_macro": _macro(score),
        "alpha": ask.ratio(score.kept_RK.sum(1), judged_R),
        "alpha_star": ask.ratio(score.best_RK.sum(1), judged_R),
        "loss": {name: ask.ratio(lost_R, judged_R) for name, lost_R in score.lost().items()},
        "ends": {name: ask.ratio(ended_R, rounds_R) for name, ended_R in score.ends().items()},
        "survival": [ask.ratio(kept_R, rounds_R) for kept_R in score.kept_RK.T],
        "survival_by_text": [quotient(hit, rounds) for hit in score.hit_RK.sum(0)],
        "alpha_by_depth": quotients(score.kept_RK.sum(0), judged_K),
        "alpha_star_by_depth": quotients(score.best_RK.sum(0), judged_K),
        "conditional": _conditional(score),
        "ceiling": quotient(score.inside_RK.sum(), judged_K.sum()),
        "ceiling_top": quotient(score.top_inside_RK.sum(), judged_K.sum()),
        "spread": spread(score),
    }
    ask.solve()
    return found


def _buckets(score: Score, dimension: str, seed: int) -> list[dict[str, Any]]:
    """The buckets of a dimension that hold text, each with its counts."""
    table_RPQ, edges = score.cells[dimension], EDGES[dimension]
    ask = _Figures(seed)
    made: list[dict[str, Any]] = []
    for index in range(len(edges)):
        sums = dict(zip(QUANTITIES, table_RPQ[:, index].T, strict=True))
        if not sums["tokens"].sum():
            continue
        judged_R = sums["judged"]
        made.append(
            {
                "name": bucket_name(edges, index),
                "from": edges[index],
                "prompts": int((sums["tokens"] > 0).sum()),
                **{key: float(sums[key].sum()) for key in ("tokens", "starts", "judged")},
                "tau": ask.ratio(sums["tokens"], sums["starts"]),
                "alpha": ask.ratio(sums["kept"], judged_R),
                "alpha_star": ask.ratio(sums["best"], judged_R),
                "loss": {name: ask.ratio(lost, judged_R) for name, lost in losses(sums).items()},
            }
        )
    if made:
        ask.solve()
    return made


def _macro(score: Score) -> float:
    some_R = score.rounds_R > 0
    if not some_R.any():
        return float("nan")
    return float((score.tokens_R[some_R] / score.rounds_R[some_R]).mean())


def _conditional(score: Score) -> list[float]:
    """Share of the rounds that accepted k - 1 drafts which accept the k-th too."""
    kept = score.kept_RK.sum(0)
    before = np.concatenate([[score.rounds_R.sum()], kept[:-1]])
    return quotients(kept, before)
