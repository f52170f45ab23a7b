"""Suffix drafting: the most frequent continuation of the longest suffix seen before.

As in SuffixDecoding (Oliaro et al. 2024) and ArcticInference: matches grow with the drafted tokens,
and drafting stops where the counts say that it is unlikely to be right. Prompt lookup copies the
latest match instead, however often it went another way.
"""

from collections.abc import Sequence

from outrider.data.target import Captured
from outrider.eval.drafters import Draft, Noise
from outrider.eval.drafters.past import Counts, PastTexts
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.plans import SuffixPlan
from outrider.eval.trees.tree import chain


class SuffixDrafter:
    """Drafts a chain from counts of what followed each n-gram of the text so far.

    With `past` above 0 it also counts the answers of the rows before, the last `past` tokens of
    them, and drafts what the better of both expects; what is accepted then depends on the order of
    the rows. Under rules that keep the text (greedy, match) the text does not.
    """

    layers: tuple[int, ...] = ()
    siblings = Siblings.CHOSEN

    def __init__(self, plan: SuffixPlan, *, past: int = 0) -> None:
        self._plan = plan
        self._past = PastTexts(plan.match, past) if past else None
        self._ids: list[int] = []
        self._num_prompt = 0
        self.matched = 0
        """Tokens of the suffix that the last draft's first token followed; 0 where none did."""

    def start(self, ids: Sequence[int], captured: Captured | None) -> None:
        """Count the prompt's n-grams."""
        self._ids, self._num_prompt = list[int](), len(ids) - 1
        self._counts = Counts(self._plan.match)
        self.accept(ids, captured)

    def propose(self, max_depth: int, noise: Noise | None) -> Draft:  # noqa: ARG002
        """At most the plan's length of tokens; none where no suffix was seen before."""
        length = min(self._plan.length, max_depth)
        found = self._counts.guess(self._ids, length)
        if self._past is not None:
            other = self._past.counts.guess(self._ids, length)
            found = other if other.score > found.score else found
        self.matched = found.matched
        return Draft(chain(self._ids[-1], found.tokens))

    def accept(self, ids: Sequence[int], captured: Captured | None) -> None:  # noqa: ARG002
        """Take the new tokens in."""
        for token in ids:
            recent = self._ids[-self._plan.match :]
            self._counts.add(recent, token)
            self._ids.append(token)

    def end(self, ids: Sequence[int]) -> None:
        """Keep the answer of the row that ended with these tokens."""
        if self._past is not None:
            self._past.add([*self._ids[self._num_prompt :], *ids])
