"""Draft, verify, roll back: one row decoded exactly, with any drafter or, plainly, with none.

A draw from the target's law for position j of a row (prompt included) gets its coin from (seed,
row, j), whatever the drafts, so a rule that draws every token from p writes the text of plain
sampling; all other coins are the round's own.
Dimensions: N tree nodes, T positions, V vocabulary, F fused feature channels, H hidden size.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outrider.data.cache import RowCache, attention_masks, query_positions
from outrider.data.penalties import Prefix
from outrider.data.rollback import check_rolls_back
from outrider.data.sampling import Sampling, process
from outrider.data.target import Captured, Target
from outrider.eval.drafters import Draft, Drafter, KeepsTexts, ReadsCache
from outrider.eval.drafters.replay import Plain
from outrider.eval.ending import Ending
from outrider.eval.metrics import Lossy, LossyRound, Round
from outrider.eval.noise import KeyedNoise
from outrider.eval.prefill import prefill
from outrider.eval.rules import Rule, Verify, fitting_rule
from outrider.eval.trees.tree import Tree

OnTokens = Callable[[Sequence[int], Sequence[bool]], None]


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How text is decoded, whoever drafts it."""

    max_new_tokens: int = 128
    """Most tokens to write, the end token included; the target's position limit may come first."""
    sampling: Sampling = field(default_factory=Sampling)
    """The law that tokens follow."""
    rule: str | None = None
    """A name of `outrider.eval.rules.RULES`. Left out: greedy at temperature 0, and above it
    rejection where chains are drawn, match where drafts are chosen."""
    seed: int = 0
    """Keys all noise, together with the row and the position."""
    ignore_eos: bool = False
    """Write on after an end token; for timing."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end an answer as an end token does; the token that completes one is kept."""
    prefill_chunk: int | None = None
    """Most positions of a prompt that are run at once; all of them when left out."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; write at least 1")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk is {self.prefill_chunk}; run at least 1 position")
        if not all(self.stop_strings):
            raise ValueError(f"stop_strings is {self.stop_strings}; an empty one stops nothing")


@dataclass(kw_only=True)
class Seconds:
    """Where the time went; `prefill` ends with the first token."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    @property
    def decode(self) -> float:
        """All but the prefill."""
        return self.draft + self.verify + self.other


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """The new tokens of one row and how they came about."""

    ids: list[int]
    is_drafted: list[bool]
    """For each new token, whether it was an accepted draft; the first, the prefill's, never is."""
    rounds: list[Round]
    """Target calls after the prefill."""
    finish: str
    """`stop` at an end token or stop string, `length` at max_new_tokens or the position limit."""
    seconds: Seconds
    num_degenerate: int
    """Rejections whose residual vanished in rounding."""


@dataclass(frozen=True, kw_only=True)
class DecodedBy(Lossy):
    """What any rule at all wrote: no figure of exact rules may be counted from it."""

    new_ids: list[int]
    lossy_rounds: list[LossyRound]


def decode(
    target: Target,
    prompt_ids: Sequence[int],
    drafter: Drafter | None = None,
    decoding: Decoding | None = None,
    *,
    row: int = 0,
    on_tokens: OnTokens | None = None,
) -> Decoded:
    """Continue a prompt exactly as the target alone would.

    Args:
        target: Writes the text.
        prompt_ids: At least one token, fewer than the target has positions.
        drafter: Guesses ahead; None decodes plainly.
        decoding: Settings; greedy by default.
        row: Number of the row in the noise's key.
        on_tokens: Called with each round's new tokens and which of them were drafted.
    """
    drafter, decoding = drafter or Plain(), decoding or Decoding()
    verify = pick_rule(decoding, drafter).verify
    run = _Run(target, prompt_ids, drafter, decoding, row, verify)
    return _finish(run, on_tokens)


def decode_by(
    verify: Verify,
    target: Target,
    prompt_ids: Sequence[int],
    drafter: Drafter,
    decoding: Decoding,
    *,
    row: int = 0,
) -> DecodedBy:
    """The same loop under any rule, `decoding.rule` aside; exact only if `verify` is.

    Nothing here knows whether it is, so what comes of it is marked as lossy.
    """
    found = _finish(_Run(target, prompt_ids, drafter, decoding, row, verify), None)
    rounds = [LossyRound(one.drafted, one.accepted, one.emitted) for one in found.rounds]
    return DecodedBy(new_ids=found.ids, lossy_rounds=rounds)


def _finish(run: "_Run", on_tokens: OnTokens | None) -> Decoded:
    run.prefill()
    shown = 0
    while True:
        if on_tokens is not None:
            on_tokens(run.new_ids[shown:], run.is_drafted[shown:])
            shown = len(run.new_ids)
        if run.finish:
            return Decoded(
                ids=run.new_ids,
                is_drafted=run.is_drafted,
                rounds=run.rounds,
                finish=run.finish,
                seconds=run.seconds,
                num_degenerate=run.num_degenerate,
            )
        run.round()


def pick_rule(decoding: Decoding, drafter: Drafter) -> Rule:
    """The rule to judge by. Raises ValueError when it would not be exact here."""
    return fitting_rule(decoding.rule, drafter.siblings, decoding.sampling.temperature)


class _Run:
    """One row at work."""

    def __init__(
        self,
        target: Target,
        prompt_ids: Sequence[int],
        drafter: Drafter,
        decoding: Decoding,
        row: int,
        verify: Verify,
    ) -> None:
        self._limit = position_limit(target)
        if not 0 < len(prompt_ids) < self._limit:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens; give 1 to {self._limit - 1}, the "
                "target's positions less one for the answer"
            )
        self._target, self._drafter, self._decoding, self._row = target, drafter, decoding, row
        check_rolls_back(target)
        self._ending = Ending(target, decoding.stop_strings, ignore_eos=decoding.ignore_eos)
        self._judge = verify
        self._ids = list(prompt_ids)
        self._budget = min(decoding.max_new_tokens, self._limit - len(prompt_ids))
        self._cache = RowCache(1)
        self.new_ids: list[int] = []
        self.is_drafted: list[bool] = []
        self.rounds: list[Round] = []
        self.finish = ""
        self.seconds = Seconds()
        self.num_degenerate = 0

    def prefill(self) -> None:
        """Run the prompt and draw the first token."""
        start = time.perf_counter()
        tree = Tree((self._ids[-1],), (-1,))
        captured = prefill(
            self._target,
            self._ids,
            self._cache,
            self._drafter.layers,
            self._decoding.prefill_chunk,
        )
        logits_1V = self._target.logits(captured.last_BTH[0, -1:])
        laws = _NodeLaws(self, tree, logits_1V, None)
        verdict = self._judge(tree, laws, self._noise())
        self._emit([verdict.token], 0)
        if isinstance(self._drafter, ReadsCache):
            self._drafter.share(self._cache)
        self._drafter.start(self._ids, captured)
        self.seconds.prefill = time.perf_counter() - start

    def round(self) -> None:
        """One target call: draft, verify, keep what stands."""
        times = [time.perf_counter()]
        noise = self._noise()
        # A node at depth d sits at position len - 1 + d, and positions end below the limit.
        draft = self._drafter.propose(self._limit - len(self._ids), noise)
        times.append(time.perf_counter())
        captured, logits_NV = self._verify(draft.tree)
        times.append(time.perf_counter())
        laws = _NodeLaws(self, draft.tree, logits_NV, draft)
        verdict = self._judge(draft.tree, laws, noise)
        self.num_degenerate += verdict.num_degenerate
        if draft.watch is not None:
            draft.watch(logits_NV)
        kept = (0, *verdict.path)
        self._keep(kept)
        tokens = [*(draft.tree.tokens[node] for node in verdict.path), verdict.token]
        emitted = self._emit(tokens, len(verdict.path))
        is_used_up = not draft.tree.children[kept[-1]]
        self.rounds.append(Round(len(draft.tree) - 1, len(verdict.path), emitted, is_used_up))
        if not self.finish:
            self._drafter.accept(tokens, _rows(captured, kept))
        elif isinstance(self._drafter, KeepsTexts):
            self._drafter.end(tokens[:emitted])
        times.append(time.perf_counter())
        self.seconds.draft += times[1] - times[0]
        self.seconds.verify += times[2] - times[1]
        self.seconds.other += times[3] - times[2]

    def law(self, logits_V: Tensor, tree: Tree, node: int) -> Tensor:
        """The target's law after a node."""
        num_prompt = len(self._ids) - len(self.new_ids)
        return law_at(logits_V, self._decoding.sampling, self._ids, num_prompt, tree, node)

    def _noise(self) -> KeyedNoise:
        return KeyedNoise(self._decoding.seed, self._row, len(self._ids))

    def _verify(self, tree: Tree) -> tuple[Captured, Tensor]:
        """States at the tree's nodes, and the logits [N, V] after each."""
        target, cache = self._target, self._cache
        assert cache.get_seq_length() == len(self._ids) - 1, "the newest token is not in the cache"
        device = target.device
        lengths_B = cache.lengths_B.to(device)
        ancestors_NN = None if tree.is_chain else tree.ancestors.to(device)
        mask = attention_masks(target.config, lengths_B, len(tree), target.dtype, ancestors_NN)
        captured = target.run(
            torch.tensor([tree.tokens], device=device),
            layers=self._drafter.layers,
            position_ids=query_positions(lengths_B, len(tree), ancestors_NN),
            attention_mask=mask,
            cache=cache,
        )
        cache.advance(len(tree))
        return captured, target.logits(captured.last_BTH[0])

    def _keep(self, kept: tuple[int, ...]) -> None:
        """Drop the keys and values of all nodes but these."""
        start = len(self._ids) - 1
        if kept == tuple(range(len(kept))):
            self._cache.truncate([start + len(kept)])
        else:
            self._cache.compact(0, start, kept)
        assert self._cache.get_seq_length() == start + len(kept)

    def _emit(self, tokens: list[int], num_drafted: int) -> int:
        """Append tokens up to the text's end; returns how many."""
        count, self.finish = self._ending.cut(self._ids, tokens, self._budget - len(self.new_ids))
        self._ids += tokens[:count]
        self.new_ids += tokens[:count]
        self.is_drafted += [index < num_drafted for index in range(count)]
        return count


class _NodeLaws:
    """Laws at the nodes of a verified tree, each made when the walk gets there."""

    def __init__(self, run: _Run, tree: Tree, logits_NV: Tensor, draft: Draft | None) -> None:
        self._run, self._tree, self._logits_NV, self._draft = run, tree, logits_NV, draft

    def target(self, node: int) -> Tensor:
        """The law p after this node's path."""
        return self._run.law(self._logits_NV[node], self._tree, node)

    def draft(self, node: int) -> Tensor | None:
        """The law q that this node's token was drawn from."""
        assert self._draft is not None
        return None if self._draft.law is None else self._draft.law(node)


def law_at(
    logits_V: Tensor,
    sampling: Sampling,
    ids: Sequence[int],
    num_prompt: int,
    tree: Tree,
    node: int,
) -> Tensor:
    """The target's law after a node of a tree whose root is the newest of a row's `ids`.

    Greedy on logits as they are, these do as well.
    """
    if sampling.is_greedy and not sampling.moves_logits:
        # Half precision has no fast argmax on CPUs.
        return logits_V.float() if logits_V.element_size() < 4 else logits_V
    prefixes = None
    if sampling.reads_path:
        path = [*ids, *(tree.tokens[step] for step in tree.path(node))]
        prefixes = [Prefix(path, num_prompt)]
    return process(logits_V[None], sampling, prefixes)[0]


def position_limit(target: Target) -> int:
    """Positions the target has; unlimited where its config names none.

    longrope turns other angles once a text passes the length it was first trained at, so passes of
    unlike lengths would see unlike keys there: texts end before.
    """
    config = target.config
    limit = int(getattr(config, "max_position_embeddings", sys.maxsize))
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        first = rope.get("original_max_position_embeddings")
        first = first or getattr(config, "original_max_position_embeddings", limit)
        limit = min(limit, int(first))
    return limit


def _rows(captured: Captured, kept: tuple[int, ...]) -> Captured:
    """The states at these nodes."""
    if kept == tuple(range(len(kept))):
        return Captured(*(states[:, : len(kept)] for states in captured))
    return Captured(*(states[:, list(kept)] for states in captured))
