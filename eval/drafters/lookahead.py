"""Lookahead decoding: the target guesses n-grams by Jacobi steps beside the ones it verifies.

Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding". One
pass holds both branches, and both are one tree under the newest token: the window's first row is a
chain, each of its further rows hangs below it column by column, and n-grams of the pool that begin
with the newest token are paths. So masks and positions are those of any tree, and a guess of the
window that happens to be right is accepted as well. Dimensions: N tree nodes, V vocabulary.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from outrider.data.target import Captured
from outrider.eval.drafters import Draft, Noise
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.loop_plans import LookaheadPlan
from outrider.eval.trees.merge import PathTree


class LookaheadDrafter:
    """Drafts from a pool of n-grams, which every target call enlarges by one a column.

    The window starts with tokens of the prompt, and the pool with its n-grams; both begin anew with
    every row. Columns hold ngram - 1 tokens, top to bottom: a token, and what each Jacobi step
    guessed to follow the one before.
    """

    layers: tuple[int, ...] = ()
    siblings = Siblings.CHOSEN

    def __init__(self, plan: LookaheadPlan) -> None:
        self._plan = plan

    def start(self, ids: Sequence[int], captured: Captured | None) -> None:  # noqa: ARG002
        """Begin a row."""
        plan, self._ids = self._plan, list[int]()
        self._pool: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        self._take(ids)
        self._columns = [self._fresh(column) for column in range(plan.window)]
        self._guesses: list[int] | None = None

    def propose(self, max_depth: int, noise: Noise | None) -> Draft:  # noqa: ARG002
        """Both branches, cut at `max_depth`."""
        merged = PathTree(self._ids[-1])
        # The newest n-gram first, so that its keys most often stay where they are.
        for path in reversed(self._pool.get(self._ids[-1], {})):
            merged.add(path[:max_depth])
        heads = [column[0] for column in self._columns]
        # Node after whose token the target's guess completes a column's n-gram, if it is there.
        ends: list[int | None] = []
        for number, column in enumerate(self._columns):
            path = [*heads[: number + 1], *column[1:]]
            nodes = merged.add(path[:max_depth])
            ends.append(nodes[-1] if len(nodes) == len(path) else None)
        return Draft(merged.tree(), watch=lambda logits_NV: self._watch(logits_NV, ends))

    def accept(self, ids: Sequence[int], captured: Captured | None) -> None:  # noqa: ARG002
        """Go on by these tokens: columns that the text has passed make room for new ones."""
        self._take(ids)
        passed = min(len(ids) - 1, len(self._columns))
        self._columns = self._columns[passed:]
        self._columns += [
            self._fresh(column) for column in range(len(self._columns), self._plan.window)
        ]

    def _watch(self, logits_NV: Tensor, ends: Sequence[int | None]) -> None:
        """Complete every column's n-gram, and move its window one step on."""
        best_N = logits_NV.argmax(-1).tolist()
        for column, end in zip(self._columns, ends, strict=True):
            if end is not None:
                self._note((*column, best_N[end]))
                column[:] = [*column[1:], best_N[end]]

    def _take(self, ids: Sequence[int]) -> None:
        for token in ids:
            self._ids.append(token)
            if len(self._ids) >= self._plan.ngram:
                self._note(tuple(self._ids[-self._plan.ngram :]))

    def _note(self, gram: tuple[int, ...]) -> None:
        """Keep an n-gram as the newest of its first token's, at most `pool` of them."""
        found = self._pool.setdefault(gram[0], OrderedDict())
        found[gram[1:]] = None
        found.move_to_end(gram[1:])
        if len(found) > self._plan.pool:
            found.popitem(last=False)

    def _fresh(self, column: int) -> list[int]:
        """Tokens of the text, unlike from column to column; any will do."""
        size, num_rows = len(self._ids), self._plan.ngram - 1
        first = (size * 31 + column * 17) % size if size > 1 else 0
        return [self._ids[(first + row) % size] for row in range(num_rows)]
