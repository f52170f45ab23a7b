"""A prompt run through the target, whole or in chunks.

Dimensions: T positions, F fused feature channels, H hidden size.
"""

from collections.abc import Sequence

import torch

from outrider.data.cache import RowCache, attention_masks, query_positions
from outrider.data.target import Captured, Target


def prefill(
    target: Target,
    ids: Sequence[int],
    cache: RowCache,
    layers: Sequence[int],
    chunk: int | None = None,
) -> Captured:
    """Run a prompt into an empty cache of one row; its states at all positions.

    With `chunk` at most so many positions a pass, whose scores grow with their square. The states
    are the same but for rounding.
    """
    size, parts = chunk or len(ids), list[Captured]()
    for start in range(0, len(ids), size):
        new = ids[start : start + size]
        lengths_B = cache.lengths_B.to(target.device)
        # A first pass is causal by itself, and fastest without a mask.
        mask = attention_masks(target.config, lengths_B, len(new), target.dtype) if start else None
        parts.append(
            target.run(
                torch.tensor([new], device=target.device),
                layers=layers,
                position_ids=query_positions(lengths_B, len(new)),
                attention_mask=mask,
                cache=cache,
            )
        )
        cache.advance(len(new))
    if len(parts) == 1:
        return parts[0]
    return Captured(*(torch.cat(states, 1) for states in zip(*parts, strict=True)))
