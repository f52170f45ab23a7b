"""Prompt lookup: the text so far as its own draft model, without any network.

Where the last tokens stood before, what followed them is guessed to follow again (Saxena 2023,
"Prompt Lookup Decoding"; transformers' `prompt_lookup_num_tokens`). It costs nothing, and wins
where an answer repeats its prompt: editing, extraction, quoting.
"""

from collections.abc import Sequence

from outrider.data.target import Captured
from outrider.eval.drafters import Draft, Noise
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.plans import LookupPlan
from outrider.eval.trees.tree import chain


class PromptLookup:
    """Drafts a chain: what followed the latest earlier place of the longest matching suffix."""

    layers: tuple[int, ...] = ()
    siblings = Siblings.CHOSEN

    def __init__(self, plan: LookupPlan) -> None:
        self._plan = plan
        self.matched = 0
        """Tokens of the suffix that the last draft followed; 0 where there was none."""

    def start(self, ids: Sequence[int], captured: Captured | None) -> None:  # noqa: ARG002
        """Index the prompt's n-grams."""
        self._ids: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        self._before: dict[tuple[int, ...], int] = {}
        for token in ids:
            self._add(token)

    def propose(self, max_depth: int, noise: Noise | None) -> Draft:  # noqa: ARG002
        """At most the plan's length of tokens; none where no suffix was seen before."""
        ids = self._ids
        self.matched = 0
        for size in range(min(self._plan.ngram, len(ids) - 1), 0, -1):
            place = self._before.get(tuple(ids[-size:]))
            if place is not None:
                self.matched = size
                stop = place + min(self._plan.length, max_depth)
                return Draft(chain(ids[-1], ids[place:stop]))
        return Draft(chain(ids[-1], []))

    def accept(self, ids: Sequence[int], captured: Captured | None) -> None:  # noqa: ARG002
        """Take the new tokens in."""
        for token in ids:
            self._add(token)

    def _add(self, token: int) -> None:
        """Note where each n-gram that ends here is followed; the newest has no follower yet."""
        self._ids.append(token)
        end = len(self._ids)
        for size in range(1, min(self._plan.ngram, end) + 1):
            gram = tuple(self._ids[end - size :])
            if gram in self._last:
                self._before[gram] = self._last[gram]
            self._last[gram] = end
