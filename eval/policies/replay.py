"""Policies replayed on known text, exactly: the renewal recursion with the policy's state in it.

Given the text, acceptance inside a round is a chain of coins (see `outrider.eval.offline.renewal`),
and on the accepted path the drafted tokens are the text's. So where a round ends, and in which
state, is decided by the text and the coins alone, and the chance of every (place, state) follows by
one pass over the text. What is drafted behind the first rejection costs time but moves nothing: its
length comes from a path that the draft itself took.
T places of an answer, place 0 the prefill's token; N = T as a number.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from outrider.eval.policies.policy import Ahead, Judged, Policy

Verify = Callable[[int], float]
"""Time of a target call on n tokens over that on one."""


class Path(NamedTuple):
    """A chain of drafts from one place, as long as drafts can be there."""

    own: Sequence[float]
    """The draft's probability of the token on the path."""
    ahead: Sequence[Ahead]
    """The law that each token came from."""


class Row(Protocol):
    """One answer, and what a draft says at every place of it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer, the prefill's included."""
        ...

    def accept(self, place: int) -> Sequence[float]:
        """Chance that each draft of a round from `place` is accepted, given the text."""
        ...

    def on_text(self, place: int) -> Path:
        """The path along the text; nothing is read behind a draft that cannot be accepted."""
        ...

    def drafted(self, place: int) -> Sequence[tuple[float, Path]]:
        """Paths that the draft itself takes, with their chances."""
        ...


class Length(NamedTuple):
    """What a policy does along a path."""

    drafted: int
    laws: int
    """Draft steps run; one more than drafted where the last law was not drawn from."""


def length_along(policy: Policy, state: Hashable, path: Path) -> Length:
    """Follow a path until the policy stops or the path ends."""
    done, last = 0, 0.0
    while done < len(path.own) and policy.steps(state, done, last):
        if not policy.draws(state, path.ahead[done]):
            return Length(done, done + 1)
        last = path.own[done]
        done += 1
    return Length(done, done)


@dataclass
class Replayed:
    """Expected counts of one answer."""

    rounds: float = 0.0
    """Target calls after the prefill."""
    kept: float = 0.0
    """Drafts that became text."""
    judged: float = 0.0
    """Drafts whose acceptance was decided inside the text."""
    lengths: dict[int, float] = field(default_factory=dict)
    """Rounds by the number of tokens they drafted."""
    idle: float = 0.0
    """Draft steps whose law was not drawn from."""
    ends: dict[Hashable, float] = field(default_factory=dict)
    """Chance of every state at the end of the answer."""

    def draft(self, length: Length, chance: float) -> None:
        """Count a round's drafts."""
        self.lengths[length.drafted] = self.lengths.get(length.drafted, 0.0) + chance
        self.idle += chance * (length.laws - length.drafted)

    @property
    def drafted(self) -> float:
        """Tokens drafted."""
        return sum(length * chance for length, chance in self.lengths.items())


States = dict[Hashable, float]


def replay(policy: Policy, row: Row, begin: Mapping[Hashable, float] | None = None) -> Replayed:
    """What decoding this answer under a policy would do, in expectation over its coins.

    Args:
        policy: Any but the oracle, which `replay_oracle` replays.
        row: The answer. The last round leaves the state as it was: its drafts behind the end are
            not in the text, and decoding is over.
        begin: Chances of the states at its start; by default the policy's own first state.
    """
    found = Replayed()
    here: list[States] = [{} for _ in range(row.num_tokens + 1)]
    here[min(1, row.num_tokens)] = dict(begin or {policy.begin(): 1.0})
    for place in range(1, row.num_tokens):
        for state, chance in here[place].items():
            found.rounds += chance
            for share, path in row.drafted(place):
                found.draft(length_along(policy, state, path), chance * share)
            _round(policy, row, place, (state, chance), here, found)
    found.ends = here[row.num_tokens]
    return found


def _round(
    policy: Policy,
    row: Row,
    place: int,
    start: tuple[Hashable, float],
    here: Sequence[States],
    found: Replayed,
) -> None:
    """Send the chance of one start to every place and state that its round can end in."""
    state, reach = start
    path, accept, num = row.on_text(place), row.accept(place), row.num_tokens
    most = length_along(policy, state, path).drafted
    for accepted in range(most + 1):
        is_full = accepted == most
        after = place + accepted + 1
        if after > num:  # the last draft was the text's last token
            _add(here[num], state, reach)
            return
        stop = reach if is_full else reach * (1 - accept[accepted])
        if stop > 0:
            judged = Judged(tuple(path.own[: min(accepted + 1, most)]), accepted, is_full)
            _add(here[after], state if after == num else policy.after(state, judged), stop)
        if is_full:
            return
        found.judged += reach
        reach *= accept[accepted]
        found.kept += reach
        if reach <= 0:
            return


def replay_oracle(row: Row, most: int, *, c: float, verify: Verify) -> Replayed:
    """The least time in which any choice of lengths up to `most` could write this answer.

    Every round's length is chosen knowing how many drafts would be accepted in it, so as to make
    the whole answer's expected time least; later rounds' coins are not known. As a policy that
    sees less can do no better, this bounds them all at the same costs.

    Args:
        row: The answer.
        most: Longest chain.
        c: Draft step over target step.
        verify: Target call on n tokens over that on one; must not fall with n.
    """
    num = row.num_tokens
    left = [0.0] * (num + most + 2)
    chosen: list[list[int]] = [[] for _ in range(num)]
    chances: list[list[float]] = [[] for _ in range(num)]
    for place in range(num - 1, 0, -1):
        accept = row.accept(place)[: min(most, num - place - 1)]
        # The draft of the text's last token is never needed: the round's own token writes it.
        reach, best = 1.0, (float("inf"), 0)
        for accepted in range(len(accept) + 1):
            cost = c * accepted + verify(accepted + 1) + left[place + accepted + 1]
            best = min(best, (cost, accepted))
            stop = reach * (1 - accept[accepted]) if accepted < len(accept) else reach
            chosen[place].append(best[1])
            chances[place].append(stop)
            left[place] += stop * best[0]
            reach -= stop
    found = Replayed()
    here = [0.0] * (num + 1)
    here[min(1, num)] = 1.0
    for place in range(1, num):
        found.rounds += here[place]
        for chance, length in zip(chances[place], chosen[place], strict=True):
            moved = here[place] * chance
            found.draft(Length(length, length), moved)
            found.kept += moved * length
            found.judged += moved * length
            here[place + length + 1] += moved
    return found


def _add(states: States, state: Hashable, chance: float) -> None:
    states[state] = states.get(state, 0.0) + chance
