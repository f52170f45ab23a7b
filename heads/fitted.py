"""Start a new EAGLE-3 head by least squares: it drafts before the first gradient step.

What a draft layer adds to its residual is linear in fc, in the output projection of attention and
in the down projection of the MLP once everything before them stands. So queries, keys and values
are written down (heads/lookup.py), gate and up stay random, and the three are fitted to the state
of the target that they stand in for: fc first, then the others over the unrolled steps, whose
input is the fit's own output. Training goes on from there.

Letters: N rows, F fused feature inputs, H target hidden size, D draft hidden size, C channels of a
token code, X regressors, P predicted tokens, B packs, T positions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.heads.eagle import EagleHead
from outrider.heads.layer_rows import Packs, Rows, layer_rows
from outrider.heads.layers import Layer, rms_norm
from outrider.heads.least_squares import NormalEquations, Room, make_room
from outrider.heads.lookup import (
    LEAST_FIT,
    TokenCodes,
    code_channels,
    still_channels,
    token_codes,
    write_copying,
    write_own_token,
    write_values,
)
from outrider.heads.rope import rotary
from outrider.heads.tables import leading_directions

RIDGE = 1e-3
MLP_RIDGE = 1e-2
GATE_SIZE = 1.5
"""Standard deviation of the MLP's gates before the fit: enough to bend."""
CODE_SIZE = 0.5
"""Size of a token code, as a share of the content's."""
REFITS = 3
STEP = 0.5
"""Share of a refit that is taken: outputs are the next step's inputs, so a whole one swings."""
SAMPLE = 1 << 14
"""Rows from which token codes are read and sizes taken."""


class Started(NamedTuple):
    """What a start found."""

    num_rows: int
    """Supervised tokens that it was fitted to."""
    num_channels: int
    """Channels of a token code by which earlier text is looked up; 0 where it is not."""
    fit: float
    """Share of the code's variance (R2) that the fused states explain."""
    explained: tuple[float, ...]
    """By draft step, the share of the target states' variance that the fitted head explains."""
    reason: str = ""
    """Why nothing is looked up, or nothing was done."""

    def __str__(self) -> str:
        if not self.num_rows:
            return f"note: no fitted start: {self.reason}"
        shares = "/".join(f"{share:.2f}" for share in self.explained)
        line = f"fitted start: least squares on {self.num_rows} tokens, R2 by step {shares}"
        if self.reason:
            return f"{line}; earlier text is not looked up: {self.reason}"
        return f"{line}; looks up earlier text by {self.num_channels} channels (R2 {self.fit:.2f})"


@torch.no_grad()
def start_fitted(head: EagleHead, packs: Packs, num_steps: int) -> Started:
    """Rewrite the first layer of a new EAGLE-3 head, fc and the final norm; later layers pass on.

    Equal packs give equal weights. The head stays as it is where no token is supervised.
    """
    return _Start(head, packs, num_steps).run()


class _Start:
    def __init__(self, head: EagleHead, packs: Packs, num_steps: int) -> None:
        self.head, self.packs, self.num_steps = head, packs, num_steps
        config, lent = head.config, head.lent()
        self.to_draft_HD: Tensor | None = None
        self.norm_D = torch.ones(config.hidden_size, device=head.device)
        if config.hidden_size != config.target_hidden_size:
            self.to_draft_HD = leading_directions(lent.output_VH, config.hidden_size).float()
        elif lent.norm_H is not None:
            norm_D = lent.norm_H.float()
            self.norm_D = norm_D.where(norm_D.abs() > 1e-3 * norm_D.abs().max(), 1.0)
        self.size = 1.0

    def run(self) -> Started:
        head, config, layer = self.head, self.head.config, self.head.layer
        sample = self._sample()
        if sample is None:
            return Started(0, 0, 0.0, (), "no token of the sample is supervised")
        projected_ND = sample.fused_NF @ head.fc.weight.float().T
        self.size = float(projected_ND.pow(2).mean(-1).sqrt().median().clamp(min=1e-6))
        self._fresh_mlp()
        codes, channels, reason = self._codes(sample)
        write_own_token(layer, config, codes, channels)
        value_DX = write_values(layer, config, codes)
        room = self._fit_fc(codes, value_DX, len(channels))
        if room is not None:
            feature_ND = sample.fused_NF @ head.fc.weight.float().T
            loudness = float(feature_ND.pow(2).mean(-1).sqrt().median())
            read_CD = room.read_CD * (loudness / (CODE_SIZE * self.size))
            read_CD = read_CD / layer.norm("hidden_norm").float()
            write_copying(layer, config, codes.code(0, len(channels)), read_CD, channels)
        self._fit_attention()
        self._fit_mlp()
        for _ in range(REFITS if self.num_steps > 1 else 0):
            self._refit()
        num_rows, explained = self._explained()
        return Started(num_rows, len(channels), codes.fit, explained, reason)

    def _sample(self) -> Rows | None:
        parts: list[Rows] = []
        for step, rows in self._rows(1):
            assert step == 0
            parts.append(rows)
            if sum(len(part.ids_N) for part in parts) >= SAMPLE:
                break
        if not sum(len(part.ids_N) for part in parts):
            return None
        return Rows(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _fresh_mlp(self) -> None:
        """Random gates of a fixed size; nothing comes out of the MLP, nor of later layers."""
        config, gated = self.head.config, self.head.layer.mlp
        spread = config.hidden_size**-0.5
        made = torch.Generator().manual_seed(0)
        for weight, size in ((gated.gate_proj.weight, GATE_SIZE), (gated.up_proj.weight, 1.0)):
            weight.copy_(torch.randn(weight.shape, generator=made) * size * spread)
        gated.down_proj.weight.zero_()
        for later in self.head.layers.values():
            assert isinstance(later, Layer)
            later.mlp.down_proj.weight.zero_()
            later.self_attn.o_proj.weight.zero_()
        scale = self.head.lent().logit_scale
        self.head.norm.weight.copy_(self.norm_D * scale)

    def _codes(self, sample: Rows) -> tuple[TokenCodes, list[int], str]:
        """Token codes, the channels that hold one, and why none do."""
        config = self.head.config
        turning, longest = rotary(config.rope, config.head_dim), int(sample.position_N.max())
        window = config.window(0)
        count = code_channels(config, turning, longest, window)
        embed_ND = self._embed(sample.ids_N)
        codes = token_codes(embed_ND, sample.fused_NF, count)
        if not count:
            return (
                codes,
                [],
                "too few channels of each head turn slowly enough to hold a token code",
            )
        if codes.fit < LEAST_FIT:
            why = (
                f"the fused layers tell their own token badly (R2 {codes.fit:.2f}, at least "
                f"{LEAST_FIT}); fuse an earlier layer (--aux-layers)"
            )
            return codes, [], why
        longest = min(longest, window or longest)
        return codes, still_channels(turning, config.head_dim, longest)[:count], ""

    def _fit_fc(self, codes: TokenCodes, value_DX: Tensor, count: int) -> Room | None:
        """Content beside the row's own token, and a token code of its own room if there is one."""
        head, equations = self.head, NormalEquations()
        width = head.fc.weight.shape[1]
        for _, rows in self._rows(1):
            own_NX = self._embed(rows.next_N) @ value_DX
            equations.add(torch.cat([rows.fused_NF, own_NX], dim=1), self._wanted(rows))
        solution_XD = equations.solve(RIDGE)
        fc_DF, room = solution_XD[:width].T, None
        if count:
            rows_WD = head.output_weights()[0].float() * head.norm.weight.float()
            room = make_room(equations.predicted_energy(solution_XD), rows_WD, count)
            fc_DF = room.keep_DD @ fc_DF
            fc_DF += CODE_SIZE * self.size * room.write_DC @ codes.read_FC.T
        head.fc.weight.copy_(fc_DF)
        return room

    def _fit_attention(self) -> None:
        equations = NormalEquations()
        for _, rows in self._rows(1):
            equations.add(rows.attended_NX, self._wanted(rows) - rows.residual_ND)
        self.head.layer.self_attn.o_proj.weight.copy_(equations.solve(RIDGE).T)

    def _fit_mlp(self) -> None:
        equations = NormalEquations()
        for _, rows in self._rows(1):
            hidden_ND = self._attended(rows)
            equations.add(self._gated(hidden_ND), self._wanted(rows) - hidden_ND)
        self.head.layer.mlp.down_proj.weight.copy_(equations.solve(MLP_RIDGE).T)

    def _refit(self) -> None:
        """Both together over all steps, in part."""
        layer, equations = self.head.layer, NormalEquations()
        for _, rows in self._rows(self.num_steps):
            given_NX = torch.cat([rows.attended_NX, self._gated(self._attended(rows))], dim=1)
            equations.add(given_NX, self._wanted(rows) - rows.residual_ND)
        o, down = layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight
        ridge_X = torch.full((o.shape[1] + down.shape[1],), MLP_RIDGE, device=o.device)
        ridge_X[: o.shape[1]] = RIDGE
        solution_XD = equations.solve(ridge_X)
        o.lerp_(solution_XD[: o.shape[1]].T.to(o.dtype), STEP)
        down.lerp_(solution_XD[o.shape[1] :].T.to(down.dtype), STEP)

    def _explained(self) -> tuple[int, tuple[float, ...]]:
        """Number of rows, and R2 of the states by step, both as the output head reads them."""
        sums = torch.zeros(self.num_steps, 3, dtype=torch.float64)
        means = [torch.zeros(self.head.config.hidden_size) for _ in range(self.num_steps)]
        for step, rows in self._rows(self.num_steps):
            heard_ND = self._wanted(rows) * self.norm_D / self.size
            said_ND = self.head.output_input(rows.out_ND).float() / self.head.lent().logit_scale
            error = (said_ND - heard_ND).pow(2).sum()
            counts = (error, heard_ND.pow(2).sum(), torch.tensor(len(heard_ND)))
            sums[step] += torch.stack([value.cpu().double() for value in counts])
            means[step] += heard_ND.sum(0).cpu()
        found = []
        for step, mean_D in enumerate(means):
            error, energy, count = sums[step].tolist()
            spread = energy - float(mean_D.double().pow(2).sum()) / max(count, 1.0)
            found.append(1 - error / max(spread, 1e-12))
        return int(sums[0, 2]), tuple(found)

    def _attended(self, rows: Rows) -> Tensor:
        return rows.residual_ND + F.linear(
            rows.attended_NX, self.head.layer.self_attn.o_proj.weight
        )

    def _gated(self, hidden_ND: Tensor) -> Tensor:
        """What the down projection multiplies."""
        layer = self.head.layer
        eps = self.head.config.rms_norm_eps
        normed = rms_norm(hidden_ND, layer.post_attention_layernorm.weight, eps)
        gated = layer.mlp
        return F.silu(F.linear(normed, gated.gate_proj.weight)) * F.linear(
            normed, gated.up_proj.weight
        )

    def _embed(self, ids_N: Tensor) -> Tensor:
        head = self.head
        norm_D = head.layer.norm("input_layernorm").float()
        return rms_norm(head.embed(ids_N, torch.float32), norm_D, head.config.rms_norm_eps)

    def _wanted(self, rows: Rows) -> Tensor:
        """The stream before the final norm that stands for the target's states."""
        last_NH = rows.last_NH
        drafted_ND = last_NH if self.to_draft_HD is None else last_NH @ self.to_draft_HD
        return drafted_ND / self.norm_D * self.size

    def _rows(self, num_steps: int) -> Iterator[tuple[int, Rows]]:
        return layer_rows(self.head, self.packs, num_steps)
