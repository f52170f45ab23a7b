"""Row kernels of batched verification: draws, sums and gathers that touch few vocabulary rows.

Sums over the vocabulary are taken in the rows' own precision, all that follows in float64.
Dimensions: B rounds, N rows, V vocabulary, G blocks, W tokens of a block, K tokens of a row, X any.
"""

import math

import torch
from torch import Tensor

from outrider.data.draws import BLOCK, block_sums, fall

_MOST = 2.0**100


def rows_at(laws_BNV: Tensor, round_X: Tensor, index_X: Tensor) -> Tensor:
    """One row of a round each, copied: [X, V]."""
    return laws_BNV.flatten(0, 1).index_select(0, round_X * laws_BNV.shape[1] + index_X)


def at(table_BN: Tensor, index_B: Tensor) -> Tensor:
    """Entry `index_B` of each round: [B]."""
    return table_BN.gather(1, index_B[:, None])[:, 0]


def shares_at(laws_BNV: Tensor, round_X: Tensor, rows_XK: Tensor, tokens_XK: Tensor) -> Tensor:
    """The probabilities of tokens in rows of a round each, float64 [X, K]."""
    return laws_BNV[round_X[:, None], rows_XK, tokens_XK].double()


def excess(p_XV: Tensor, q_XV: Tensor, times_X: Tensor, out: Tensor | None = None) -> Tensor:
    """[p - c q]+ for a factor c of each row, [X, V].

    `out` receives it: fresh memory for every row costs a CPU more than the sum.
    """
    factor = -times_X.clamp(max=_MOST)[..., None].to(p_XV.dtype)
    return torch.addcmul(p_XV, q_XV, factor, out=out).relu_()


def mass(weights_XV: Tensor) -> Tensor:
    """The sum of each row, float64 [X]."""
    return weights_XV.sum(-1).double()


def draw(weights_XV: Tensor, coins_X: Tensor) -> Tensor:
    """The token on whose share of [0, total) the coin falls: int64 [X].

    Weights need not sum to one. Never a token of weight zero; -1 where there is nothing to draw.
    """
    sums_XG = block_sums(weights_XV)
    total_X = sums_XG.double().sum(-1)
    return torch.where((total_X > 0) & (total_X < math.inf), fall(weights_XV, sums_XG, coins_X), -1)


def first_max(weights_XV: Tensor) -> Tensor:
    """The token of the largest weight, the lowest id among equals, -1 beside NaN: int64 [X]."""
    vocab = weights_XV.shape[-1]
    num_whole = vocab // BLOCK
    tops = weights_XV[..., : num_whole * BLOCK].unflatten(-1, (num_whole, BLOCK)).amax(-1)
    if vocab % BLOCK:
        tail = weights_XV[..., num_whole * BLOCK :].amax(-1, keepdim=True)
        tops = torch.cat([tops, tail], -1)
    peak_X1 = tops.amax(-1, keepdim=True)
    block_X = _first(tops == peak_X1)
    ids_XW = block_X[..., None] * BLOCK + torch.arange(BLOCK, device=block_X.device)
    # Beyond the vocabulary the last token again: it never comes before itself.
    inside_XW = weights_XV.gather(-1, ids_XW.clamp(max=vocab - 1))
    token_X = block_X * BLOCK + _first(inside_XW == inside_XW.amax(-1, keepdim=True))
    return torch.where(peak_X1[..., 0].isnan(), -1, token_X)


def _first(is_it_XN: Tensor) -> Tensor:
    """The first true entry of each row."""
    count = is_it_XN.shape[-1]
    ids_N = torch.arange(count, device=is_it_XN.device)
    return torch.where(is_it_XN, ids_N, count).amin(-1)


def without(weights_XV: Tensor, tokens_XK: Tensor, is_there_XK: Tensor) -> Tensor:
    """The rows with these tokens' weights zero, [X, V]; a token may come twice."""
    lost_XK = torch.where(is_there_XK, weights_XV.gather(-1, tokens_XK), 0)
    # Each token once, so that its weight less itself is exactly zero.
    lost_XK = torch.where(is_repeated(tokens_XK, is_there_XK), 0, lost_XK)
    return weights_XV.scatter_add(-1, tokens_XK, -lost_XK)


def is_repeated(tokens_XK: Tensor, is_there_XK: Tensor) -> Tensor:
    """Which tokens came before in their row, bool [X, K]."""
    count = tokens_XK.shape[-1]
    is_same_XKK = tokens_XK[..., :, None] == tokens_XK[..., None, :]
    is_elder_KK = torch.ones(count, count, dtype=torch.bool, device=tokens_XK.device).tril(-1)
    is_pair_XKK = is_there_XK[..., :, None] & is_there_XK[..., None, :]
    return (is_same_XKK & is_elder_KK & is_pair_XKK).any(-1)


def rows_at_once(p_BNV: Tensor) -> int:
    """How many rows of every round to work on at once: what stays in a CPU's cache, else many."""
    room = 1 << 28 if p_BNV.is_cuda else 1 << 20
    return max(1, room // math.prod((len(p_BNV), p_BNV.shape[-1])))
