"""Static trees from a trace: the ranks that the target's text took, and the best tree for them.

N round starts, K depths, W likeliest tokens looked at.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.data.target import Target
from outrider.eval.offline.batching import batches, check_match
from outrider.eval.offline.chain import hidden_steps
from outrider.eval.offline.coins import Contexts
from outrider.eval.offline.contexts import DraftVocabulary
from outrider.eval.offline.traces import Trace
from outrider.heads import DraftHead

_CHUNK = 512


class StaticTree(NamedTuple):
    """Rank paths of a tree, and what it is expected to accept in a round."""

    paths: tuple[tuple[int, ...], ...]
    accepted: float


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """For each start in the text, at what rank the head had the text's next tokens."""

    ranks_NK: NDArray[np.int64]
    """Rank of the text's token, the head having been fed the text up to it; `width` where it is
    not among the likeliest, or where the text has ended."""
    width: int

    @property
    def depth(self) -> int:
        """Tokens ahead that were looked at."""
        return self.ranks_NK.shape[1]


@torch.no_grad()
def text_ranks(
    head: DraftHead,
    trace: Trace,
    target: Target,
    *,
    depth: int,
    width: int,
    rows: Sequence[int] | None = None,
) -> Ranks:
    """Look up every place of a trace as the start of a round.

    Raises ValueError when the trace is of another target, or depth or width are below 1.
    """
    check_match(trace, target)
    for name, value in (("depth", depth), ("width", width)):
        if value < 1:
            raise ValueError(f"{name} is {value}; look at 1 or more")
    slot_V = DraftVocabulary.of(head).slot_V
    limit = head.config.max_position_embeddings
    found: list[NDArray[np.int64]] = []
    for batch in batches(trace, head.config.aux_layers, rows):
        context = Contexts.of(batch)
        num_tokens_N = torch.tensor([row.num_tokens for row in batch])[context.row_N]
        ids = torch.nn.utils.rnn.pad_sequence([row.ids_T for row in batch], batch_first=True)
        ranks_NK = torch.full((len(context.row_N), depth), width)
        for step, hidden_ND in enumerate(hidden_steps(head, batch, context, depth)):
            inside_N = (context.place_N + step < num_tokens_N).nonzero()[:, 0]
            # As in decoding: no draft runs at a position that the head was not made for.
            inside_N = inside_N[context.position_N[inside_N] + step - 2 < limit]
            for part_N in inside_N.split(_CHUNK):
                token_N = ids[context.row_N[part_N], context.position_N[part_N] + step]
                logits_NW = head.draft_logits(hidden_ND[part_N.to(hidden_ND.device)], step).cpu()
                top_NW = logits_NW.topk(min(width, head.config.num_proposable), dim=-1).indices
                is_hit_NW = top_NW == slot_V[token_N][:, None]
                hit_N = is_hit_NW.int().argmax(-1)
                ranks_NK[part_N, step] = torch.where(is_hit_NW.any(-1), hit_N, width)
        found.append(ranks_NK.numpy())
    return Ranks(ranks_NK=np.concatenate(found), width=width)


def grow_by_hits(ranks: Ranks, nodes: int) -> StaticTree:
    """The tree of `nodes` rank paths that the text took most often, counted jointly.

    A path is worth the share of starts whose text goes along it; no path is worth more than its
    parent, so taking the best first is optimal for the starts counted (Medusa's greedy growth, Cai
    et al. 2024, section 2.3.3, without its assumption that depths are independent).
    """
    _check_nodes(nodes)
    hits: Counter[tuple[int, ...]] = Counter()
    for row in ranks.ranks_NK.tolist():
        for end, rank in enumerate(row, start=1):
            if rank == ranks.width:
                break
            hits[tuple(row[:end])] += 1
    # Ties: shallower first, then the likelier rank, so the tree is connected.
    best = sorted(hits, key=lambda path: (-hits[path], len(path), path))[:nodes]
    num_starts = max(1, len(ranks.ranks_NK))
    return StaticTree(tuple(best), sum(hits[path] for path in best) / num_starts)


def accept_by_rank(ranks: Ranks) -> NDArray[np.float64]:
    """Share of each rank [K, W], of the starts whose tokens before were among the likeliest."""
    table_KW = np.zeros((ranks.depth, ranks.width))
    going_N = np.ones(len(ranks.ranks_NK), dtype=bool)
    for depth in range(ranks.depth):
        rank_N = ranks.ranks_NK[going_N, depth]
        counts_W = np.bincount(rank_N, minlength=ranks.width + 1)[: ranks.width]
        table_KW[depth] = counts_W / max(1, len(rank_N))
        going_N &= ranks.ranks_NK[:, depth] < ranks.width
    return table_KW


def grow_by_rank(accept_KW: NDArray[np.float64], nodes: int) -> StaticTree:
    """The best tree when acceptance depends on depth and rank alone, by dynamic programming.

    Sequoia (Chen et al. 2024, section 3.1), with a row of acceptances for each depth where it has
    one for all. `accept_KW[k, r]` is the chance that rank r of depth k is accepted.
    """
    _check_nodes(nodes)
    depth, width = accept_KW.shape

    @cache
    def under(level: int, count: int, rank: int) -> tuple[float, tuple[int, ...]]:
        """Best value of `count` nodes under one of depth `level`, ranks from `rank` on; sizes."""
        if count == 0 or level == depth or rank == width:
            return 0.0, ()
        best: tuple[float, tuple[int, ...]] = (-1.0, ())
        for size in range(count + 1):
            own = accept_KW[level, rank] * (1 + under(level + 1, size - 1, 0)[0]) if size else 0.0
            rest, sizes = under(level, count - size, rank + 1)
            if own + rest > best[0]:
                best = (own + rest, (size, *sizes))
        return best

    def paths(level: int, count: int, prefix: tuple[int, ...]) -> list[tuple[int, ...]]:
        found: list[tuple[int, ...]] = []
        for rank, size in enumerate(under(level, count, 0)[1]):
            if size:
                found.append((*prefix, rank))
                found += paths(level + 1, size - 1, found[-1])
        return found

    value = under(0, nodes, 0)[0]
    return StaticTree(tuple(sorted(paths(0, nodes, ()), key=lambda one: (len(one), one))), value)


def _check_nodes(nodes: int) -> None:
    if nodes < 1:
        raise ValueError(f"nodes is {nodes}; draft at least 1")
