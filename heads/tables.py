"""What a head borrows from its frozen target, and the arithmetic on it.

Letters: V target vocabulary, H target hidden size.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

START_NORM = 0.3
"""Share of the target's final norm that a fresh head's own norm starts from: unsure is better than
sure of something random. Its output head is the target's, and its fc hands on the last fused layer
alone, which accepted more in the demo's first steps than a random fc. A narrower draft starts from
the leading directions of the target's tables.
"""


class Tables(NamedTuple):
    """What a head borrows from its frozen target. Build it with keywords."""

    embedding_VH: Tensor
    """Input embedding rows, unscaled: engines share the rows with the draft, not a scale."""
    output_VH: Tensor
    """Rows of the target's output head (the embedding rows when tied)."""
    tokenizer_size: int
    """Ids at or above it are padding and are never proposed."""
    num_layers: int
    """Decoder layers of the target, which resolves default feature layers."""
    norm_H: Tensor | None = None
    """Weight of the target's final norm; a new EAGLE-3 head starts its own norm from it."""
    embed_scale: float = 1.0
    """The target's own factor on embeddings; recorded, not applied (see embedding_VH)."""
    logit_scale: float = 1.0
    """The target's factor on logits."""
    softcap: float | None = None
    """The target's tanh cap on logits."""


def bend(logits: Tensor, tables: Tables) -> Tensor:
    """The target's own scale and tanh cap on logits."""
    logits = logits if tables.logit_scale == 1.0 else logits * tables.logit_scale
    if tables.softcap is None:
        return logits
    return tables.softcap * torch.tanh(logits / tables.softcap)


def leading_directions(table_VH: Tensor, width: int) -> Tensor:
    """Orthonormal leading directions [H, width] of a table's rows."""
    exact = torch.promote_types(table_VH.dtype, torch.float32)
    gram_HH = table_VH.to(exact).T @ table_VH.to(exact)
    if width > gram_HH.shape[0]:
        return torch.eye(gram_HH.shape[0], width, dtype=exact, device=table_VH.device)
    return torch.linalg.eigh(gram_HH).eigenvectors.flip(-1)[:, :width]


def to_device(tables: Tables, device: torch.device) -> Tables:
    def moved(x: Any) -> Any:  # noqa: ANN401 - tensors move, numbers and None stay
        return x.detach().to(device) if isinstance(x, Tensor) else x

    return Tables(*[moved(x) for x in tables])
