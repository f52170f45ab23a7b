"""What a draft step and a verify pass cost here, against a plain step of the target.

Letters: T positions, D head width.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median as middle
from typing import Any

import torch

from outrider.data.cache import RowCache, attention_masks, query_positions
from outrider.data.target import Target
from outrider.heads import DraftHead, HeadCache


def cost(
    target: Target,
    head: DraftHead,
    *,
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 32),
    context: int = 128,
    repeats: int = 9,
) -> dict[str, Any]:
    """Time of a draft step (`c`) and of verify passes of n tokens, over a plain step's.

    The passes take turns, so a slow moment of the machine falls on all of them.
    """
    limit = int(target.config.max_position_embeddings) - max(sizes)
    context = max(2, min(context, limit, head.config.max_position_embeddings - 1))
    passes: dict[str, Callable[[], None]] = {str(n): _verify(target, context, n) for n in sizes}
    passes["draft"] = _draft_step(head, context)
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for repeat in range(repeats + 1):
        for name, run in passes.items():
            begun = time.perf_counter()
            run()
            if repeat:  # the first turn warms up
                seconds[name].append(time.perf_counter() - begun)
    typical = {name: middle(times) for name, times in seconds.items()}
    step = typical[str(sizes[0])]
    return {
        "c": typical["draft"] / step,
        "draft_ms": 1000 * typical["draft"],
        "context": context,
        "verify": [
            {"tokens": n, "ms": 1000 * typical[str(n)], "ratio": typical[str(n)] / step}
            for n in sizes
        ],
    }


def _verify(target: Target, context: int, num_new: int) -> Callable[[], None]:
    """A pass of `num_new` tokens over a full cache, output head included, rolled back after."""
    cache = RowCache(1)
    ids_1T = torch.arange(context, device=target.device)[None] % target.tokenizer_size
    target.run(ids_1T, position_ids=query_positions(cache.lengths_B, context), cache=cache)
    cache.advance(context)

    def run() -> None:
        mask = attention_masks(target.config, cache.lengths_B, num_new, target.dtype)
        captured = target.run(
            ids_1T[:, :num_new],
            layers=(),
            position_ids=query_positions(cache.lengths_B, num_new),
            attention_mask=mask,
            cache=cache,
        )
        float(target.logits(captured.last_BTH[0]).sum())  # waits for a GPU

    return run


@torch.no_grad()
def _draft_step(head: DraftHead, context: int) -> Callable[[], None]:
    """One step of a chain over a full cache, output head and choice included."""
    cache = HeadCache()
    device, dtype = head.device, head.dtype
    feature_1TD = torch.zeros(1, context, head.config.hidden_size, device=device, dtype=dtype)
    ids_1T = torch.arange(context, device=device)[None] % head.config.tokenizer_size
    head.step(feature_1TD, ids_1T, torch.arange(context, device=device)[None], cache)
    position_11 = torch.tensor([[context]], device=device)

    @torch.no_grad()
    def run() -> None:
        hidden_11D = head.step(feature_1TD[:, :1], ids_1T[:, :1], position_11, cache)
        int(head.draft_logits(hidden_11D[0]).argmax())
        cache.truncate(context)

    return run
