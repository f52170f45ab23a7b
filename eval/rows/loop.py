"""Draft, verify, roll back for many rows in step: each row's text is that of decoding it alone.

Rows join when a slot is free and leave when they end; every round has one call of the target over
the rows at work. Dimensions: B rows, n nodes of a tree, T positions, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.data.cache import RowCache, attention_masks, query_positions
from outrider.data.target import Captured, Target
from outrider.eval.decode import Decoding, law_at, position_limit
from outrider.eval.drafters import Draft
from outrider.eval.metrics import Round
from outrider.eval.noise import KeyedNoise
from outrider.eval.rows import EachRow, RowsDrafter
from outrider.eval.rules import Verify, fitting_rule
from outrider.eval.trees.tree import Tree


@dataclass(kw_only=True, eq=False)
class Row:
    """A row at work or done."""

    number: int
    """Which of the prompts it is, and its number in the noise's key."""
    ids: list[int]
    """Prompt and new tokens."""
    num_prompt: int
    budget: int
    """Tokens to write at most."""
    rounds: list[Round] = field(default_factory=list)
    finish: str = ""
    """`stop` at an end token, `length` at the budget; empty while it is at work."""

    @property
    def new_ids(self) -> list[int]:
        """What it wrote."""
        return self.ids[self.num_prompt :]


class RoundTime(NamedTuple):
    """Where the time of a round went, seconds."""

    draft: float
    verify: float
    other: float
    rows: int
    """Rows at work."""
    emitted: int
    """Tokens that all of them wrote."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.draft + self.verify + self.other


class Prefill(NamedTuple):
    """A prompt that has been run; what it leaves is read only."""

    cache: RowCache
    captured: Captured
    logits_1V: Tensor


class _Saved(NamedTuple):
    lengths_B: Tensor
    sizes: list[tuple[int, int, str]]
    drafter: Any


class RowsRun:
    """Rows that share the target's calls."""

    def __init__(
        self,
        target: Target,
        num_rows: int,
        drafter: RowsDrafter | None = None,
        decoding: Decoding | None = None,
        verify: Verify | None = None,
    ) -> None:
        """Begin with free slots.

        Args:
            target: Writes the text.
            num_rows: Slots; fill all of them before the first round.
            drafter: Guesses ahead; None decodes plainly.
            decoding: Settings; greedy by default.
            verify: Instead of the settings' rule, any rule at all; what comes of it is exact only
                if it is.
        """
        if num_rows < 1:
            raise ValueError(f"num_rows is {num_rows}; decode at least 1 row")
        self.target, self.drafter = target, drafter or EachRow()
        self.decoding = decoding or Decoding()
        rule = fitting_rule(
            self.decoding.rule, self.drafter.siblings, self.decoding.sampling.temperature
        )
        self._judge = verify or rule.verify
        self._cache = RowCache(num_rows)
        self._limit = position_limit(target)
        self.rows: list[Row | None] = [None] * num_rows
        self.times: list[RoundTime] = []
        """Of every round so far; prefills are not in it."""
        self.done: list[Row] = []
        """Rows that `decode_rows` decoded."""
        self.prefills: dict[tuple[int, ...], Prefill] | None = None
        """Set it to keep what prompts leave, for runs with the same target and layers."""

    def admit(self, slot: int, prompt_ids: Sequence[int], number: int) -> Row:
        """Run a prompt into a free slot and draw its first token; it may end with that."""
        if not 0 < len(prompt_ids) < self._limit:
            raise ValueError(
                f"prompt {number} has {len(prompt_ids)} tokens; give 1 to {self._limit - 1}, the "
                "target's positions less one for the answer"
            )
        budget = min(self.decoding.max_new_tokens, self._limit - len(prompt_ids))
        row = Row(number=number, ids=list(prompt_ids), num_prompt=len(prompt_ids), budget=budget)
        known = self.prefills if self.prefills is not None else {}
        prefill = known.get(tuple(row.ids)) or self._prefill(row.ids)
        known[tuple(row.ids)] = prefill
        tree = Tree((row.ids[-1],), (-1,))
        laws = _Laws(self, row, tree, prefill.logits_1V, None)
        self._emit(row, [self._judge(tree, laws, self._noise(row)).token])
        self._cache.replace_row(slot, prefill.cache, 0)
        self.drafter.start(slot, row.ids, prefill.captured)
        self.rows[slot] = row
        return row

    def _prefill(self, ids: Sequence[int]) -> Prefill:
        device, fresh = self.target.device, RowCache(1)
        captured = self.target.run(
            torch.tensor([ids], device=device),
            layers=self.drafter.layers,
            position_ids=query_positions(fresh.lengths_B.to(device), len(ids)),
            cache=fresh,
        )
        fresh.advance(len(ids))
        return Prefill(fresh, captured, self.target.logits(captured.last_BTH[0, -1:]))

    def keep_rows(self, slots: Sequence[int]) -> None:
        """Drop all slots but these."""
        self._cache.keep_rows(slots)
        self.drafter.keep_rows(slots)
        self.rows = [self.rows[slot] for slot in slots]

    def round(self) -> RoundTime:
        """One call of the target for all rows, every slot filled."""
        rows = [row for row in self.rows if row is not None]
        assert len(rows) == len(self.rows), "a slot is empty"
        times = [self._clock()]
        noises = [self._noise(row) for row in rows]
        # A node at depth d sits at position len - 1 + d, and positions end below the limit.
        room = self._limit - max(len(row.ids) for row in rows)
        drafts = self.drafter.propose(room, noises)
        times.append(self._clock())
        captured, logits_BnV = self._verify([draft.tree for draft in drafts])
        times.append(self._clock())
        accepted: list[list[int]] = []
        kept: list[tuple[int, ...]] = []
        emitted = 0
        for index, (row, draft, noise) in enumerate(zip(rows, drafts, noises, strict=True)):
            laws = _Laws(self, row, draft.tree, logits_BnV[index], draft)
            verdict = self._judge(draft.tree, laws, noise)
            tokens = [*(draft.tree.tokens[node] for node in verdict.path), verdict.token]
            count = self._emit(row, tokens)
            is_used_up = not draft.tree.children[verdict.path[-1] if verdict.path else 0]
            row.rounds.append(Round(len(draft.tree) - 1, len(verdict.path), count, is_used_up))
            accepted.append(tokens)
            kept.append((0, *verdict.path))
            emitted += count
        self._keep(kept, logits_BnV.shape[1])
        self.drafter.accept(accepted, captured, kept)
        times.append(self._clock())
        draft_s, verify_s, other_s = (after - before for before, after in pairwise(times))
        self.times.append(RoundTime(draft_s, verify_s, other_s, len(rows), emitted))
        return self.times[-1]

    def save(self) -> _Saved:
        """What `restore` needs to come back to here, as long as no row comes or goes."""
        sizes = [(len(row.ids), len(row.rounds), row.finish) for row in self.rows if row]
        return _Saved(self._cache.lengths_B, sizes, self.drafter.save())

    def restore(self, saved: _Saved) -> None:
        """Come back to where `save` was called, with the same drafter."""
        self._cache.truncate(saved.lengths_B)
        for row, (num_ids, num_rounds, finish) in zip(self.rows, saved.sizes, strict=True):
            assert row is not None
            del row.ids[num_ids:], row.rounds[num_rounds:]
            row.finish = finish
        self.drafter.restore(saved.drafter)

    def _clock(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()

    def _noise(self, row: Row) -> KeyedNoise:
        return KeyedNoise(self.decoding.seed, row.number, len(row.ids))

    def _verify(self, trees: Sequence[Tree]) -> tuple[Captured, Tensor]:
        """States at the trees' nodes, and the logits [B, n, V] after each."""
        target, cache, device = self.target, self._cache, self.target.device
        lengths_B, num_nodes = cache.lengths_B.to(device), max(map(len, trees))
        tokens = [[*tree.tokens, *[0] * (num_nodes - len(tree))] for tree in trees]
        ancestors = _ancestors(trees, num_nodes)
        ancestors = None if ancestors is None else ancestors.to(device)
        captured = target.run(
            torch.tensor(tokens, device=device),
            layers=self.drafter.layers,
            position_ids=query_positions(lengths_B, num_nodes, ancestors),
            attention_mask=attention_masks(
                target.config, lengths_B, num_nodes, target.dtype, ancestors
            ),
            cache=cache,
        )
        cache.advance(num_nodes)
        logits = target.logits(captured.last_BTH.flatten(0, 1))
        return captured, logits.unflatten(0, (len(trees), num_nodes))

    def _keep(self, kept: Sequence[tuple[int, ...]], num_nodes: int) -> None:
        """Drop the keys and values of all nodes but each row's kept ones."""
        starts = (self._cache.lengths_B - num_nodes).tolist()
        for index, (start, nodes) in enumerate(zip(starts, kept, strict=True)):
            if nodes != tuple(range(len(nodes))):
                self._cache.compact(index, start, nodes)
        ends = [start + len(nodes) for start, nodes in zip(starts, kept, strict=True)]
        self._cache.truncate(ends)

    def _emit(self, row: Row, tokens: Sequence[int]) -> int:
        """Append tokens up to an end token or the budget; returns how many."""
        for index, token in enumerate(tokens):
            row.ids.append(token)
            if token in self.target.eos_ids and not self.decoding.ignore_eos:
                row.finish = "stop"
            elif len(row.ids) - row.num_prompt == row.budget:
                row.finish = "length"
            if row.finish:
                return index + 1
        return len(tokens)


class _Laws:
    """Laws at the nodes of a row's verified tree, each made when the walk gets there."""

    def __init__(
        self, run: RowsRun, row: Row, tree: Tree, logits_nV: Tensor, draft: Draft | None
    ) -> None:
        self._sampling, self._row, self._tree = run.decoding.sampling, row, tree
        self._logits_nV, self._draft = logits_nV, draft

    def target(self, node: int) -> Tensor:
        """The law p after this node's path."""
        row = self._row
        return law_at(
            self._logits_nV[node], self._sampling, row.ids, row.num_prompt, self._tree, node
        )

    def draft(self, node: int) -> Tensor | None:
        """The law q that this node's token was drawn from."""
        assert self._draft is not None
        return None if self._draft.law is None else self._draft.law(node)


def _ancestors(trees: Sequence[Tree], num_nodes: int) -> Tensor | None:
    """Who sees whom [B, n, n]; None where every row is a chain of full length."""
    if all(tree.is_chain for tree in trees) and len({len(tree) for tree in trees}) == 1:
        return None
    found = torch.eye(num_nodes, dtype=torch.bool).repeat(len(trees), 1, 1)
    for index, tree in enumerate(trees):
        found[index, : len(tree), : len(tree)] = tree.ancestors
    return found


def decode_rows(
    target: Target,
    prompts: Sequence[Sequence[int]],
    drafter: RowsDrafter | None = None,
    decoding: Decoding | None = None,
    *,
    batch_size: int,
    until_idle: bool = False,
    prefills: dict[tuple[int, ...], Prefill] | None = None,
) -> RowsRun:
    """Decode prompts, at most `batch_size` at a time; a row that ends gives its slot to the next.

    Row numbers in the noise's key are the prompts' places. With `until_idle` it stops at the first
    slot that no prompt is left for, so that every timed round had a full batch; rows cut short by
    that have no `finish`. `prefills` may be shared by runs whose drafters read the same layers.
    Returns the run; its `done` are the rows in the order of the prompts.
    """
    run = RowsRun(target, min(batch_size, len(prompts)), drafter, decoding)
    run.prefills = prefills
    waiting = list(enumerate(prompts))[::-1]
    found: list[Row] = []
    slots = list(range(len(run.rows)))
    while True:
        for slot in slots:
            while waiting and (run.rows[slot] is None or _is_done(run.rows[slot])):
                number, prompt = waiting.pop()
                found.append(run.admit(slot, prompt, number))
        going = [slot for slot, row in enumerate(run.rows) if row is not None and not row.finish]
        if not going or (until_idle and len(going) < len(slots)):
            run.done = sorted(found, key=lambda row: row.number)
            return run
        if len(going) < len(run.rows):
            run.keep_rows(going)
            slots = list(range(len(going)))
        run.round()


def _is_done(row: Row | None) -> bool:
    return row is not None and bool(row.finish)
