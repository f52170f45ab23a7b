"""Drafting with a head for many rows at once: chains, likeliest or drawn, and trees.

As in `outrider.eval.drafters.head`, a row's cache holds one entry per position the target has run
and drafts are rebuilt from the target's states once accepted; here rows are of unlike lengths.
Dimensions: B rows, T new entries, D head width, W draft vocabulary, N frontier nodes, R drafted
entries, S all entries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.data.cache import query_mask
from outrider.data.sampling import GREEDY_BELOW, draw
from outrider.data.target import Captured
from outrider.eval.drafters import Draft, Noise
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.plans import (
    ChainPlan,
    DrawnPlan,
    LikeliestPlan,
    LookupPlan,
    Plan,
    SuffixPlan,
)
from outrider.eval.trees.tree import chain
from outrider.heads import DraftHead
from outrider.heads.row_cache import RowHeadCache


class _Waiting(NamedTuple):
    """Entries that the head has not run yet, rows padded to the longest."""

    feature_BTD: Tensor
    ids_BT: Tensor
    counts_B: Tensor


class _Saved(NamedTuple):
    lengths_B: Tensor
    newest_BD: Tensor | None
    waiting: _Waiting | None
    roots: list[int]
    known: list[int]


class HeadRows:
    """Drafts for a batch of rows, all by one plan; `plan` may be set anew between rounds."""

    def __init__(
        self, head: DraftHead, plan: Plan, num_rows: int, *, temperature: float = 0.0
    ) -> None:
        self._temperature = 0.0 if temperature < GREEDY_BELOW else temperature
        self._head = head
        self._ids_W = head.draft_ids_W
        self._cache = RowHeadCache(num_rows)
        self._roots = [0] * num_rows
        self._known = [0] * num_rows
        self._newest_BD: Tensor | None = None
        self._waiting: _Waiting | None = None
        self.plan = plan

    @property
    def plan(self) -> ChainPlan | LikeliestPlan:
        """What is drafted."""
        return self._plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        if isinstance(plan, LookupPlan | SuffixPlan | DrawnPlan):
            raise ValueError(
                f"plan is {plan}; a head drafts chains and trees of its likeliest tokens in "
                "batches: write chain:LENGTH, tree:DEPTH,WIDTH,NODES or static:FILE"
            )
        if self._temperature and not isinstance(plan, ChainPlan):
            raise ValueError(
                f"temperature is {self._temperature} for a tree; trees take the likeliest tokens, "
                "so give 0, or a chain"
            )
        self._plan = plan

    @property
    def layers(self) -> tuple[int, ...]:
        """Target layers whose states the head fuses."""
        return self._head.config.aux_layers

    @property
    def siblings(self) -> Siblings:
        """Drawn chains above temperature 0, else the likeliest tokens."""
        return Siblings.SINGLE if self._temperature else Siblings.CHOSEN

    @torch.no_grad()
    def start(self, row: int, ids: Sequence[int], captured: Captured) -> None:
        """Run a row's prompt; what other rows wait for stays for their next round."""
        feature_1TD = self._head.project(captured.aux_BTF, captured.last_BTH)
        device, count = feature_1TD.device, feature_1TD.shape[1]
        alone = RowHeadCache(1)
        hidden_1TD = self._head.step(
            feature_1TD,
            torch.tensor([ids[1:]], device=device),
            torch.arange(count, device=device)[None],
            alone,
            query_mask(torch.zeros(1, dtype=torch.long, device=device), count),
        )
        alone.advance(count)
        self._cache.replace_row(row, alone)
        if self._newest_BD is None:
            self._newest_BD = hidden_1TD.new_zeros(len(self._roots), hidden_1TD.shape[-1])
        self._newest_BD[row] = hidden_1TD[0, -1]
        self._roots[row], self._known[row] = ids[-1], count
        if self._waiting is not None:
            counts_B = self._waiting.counts_B.clone()
            counts_B[row] = 0
            self._waiting = self._waiting._replace(counts_B=counts_B)

    @torch.no_grad()
    def accept(
        self, tokens: Sequence[Sequence[int]], captured: Captured, kept: Sequence[Sequence[int]]
    ) -> None:
        """Go on by each row's tokens; its states are those of `captured` at its kept nodes."""
        assert self._waiting is None, "a round was accepted without drafting for it"
        device = captured.last_BTH.device
        index_BT = _padded(kept, device)
        rows_B1 = torch.arange(len(kept), device=device)[:, None]
        feature_BTD = self._head.project(
            captured.aux_BTF[rows_B1, index_BT], captured.last_BTH[rows_B1, index_BT]
        )
        counts_B = torch.tensor([len(one) for one in kept])
        self._waiting = _Waiting(feature_BTD, _padded(tokens, device), counts_B)
        self._roots = [ids[-1] for ids in tokens]
        self._known = [count + len(nodes) for count, nodes in zip(self._known, kept, strict=True)]

    def end(self, row: int, ids: Sequence[int]) -> None:
        """Nothing: a row that ends is dropped or started anew."""

    @torch.no_grad()
    def propose(self, max_depths: Sequence[int], noises: Sequence[Noise]) -> list[Draft]:
        """Draft for every row; one past the head's positions drafts nothing."""
        hidden_BD = self._catch_up()
        lengths_B = self._cache.lengths_B
        assert lengths_B.tolist() == self._known, "the draft's cache lacks or keeps an entry"
        limit = self._head.config.max_position_embeddings
        most = min(self._plan.depth, self._head.config.max_drafts)
        depths = [
            max(0, min(most, room, limit - known + 1))
            for room, known in zip(max_depths, self._known, strict=True)
        ]
        if not any(depths):
            return [Draft(chain(root, ())) for root in self._roots]
        if isinstance(self._plan, ChainPlan):
            drafts = self._chains(hidden_BD, depths, noises)
        else:
            drafts = self._trees(hidden_BD, depths, self._plan)
        self._cache.set_lengths(lengths_B)
        return drafts

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        chosen = list(rows)
        self._cache.keep_rows(chosen)
        self._roots = [self._roots[row] for row in chosen]
        self._known = [self._known[row] for row in chosen]
        assert self._newest_BD is not None
        self._newest_BD = self._newest_BD[chosen]
        if self._waiting is not None:
            self._waiting = _Waiting(*(part[chosen] for part in self._waiting))

    def save(self) -> _Saved:
        """What `restore` needs; see `RowsDrafter`."""
        newest = None if self._newest_BD is None else self._newest_BD.clone()
        return _Saved(
            self._cache.lengths_B, newest, self._waiting, list(self._roots), list(self._known)
        )

    def restore(self, saved: _Saved) -> None:
        """Come back to where `save` was called."""
        self._newest_BD, self._waiting = saved.newest_BD, saved.waiting
        self._cache.set_lengths(saved.lengths_B)
        self._roots, self._known = list(saved.roots), list(saved.known)

    def _catch_up(self) -> Tensor:
        """Run the entries that wait; returns each row's newest output [B, D]."""
        if self._waiting is not None:
            feature_BTD, ids_BT, counts_B = self._waiting
            hidden_BTD = self._step(feature_BTD, ids_BT, 0)
            self._cache.advance(counts_B)
            assert self._newest_BD is not None
            device = hidden_BTD.device
            last_B = (counts_B - 1).clamp(min=0).to(device)
            newest_BD = hidden_BTD[torch.arange(len(counts_B), device=device), last_B]
            is_new_B1 = (counts_B > 0).to(device)[:, None]
            self._newest_BD = torch.where(is_new_B1, newest_BD, self._newest_BD)
            self._waiting = None
        assert self._newest_BD is not None, "no row was started"
        return self._newest_BD

    def _step(self, feature_BTD: Tensor, ids_BT: Tensor, depth: int) -> Tensor:
        """Entries after each row's length that see the row's past and one another causally."""
        lengths_B, num_new = self._cache.lengths_B.to(ids_BT.device), ids_BT.shape[1]
        position_BT = lengths_B[:, None] + torch.arange(num_new, device=ids_BT.device)
        mask = query_mask(lengths_B, num_new)
        return self._head.step(feature_BTD, ids_BT, position_BT, self._cache, mask, depth)

    def _chains(
        self, hidden_BD: Tensor, depths: Sequence[int], noises: Sequence[Noise]
    ) -> list[Draft]:
        drawn: list[list[int]] = []
        laws: list[Tensor] = []
        ids_B = hidden_BD.new_zeros(len(hidden_BD), dtype=torch.long)
        for step in range(max(depths)):
            if step:
                hidden_BD = self._step(hidden_BD[:, None], ids_B[:, None], step)[:, 0]
                self._cache.advance(1)
            logits_BW = self._head.draft_logits(hidden_BD, step)
            if self._temperature:
                laws.append((logits_BW / self._temperature).softmax(-1))
                rows = zip(laws[-1], noises, strict=True)
                chosen = [draw(law_W, noise.draft(step)) for law_W, noise in rows]
                ids_B = self._ids_W[torch.tensor(chosen, device=hidden_BD.device)]
            else:
                ids_B = self._ids_W[logits_BW.argmax(-1)]
            drawn.append(ids_B.tolist())
        tokens = zip(*drawn, strict=True)
        trees = [
            chain(root, row[:depth])
            for root, row, depth in zip(self._roots, tokens, depths, strict=True)
        ]
        if not self._temperature:
            return [Draft(tree) for tree in trees]
        return [Draft(tree, _ChainLaw(self._head, laws, row)) for row, tree in enumerate(trees)]

    def _trees(self, hidden_BD: Tensor, depths: Sequence[int], plan: LikeliestPlan) -> list[Draft]:
        growths = [plan.start(root) for root in self._roots]
        trees = [chain(root, ()) for root in self._roots]
        device, num_rows = hidden_BD.device, len(growths)
        base_B = self._cache.lengths_B.to(device)
        hidden_BND = hidden_BD[:, None]
        seen_BNR = torch.zeros(num_rows, 1, 0, dtype=torch.bool, device=device)
        for level in range(max(depths)):
            if level:
                parents_BN = torch.tensor([one.parent_slots for one in growths], device=device)
                rows_B1 = torch.arange(num_rows, device=device)[:, None]
                own_NN = torch.eye(parents_BN.shape[1], dtype=torch.bool, device=device)
                own_BNN = own_NN.expand(num_rows, -1, -1)
                seen_BNR = torch.cat([seen_BNR[rows_B1, parents_BN], own_BNN], dim=2)
                frontier = [[one.tokens[node] for node in one.frontier] for one in growths]
                ids_BN = torch.tensor(frontier, device=device)
                position_BN = (base_B[:, None] + level - 1).expand_as(ids_BN)
                mask = _tree_mask(base_B, seen_BNR)
                fed_BND = hidden_BND[rows_B1, parents_BN]
                hidden_BND = self._head.step(fed_BND, ids_BN, position_BN, self._cache, mask, level)
                self._cache.advance(ids_BN.shape[1])
            logits_BNW = self._head.draft_logits(hidden_BND, level)
            top = logits_BNW.topk(min(plan.width, self._head.config.num_proposable), dim=-1)
            log_probs_BNK = top.values - logits_BNW.logsumexp(-1, keepdim=True)
            names_BNK = self._ids_W[top.indices]
            rows = zip(growths, log_probs_BNK.tolist(), names_BNK.tolist(), strict=True)
            for row, (growth, log_probs, names) in enumerate(rows):
                growth.add_level(log_probs, names, plan.width)
                if level + 1 == depths[row]:  # others may have room for more levels
                    trees[row] = growth.select(plan.nodes)
        return [Draft(tree) for tree in trees]


class _ChainLaw:
    """The laws that a row's chain was drawn from."""

    def __init__(self, head: DraftHead, laws: Sequence[Tensor], row: int) -> None:
        self._head, self._laws, self._row = head, laws, row

    def __call__(self, node: int) -> Tensor:
        """The [V] law of a node's token."""
        return self._head.scatter(self._laws[node - 1][self._row : self._row + 1])[0]


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Rows of numbers [B, T], short ones filled up with 0."""
    longest = max(map(len, rows))
    filled = [[*row, *[0] * (longest - len(row))] for row in rows]
    return torch.tensor(filled, device=device)


def _tree_mask(base_B: Tensor, seen_BNR: Tensor) -> Tensor:
    """Which entries each of the newest N sees: its row's past, and its ancestors of the R drafted.

    Bool [B, 1, N, S], S = longest past + R.
    """
    num_drafted = seen_BNR.shape[2]
    slots_S = torch.arange(int(base_B.max()) + num_drafted, device=base_B.device)
    drafted_BS = slots_S - base_B[:, None]
    is_drafted_BS = (drafted_BS >= 0) & (drafted_BS < num_drafted)
    index_BNS = drafted_BS.clamp(0, num_drafted - 1)[:, None].expand(-1, seen_BNR.shape[1], -1)
    mask_BNS = seen_BNR.gather(2, index_BNS) & is_drafted_BS[:, None]
    return (mask_BNS | (drafted_BS < 0)[:, None])[:, None]
