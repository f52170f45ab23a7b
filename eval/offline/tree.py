"""Exact acceptance of likeliest-token trees: walk the target's text, a tree at every round.

Trees are not drawn, so at any temperature the text alone decides what each round accepts.

B rows walked together, S tokens of a row, N frontier nodes, R drafted rows, D head width, C judged
contexts, V target vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.offline.batching import batches, check_match, check_rule, side_by_side
from outrider.eval.offline.chain import by_bin, in_order
from outrider.eval.offline.contexts import DraftVocabulary, Place, target_law
from outrider.eval.offline.scores import Score, join
from outrider.eval.offline.traces import Trace, TraceRow
from outrider.eval.rules import rule_named
from outrider.eval.trees.growth import Growth
from outrider.eval.trees.plans import LikeliestPlan
from outrider.eval.trees.tree import Tree
from outrider.heads import EagleHead, HeadCache

_CHUNK = 128


def score_tree(
    head: EagleHead,
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
    for batch in batches(trace, head, rows):
        walks = [_Walk(row) for row in batch]
        _walk_all(head, walks, plan)
        parts.append(_score(head, walks, target, trace.sampling, plan, rule))
    wanted = [trace.row_ids[i] for i in (range(len(trace)) if rows is None else rows)]
    return in_order(join(parts), wanted)


class _Judged(NamedTuple):
    """A context that the walk came to, and the tokens drafted for it."""

    place: int
    depth: int
    tokens: tuple[int, ...]


@dataclass
class _Walk:
    """One row on the way through its text; place 0 is the prefill's token."""

    row: TraceRow
    place: int = 1
    starts: list[int] = field(default_factory=list)
    drafted: int = 0
    judged: list[_Judged] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether the text is used up."""
        return self.place >= self.row.num_tokens

    @property
    def root(self) -> int:
        """Row of the head that the next round starts from: see the alignment rule."""
        return self.row.prompt_length + self.place - 2

    def token(self, place: int) -> int:
        """The text's token at a place."""
        return int(self.row.ids_T[self.row.prompt_length + place])

    def follow(self, tree: Tree) -> None:
        """One round: go down the tree as far as the text is in it, and one token on."""
        self.starts.append(self.place)
        self.drafted += len(tree) - 1
        node, depth = 0, 0
        while children := tree.children[node]:
            if self.is_done:
                return
            tokens = tuple(tree.tokens[child] for child in children)
            self.judged.append(_Judged(self.place, depth, tokens))
            token = self.token(self.place)
            self.place += 1
            if token not in tokens:
                return
            node, depth = children[tokens.index(token)], depth + 1
        self.place += 1


@torch.no_grad()
def _walk_all(head: EagleHead, walks: Sequence[_Walk], plan: LikeliestPlan) -> None:
    while going := [walk for walk in walks if not walk.is_done]:
        grower = _Grower(head, [walk.row for walk in going], plan)
        # Finished rows ride along; once they are half of the batch it is cheaper to start afresh.
        while 2 * sum(not walk.is_done for walk in going) > len(going):
            trees = grower.grow([walk.root if not walk.is_done else 0 for walk in going])
            for walk, tree in zip(going, trees, strict=True):
                if not walk.is_done:
                    walk.follow(tree)


class _Grower:
    """Grows the trees of several rows at once over one cache of their texts."""

    def __init__(self, head: EagleHead, rows: Sequence[TraceRow], plan: LikeliestPlan) -> None:
        self._head, self._plan, self._ids_W = head, plan, head.draft_ids_W
        self._width = min(plan.width, head.config.num_proposable)
        self._limit = head.config.max_position_embeddings
        self._device = head.fc.weight.device
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

    def grow(self, roots: Sequence[int]) -> list[Tree]:
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
        depths = [min(self._plan.depth, self._limit - root) for root in roots]
        length = self._cache.length
        for level in range(max(depths)):
            if level:
                own_NN = torch.eye(parent_BN.shape[1], dtype=torch.bool, device=device)
                own_BNN = own_NN.expand(len(roots), -1, -1)
                seen_BNR = torch.cat([seen_BNR[every_B[:, None], parent_BN], own_BNN], -1)
                fed_BND = hidden_BND[every_B[:, None], parent_BN]
                hidden_BND = self._step(fed_BND, growths, root_B, level, seen_BNR)
            parent_BN = self._add_level(hidden_BND, growths, [level < depth for depth in depths])
        self._cache.truncate(length)
        return [growth.select(self._plan.nodes) for growth in growths]

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
        return self._head.step(fed_BND, ids_BN, position_BN, self._cache, mask_BNS[:, None])

    def _add_level(
        self, hidden_BND: Tensor, growths: Sequence[Growth], is_open: Sequence[bool]
    ) -> Tensor:
        """Hang children under the frontiers; returns where each new one's parent was, [B, N]."""
        logits_BNW = self._head.draft_logits(hidden_BND)
        top = logits_BNW.topk(self._width, dim=-1)
        log_probs = (top.values - logits_BNW.logsumexp(-1, keepdim=True)).tolist()
        tokens = self._ids_W[top.indices].tolist()
        parents: list[list[int]] = []
        for b, growth in enumerate(growths):
            slot = {node: index for index, node in enumerate(growth.frontier)}
            if is_open[b]:
                growth.add_level(log_probs[b], tokens[b], self._plan.width)
                parents.append([slot[growth.parents[node]] for node in growth.frontier])
            else:
                parents.append([0])
        num_new = max(map(len, parents))
        return torch.tensor([_fill(row, num_new) for row in parents], device=self._device)


def _fill(values: list[int], length: int) -> list[int]:
    """Repeat the last value: a row that is done, or at its limit, rides along."""
    return (values + values[-1:] * length)[:length]


def _score(
    head: EagleHead,
    walks: Sequence[_Walk],
    target: Target,
    sampling: Sampling,
    plan: LikeliestPlan,
    rule: str,
) -> Score:
    num_places = max(walk.row.num_tokens for walk in walks)
    sums_4RK = np.zeros((4, len(walks), plan.depth))
    judged_RK = np.zeros((len(walks), plan.depth))
    for found in _judge(DraftVocabulary.of(head), walks, target, sampling):
        judged_RK[found.row, found.depth] += 1
        sums_4RK[:, found.row, found.depth] += found.figures
    starts_BT = torch.zeros(len(walks), num_places, dtype=torch.float64)
    for b, walk in enumerate(walks):
        starts_BT[b, walk.starts] = 1
    tokens_B = torch.tensor([walk.row.num_tokens for walk in walks])
    hit_RK, kept_RK, inside_RK, top_inside_RK = sums_4RK
    return Score(
        draft=plan.label,
        rule=rule,
        row_ids=tuple(walk.row.row_id for walk in walks),
        kinds=tuple(walk.row.kind for walk in walks),
        tokens_R=(tokens_B - 1).double().numpy(),
        rounds_R=np.array([float(len(walk.starts)) for walk in walks]),
        drafted_R=np.array([float(walk.drafted) for walk in walks]),
        judged_RK=judged_RK,
        kept_RK=kept_RK,
        hit_RK=hit_RK,
        # The drafts of a node are a fixed set, and no rule accepts more than the set's mass.
        best_RK=kept_RK,
        inside_RK=inside_RK,
        top_inside_RK=top_inside_RK,
        tokens_RP=by_bin((torch.arange(num_places) < tokens_B[:, None]).double()),
        starts_RP=by_bin(starts_BT),
    )


class _Found(NamedTuple):
    """One judged context: hit, kept, inside, top_inside."""

    row: int
    depth: int
    figures: tuple[float, float, float, float]


def _judge(
    vocabulary: DraftVocabulary, walks: Sequence[_Walk], target: Target, sampling: Sampling
) -> Iterator[_Found]:
    """What the target's law says at every context that the walks came to."""
    contexts = [(b, judged) for b, walk in enumerate(walks) for judged in walk.judged]
    is_inside_V = vocabulary.is_inside
    for first in range(0, len(contexts), _CHUNK):
        chunk = contexts[first : first + _CHUNK]
        rows = [walks[b].row for b, _ in chunk]
        places = [
            Place(row.ids_T, row.prompt_length + judged.place, row.prompt_length)
            for row, (_, judged) in zip(rows, chunk, strict=True)
        ]
        ids_C = torch.stack([ids_S[position] for ids_S, position, _ in places])
        if sampling.is_greedy:
            inside_C = top_C = is_inside_V[ids_C].double()
            probs_CV = None
        else:
            before = [
                row.last_TH[place.position - 1] for row, place in zip(rows, places, strict=True)
            ]
            probs_CV = target_law(target, torch.stack(before), places, sampling).probs_NV
            inside_C = probs_CV[:, is_inside_V].sum(-1)
            top_C = is_inside_V[probs_CV.argmax(-1)].double()
        for c, (b, judged) in enumerate(chunk):
            hit = float(int(ids_C[c]) in judged.tokens)
            kept = hit if probs_CV is None else float(probs_CV[c, list(judged.tokens)].sum())
            yield _Found(b, judged.depth, (hit, kept, float(inside_C[c]), float(top_C[c])))
