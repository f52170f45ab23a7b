"""Policies that choose the length of every round's chain, each with the state that it carries.

What a policy may look at (non-anticipation per slot): a draft may be dropped for what its law says,
never for which token was drawn from it. So a policy is asked twice: whether to compute one more
law, knowing the drafts so far, which all stay; and whether to draw from that law, knowing it alone.
Stopping on the drawn token's own probability is exact because that token stays (transformers'
`ConfidenceCriteria`); dropping it would not be.
"""

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Ahead(NamedTuple):
    """What the law of the next draft says, before anything is drawn from it."""

    top: float
    """Largest probability."""
    entropy: float
    """In nats."""


class Judged(NamedTuple):
    """How a round went."""

    own: tuple[float, ...]
    """The draft's probability of each judged token: the accepted, and the first rejected if any."""
    accepted: int
    """Drafts in a row that were accepted."""
    is_full: bool
    """Whether all that was drafted was accepted."""


@dataclass(frozen=True)
class Policy:
    """Drafts up to `most` tokens a round; subclasses say where to stop."""

    most: int

    looks_ahead = False
    """Whether a law may be computed and then not drawn from: that draft step is paid in vain."""
    persists = False
    """Whether the state goes on from one answer to the next."""
    reads_rejected = False
    """Whether the state depends on the probability of a rejected token."""

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"the longest chain of a policy is {self.most}; allow at least 1")

    @property
    def label(self) -> str:
        """How it is written."""
        return f"fixed:{self.most}"

    def begin(self) -> Hashable:
        """The state before the first round."""
        return None

    def steps(self, state: Hashable, done: int, last: float) -> bool:  # noqa: ARG002
        """Whether to compute one more law after `done` drafts, the last of probability `last`."""
        return done < self.most

    def draws(self, state: Hashable, ahead: Ahead) -> bool:  # noqa: ARG002
        """Whether to draw from the law just computed."""
        return True

    def after(self, state: Hashable, judged: Judged) -> Hashable:  # noqa: ARG002
        """The state after a round that did not end the answer."""
        return state


@dataclass(frozen=True)
class Confidence(Policy):
    """Stop where the draft's likeliest token is below `least`, without drawing it.

    As vLLM's `acceptance_estimator` does, it reads max q, which the prefix decides.
    """

    least: float

    looks_ahead = True

    @property
    def label(self) -> str:
        """How it is written."""
        return f"confidence:{self.least:g},{self.most}"

    def draws(self, state: Hashable, ahead: Ahead) -> bool:  # noqa: ARG002
        """Only from a law that is sure enough."""
        return ahead.top >= self.least


@dataclass(frozen=True)
class Entropy(Policy):
    """Stop where the draft's law has more than `limit` nats of entropy (SVIP, AdaEDL style)."""

    limit: float

    looks_ahead = True

    @property
    def label(self) -> str:
        """How it is written."""
        return f"entropy:{self.limit:g},{self.most}"

    def draws(self, state: Hashable, ahead: Ahead) -> bool:  # noqa: ARG002
        """Only from a law that is sharp enough."""
        return ahead.entropy <= self.limit


@dataclass(frozen=True)
class Kept(Policy):
    """Stop after a token that the draft gave less than `least`; the token stays.

    transformers' `assistant_confidence_threshold` at a constant value.
    """

    least: float

    @property
    def label(self) -> str:
        """How it is written."""
        return f"kept:{self.least:g},{self.most}"

    def steps(self, state: Hashable, done: int, last: float) -> bool:  # noqa: ARG002
        """While the tokens so far were likely."""
        return done < self.most and (done == 0 or last >= self.least)


@dataclass(frozen=True)
class Heuristic(Policy):
    """transformers' `num_assistant_tokens_schedule`: 2 more after a full round, else 1 less.

    `heuristic` goes on from answer to answer, `heuristic_transient` starts each afresh. Theirs has
    no upper end; here `most` is one, kept by the state too.
    """

    first: int
    is_transient: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.first <= self.most:
            raise ValueError(
                f"a heuristic schedule starts at {self.first} of at most {self.most}; start at 1 "
                "to that"
            )

    @property
    def persists(self) -> bool:  # type: ignore[override]
        """Unless it is the transient one."""
        return not self.is_transient

    @property
    def label(self) -> str:
        """How it is written."""
        name = "transient" if self.is_transient else "heuristic"
        return f"{name}:{self.first},{self.most}"

    def begin(self) -> int:
        """The first length."""
        return self.first

    def steps(self, state: Hashable, done: int, last: float) -> bool:  # noqa: ARG002
        """Up to the length of the moment."""
        assert isinstance(state, int)
        return done < state

    def after(self, state: Hashable, judged: Judged) -> int:
        """Longer after a full round, shorter after any other."""
        assert isinstance(state, int)
        return min(self.most, state + 2) if judged.is_full else max(1, state - 1)


class _Known(NamedTuple):
    """What the dynamic threshold has learned in an answer."""

    least: float
    own: tuple[float, ...]
    is_match: tuple[bool, ...]


@dataclass(frozen=True)
class Dynamic(Policy):
    """transformers' dynamic `assistant_confidence_threshold`, length constant at `most`.

    After each round the threshold is set to the point of the ROC curve (the draft's probability of
    a token, against whether it was accepted) of least false-positive + 3 x false-negative rate,
    once there are more than 5 judged tokens of both kinds (transformers 5.24,
    `AssistedCandidateGenerator.update_candidate_strategy`). It learns anew in every answer.
    """

    least: float

    reads_rejected = True

    @property
    def label(self) -> str:
        """How it is written."""
        return f"dynamic:{self.least:g},{self.most}"

    def begin(self) -> _Known:
        """The threshold as given, and nothing seen."""
        return _Known(self.least, (), ())

    def steps(self, state: Hashable, done: int, last: float) -> bool:
        """While the tokens so far were likely."""
        assert isinstance(state, _Known)
        return done < self.most and (done == 0 or last >= state.least)

    def after(self, state: Hashable, judged: Judged) -> _Known:
        """Learn from the judged tokens."""
        assert isinstance(state, _Known)
        own = state.own + judged.own
        matches = state.is_match + tuple(i < judged.accepted for i in range(len(judged.own)))
        least = state.least
        if len(own) > 5 and len(set(matches)) == 2:
            least = best_threshold(own, matches)
        return _Known(least, own, matches)


def best_threshold(own: Sequence[float], is_match: Sequence[bool]) -> float:
    """The probability at which "accepted if at least this" errs least: fpr + 3 fnr, highest first.

    Both kinds must be present. The points are those of scikit-learn's `roc_curve`.
    """
    matches = sum(is_match)
    others = len(is_match) - matches
    best, least = float("inf"), float("inf")
    hits = alarms = 0
    pairs = sorted(zip(own, is_match, strict=True), reverse=True)
    for place, (value, match) in enumerate(pairs):
        hits, alarms = hits + match, alarms + (not match)
        if place + 1 < len(pairs) and pairs[place + 1][0] == value:
            continue
        cost = alarms / others + 3 * (1 - hits / matches)
        if cost < best:
            best, least = cost, value
    return least


@dataclass(frozen=True)
class Table(Policy):
    """A length per batch size, at a batch that holds: vLLM's table of tokens per batch size."""

    sizes: tuple[int, ...]
    """Batch sizes, rising, from which on the length of the same place is used."""
    lengths: tuple[int, ...]
    batch: int
    """Requests that run at once."""

    @property
    def label(self) -> str:
        """How it is written."""
        pairs = zip(self.sizes, self.lengths, strict=True)
        rows = ",".join(f"{size}={length}" for size, length in pairs)
        return f"table:{rows}@{self.batch}"

    @property
    def length(self) -> int:
        """Drafts a round at this batch; 0 drafts nothing."""
        return self.lengths[bisect_right(self.sizes, self.batch) - 1]

    def steps(self, state: Hashable, done: int, last: float) -> bool:  # noqa: ARG002
        """Up to the table's length."""
        return done < self.length


@dataclass(frozen=True)
class Oracle(Policy):
    """The best length of every round in hindsight: a bound, which no decoder can run."""

    @property
    def label(self) -> str:
        """How it is written."""
        return f"oracle:{self.most}"
