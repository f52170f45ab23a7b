"""Offline acceptance as sums per prompt: every figure is a quotient of two sums over prompts.

R prompts, K depths of a draft, P buckets of a dimension, Q quantities.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.eval.offline.losses import ends, losses
from outrider.eval.stats import Interval, ratio_differences

Floats = NDArray[np.float64]


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
    cut_R: Floats
    """Rounds that the end of the text ended before they ended otherwise."""
    undrafted_R: Floats
    """Rounds that ended above the plan's depth, where nothing was drafted."""
    judged_RK: Floats
    """Contexts in which the draft of depth k was judged."""
    kept_RK: Floats
    """Chance of acceptance under the target's law, summed over those contexts (Rao-Blackwell)."""
    hit_RK: Floats
    """Drafts that the text itself accepted: noisier than kept_RK, equal in expectation."""
    best_RK: Floats
    """What the best exact rule would accept with the same draft law, over those contexts."""
    wide_RK: Floats
    """The same had every context as many drafts as the plan has anywhere."""
    inside_RK: Floats
    """The target's mass inside the draft vocabulary, over those contexts."""
    top_inside_RK: Floats
    """Contexts whose likeliest token is inside the draft vocabulary."""
    cells: Mapping[str, Floats] = field(default_factory=dict)
    """By dimension of `outrider.eval.offline.cells`, [R, P, Q]: sums by bucket."""

    @property
    def tau(self) -> float:
        """Tokens per target call, pooled."""
        return float(self.tokens_R.sum() / self.rounds_R.sum())

    @property
    def alpha(self) -> float:
        """Mean chance of acceptance over judged contexts."""
        return quotient(self.kept_RK.sum(), self.judged_RK.sum())

    @property
    def survival(self) -> tuple[float, ...]:
        """Chance that a round accepts at least k drafts, k = 1, 2, ..."""
        return tuple(quotient(kept, self.rounds_R.sum()) for kept in self.kept_RK.sum(0))

    def lost(self) -> dict[str, Floats]:
        """What each prompt's judged contexts lost to what, [R]: see `losses`."""
        names = ("judged", "inside", "wide", "best", "kept")
        return losses({name: getattr(self, f"{name}_RK").sum(1) for name in names})

    def ends(self) -> dict[str, Floats]:
        """Why each prompt's rounds ended, [R]: see `losses`."""
        return ends(self.lost(), self.rounds_R, self.undrafted_R, self.cut_R)

    def subset(self, kind: str) -> "Score":
        """The same sums for the prompts of one kind."""
        chosen = [i for i, one in enumerate(self.kinds) if one == kind]
        if not chosen:
            raise ValueError(f"no prompt of kind {kind!r}; kinds are {sorted(set(self.kinds))}")
        return self.take(chosen)

    def take(self, indices: Sequence[int]) -> "Score":
        """The same sums for some of the prompts, in the order given."""
        chosen = list(indices)
        columns: dict[str, Any] = {name: getattr(self, name)[chosen] for name in _columns()}
        return replace(
            self,
            row_ids=tuple(self.row_ids[i] for i in chosen),
            kinds=tuple(self.kinds[i] for i in chosen),
            cells={name: table[chosen] for name, table in self.cells.items()},
            **columns,
        )


def _columns() -> list[str]:
    return [field.name for field in fields(Score) if "_R" in field.name]


def join(parts: Sequence[Score]) -> Score:
    """Scores of the same draft over different prompts, as one."""
    first = parts[0]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in _columns()
    }
    return replace(
        first,
        row_ids=tuple(name for part in parts for name in part.row_ids),
        kinds=tuple(kind for part in parts for kind in part.kinds),
        cells={name: np.concatenate([part.cells[name] for part in parts]) for name in first.cells},
        **columns,
    )


def in_order(score: Score, row_ids: Sequence[str]) -> Score:
    """The score with its prompts in this order."""
    place = {name: i for i, name in enumerate(score.row_ids)}
    return score.take([place[name] for name in row_ids])


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
    rate = quotient(top_R.sum(), bottom_R.sum())
    off_R = np.zeros_like(top_R) if np.isnan(rate) else top_R - rate * bottom_R
    return {"squares": float((bottom_R**2).sum()), "off_squares": float((off_R**2).sum())}


def difference(a: Score, b: Score, *, seed: int = 0) -> Interval:
    """Tau of `a` less tau of `b`, paired by prompt."""
    return differences(a, b, seed=seed)["tau"]


def differences(a: Score, b: Score, *, seed: int = 0) -> dict[str, Interval]:
    """Tau and alpha of `a` less those of `b`, paired by prompt."""
    if a.row_ids != b.row_ids:
        raise ValueError(
            "the two scores are of different prompts; score both heads on the same trace"
        )
    found = ratio_differences(_tau_and_alpha(a), _tau_and_alpha(b), seed=seed)
    return dict(zip(("tau", "alpha"), found, strict=True))


def _tau_and_alpha(score: Score) -> tuple[Floats, Floats]:
    top = np.stack([score.tokens_R, score.kept_RK.sum(1)], 1)
    return top, np.stack([score.rounds_R, score.judged_RK.sum(1)], 1)


def quotient(top: float, bottom: float) -> float:
    """A pooled share; NaN where there is nothing to divide by."""
    return float(top / bottom) if bottom else float("nan")


def quotients(top: Floats, bottom: Floats) -> list[float]:
    """The same, one by one."""
    return [quotient(a, b) for a, b in zip(top, bottom, strict=True)]


def as_json(interval: Interval) -> dict[str, Any]:
    """Value, low and high."""
    return interval._asdict()
