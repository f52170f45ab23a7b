"""Walks through traced text by drafted trees, and what the target's law says where they came.

R walked rows, T places in the answer, K depths of a draft, C judged contexts, V target vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from outrider.data.target import Target
from outrider.eval.offline.cells import QUANTITIES, cells
from outrider.eval.offline.contexts import DraftVocabulary, Place, target_law
from outrider.eval.offline.scores import Score
from outrider.eval.offline.traces import Trace, TraceRow
from outrider.eval.trees.plans import LikeliestPlan
from outrider.eval.trees.tree import Tree

_CHUNK = 128


class Drafted(NamedTuple):
    """A tree, and per node the likeliest tokens after it, as many as the plan is wide."""

    tree: Tree
    widest: tuple[tuple[int, ...], ...]


class _Judged(NamedTuple):
    """A context that the walk came to, and the tokens drafted for it."""

    place: int
    depth: int
    tokens: tuple[int, ...]
    widest: tuple[int, ...]


@dataclass
class Walk:
    """One row on the way through its text; place 0 is the prefill's token."""

    row: TraceRow
    depth: int
    """Of the plan."""
    place: int = 1
    starts: list[int] = field(default_factory=list)
    drafted: int = 0
    cut: int = 0
    undrafted: int = 0
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

    def follow(self, drafted: Drafted) -> None:
        """One round: go down the tree as far as the text is in it, and one token on."""
        tree = drafted.tree
        self.starts.append(self.place)
        self.drafted += len(tree) - 1
        node, depth = 0, 0
        while depth < self.depth:
            if self.is_done:
                self.cut += 1
                return
            children = tree.children[node]
            if not children:
                self.undrafted += 1
                break
            tokens = tuple(tree.tokens[child] for child in children)
            self.judged.append(_Judged(self.place, depth, tokens, drafted.widest[node]))
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
    trace: Trace,
    plan: LikeliestPlan,
    rule: str,
) -> Score:
    """The figures of walked rows; the drafts of a node are a set, and any rule accepts alike."""
    rows = [walk.row for walk in walks]
    num_places = max(row.num_tokens for row in rows)
    by_depth = np.zeros((len(_FIGURES), len(walks), plan.depth))
    by_place = np.zeros((len(_FIGURES), len(walks), num_places))
    for found in _judge(vocabulary, walks, target, trace):
        by_depth[:, found.row, found.depth] += found.figures
        by_place[:, found.row, found.place] += found.figures
    starts_BT = torch.zeros(len(walks), num_places, dtype=torch.float64)
    for b, walk in enumerate(walks):
        starts_BT[b, walk.starts] = 1
    tokens_B = torch.tensor([row.num_tokens for row in rows])
    is_text_BT = (torch.arange(num_places) < tokens_B[:, None]).double()
    judged_RK, hit_RK, kept_RK, wide_RK, inside_RK, top_inside_RK = by_depth
    tables = dict(zip(_FIGURES, torch.from_numpy(by_place), strict=True))
    # The drafts of a node are a fixed set, and no rule accepts more than the set's mass.
    tables |= {"tokens": is_text_BT, "starts": starts_BT, "best": tables["kept"]}

    return Score(
        draft=plan.label,
        rule=rule,
        row_ids=tuple(row.row_id for row in rows),
        kinds=tuple(row.kind for row in rows),
        tokens_R=(tokens_B - 1).double().numpy(),
        rounds_R=starts_BT.sum(1).numpy(),
        drafted_R=np.array([float(walk.drafted) for walk in walks]),
        cut_R=np.array([float(walk.cut) for walk in walks]),
        undrafted_R=np.array([float(walk.undrafted) for walk in walks]),
        judged_RK=judged_RK,
        kept_RK=kept_RK,
        hit_RK=hit_RK,
        best_RK=kept_RK,
        wide_RK=wide_RK,
        inside_RK=inside_RK,
        top_inside_RK=top_inside_RK,
        cells=cells(rows, {name: tables[name] for name in QUANTITIES}),
    )


_FIGURES = ("judged", "hit", "kept", "wide", "inside", "top_inside")


class _Found(NamedTuple):
    """One judged context, with `_FIGURES`."""

    row: int
    place: int
    depth: int
    figures: tuple[float, ...]


def _judge(
    vocabulary: DraftVocabulary, walks: Sequence[Walk], target: Target, trace: Trace
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
        if trace.sampling.is_greedy:
            inside_C = top_C = is_inside_V[ids_C].double()
            probs_CV = None
        else:
            before = [
                row.last_TH[place.position - 1] for row, place in zip(rows, places, strict=True)
            ]
            probs_CV = target_law(target, torch.stack(before), places, trace.sampling).probs_NV
            inside_C = probs_CV[:, is_inside_V].sum(-1)
            top_C = is_inside_V[probs_CV.argmax(-1)].double()
        for c, (b, judged) in enumerate(chunk):
            token = int(ids_C[c])
            hit, wide = float(token in judged.tokens), float(token in judged.widest)
            kept = hit
            if probs_CV is not None:
                kept = float(probs_CV[c, list(judged.tokens)].sum())
                wide = float(probs_CV[c, list(judged.widest)].sum())
            figures = (1.0, hit, kept, wide, float(inside_C[c]), float(top_C[c]))
            yield _Found(b, judged.place, judged.depth, figures)
