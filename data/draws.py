"""The token that a coin falls on, found in two steps: which block of tokens, then which of them.

A running sum over a whole vocabulary costs ten times its plain sums by block.
Dimensions: X any, V vocabulary, G blocks, W tokens of a block.
"""

import torch
from torch import Tensor

BLOCK = 512
"""Tokens summed at once: one pass over the row, then a look into one block."""


def block_sums(weights_XV: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sums of `BLOCK` tokens each, the last of what is left: [X, G], taken in `dtype`.

    By default in the weights' own precision: five times as fast as in float64.
    """
    vocab = weights_XV.shape[-1]
    num_whole = vocab // BLOCK
    whole = weights_XV[..., : num_whole * BLOCK].unflatten(-1, (num_whole, BLOCK))
    whole = whole.sum(-1, dtype=dtype)
    if vocab % BLOCK == 0:
        return whole
    tail = weights_XV[..., num_whole * BLOCK :].sum(-1, keepdim=True, dtype=dtype)
    return torch.cat([whole, tail], -1)


def block_at(weights_XV: Tensor, block_X: Tensor) -> Tensor:
    """The tokens' weights in one block of each row, zero beyond the vocabulary: [X, W]."""
    vocab = weights_XV.shape[-1]
    ids_XW = block_X[..., None] * BLOCK + torch.arange(BLOCK, device=block_X.device)
    found_XW = weights_XV.gather(-1, ids_XW.clamp(max=vocab - 1))
    return found_XW * (ids_XW < vocab)


def fall(weights_XV: Tensor, sums_XG: Tensor, coins_X: Tensor) -> Tensor:
    """The token on whose share of [0, total) each row's coin falls: int64 [X].

    `sums_XG` are the row's `block_sums`. Weights need not sum to one, but to more than zero; then
    no coin falls on a token of weight zero.
    """
    cdf_XG = sums_XG.double().cumsum(-1)
    total_X = cdf_XG[..., -1]
    # A coin close to 1 times the total may round up to the total itself.
    below_X = torch.nextafter(total_X, torch.zeros_like(total_X))
    points_X = torch.minimum(coins_X * total_X, below_X)
    block_X = torch.searchsorted(cdf_XG, points_X[..., None], right=True)
    block_X = block_X.clamp(max=cdf_XG.shape[-1] - 1)
    before_X = torch.where(block_X > 0, cdf_XG.gather(-1, (block_X - 1).clamp(min=0)), 0.0)
    inside_XW = block_at(weights_XV, block_X[..., 0])
    cdf_XW = inside_XW.double().cumsum(-1)
    place_X = torch.searchsorted(cdf_XW, points_X[..., None] - before_X, right=True)
    # A block's sum and the sum of its parts may differ in rounding: no further than the last token.
    ids_W = torch.arange(BLOCK, device=place_X.device)
    last_X = torch.where(inside_XW > 0, ids_W, 0).amax(-1)
    return block_X[..., 0] * BLOCK + torch.minimum(place_X[..., 0], last_X)
