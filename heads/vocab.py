"""Draft vocabularies: which target ids a head can propose, the maps both ways, what they cover.

Letters: V target vocabulary, W draft vocabulary.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from outrider.heads.config import HeadConfig


def choose(
    counts_V: Tensor, size: int, always: Iterable[int] = (), tokenizer_size: int | None = None
) -> Tensor:
    """The `size` most frequent target ids, sorted; `always` (special, end, byte ids) come first.

    Ties go to the lower id. Ids at or above tokenizer_size are never chosen.
    """
    limit = tokenizer_size or counts_V.shape[0]
    if counts_V.dim() != 1 or limit > counts_V.shape[0]:
        raise ValueError(
            f"counts have shape {tuple(counts_V.shape)}; give one count for each of the target's "
            f"ids, at least {limit}"
        )
    kept = sorted(set(always))
    outside = [token for token in kept if not 0 <= token < limit]
    if outside:
        raise ValueError(
            f"ids {outside} are always in but do not exist; they must be in 0..{limit - 1}"
        )
    if not len(kept) <= size <= limit or size < 1:
        raise ValueError(
            f"draft vocabulary size is {size}; it must hold the {len(kept)} ids that are always in "
            f"and be at most {limit}"
        )
    order = counts_V[:limit].double().clone()
    order[torch.tensor(kept, dtype=torch.int64)] = float("inf")
    ids_W = torch.argsort(order, descending=True, stable=True)[:size]
    return ids_W.sort().values


def offsets(draft_ids_W: Tensor) -> Tensor:
    """The published d2t: target id minus draft id, int64."""
    return draft_ids_W - torch.arange(draft_ids_W.shape[0], device=draft_ids_W.device)


def selected(draft_ids_W: Tensor, vocab_size: int) -> Tensor:
    """The published t2d: whether a target id is in the draft vocabulary."""
    mask_V = torch.zeros(vocab_size, dtype=torch.bool, device=draft_ids_W.device)
    mask_V[draft_ids_W] = True
    return mask_V


def to_draft(draft_ids_W: Tensor, vocab_size: int) -> Tensor:
    """Draft id of every target id, -1 where there is none."""
    draft_V = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_ids_W.device)
    draft_V[draft_ids_W] = torch.arange(draft_ids_W.shape[0], device=draft_ids_W.device)
    return draft_V


def coverage(counts_V: Tensor, draft_ids_W: Tensor) -> float:
    """Share of counted tokens that the draft vocabulary holds: a ceiling on acceptance."""
    total = counts_V.double().sum()
    if total == 0:
        raise ValueError("all token counts are zero; count the supervised tokens first")
    return float(counts_V[draft_ids_W].double().sum() / total)


def check_draft_ids(draft_ids_W: Tensor, config: HeadConfig) -> None:
    """Refuse a map that is not rising, not one to one, of the wrong size or past the tokenizer."""
    size, limit = config.draft_vocab_size, config.tokenizer_size
    if draft_ids_W.shape != (size,) or draft_ids_W.dtype != torch.int64:
        raise ValueError(
            f"draft ids are {draft_ids_W.dtype} of shape {tuple(draft_ids_W.shape)}; "
            f"give int64 of shape ({size},)"
        )
    if not bool((draft_ids_W[1:] > draft_ids_W[:-1]).all()):
        raise ValueError("draft ids do not rise strictly; sort them and drop repeats")
    low, high = int(draft_ids_W[0]), int(draft_ids_W[-1])
    if low < 0 or high >= limit:
        raise ValueError(f"draft ids run from {low} to {high}; they must be in 0..{limit - 1}")
