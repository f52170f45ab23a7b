"""What an engine counted over some time, and what no counts can be."""

import itertools
import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Window:
    """Counts of one route over some time."""

    engine: Literal["vllm", "sglang"]
    route: str
    """What served it: the engine's labels, or the file."""
    when: str
    rounds: float
    """Target calls that judged a draft; 0 where the source has averages only."""
    accepted: float
    """Accepted drafts."""
    accepted_at: tuple[float, ...] = ()
    """Rounds that accepted at least 1, 2, ... drafts; empty where not told."""
    requests: float | None = None
    """Answers that ended; None where not told."""
    length: float | None = None
    """Mean accepted length with the bonus, where that is all there is."""
    has_one_length: bool = True
    """Whether every round drafted as many tokens as there are positions, near ends apart."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        reach = (self.rounds, *self.accepted_at)
        never_rises = all(later <= before for before, later in itertools.pairwise(reach))
        counts = (*reach, self.accepted)
        if not never_rises or not all(0 <= one < math.inf for one in counts):
            raise ValueError(
                f"{self.route}, {self.when}: {self.rounds:g} calls, {self.accepted:g} accepted, by "
                f"position {list(self.accepted_at)}; counts are finite, 0 or more, and never rise "
                "with the position: give the engine's own figures, whole scrapes in their order"
            )

    @property
    def mean_length(self) -> float:
        """1 + accepted / rounds."""
        if self.length is not None:
            return self.length
        return 1 + self.accepted / self.rounds if self.rounds else float("nan")
