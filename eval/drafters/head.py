"""Drafting with a head of any kind: chains and trees, drawn or likeliest.

The head's cache holds one row per position the target has run: row t is the target's state at t
with token x_{t+1}. Rows for drafts go behind them during one `propose` and are dropped at its end,
so accepted drafts are always rebuilt from the target's states. Dimensions: T new rows, D head
width, W draft vocabulary, V target vocabulary, N frontier nodes, R drafted rows, S all rows.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.data.sampling import GREEDY_BELOW, draw
from outrider.data.target import Captured
from outrider.eval.drafters import Draft, Noise
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.growth import DrawnGrowth, Growth
from outrider.eval.trees.plans import (
    ChainPlan,
    DrawnPlan,
    HeadPlan,
    LikeliestPlan,
    LookupPlan,
    Plan,
    SuffixPlan,
    TreePlan,
    is_drawn,
)
from outrider.eval.trees.tree import Tree, chain
from outrider.heads import DraftHead, HeadCache


class HeadDrafter:
    """Drafts for one row at a time.

    At `temperature` above 0 chains and drawn trees are drawn from softmax(logits / temperature), as
    rejection rules need; at 0 every draft is the head's likeliest. Other trees are never drawn, and
    score nodes by the head's law at temperature 1.
    """

    def __init__(self, head: DraftHead, plan: Plan, *, temperature: float = 0.0) -> None:
        # One epsilon with the text's: what is greedy there draws nothing here.
        temperature = 0.0 if temperature < GREEDY_BELOW else temperature
        if isinstance(plan, LookupPlan | SuffixPlan):
            raise ValueError(f"plan is {plan.label}, which no head drafts; use drafter_by")
        if temperature and not is_drawn(plan):
            raise ValueError(
                f"temperature is {temperature} for a tree of drafts; trees take the likeliest "
                "tokens, so give 0, or a chain or drawn plan"
            )
        if isinstance(plan, DrawnPlan) and not temperature:
            plan = TreePlan(plan.depth, plan.width, plan.nodes)
        self._head, self._temperature = head, temperature
        self._plan: HeadPlan = plan
        self._ids_W = head.draft_ids_W
        self._limit = head.config.max_position_embeddings
        self._cache = HeadCache()
        self._num_rows = 0
        self._root = 0
        self._forget()

    @property
    def layers(self) -> tuple[int, ...]:
        """Target layers whose states the head fuses; an EAGLE-1 head reads the last state only."""
        return self._head.config.aux_layers

    @property
    def siblings(self) -> Siblings:
        """Above temperature 0 drawn chains or trees, else the likeliest tokens."""
        if not self._temperature:
            return Siblings.CHOSEN
        return Siblings.WITHOUT if isinstance(self._plan, DrawnPlan) else Siblings.SINGLE

    def start(self, ids: Sequence[int], captured: Captured) -> None:
        """Begin a row: its tokens, and the target's states at all of them but the newest."""
        self._cache.truncate(0)
        self._num_rows = 0
        self._forget()
        self.accept(ids[1:], captured)

    @torch.no_grad()
    def accept(self, ids: Sequence[int], captured: Captured) -> None:
        """Go on by these tokens; states at the old root and at all of them but the newest."""
        assert captured.last_BTH.shape[1] == len(ids), "one target state per token it led to"
        self._root = ids[-1]
        self._num_rows += len(ids)
        if self._num_rows > self._limit:
            # Past the head's positions no draft is made any more, so nothing need be kept.
            self._forget()
            return
        self._features.append(self._head.project(captured.aux_BTF, captured.last_BTH))
        self._ids += ids

    @torch.no_grad()
    def propose(self, max_depth: int, noise: Noise) -> Draft:
        """Draft at most `max_depth` tokens ahead of the root, within the head's positions."""
        # The first draft is the output of row num_rows - 1, each further one of the next row.
        depth = min(self._plan.depth, max_depth, self._limit - self._num_rows + 1)
        depth = min(depth, self._head.config.max_drafts)
        if depth < 1:
            return Draft(chain(self._root, ()))
        hidden_1D = self._catch_up()
        if isinstance(self._plan, ChainPlan):
            draft = self._chain(hidden_1D, depth, noise)
        elif isinstance(self._plan, DrawnPlan):
            draft = self._drawn(hidden_1D, depth, self._plan, noise)
        else:
            draft = Draft(self._tree(hidden_1D, depth, self._plan))
        self._cache.truncate(self._num_rows)
        return draft

    def _catch_up(self) -> Tensor:
        """Run the rows that wait; returns the output of the newest, [1, D]."""
        assert self._cache.length + len(self._ids) == self._num_rows, "a row was lost"
        features = self._features
        if not features:  # proposed before: nothing new since
            return self._newest_1D
        feature_1TD = features[0] if len(features) == 1 else torch.cat(features, 1)
        hidden_1TD = self._step(feature_1TD, self._ids, self._cache.length)
        self._forget()
        self._newest_1D = hidden_1TD[0, -1:]
        return self._newest_1D

    def _forget(self) -> None:
        self._features: list[Tensor] = []
        self._ids: list[int] = []

    def _step(self, feature_1TD: Tensor, ids: Sequence[int], start: int, depth: int = 0) -> Tensor:
        device = feature_1TD.device
        position_1T = torch.arange(start, start + len(ids), device=device)[None]
        ids_1T = torch.tensor([ids], device=device)
        return self._head.step(feature_1TD, ids_1T, position_1T, self._cache, depth=depth)

    def _chain(self, hidden_1D: Tensor, depth: int, noise: Noise) -> Draft:
        tokens: list[int] = []
        laws: list[Tensor] = []
        is_drawn = self._temperature > 0
        for step in range(depth):
            if step:
                row = self._num_rows + step - 1
                hidden_1D = self._step(hidden_1D[None], tokens[-1:], row, step)[0]
            logits_1W = self._head.draft_logits(hidden_1D, step)
            if is_drawn:
                laws.append((logits_1W / self._temperature).softmax(-1))
                draft_id = draw(laws[-1][0], noise.draft(step))
            else:
                draft_id = int(logits_1W.argmax())
            tokens.append(int(self._ids_W[draft_id]))
        tree = chain(self._root, tokens)
        if not is_drawn:
            return Draft(tree)
        return Draft(tree, lambda node: self._head.scatter(laws[node - 1])[0])

    def _drawn(self, hidden_ND: Tensor, depth: int, plan: DrawnPlan, noise: Noise) -> Draft:
        """A tree whose slots are planned by sorted q, then filled by draws without replacement."""
        growth = DrawnGrowth(
            self._root,
            lambda law_W, level, slot: draw(law_W, noise.draft(level, slot)),
            lambda index: int(self._ids_W[index]),
        )
        seen_NR = torch.zeros(1, 0, dtype=torch.bool, device=hidden_ND.device)
        for level in range(depth):
            if level:
                hidden_ND, seen_NR = self._level(hidden_ND, seen_NR, growth, level)
            logits_NW = self._head.draft_logits(hidden_ND, level) / self._temperature
            law_NW = logits_NW.softmax(-1)
            shares = law_NW.topk(min(plan.width, self._head.config.num_proposable), dim=-1).values
            # A token of share zero cannot be drawn: it has no slot.
            rows = [[math.log(share) for share in row if share > 0] for row in shares.tolist()]
            growth.add_level(list(law_NW), rows, plan.width)
        tree, laws = growth.select(plan.nodes)
        return Draft(tree, lambda node: self._head.scatter(laws[node][None])[0])

    def _tree(self, hidden_ND: Tensor, depth: int, plan: LikeliestPlan) -> Tree:
        growth = plan.start(self._root)
        seen_NR = torch.zeros(1, 0, dtype=torch.bool, device=hidden_ND.device)
        for level in range(depth):
            if level:
                hidden_ND, seen_NR = self._level(hidden_ND, seen_NR, growth, level)
            logits_NW = self._head.draft_logits(hidden_ND, level)
            top = logits_NW.topk(min(plan.width, self._head.config.num_proposable), dim=-1)
            log_probs_NK = top.values - logits_NW.logsumexp(-1, keepdim=True)
            growth.add_level(log_probs_NK.tolist(), self._ids_W[top.indices].tolist(), plan.width)
        return growth.select(plan.nodes)

    def _level(
        self, hidden_ND: Tensor, seen_NR: Tensor, growth: Growth | DrawnGrowth, level: int
    ) -> tuple[Tensor, Tensor]:
        """Run the frontier's nodes; returns their outputs and which drafted rows each saw."""
        device = hidden_ND.device
        parents_N = torch.tensor(growth.parent_slots, device=device)
        num_new = len(growth.frontier)
        own_NN = torch.eye(num_new, dtype=torch.bool, device=device)
        seen_NR = torch.cat([seen_NR[parents_N], own_NN], dim=1)
        mask_NS = torch.nn.functional.pad(seen_NR, (self._num_rows, 0), value=True)
        ids_1N = torch.tensor([[growth.tokens[node] for node in growth.frontier]], device=device)
        position_1N = torch.full_like(ids_1N, self._num_rows + level - 1)
        fed_1ND, mask = hidden_ND[parents_N][None], mask_NS[None, None]
        hidden_1ND = self._head.step(fed_1ND, ids_1N, position_1N, self._cache, mask, level)
        return hidden_1ND[0], seen_NR
