"""Exact acceptance of likeliest-token trees: walk the target's text, a tree at every round.

Trees are not drawn, so at any temperature the text alone decides what each round accepts.

B rows walked together, S tokens of a row, N frontier nodes, R drafted rows, D head width, C judged
contexts, V target vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.data.target import Target
from outrider.eval.offline.batching import batches, check_match, check_rule, side_by_side
from outrider.eval.offline.contexts import DraftVocabulary
from outrider.eval.offline.scores import Score, in_order, join
from outrider.eval.offline.traces import Trace, TraceRow
from outrider.eval.offline.walks import Drafted, Walk, score_walks
from outrider.eval.rules import rule_named
from outrider.eval.trees.growth import Growth
from outrider.eval.trees.plans import LikeliestPlan
from outrider.heads import DraftHead, HeadCache

_CHUNK = 128


def score_tree(
    head: DraftHead,
    trace: Trace,
    target: Target,
    plan: LikeliestPlan,
    *,
    rule: str | None = None,
    rows: Sequence[int] | None = None,
) -> Score:
    """Score a tree; greedy, match and point_mass accept alike, so the rule is a label."""
    if rule is None:
        rule = "greedy" if trace.sampling.is_greedy else "match"
    rule = check_rule(rule, trace.sampling)
    if rule_named(rule).is_chain_only:
        raise ValueError(f"rule {rule!r} judges drawn chains; for a tree use match or point_mass")
    check_match(trace, target)
    parts = []
    for batch in batches(trace, head.config.aux_layers, rows):
        walks = [Walk(row, plan.depth) for row in batch]
        _walk_all(head, walks, plan)
        parts.append(score_walks(DraftVocabulary.of(head), walks, target, trace, plan, rule))
    wanted = [trace.row_ids[i] for i in (range(len(trace)) if rows is None else rows)]
    return in_order(join(parts), wanted)


@torch.no_grad()
def _walk_all(head: DraftHead, walks: Sequence[Walk], plan: LikeliestPlan) -> None:
    while going := [walk for walk in walks if not walk.is_done]:
        grower = _Grower(head, [walk.row for walk in going], plan)
        # Finished rows ride along; once they are half of the batch it is cheaper to start afresh.
        while 2 * sum(not walk.is_done for walk in going) > len(going):
            found = grower.grow([walk.root if not walk.is_done else 0 for walk in going])
            for walk, drafted in zip(going, found, strict=True):
                if not walk.is_done:
                    walk.follow(drafted)


class _Grower:
    """Grows the trees of several rows at once over one cache of their texts."""

    def __init__(self, head: DraftHead, rows: Sequence[TraceRow], plan: LikeliestPlan) -> None:
        self._head, self._plan, self._ids_W = head, plan, head.draft_ids_W
        self._width = min(plan.width, head.config.num_proposable)
        self._limit = head.config.max_position_embeddings
        self._device = head.device
        self._ids_BS, aux_BSF, last_BSH = (
            side_by_side(rows, name).to(self._device) for name in ("ids_T", "aux_TF", "last_TH")
        )
        feature_BSD = head.project(aux_BSF, last_BSH)
        num_rows = self._ids_BS.shape[1] - 1
        self._cache = HeadCache(num_rows + plan.depth * plan.width)
        position_BS = torch.arange(num_rows, device=self._device).expand(len(rows), -1)
        self._hidden_BSD = head.step(
            feature_BSD[:, :-1], self._ids_BS[:, 1:], position_BS, self._cache
        )

    def grow(self, roots: Sequence[int]) -> list[Drafted]:
        """The tree of each row, for rounds whose root row is given."""
        device = self._device
        root_B = torch.tensor(roots, device=device)
        every_B = torch.arange(len(roots), device=device)
        growths: list[Growth] = [
            self._plan.start(token) for token in self._ids_BS[every_B, root_B + 1].tolist()
        ]
        hidden_BND = self._hidden_BSD[every_B, root_B][:, None]
        seen_BNR = torch.zeros(len(roots), 1, 0, dtype=torch.bool, device=device)
        parent_BN = torch.zeros(len(roots), 1, dtype=torch.long, device=device)
        # As in decoding: the draft of depth d runs at position root + d - 1, below the limit.
        deepest = min(self._plan.depth, self._head.config.max_drafts)
        depths = [min(deepest, self._limit - root) for root in roots]
        length = self._cache.length
        widest: list[dict[int, tuple[int, ...]]] = [{} for _ in roots]
        for level in range(max(depths)):
            if level:
                own_NN = torch.eye(parent_BN.shape[1], dtype=torch.bool, device=device)
                own_BNN = own_NN.expand(len(roots), -1, -1)
                seen_BNR = torch.cat([seen_BNR[every_B[:, None], parent_BN], own_BNN], -1)
                fed_BND = hidden_BND[every_B[:, None], parent_BN]
                hidden_BND = self._step(fed_BND, growths, root_B, level, seen_BNR)
            parent_BN = self._add_level(hidden_BND, growths, widest, depths, level)
        self._cache.truncate(length)
        return [self._drafted(*pair) for pair in zip(growths, widest, strict=True)]

    def _drafted(self, growth: Growth, widest: dict[int, tuple[int, ...]]) -> Drafted:
        kept = growth.kept(self._plan.nodes)
        return Drafted(
            growth.select(self._plan.nodes), tuple(widest.get(node, ()) for node in kept)
        )

    def _step(
        self,
        fed_BND: Tensor,
        growths: Sequence[Growth],
        root_B: Tensor,
        level: int,
        seen_BNR: Tensor,
    ) -> Tensor:
        """Run every row's frontier over its text up to the root and its own ancestors."""
        num_new = fed_BND.shape[1]
        text_S = torch.arange(self._hidden_BSD.shape[1], device=self._device)
        text_BNS = (text_S <= root_B[:, None, None]).expand(-1, num_new, -1)
        fed = [[growth.tokens[node] for node in growth.frontier] for growth in growths]
        filled = [_fill(tokens, num_new) for tokens in fed]
        ids_BN = torch.tensor(filled, device=self._device)
        position_BN = (root_B + level)[:, None].expand(-1, num_new)
        mask_BNS = torch.cat([text_BNS, seen_BNR], -1)
        return self._head.step(
            fed_BND, ids_BN, position_BN, self._cache, mask_BNS[:, None], depth=level
        )

    def _add_level(
        self,
        hidden_BND: Tensor,
        growths: Sequence[Growth],
        widest: Sequence[dict[int, tuple[int, ...]]],
        depths: Sequence[int],
        level: int,
    ) -> Tensor:
        """Hang children under the frontiers; returns where each new one's parent was, [B, N].

        `widest` receives the likeliest tokens under each node of the frontiers.
        """
        logits_BNW = self._head.draft_logits(hidden_BND, level)
        top = logits_BNW.topk(self._width, dim=-1)
        log_probs = (top.values - logits_BNW.logsumexp(-1, keepdim=True)).tolist()
        tokens = self._ids_W[top.indices].tolist()
        parents: list[list[int]] = []
        for b, growth in enumerate(growths):
            slot = {node: index for index, node in enumerate(growth.frontier)}
            if level < depths[b]:
                widest[b].update(zip(slot, map(tuple, tokens[b]), strict=False))
                growth.add_level(log_probs[b], tokens[b], self._plan.width)
                parents.append([slot[growth.parents[node]] for node in growth.frontier])
            else:
                parents.append([0])
        num_new = max(map(len, parents))
        return torch.tensor([_fill(row, num_new) for row in parents], device=self._device)


def _fill(values: list[int], length: int) -> list[int]:
    """Repeat the last value: a row that is done, or at its limit, rides along."""
    return (values + values[-1:] * length)[:length]
