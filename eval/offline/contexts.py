"""The target's law at contexts of traced text, and which of its tokens a head can propose.

N contexts, H hidden size, W draft vocabulary, V target vocabulary, S tokens of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.data.penalties import Prefix
from outrider.data.sampling import Sampling, process
from outrider.data.target import Target
from outrider.heads import EagleHead


class Place(NamedTuple):
    """A token of a row of text; its context is everything before it."""

    ids_S: Tensor
    position: int
    num_prompt: int

    @property
    def prefix(self) -> Prefix:
        """The tokens before it."""
        return Prefix(self.ids_S[: self.position].tolist(), self.num_prompt)


class Law(NamedTuple):
    """What the target says about the next token: raw, and as decoding draws it."""

    logits_NV: Tensor
    probs_NV: Tensor


def target_law(target: Target, last_NH: Tensor, places: Sequence[Place], sampling: Sampling) -> Law:
    """The law of the token at each place, from the state before it; keep N small, V is large.

    Computed where the target is, returned on the CPU.
    """
    logits_NV = target.logits(last_NH.to(target.device)).float()
    prefixes = [place.prefix for place in places] if sampling.reads_path else None
    probs_NV = process(logits_NV, sampling, prefixes)
    return Law(logits_NV.cpu(), probs_NV.cpu())


class DraftVocabulary(NamedTuple):
    """Which target token each draft id is, and back."""

    ids_W: Tensor
    slot_V: Tensor
    """Draft id of a target token, -1 where the head cannot propose it."""

    @classmethod
    def of(cls, head: EagleHead) -> "DraftVocabulary":
        """Read the map of a head; padding rows of a full vocabulary do not count."""
        ids_W = head.draft_ids_W.cpu()
        num = head.config.num_proposable
        slot_V = torch.full((head.config.vocab_size,), -1, dtype=torch.long)
        slot_V[ids_W[:num]] = torch.arange(num)
        return cls(ids_W, slot_V)

    @property
    def is_inside(self) -> Tensor:
        """Whether the head can propose each target token."""
        return self.slot_V >= 0
