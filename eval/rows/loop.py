"""Draft, verify, roll back for many rows in step: each row's text is that of decoding it alone.

Rows join when a slot is free and leave when they end; every round has one call of the target over
the rows at work. Dimensions: B rows, n nodes of a tree, T positions, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from outrider.data.cache import RowCache, attention_masks, query_positions
from outrider.data.rollback import check_rolls_back
from outrider.data.target import Captured, Target
from outrider.eval.decode import Decoding, law_at, position_limit
from outrider.eval.drafters import Draft
from outrider.eval.ending import Ending
from outrider.eval.metrics import Round
from outrider.eval.noise import KeyedNoise
from outrider.eval.prefill import prefill
from outrider.eval.rows import EachRow, RowsDrafter
from outrider.eval.rows.row import Prefill, RoundTime, Row
from outrider.eval.rules import Verify, fitting_rule
from outrider.eval.trees.tree import Tree

OnRowTokens: TypeAlias = Callable[[int, Sequence[int], Sequence[bool]], None]
"""Hears of a row, by its number, its new tokens and which of them were drafted."""


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
        check_rolls_back(target)
        self._judge = verify or rule.verify
        self._ending = Ending(
            target, self.decoding.stop_strings, ignore_eos=self.decoding.ignore_eos
        )
        self._cache = RowCache(num_rows)
        self._limit = position_limit(target)
        self.rows: list[Row | None] = [None] * num_rows
        self.times: list[RoundTime] = []
        """Of every round so far; prefills are not in it."""
        self.done: list[Row] = []
        """Rows that `decode` decoded, in the order of their prompts."""
        self.prefills: dict[tuple[int, ...], Prefill] | None = None
        """Set it to keep what prompts leave, for runs with the same target and layers."""
        self.on_tokens: OnRowTokens | None = None
        """Set it to hear of tokens as they come."""

    def admit(
        self, slot: int, prompt_ids: Sequence[int], number: int, key: int | None = None
    ) -> Row:
        """Run a prompt into a free slot and draw its first token; it may end with that.

        `key` is the row's in the noise; its number when left out.
        """
        if not 0 < len(prompt_ids) < self._limit:
            raise ValueError(
                f"prompt {number} has {len(prompt_ids)} tokens; give 1 to {self._limit - 1}, the "
                "target's positions less one for the answer"
            )
        start = self._clock()
        row = Row(
            number=number,
            key=number if key is None else key,
            ids=list(prompt_ids),
            num_prompt=len(prompt_ids),
            budget=min(self.decoding.max_new_tokens, self._limit - len(prompt_ids)),
        )
        known = self.prefills if self.prefills is not None else {}
        left = known.get(tuple(row.ids)) or self._prefill(row.ids)
        known[tuple(row.ids)] = left
        tree = Tree((row.ids[-1],), (-1,))
        laws = _Laws(self, row, tree, left.logits_1V, None)
        self._emit(row, [self._judge(tree, laws, self._noise(row)).token], 0)
        self._cache.replace_row(slot, left.cache, 0)
        self.drafter.start(slot, row.ids, left.captured)
        self.rows[slot] = row
        row.seconds = self._clock() - start
        return row

    def _prefill(self, ids: Sequence[int]) -> Prefill:
        fresh, chunk = RowCache(1), self.decoding.prefill_chunk
        captured = prefill(self.target, ids, fresh, self.drafter.layers, chunk)
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
        self._check_lengths(rows)
        # A node at depth d sits at position len - 1 + d, and positions end below the limit.
        drafts = self.drafter.propose([self._limit - len(row.ids) for row in rows], noises)
        times.append(self._clock())
        captured, logits_BnV = self._verify([draft.tree for draft in drafts])
        times.append(self._clock())
        accepted: list[list[int]] = []
        kept: list[tuple[int, ...]] = []
        emitted = 0
        for index, (row, draft, noise) in enumerate(zip(rows, drafts, noises, strict=True)):
            laws = _Laws(self, row, draft.tree, logits_BnV[index], draft)
            verdict = self._judge(draft.tree, laws, noise)
            if draft.watch is not None:
                draft.watch(logits_BnV[index, : len(draft.tree)])
            tokens = [*(draft.tree.tokens[node] for node in verdict.path), verdict.token]
            count = self._emit(row, tokens, len(verdict.path))
            is_used_up = not draft.tree.children[verdict.path[-1] if verdict.path else 0]
            row.rounds.append(Round(len(draft.tree) - 1, len(verdict.path), count, is_used_up))
            if row.finish:
                self.drafter.end(index, tokens[:count])
            accepted.append(tokens)
            kept.append((0, *verdict.path))
            emitted += count
        self._keep(kept, logits_BnV.shape[1])
        self._check_lengths(rows)
        self.drafter.accept(accepted, captured, kept)
        times.append(self._clock())
        draft_s, verify_s, other_s = (after - before for before, after in pairwise(times))
        self.times.append(RoundTime(draft_s, verify_s, other_s, len(rows), emitted))
        return self.times[-1]

    def _check_lengths(self, rows: Sequence[Row]) -> None:
        """The cache of every row at work holds all its tokens but the newest."""
        for row, length in zip(rows, self._cache.lengths_B.tolist(), strict=True):
            assert row.finish or length == len(row.ids) - 1, (
                f"row {row.number} has {len(row.ids)} tokens and {length} in the cache"
            )

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[int] | None = None,
        *,
        until_idle: bool = False,
    ) -> list[Row]:
        """Decode prompts; a row that ends gives its slot to the next. See `decode_rows`.

        `keys` are the rows' in the noise; their places when left out.
        """
        waiting = list(enumerate(prompts))[::-1]
        found: list[Row] = []
        slots = list(range(len(self.rows)))
        while True:
            for slot in slots:
                while waiting and (self.rows[slot] is None or _is_done(self.rows[slot])):
                    number, prompt = waiting.pop()
                    key = None if keys is None else keys[number]
                    found.append(self.admit(slot, prompt, number, key))
            going = [slot for slot, row in enumerate(self.rows) if row and not row.finish]
            if not going or (until_idle and len(going) < len(slots)):
                self.done = sorted(found, key=lambda row: row.number)
                return self.done
            if len(going) < len(self.rows):
                self.keep_rows(going)
                slots = list(range(len(going)))
            self.round()

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
        return KeyedNoise(self.decoding.seed, row.key, len(row.ids))

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

    def _emit(self, row: Row, tokens: Sequence[int], num_drafted: int) -> int:
        """Append tokens up to the text's end; returns how many."""
        room = row.budget - (len(row.ids) - row.num_prompt)
        count, row.finish = self._ending.cut(row.ids, tokens, room)
        row.ids += tokens[:count]
        if self.on_tokens is not None:
            is_drafted = [index < num_drafted for index in range(count)]
            self.on_tokens(row.number, tokens[:count], is_drafted)
        return count


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
    run.decode(prompts, until_idle=until_idle)
    return run


def _is_done(row: Row | None) -> bool:
    return row is not None and bool(row.finish)
