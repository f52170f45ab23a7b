"""Start a new EAGLE-3 head with induction heads: find the current token earlier and copy on.

Text repeats itself, and much of what a draft can be sure of is what came after the same token
before (Olsson et al. 2022, "In-context Learning and Induction Heads", arXiv 2209.11895). Row s of
an EAGLE head holds both halves of such a look-up: the target's early state at s tells x_s, and the
embedding beside it is x_{s+1}. Attention must compare a query made from the embedding of x_{t+1}
with keys made from the states, and carry embeddings as values. Neither half earns anything without
the other, so training on few rows does not find them; here both are written down, from tables of
the target and a least-squares fit on a sample of its states, and training goes on from there.

Letters: N sample rows, F fused feature inputs, H target hidden size, D draft hidden size,
C channels of a token code, J copying heads, E head size, W draft vocabulary.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.heads.base import States
from outrider.heads.eagle import EagleHead
from outrider.heads.layers import rms_norm
from outrider.heads.lookup import LEAST_CHANNELS, LEAST_FIT, MATCH_SCORE, roles, still_channels
from outrider.heads.rope import rotary

COPY_SHARE = 0.9
"""Size of what is copied into the residual, as a share of the features' own."""
LARGEST_CODES = 1 / 6
"""Share of the features' channels that may hold token codes."""
RIDGE = 1e-2


class Induction(NamedTuple):
    """What a start found, or why it left the head alone."""

    num_heads: int
    """Query heads that look up and copy; 0 when the start does not fit this head."""
    num_channels: int
    """Slowly turning channels of each that hold the token code."""
    fit: float
    """Share of the codes' variance (R2) that the first fused layer's states explain."""
    reason: str = ""
    """Why nothing was done."""

    def __str__(self) -> str:
        if self.reason:
            return f"note: no induction start: {self.reason}"
        return (
            f"induction start: {self.num_heads} query heads look up the current token in earlier "
            f"text by {self.num_channels} channels each (R2 {self.fit:.2f})"
        )


class Codes(NamedTuple):
    """Token codes: near-white projections of normalised embeddings."""

    code_JDC: Tensor
    """From a normalised embedding to the code of each head."""
    directions_DX: Tensor
    """Leading orthonormal directions of the embeddings, best first."""
    read_HX: Tensor
    """From the first fused layer's states to all codes, head after head."""
    fit: float


@torch.no_grad()
def start_induction(head: EagleHead, states: States, document_BT: Tensor) -> Induction:
    """Rewrite fc and the first layer's attention of a new EAGLE-3 head so that they copy.

    `states` are the target's on a sample, document is 0 where it is padding. The first position of
    a text, whose states are unlike all others, is left out of the fit. A head whose rotary turns
    too fast for the sample's distances, or whose first fused layer no longer tells its token, is
    left as it is and the result says why. Equal samples give equal weights.
    """
    real_BT = document_BT > 0
    fused_NF = head.fused(states.aux_BTF[real_BT], torch.float32)
    ids_N, position_N = states.ids_BT[real_BT], states.position_BT[real_BT]
    config, layer = head.config, head.layer
    kept_N = position_N > 0
    if int(kept_N.sum()) < 2 * LEAST_CHANNELS:
        return declined("the sample has too few positions")
    heads = roles(config).kv_heads
    distance = min(int(position_N.max()), config.window(0) or sys.maxsize)
    channels = still_channels(rotary(config.rope, config.head_dim), config.head_dim, distance)
    room = int(config.hidden_size * LARGEST_CODES) // len(heads)
    channels = channels[:room]
    if len(channels) < LEAST_CHANNELS:
        return declined(
            f"{len(channels)} channels of each head can hold a token code (at least "
            f"{LEAST_CHANNELS}); the others turn too fast or there is no room",
        )
    fused_NF, ids_N = fused_NF[kept_N].float(), ids_N[kept_N]
    norm_D = layer.norm("input_layernorm").float()
    embed_ND = rms_norm(head.embed(ids_N, torch.float32), norm_D, config.rms_norm_eps)
    state_NH = fused_NF[:, : config.target_hidden_size]
    codes = token_codes(embed_ND, state_NH, len(heads), len(channels))
    if codes.fit < LEAST_FIT:
        return declined(
            f"the first fused layer tells its own token badly (R2 {codes.fit:.2f}, at least "
            f"{LEAST_FIT}); fuse an earlier layer (--aux-layers)",
            codes.fit,
        )
    room_DX = code_room(head, codes.read_HX.shape[1])
    size = _write_fc(head, codes, room_DX, fused_NF)
    scale = (MATCH_SCORE * config.head_dim**0.5 / len(channels)) ** 0.5
    _write_keys(head, codes, room_DX, heads, channels, scale)
    _write_values(head, codes, heads, embed_ND, ids_N, COPY_SHARE * size)
    return Induction(len(heads), len(channels), codes.fit)


def declined(reason: str, fit: float = 0.0) -> Induction:
    """What is returned where the head is left as it is."""
    return Induction(0, 0, fit, reason)


def token_codes(embed_ND: Tensor, state_NH: Tensor, num_heads: int, size: int) -> Codes:
    """Codes for `num_heads` heads, dealt in turn from the leading directions, and their readers.

    The embeddings' mean is projected out, so that a query does not favour a token by itself.
    """
    mean_D = embed_ND.mean(0)
    away_D = mean_D / mean_D.norm().clamp(min=1e-12)
    centred_ND = embed_ND - mean_D
    centred_ND = centred_ND - (centred_ND @ away_D)[:, None] * away_D
    covariance_DD = centred_ND.T @ centred_ND / len(centred_ND)
    values, vectors = torch.linalg.eigh(covariance_DD)
    order = values.argsort(descending=True, stable=True)
    directions_DX, spread_X = vectors[:, order], values[order]
    used = num_heads * size
    # Directions that no sample token has would be divided by nothing.
    scale_X = spread_X[:used].clamp(min=1e-3 * float(spread_X[0])).rsqrt()
    code_DX = directions_DX[:, :used] * scale_X
    code_JDC = torch.stack([code_DX[:, head::num_heads] for head in range(num_heads)])
    wanted_NX = torch.cat([centred_ND @ code_DC for code_DC in code_JDC], dim=1)
    read_HX = ridge(state_NH, wanted_NX)
    state_NH = state_NH - state_NH.mean(0)
    error = (wanted_NX - state_NH @ read_HX).pow(2).mean()
    fit = 1 - float(error / wanted_NX.pow(2).mean())
    return Codes(code_JDC, directions_DX, read_HX, fit)


def ridge(given_NX: Tensor, wanted_NY: Tensor) -> Tensor:
    """Least squares [X, Y] on centred columns of unit spread, with a small ridge."""
    given_NX = (given_NX - given_NX.mean(0)).double()
    wanted_NY = (wanted_NY - wanted_NY.mean(0)).double()
    spread_X = given_NX.std(0, correction=0).clamp(min=1e-12)
    given_NX = given_NX / spread_X
    gram_XX = given_NX.T @ given_NX
    gram_XX.diagonal().add_(RIDGE * len(given_NX))
    solved_XY = torch.linalg.solve(gram_XX, given_NX.T @ wanted_NY)
    return (solved_XY / spread_X[:, None]).to(torch.float32)


def _write_fc(head: EagleHead, codes: Codes, room_DX: Tensor, fused_NF: Tensor) -> float:
    """Put the codes where the output head hardly looks; returns the features' usual size."""
    fc_DF, width = head.fc.weight, codes.read_HX.shape[0]
    feature_ND = fused_NF @ fc_DF.float().T
    size = float(feature_ND.pow(2).mean(-1).sqrt().median())
    fc_DF.sub_((room_DX @ (room_DX.T @ fc_DF.float())).to(fc_DF.dtype))
    fc_DF[:, :width] += (room_DX @ codes.read_HX.T * size).to(fc_DF.dtype)
    return size


def code_room(head: EagleHead, count: int) -> Tensor:
    """Orthonormal directions [D, count] of least weight in the output head."""
    rows_WD = head.output_weights()[0].float() * head.norm.weight.float()
    return torch.linalg.eigh(rows_WD.T @ rows_WD).eigenvectors[:, :count]


def _write_keys(
    head: EagleHead,
    codes: Codes,
    room_DX: Tensor,
    heads: Sequence[int],
    channels: Sequence[int],
    scale: float,
) -> None:
    """Queries read the code of the next token's embedding, keys the code in the features."""
    width, size = head.config.hidden_size, head.config.head_dim
    group = head.config.num_heads // head.config.num_kv_heads
    q, k = head.layer.self_attn.q_proj.weight, head.layer.self_attn.k_proj.weight
    for number, kv_head in enumerate(heads):
        span = slice(number * len(channels), (number + 1) * len(channels))
        at_q = torch.tensor(channels, device=q.device) + kv_head * group * size
        at_k = torch.tensor(channels, device=q.device) + kv_head * size
        q[at_q], k[at_k] = 0.0, 0.0
        q[at_q, :width] = (codes.code_JDC[number].T * scale).to(q.dtype)
        k[at_k, width:] = (room_DX[:, span].T * scale).to(k.dtype)


def _write_values(
    head: EagleHead,
    codes: Codes,
    heads: Sequence[int],
    embed_ND: Tensor,
    ids_N: Tensor,
    size: float,
) -> None:
    """Values carry leading directions of embeddings; the output projection turns them to logits."""
    width, head_dim = head.config.hidden_size, head.config.head_dim
    group = head.config.num_heads // head.config.num_kv_heads
    taken = min(len(heads) * head_dim, width)
    value_DX = codes.directions_DX[:, :taken]
    back_XD = _to_outputs(head, embed_ND @ value_DX, ids_N)
    copied_ND = (embed_ND @ value_DX) @ back_XD
    back_XD = back_XD * (size / copied_ND.pow(2).mean(-1).sqrt().median().clamp(min=1e-12))
    v, o = head.layer.self_attn.v_proj.weight, head.layer.self_attn.o_proj.weight
    for number, kv_head in enumerate(heads):
        span = slice(number * head_dim, min((number + 1) * head_dim, taken))
        count = span.stop - span.start
        rows = slice(kv_head * head_dim, kv_head * head_dim + count)
        v[rows] = 0.0
        v[rows, :width] = value_DX[:, span].T.to(v.dtype)
        start = kv_head * group * head_dim
        o[:, start : start + count] = back_XD[span].T.to(o.dtype)


def _to_outputs(head: EagleHead, value_NX: Tensor, ids_N: Tensor) -> Tensor:
    """Least squares [X, D] from a token's values to its row of the output head."""
    place_V = torch.full((head.config.vocab_size,), -1, device=ids_N.device)
    draft_ids_W = head.draft_ids_W[: head.config.num_proposable]
    place_V[draft_ids_W] = torch.arange(len(draft_ids_W), device=ids_N.device)
    known_N = place_V[ids_N] >= 0
    rows_ND = head.output_weights()[0].float()[place_V[ids_N[known_N]]]
    return ridge(value_NX[known_N], rows_ND)
