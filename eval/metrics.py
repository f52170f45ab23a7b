"""What happened in decoding, counted once and named: the definitions behind every figure.

A request is the list of its rounds; the prefill, which makes the first token, is not a round.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class RoundCounts(Protocol):
    """What a round must say of itself; the decode loop's own record has these three and more."""

    @property
    def drafted(self) -> int:
        """Draft tokens sent to the target: the length of a chain, the nodes of a tree."""
        ...

    @property
    def accepted(self) -> int:
        """Drafts in a row that the rule accepted, before EOS or the length limit cut any."""
        ...

    @property
    def emitted(self) -> int:
        """Tokens that reached the text, correction or bonus included."""
        ...


class Lossy:
    """Mark of what an inexact rule made: refused wherever figures of exact rules are counted.

    Its subclasses name their fields otherwise than exact results do, so a type checker sees it too.
    """


@dataclass(frozen=True)
class LossyRound(Lossy):
    """One call of the target after the prefill, judged by a rule that no certificate covers."""

    proposed: int
    """As `drafted`, `accepted` and `emitted` of an exact rule's round."""
    taken: int
    written: int


def refuse_lossy(results: Iterable[object]) -> None:
    """ValueError when a result, or a row read from a file, is an inexact rule's."""
    for one in results:
        is_row = isinstance(one, Mapping) and one.get("exact", True) is not True
        if is_row or isinstance(one, Lossy):
            raise ValueError(
                "a lossy result cannot enter a table of exact figures: its text is not the "
                "target's, so its acceptance means something else; outrider lossy reports it"
            )


class Round(NamedTuple):
    """One call of the target after the prefill."""

    drafted: int
    accepted: int
    emitted: int
    is_used_up: bool = False
    """Whether nothing was drafted after the last accepted draft, so that none was refused."""


DEFINITIONS: dict[str, str] = {
    "tau": "emitted tokens / rounds, pooled over the corpus; the bonus or correction counts, the "
    "prefill's own token and anything after EOS or the length limit do not",
    "tau_macro": "mean over prompts of each prompt's own emitted / rounds",
    "survival": "share of rounds whose i-th draft was accepted and emitted (unconditional, over "
    "all rounds)",
    "conditional": "among rounds whose drafts before the i-th were accepted and emitted, the share "
    "whose i-th was too; equals survival_i / survival_(i-1)",
    "judged_alpha": "accepted and emitted drafts / judged drafts; a round judges the accepted ones "
    "and the first rejected one",
    "drafted_rate": "accepted and emitted drafts / drafted tokens; falls as drafts get longer, so "
    "it is not alpha",
    "accepted_plus_one": "1 + accepted / rounds with nothing cut (the engines' mean acceptance "
    "length); exceeds tau where EOS or the length limit cuts a round",
    "alpha": "1 - TV(p, q): chance that a draft is accepted at a context, averaged over the "
    "contexts that decoding reaches",
    "alpha_star": "the best that any exact rule could accept with the same draft law, over the "
    "same contexts",
    "loss": "1 - alpha by cause, adding up: vocabulary (p outside the draft vocabulary), head (p "
    "inside it that the widest draft's alpha* does not reach; with the vocabulary, 1 - alpha*), "
    "shape (tree children left out), rule (alpha* - alpha)",
    "ends": "why rounds end, adding up: a loss, undrafted (nothing drafted here above the plan's "
    "depth; with shape, the tree's shape), text (its end), complete (every draft accepted)",
    "ceiling": "what a perfect head could accept with this draft vocabulary: p's mass inside it "
    "(or whether p's likeliest token is inside)",
    "c": "time of one draft step / time of one plain step of the target",
}


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Sums over rounds; every rate is a quotient of two of them."""

    rounds: int
    """Target calls after the prefill."""
    drafted: int
    """Draft tokens sent to the target."""
    emitted: int
    """Tokens that reached the text."""
    accepted: int
    """Accepted drafts, those behind EOS or the length limit included."""
    kept: int
    """Accepted drafts that reached the text."""
    judged: int
    """Drafts whose acceptance was decided inside the text."""
    kept_at: tuple[int, ...]
    """Rounds that kept at least i drafts, for i = 1, 2, ..."""
    cut: int
    """Rounds that ended early because of EOS or the length limit."""
    per_request: tuple[float, ...]
    """Emitted / rounds of each request that had a round."""

    @property
    def tau(self) -> float:
        """Tokens per target call."""
        return self.emitted / self.rounds if self.rounds else float("nan")

    @property
    def tau_macro(self) -> float:
        """Mean over requests of tokens per target call."""
        return float(np.mean(self.per_request)) if self.per_request else float("nan")

    @property
    def drafted_rate(self) -> float:
        """Kept drafts per drafted token; zero when nothing was drafted."""
        return self.kept / self.drafted if self.drafted else 0.0

    @property
    def judged_alpha(self) -> float:
        """Kept drafts per judged draft; zero when nothing was drafted."""
        return self.kept / self.judged if self.judged else 0.0

    @property
    def accepted_plus_one(self) -> float:
        """The engines' mean acceptance length, 1 + accepted / rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else float("nan")

    @property
    def survival(self) -> tuple[float, ...]:
        """Share of rounds that kept at least i drafts."""
        return tuple(count / self.rounds for count in self.kept_at)

    @property
    def conditional(self) -> tuple[float, ...]:
        """Share of the rounds that kept i - 1 drafts which kept the i-th too."""
        before = (self.rounds, *self.kept_at)  # the last has no successor
        return tuple(
            now / then if then else 0.0 for now, then in zip(self.kept_at, before, strict=False)
        )


def count(requests: Sequence[Sequence[RoundCounts]], *, depth: int | None = None) -> Counts:
    """Sum the rounds of all requests.

    Args:
        requests: The rounds of every request, in order.
        depth: Longest path of a draft; by default the longest accepted or, for chains, drafted.
    """
    flat = [one for rounds in requests for one in rounds]
    refuse_lossy(flat)
    table_R3 = _table(flat)
    drafted_R, accepted_R, emitted_R = table_R3.T
    kept_R = np.minimum(accepted_R, emitted_R)
    # In a chain a round that accepts all it drafted is seen to; in a tree a leaf may come earlier.
    is_used_up_R = np.array([getattr(one, "is_used_up", False) for one in flat], dtype=bool)
    used_up_R = (is_used_up_R & (emitted_R > accepted_R)).astype(np.int64)
    if depth is None:
        depth = int(drafted_R.max(initial=0))
    return Counts(
        rounds=len(flat),
        drafted=int(drafted_R.sum()),
        emitted=int(emitted_R.sum()),
        accepted=int(accepted_R.sum()),
        kept=int(kept_R.sum()),
        # A cut round shows no rejection: its last emitted token is itself an accepted draft.
        judged=int(np.minimum(emitted_R - used_up_R, np.minimum(drafted_R, depth)).sum()),
        kept_at=tuple(int((kept_R >= i).sum()) for i in range(1, depth + 1)),
        cut=int((emitted_R <= accepted_R).sum()),
        per_request=tuple(
            sum(one.emitted for one in rounds) / len(rounds) for rounds in requests if rounds
        ),
    )


def _table(rounds: Sequence[RoundCounts]) -> NDArray[np.int64]:
    rows = [(one.drafted, one.accepted, one.emitted) for one in rounds]
    for drafted, accepted, emitted in rows:
        if not (0 <= accepted <= drafted and 1 <= emitted <= accepted + 1):
            raise ValueError(
                f"a round drafted {drafted}, accepted {accepted} and emitted {emitted}; a round "
                "accepts at most what it drafted and emits 1 to accepted + 1 tokens"
            )
    return np.array(rows, dtype=np.int64).reshape(-1, 3)
