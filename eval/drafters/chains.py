"""Chains drafted by a causal model, one step after another.

Dimensions: W the tokens that the model may propose, H hidden size, n new tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.data.cache import RowCache, attention_masks, query_positions
from outrider.data.sampling import draw
from outrider.data.target import Target
from outrider.eval.drafters import Draft, Noise
from outrider.eval.trees.tree import chain


def draft_chain(
    root: int,
    depth: int,
    step: Callable[[Sequence[int]], Tensor],
    *,
    temperature: float,
    noise: Noise,
    scatter: Callable[[Tensor], Tensor] = lambda law_W: law_W,
) -> Draft:
    """Draft `depth` tokens: the likeliest at temperature 0, above it drawn.

    Args:
        root: The newest token.
        depth: How many to draft; none below 1.
        step: The logits [W], fp32, that follow the tokens drafted so far.
        temperature: Of the draft law.
        noise: Coins of drawn drafts.
        scatter: From a law [W] to the target's vocabulary.
    """
    tokens: list[int] = []
    laws: list[Tensor] = []
    for number in range(depth):
        logits_W = step(tokens)
        if temperature:
            laws.append((logits_W / temperature).softmax(-1))
            tokens.append(draw(laws[-1], noise.draft(number)))
        else:
            tokens.append(int(logits_W.argmax()))
    tree = chain(root, tokens)
    return Draft(tree, (lambda node: scatter(laws[node - 1])) if temperature else None)


def run_new(model: Target, cache: RowCache, ids: Sequence[int]) -> Tensor:
    """Run tokens after what the cache of one row holds; the state [1, H] at the newest."""
    lengths_B = cache.lengths_B.to(model.device)
    captured = model.run(
        torch.tensor([ids], device=model.device),
        position_ids=query_positions(lengths_B, len(ids)),
        attention_mask=attention_masks(model.config, lengths_B, len(ids), model.dtype),
        cache=cache,
    )
    cache.advance(len(ids))
    return captured.last_BTH[0, -1:]
