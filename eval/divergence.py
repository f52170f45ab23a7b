"""Where two texts part, and whether rounding can be why.

In half precision passes of unlike query length round differently, so speculative text may leave
plain text at a near tie. A gap there below the noise that plain passes of unlike length show
show for the same two tokens is a tie-flip; a larger one is a defect. N positions, V vocabulary.
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
    """The most by which the gap of these two tokens moved between two plain runs of unlike query
    length, anywhere near, and at least one step of the precision."""
    moved: float
    """By how much it moved between them at the place itself."""
    kind: Literal["tie-flip", "defect"]

    def text(self) -> str:
        """The finding in one line."""
        return (
            f"first difference at token {self.place}: {self.other} for {self.plain}, gap "
            f"{self.gap:.4g} (top two {self.top_gap:.4g}), noise {self.noise:.4g} (here "
            f"{self.moved:.4g}): {self.kind}"
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
            noise=0.0,
            moved=0.0,
            kind="defect",
        )
    plain, other = plain_ids[place], other_ids[place]
    score_V, again_V = (_scores(row_V, context, ids) for row_V in (one_V, many_V))
    gap = float(score_V[plain] - score_V[other])
    if not (score_V[other] > -float("inf")) and again_V[other] > -float("inf"):
        gap = 0.0  # a filter's edge lies between the two passes
    top = score_V.topk(2).values
    moves_N = gap_moves(one_NV, many_NV, (plain, other))
    step = torch.finfo(target.dtype).eps * float(one_V[[plain, other]].abs().max())
    # Runs that happen to agree prove no less than a step.
    noise = max(float(moves_N.max()), step)
    return Divergence(
        place=place,
        plain=plain,
        other=other,
        gap=gap,
        top_gap=float(top[0] - top[1]),
        noise=noise,
        moved=float(moves_N[len(ids) - 1 - start]),
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


def gap_moves(one_NV: Tensor, other_NV: Tensor, pair: tuple[int, int]) -> Tensor:
    """By how much the gap of two tokens' logits differs between two runs, at each position: [N].

    The largest move of any likely pair, over so many positions, would pass for noise gaps that no
    move of this pair explains.
    """
    moved_N2 = (other_NV - one_NV)[:, list(pair)]
    return (moved_N2[:, 0] - moved_N2[:, 1]).abs()


def _scores(logits_V: Tensor, context: Context, ids: Sequence[int]) -> Tensor:
    """What decoding takes the largest of: moved logits, with the token's noise when sampled."""
    sampling, prefixes = context.sampling, [Prefix(ids, len(context.prompt_ids))]
    if sampling.is_greedy:
        return move_logits(logits_V[None], sampling, prefixes)[0]
    p_V = process(logits_V[None], sampling, prefixes)[0].double()
    coin = uniform(context.seed, context.row, len(ids), Stream.TARGET)
    return sampling.temperature * (p_V.log() - race_times(p_V, coin).log())
