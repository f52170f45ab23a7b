"""A teacher that knows the target's law by its likeliest ids and what is left over.

Letters: P predicted tokens, M ids known of a law, W proposable draft ids.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.heads.base import DraftHead
from outrider.heads.tables import Tables

TINY = 1e-30


class TopTeacher(NamedTuple):
    """Where the target's probabilities come from: the largest of every law, and an even rest.

    Every draft id that a law does not list gets the tail's probability divided by the number of ids
    not listed in the law's own vocabulary. A law over just the draft vocabulary so keeps its listed
    probabilities exactly and sums to 1; one over a larger vocabulary is renormalised on the draft
    ids, its tail being shared as if evenly over all ids.
    """

    ids_PM: Tensor
    """Draft ids; W stands for an id that is not proposable."""
    probs_PM: Tensor
    rest_P: Tensor
    """Probability of each id that is not listed, before renormalising."""
    width: int
    """W."""
    tables: Tables
    """For the target's own scale and cap, which these laws already have."""
    bends_draft: bool
    """Whether the draft's logits get them too."""

    def probs(self, rows: slice | None = None, temperature: float = 1.0) -> Tensor:
        """The laws over the draft vocabulary, renormalised there [rows, W].

        At another temperature every id's probability is raised to its inverse before, that of an
        unlisted id too, so that the support stays the same.
        """
        rows = slice(None) if rows is None else rows
        rest = self.rest_P[rows, None]
        probs = rest.repeat(1, self.width + 1).scatter_(1, self.ids_PM[rows], self.probs_PM[rows])
        probs = probs[:, : self.width]
        if temperature != 1:  # by logarithms: powers of a law far from the draft's ids underflow
            return (probs.log() / temperature).softmax(-1)
        return probs / probs.sum(-1, keepdim=True)


def top_teacher(
    head: DraftHead, ids_PM: Tensor, log_probs_PM: Tensor, tail_P: Tensor, num_rest: int
) -> TopTeacher:
    """The teacher of a head from likeliest target ids, their log probabilities and the tail."""
    draft_ids_W = head.draft_ids_W[: head.config.num_proposable]
    width = len(draft_ids_W)
    place_V = torch.full((head.config.vocab_size,), width, device=draft_ids_W.device)
    place_V[draft_ids_W] = torch.arange(width, device=draft_ids_W.device)
    # Never zero: a law that says nothing about the draft vocabulary is even over it, not NaN.
    rest_P = (tail_P / max(num_rest, 1)).clamp(min=TINY)
    ids_PM = place_V[ids_PM.long()]
    return TopTeacher(ids_PM, log_probs_PM.exp(), rest_P, width, head.lent(), head.is_bent)
