"""Walks through traced text by drafted trees, and what the target's law says where they came.

R walked rows, K depths of a draft, C judged contexts, V target vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.offline.chain import by_bin
from outrider.eval.offline.contexts import DraftVocabulary, Place, target_law
from outrider.eval.offline.scores import Score
from outrider.eval.offline.traces import TraceRow
from outrider.eval.trees.plans import LikeliestPlan, LookupPlan
from outrider.eval.trees.tree import Tree

_CHUNK = 128


class _Judged(NamedTuple):
    """A context that the walk came to, and the tokens drafted for it."""

    place: int
    depth: int
    tokens: tuple[int, ...]


@dataclass
class Walk:
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


def score_walks(
    vocabulary: DraftVocabulary,
    walks: Sequence[Walk],
    target: Target,
    sampling: Sampling,
    plan: LikeliestPlan | LookupPlan,
    rule: str,
) -> Score:
    """The figures of walked rows; the drafts of a node are a set, and any rule accepts alike."""
    num_places = max(walk.row.num_tokens for walk in walks)
    sums_4RK = np.zeros((4, len(walks), plan.depth))
    judged_RK = np.zeros((len(walks), plan.depth))
    for found in _judge(vocabulary, walks, target, sampling):
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
    vocabulary: DraftVocabulary, walks: Sequence[Walk], target: Target, sampling: Sampling
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
