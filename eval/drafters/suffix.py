"""Suffix drafting: the most frequent continuation of the longest suffix seen before.

As in SuffixDecoding (Oliaro et al. 2024) and ArcticInference, over the row's own text: matches
grow with the drafted tokens, and drafting stops where the counts say that it is unlikely to be
right. Prompt lookup copies the latest match instead, however often it went another way.
"""

from collections.abc import Sequence

from outrider.data.target import Captured
from outrider.eval.drafters import Draft, Noise
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.plans import SuffixPlan
from outrider.eval.trees.tree import chain

LEAST_CHANCE = 0.1
"""Least product of counted shares along a draft; ArcticInference's default for its tokens."""


class SuffixDrafter:
    """Drafts a chain from counts of what followed each n-gram of the text so far."""

    layers: tuple[int, ...] = ()
    siblings = Siblings.CHOSEN

    def __init__(self, plan: SuffixPlan) -> None:
        self._plan = plan

    def start(self, ids: Sequence[int], captured: Captured | None) -> None:
        """Count the prompt's n-grams."""
        self._ids: list[int] = []
        # n-gram -> next token -> (times seen, place last seen)
        self._after: dict[tuple[int, ...], dict[int, tuple[int, int]]] = {}
        self.accept(ids, captured)

    def propose(self, max_depth: int, noise: Noise | None) -> Draft:  # noqa: ARG002
        """At most the plan's length of tokens; none where no suffix was seen before."""
        recent, chance, drafts = self._ids[-self._plan.match :], 1.0, list[int]()
        while len(drafts) < min(self._plan.length, max_depth):
            found = self._likeliest(recent)
            if found is None or chance * found[1] < LEAST_CHANCE:
                break
            drafts.append(found[0])
            chance *= found[1]
            recent = [*recent, found[0]][-self._plan.match :]
        return Draft(chain(self._ids[-1], drafts))

    def accept(self, ids: Sequence[int], captured: Captured | None) -> None:  # noqa: ARG002
        """Take the new tokens in."""
        for token in ids:
            end = len(self._ids)
            for size in range(1, min(self._plan.match, end) + 1):
                after = self._after.setdefault(tuple(self._ids[end - size :]), {})
                after[token] = (after.get(token, (0, 0))[0] + 1, end)
            self._ids.append(token)

    def _likeliest(self, recent: Sequence[int]) -> tuple[int, float] | None:
        """The token that followed the longest known suffix most often, and its share."""
        for first in range(len(recent)):
            after = self._after.get(tuple(recent[first:]))
            if after:
                token = max(after, key=lambda one: after[one])
                return token, after[token][0] / sum(count for count, _ in after.values())
        return None
