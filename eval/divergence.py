"""Where two texts part, and whether rounding can be why.

In half precision passes of unlike query length round differently, so speculative text may leave
plain text at a near tie. A gap there below the noise that plain passes of unlike length show
themselves is a tie-flip; a larger one is a defect. N positions, V vocabulary, M likeliest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outrider.data.cache import RowCache, attention_masks, query_positions
from outrider.data.penalties import Prefix
from outrider.data.sampling import Sampling, Stream, move_logits, process, uniform
from outrider.data.target import Target
from outrider.eval.noise import race_times

_SPAN = 64
_LIKELIEST = 8


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first place where a text differs from plain decoding's."""

    place: int
    """Index of the token in the answer."""
    plain: int | None
    """Plain decoding's token; None where its text ended."""
    other: int | None
    gap: float
    """By how much plain decoding preferred its token over the other, in logits; sampled, noise
    included."""
    top_gap: float
    """Between its first and second choice."""
    noise: float
    """The most by which such gaps moved between two plain runs of unlike query length, and at least
    one step of the precision."""
    kind: Literal["tie-flip", "defect"]

    def text(self) -> str:
        """The finding in one line."""
        return (
            f"first difference at token {self.place}: {self.other} for {self.plain}, gap "
            f"{self.gap:.4g} (top two {self.top_gap:.4g}), noise {self.noise:.4g}: {self.kind}"
        )


@dataclass(frozen=True, kw_only=True)
class Context:
    """How the plain text was decoded."""

    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int = 0
    row: int = 0


def find_divergence(
    target: Target,
    context: Context,
    plain_ids: Sequence[int],
    other_ids: Sequence[int],
    *,
    width: int = 8,
) -> Divergence | None:
    """Compare two answers to a prompt; None when they are equal.

    Args:
        target: As it decoded both.
        context: Of the plain text.
        plain_ids: The answer of plain decoding.
        other_ids: The answer of decoding with drafts, by a rule that keeps the text.
        width: Tokens a pass of the second plain run; the first takes one at a time.
    """
    if list(plain_ids) == list(other_ids):
        return None
    pairs = zip(plain_ids, other_ids, strict=False)
    place = next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain_ids), len(other_ids))
    )
    ids = [*context.prompt_ids, *plain_ids[:place]]
    start = max(0, len(ids) - _SPAN)
    # The plain text after the place tells of noise as well as that before it.
    around = [*context.prompt_ids, *plain_ids][: len(ids) + _SPAN]
    one_NV, many_NV = (logits_after(target, around, start, n) for n in (1, width))
    noise = gap_noise(one_NV, many_NV, target.dtype)
    one_V, many_V = one_NV[len(ids) - 1 - start], many_NV[len(ids) - 1 - start]
    if place in (len(plain_ids), len(other_ids)):
        # One text ends where the other goes on: no rounding of logits does that.
        tokens = [one[place] if place < len(one) else None for one in (plain_ids, other_ids)]
        return Divergence(
            place=place,
            plain=tokens[0],
            other=tokens[1],
            gap=float("inf"),
            top_gap=float("inf"),
            noise=noise,
            kind="defect",
        )
    plain, other = plain_ids[place], other_ids[place]
    score_V, again_V = (_scores(row_V, context, ids) for row_V in (one_V, many_V))
    gap = float(score_V[plain] - score_V[other])
    if not (score_V[other] > -float("inf")) and again_V[other] > -float("inf"):
        gap = 0.0  # a filter's edge lies between the two passes
    top = score_V.topk(2).values
    return Divergence(
        place=place,
        plain=plain,
        other=other,
        gap=gap,
        top_gap=float(top[0] - top[1]),
        noise=noise,
        kind="tie-flip" if abs(gap) <= noise else "defect",
    )


def logits_after(target: Target, ids: Sequence[int], start: int, width: int) -> Tensor:
    """Logits [N, V] after the tokens from `start` on, computed `width` tokens a pass."""
    cache = RowCache(1)
    found: list[Tensor] = []
    spans = [(0, start)] if start else []
    spans += [(i, min(i + width, len(ids))) for i in range(start, len(ids), width)]
    for begin, end in spans:
        lengths_B = cache.lengths_B.to(target.device)
        num_new = end - begin
        captured = target.run(
            torch.tensor([ids[begin:end]], device=target.device),
            position_ids=query_positions(lengths_B, num_new),
            attention_mask=attention_masks(target.config, lengths_B, num_new, target.dtype),
            cache=cache,
        )
        cache.advance(num_new)
        if begin >= start:
            found.append(target.logits(captured.last_BTH[0]).float())
    return torch.cat(found)


def gap_noise(one_NV: Tensor, other_NV: Tensor, dtype: torch.dtype) -> float:
    """The most by which the gap of two likely tokens differs between two runs.

    At least one step of `dtype` at the largest logit: runs that happen to agree prove no less.
    """
    top = one_NV.topk(min(_LIKELIEST, one_NV.shape[-1]), dim=-1)
    moved_NM = (other_NV - one_NV).gather(-1, top.indices)
    measured = float((moved_NM.amax(-1) - moved_NM.amin(-1)).max())
    return max(measured, torch.finfo(dtype).eps * float(top.values.abs().max()))


def _scores(logits_V: Tensor, context: Context, ids: Sequence[int]) -> Tensor:
    """What decoding takes the largest of: moved logits, with the token's noise when sampled."""
    sampling, prefixes = context.sampling, [Prefix(ids, len(context.prompt_ids))]
    if sampling.is_greedy:
        return move_logits(logits_V[None], sampling, prefixes)[0]
    p_V = process(logits_V[None], sampling, prefixes)[0].double()
    coin = uniform(context.seed, context.row, len(ids), Stream.TARGET)
    return sampling.temperature * (p_V.log() - race_times(p_V, coin).log())
