"""Lookup or suffix candidates and a head's drafts in one verified tree, each where it pays.

Text that repeats is copied for nothing, whatever else comes is drafted by a model. Before a round
the hit rates of both so far, in this row, say what a tree of either or of both would yield for its
cost; the best is verified. What is drafted is a function of the row's text alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.data.target import Captured
from outrider.eval.drafters import Draft, Drafter, Noise
from outrider.eval.drafters.lookup import PromptLookup
from outrider.eval.drafters.suffix import SuffixDrafter
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.merge import PathTree
from outrider.eval.trees.tree import Tree, chain


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What drafting costs, in target calls of one token."""

    model: float = 0.2
    """One draft of the model, all of its steps."""
    node: float = 0.03
    """One more token in the verified tree."""

    def __post_init__(self) -> None:
        for name in ("model", "node"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a cost of 0 or more")


class Rate:
    """How often drafts were right: the first of a round, and each later one behind a right one."""

    def __init__(self, first: float, later: float, weight: float = 2.0) -> None:
        self._hits = [first * weight, later * weight]
        self._trials = [weight, weight]

    @property
    def first(self) -> float:
        """Share of right first drafts."""
        return self._hits[0] / self._trials[0]

    @property
    def later(self) -> float:
        """Share of right drafts among those behind a right one."""
        return self._hits[1] / self._trials[1]

    def expected(self) -> Iterator[float]:
        """How many of 0, 1, 2 ... drafts are expected to be right."""
        total, chance = 0.0, self.first
        while True:
            yield total
            total += chance
            chance *= self.later

    def note(self, hits: int, *, is_missed: bool) -> None:
        """Count a round of `hits` right drafts and, unless the text or they ended, a wrong one."""
        for depth in range(hits + is_missed):
            kind = min(depth, 1)
            self._trials[kind] += 1
            self._hits[kind] += depth < hits


class _Choice(NamedTuple):
    speed: float
    num_copied: int
    uses_model: bool


class HybridDrafter:
    """Merges a draft of the text with a model's; both are chosen without noise.

    The model is left out where a copied text is likely enough to stand, the copy where it is not,
    and the copy is cut where the next token would cost more than it brings.
    """

    siblings = Siblings.CHOSEN

    def __init__(
        self, text: PromptLookup | SuffixDrafter, model: Drafter, costs: Costs | None = None
    ) -> None:
        """Join two drafters. Raises ValueError for a model whose drafts are drawn."""
        if model.siblings is not Siblings.CHOSEN:
            raise ValueError(
                f"the hybrid's model drafts {model.siblings} tokens; a tree of both kinds has no "
                "law: draft at temperature 0 and judge by greedy, match or point_mass"
            )
        self._text, self._model, self._costs = text, model, costs or Costs()
        self._begin()

    @property
    def layers(self) -> tuple[int, ...]:
        """Target layers whose states the model reads."""
        return self._model.layers

    def start(self, ids: Sequence[int], captured: Captured) -> None:
        """Begin a row; nothing is known of its rates."""
        self._text.start(ids, captured)
        self._model.start(ids, captured)
        self._begin()

    def accept(self, ids: Sequence[int], captured: Captured) -> None:
        """Go on by these tokens, and count which drafts they prove right."""
        self._note(ids)
        self._text.accept(ids, captured)
        self._model.accept(ids, captured)

    def end(self, ids: Sequence[int]) -> None:
        """Let the text's drafter keep the row."""
        if isinstance(self._text, SuffixDrafter):
            self._text.end(ids)

    def propose(self, max_depth: int, noise: Noise) -> Draft:
        """A chain of the text, the model's draft, or one tree of both."""
        copied = self._text.propose(max_depth, noise).tree
        self._copied, self._modelled = copied, None
        choice = self._choose(len(copied) - 1)
        if not choice.uses_model:
            return Draft(chain(copied.tokens[0], copied.tokens[1 : 1 + choice.num_copied]))
        self._modelled = self._model.propose(max_depth, noise).tree
        merged = PathTree(copied.tokens[0])
        # The copy first: where it stands alone, its keys are kept without being moved.
        merged.add(copied.tokens[1 : 1 + choice.num_copied])
        merged.add_tree(self._modelled)
        return Draft(merged.tree())

    def _choose(self, num_copied: int) -> _Choice:
        """Most tokens a target call's time."""
        copy, costs = self._copy_rate(), self._costs
        model_tokens = self._tokens()
        options: list[_Choice] = []
        for count, expected in zip(range(num_copied + 1), copy.expected(), strict=False):
            if count:
                cost = 1 + costs.node * count
                options.append(_Choice((1 + expected) / cost, count, uses_model=False))
            # Behind a wrong first copy the model has its turn; else it adds next to nothing.
            both = expected + (1 - copy.first) * model_tokens if count else model_tokens
            cost = 1 + costs.node * (count + self._num_nodes) + costs.model
            options.append(_Choice((1 + max(both, model_tokens)) / cost, count, uses_model=True))
        return max(options)

    def _tokens(self) -> float:
        """How many of the model's drafts are expected to be right."""
        for depth, expected in enumerate(self._model_rate.expected()):
            if depth == self._model_depth:
                return expected
        raise AssertionError("the expectation has an entry for every depth")

    def _begin(self) -> None:
        self._copy_rates: dict[int, Rate] = {}
        self._model_rate = Rate(0.6, 0.5)
        # Until the model has drafted, of the usual size.
        self._num_nodes, self._model_depth = 3, 3
        self._copied: Tree | None = None
        self._modelled: Tree | None = None

    def _copy_rate(self) -> Rate:
        """Of copies behind as long a match; longer ones are likelier right from the start."""
        size = self._text.matched
        return self._copy_rates.setdefault(size, Rate(size / (size + 2), 0.8))

    def _note(self, ids: Sequence[int]) -> None:
        """Compare what both would have drafted, verified or not, with the text as it went on."""
        if self._copied is not None and len(self._copied) > 1:
            _judge(self._copied, ids, self._copy_rate())
        if self._modelled is not None:
            if len(self._modelled) > 1:
                self._num_nodes = len(self._modelled) - 1
                self._model_depth = max(self._modelled.depths)
            _judge(self._modelled, ids, self._model_rate)


def _judge(tree: Tree, ids: Sequence[int], rate: Rate) -> None:
    node, hits = 0, 0
    for token in ids:
        found = [child for child in tree.children[node] if tree.tokens[child] == token]
        if not found:
            break
        node, hits = found[0], hits + 1
    is_missed = hits < len(ids) and bool(tree.children[node])
    rate.note(hits, is_missed=is_missed)
