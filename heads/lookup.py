"""Attention that a new EAGLE-3 head starts with: find a token earlier in the text, and read itself.

Text repeats itself, and much of what a draft can be sure of is what came after the same token
before (Olsson et al. 2022, "In-context Learning and Induction Heads", arXiv 2209.11895). Row s of
an EAGLE head holds both halves of such a look-up: the target's states at s tell x_s (the earlier
the layer, the better), and the embedding beside them is x_{s+1}. Copying heads compare a query made
from the embedding of x_{t+1} with keys made from the states, by channels that turn slowly with the
distance. Own-token heads use the other channels to compare embeddings with embeddings, so that a
row finds its own token, which nothing else carries into the residual. The values of both are
leading directions of embeddings.

Letters: N sample rows, F fused feature inputs, D draft hidden size, C channels of a token code,
R the other channels, G key-value heads that copy, E head size, X value directions.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.heads.config import DecoderConfig
from outrider.heads.layers import Layer
from outrider.heads.least_squares import NormalEquations
from outrider.heads.rope import Rotary

MATCH_SCORE = 4.0
"""Attention score of a row whose token is the query's, read without error; others are near zero."""
OWN_SCORE = 10.0
"""The same of an own-token head, whose query must outweigh all of the text by itself."""
LARGEST_TURN = 0.5
"""Radians that a channel may turn over the longest distance in the sample and still match."""
LARGEST_CODE = 1 / 16
"""Share of the stream's channels that a token code may take."""
LEAST_CHANNELS = 8
LEAST_FIT = 0.2
"""R2 of the token code by the fused layers, below which nothing is looked up."""
LEAST_SPREAD = 1e-3
"""Share of the largest variance below which a direction of embeddings does not grow any more."""
READ_RIDGE = 1e-2


class HeadRoles(NamedTuple):
    """Which heads of the attention do what."""

    kv_heads: list[int]
    """Key-value heads whose first query head copies."""
    copying: list[int]
    own: list[int]
    """Query heads that find their own token."""
    own_kv: list[int]
    """The key-value head of each."""


class TokenCodes(NamedTuple):
    """Directions of normalised embeddings, and how states tell the token's code."""

    directions_DX: Tensor
    """Orthonormal, of falling variance, free of the embeddings' mean."""
    variance_X: Tensor
    read_FC: Tensor
    """From the fused states to the code; nothing on average."""
    fit: float
    """Share of the code's variance (R2) that it explains."""

    def code(self, start: int, stop: int, step: int = 1) -> Tensor:
        """Near-white projections [D, C] by the directions from start to stop."""
        span = slice(start, stop, step)
        # Directions that no sample token has would be divided by nothing.
        least = LEAST_SPREAD * float(self.variance_X[0])
        return self.directions_DX[:, span] * self.variance_X[span].clamp(min=least).rsqrt()


def roles(config: DecoderConfig) -> HeadRoles:
    """Heads that copy, whose values hold no more directions than an embedding has, and the others.

    With several query heads to a key-value head the second of a copying group is an own-token one;
    without, every second head. At least a third of all query heads stay as they are where there are
    three or more to a group.
    """
    group = config.num_heads // config.num_kv_heads
    most = max(1, config.hidden_size // config.head_dim)
    if group > 1:
        kv_heads = list(range(config.num_kv_heads))[:most]
        copying = [head * group for head in kv_heads]
        return HeadRoles(kv_heads, copying, [head + 1 for head in copying], kv_heads)
    step = 2 if config.num_heads > 1 else 1
    kv_heads = list(range(0, config.num_heads, step))[:most]
    own = [head + 1 for head in kv_heads if head + 1 < config.num_heads]
    return HeadRoles(kv_heads, kv_heads, own, own)


def still_channels(turning: Rotary, head_dim: int, distance: int) -> list[int]:
    """Channels of a head that turn at most LARGEST_TURN over this distance, the stillest first."""
    half = len(turning.inverse_R)
    turns = turning.inverse_R.double() * distance
    pairs = [pair for pair in range(half - 1, -1, -1) if turns[pair] <= LARGEST_TURN]
    unrotated = list(range(2 * half, head_dim))
    return unrotated + [channel for pair in pairs for channel in (pair, pair + half)]


def code_channels(config: DecoderConfig, turning: Rotary, longest: int, window: int | None) -> int:
    """How many of them a code may take: 0 where there are too few."""
    still = len(still_channels(turning, config.head_dim, min(longest, window or sys.maxsize)))
    count = min(still, int(config.hidden_size * LARGEST_CODE))
    return count if count >= LEAST_CHANNELS else 0


def token_codes(embed_ND: Tensor, fused_NF: Tensor, count: int) -> TokenCodes:
    """Directions of the embeddings and a least-squares reading of the first `count` from states.

    The embeddings' mean is projected out, so that a query does not favour a token by itself.
    """
    mean_D = embed_ND.mean(0)
    away_D = mean_D / mean_D.norm().clamp(min=1e-12)
    centred_ND = embed_ND - mean_D
    centred_ND = centred_ND - (centred_ND @ away_D)[:, None] * away_D
    variance_X, directions_DX = torch.linalg.eigh(centred_ND.T @ centred_ND / len(centred_ND))
    found = TokenCodes(directions_DX.flip(1), variance_X.flip(0), fused_NF.new_zeros(0, 0), 0.0)
    if not count:
        return found
    wanted_NC = centred_ND @ found.code(0, count)
    equations = NormalEquations()
    equations.add(fused_NF - fused_NF.mean(0), wanted_NC)
    read_FC = equations.solve(READ_RIDGE)
    error = (wanted_NC - (fused_NF - fused_NF.mean(0)) @ read_FC).pow(2).mean()
    fit = 1 - float(error / wanted_NC.pow(2).mean())
    # There is no bias to take the mean away: bend the reading along the least that does.
    constant = NormalEquations()
    constant.add(fused_NF, fused_NF.new_ones(len(fused_NF), 1))
    one_F = constant.solve(READ_RIDGE**2)[:, 0]
    offset_C = fused_NF.mean(0) @ read_FC
    one_F = one_F / (fused_NF.mean(0) @ one_F)
    return found._replace(read_FC=read_FC - one_F[:, None] * offset_C, fit=fit)


def write_own_token(
    layer: Layer, config: DecoderConfig, codes: TokenCodes, taken: Sequence[int]
) -> None:
    """Queries and keys of own-token heads, by the channels that copying does not take."""
    size, width = config.head_dim, config.hidden_size
    free = [channel for channel in range(size) if channel not in taken]
    if not free:
        return
    who = roles(config)
    q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
    count = len(who.own)
    scale = (OWN_SCORE * size**0.5 / len(free)) ** 0.5
    for number, (head, kv_head) in enumerate(zip(who.own, who.own_kv, strict=True)):
        code_DR = codes.code(0, count * len(free))[:, number::count] * scale
        at = torch.tensor(free[: code_DR.shape[1]], device=q.device)
        q[head * size : (head + 1) * size] = 0.0
        k[torch.tensor(free, device=k.device) + kv_head * size] = 0.0
        q[at + head * size, :width] = code_DR.T.to(q.dtype)
        k[at + kv_head * size, :width] = code_DR.T.to(k.dtype)


def write_copying(
    layer: Layer,
    config: DecoderConfig,
    code_DC: Tensor,
    read_CD: Tensor,
    channels: Sequence[int],
) -> None:
    """Queries of copying heads read the code of the next token, keys the one in the feature."""
    size, width = config.head_dim, config.hidden_size
    who = roles(config)
    q, k = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
    scale = (MATCH_SCORE * size**0.5 / len(channels)) ** 0.5
    at = torch.tensor(channels, device=q.device)
    for head, kv_head in zip(who.copying, who.kv_heads, strict=True):
        q[head * size : (head + 1) * size] = 0.0
        k[at + kv_head * size] = 0.0
        q[at + head * size, :width] = (code_DC * scale).T.to(q.dtype)
        k[at + kv_head * size, width:] = (read_CD * scale).to(k.dtype)


def write_values(layer: Layer, config: DecoderConfig, codes: TokenCodes) -> Tensor:
    """Values of the heads at work: leading directions of embeddings. Returns those used [D, X]."""
    size, width = config.head_dim, config.hidden_size
    who, v = roles(config), layer.self_attn.v_proj.weight
    for kv_heads in {tuple(who.kv_heads), tuple(who.own_kv)}:
        for number, kv_head in enumerate(kv_heads):
            part_DE = codes.directions_DX[:, number * size : (number + 1) * size]
            v[kv_head * size : (kv_head + 1) * size] = 0.0
            v[kv_head * size : kv_head * size + part_DE.shape[1], :width] = part_DE.T.to(v.dtype)
    return codes.directions_DX[:, : len(who.kv_heads) * size]
