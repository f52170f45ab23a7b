"""Targets whose state can be rolled back, and the reasons why others cannot be used.

Speculation runs tokens that may not stand. Keys and values of those are cut off; a recurrent state
has them mixed in for good.
"""

import torch

from outrider.data.cache import RowCache, attention_masks, query_positions
from outrider.data.target import Target

# Where configs name the kinds of their layers.
_KIND_FIELDS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")


def check_rolls_back(target: Target) -> None:
    """Refuse a target that the loops cannot decode with, before any token.

    Raises ValueError where layers carry a state that rejected drafts cannot be taken out of
    (Mamba, RWKV, linear attention, short convolutions), hide positions by rules of their own
    (chunked attention), or attend in a form that takes no mask of ours.
    """
    name, config = target.name, target.config
    if reason := _state(target):
        raise ValueError(
            f"target {name!r} ({config.model_type}) cannot be decoded here: {reason}, so drafts "
            "that are rejected could not be taken back; use a target of attention layers alone, "
            "or transformers' own generate without drafts"
        )
    attention_masks(config, torch.zeros(1, dtype=torch.long), 1, target.dtype)


@torch.no_grad()
def probe_roll_back(target: Target) -> None:
    """Run three tokens, take two back, run one again: its state must be the one of a fresh pass.

    For models of unknown make, whose config says nothing. Raises ValueError where it differs.
    """
    check_rolls_back(target)
    cache, ids = RowCache(1), [1, 2, 3, 1]
    ids = [token % target.vocab_size for token in ids]
    _step(target, cache, ids[:3])
    written = len(cache)
    cache.truncate([1])
    again_1H = _step(target, cache, ids[3:])
    fresh = RowCache(1)
    _step(target, fresh, ids[:1])
    wanted_1H = _step(target, fresh, ids[3:])
    slack = 64 * torch.finfo(target.dtype).eps * float(wanted_1H.abs().max())
    if written != target.num_layers or float((again_1H - wanted_1H).abs().max()) > slack:
        raise ValueError(
            f"target {target.name!r} ({target.config.model_type}) cannot be decoded here: only "
            f"{written} of its {target.num_layers} layers keep keys and values that can be cut "
            "off, so drafts that are rejected would leave a trace; use transformers' own generate"
        )


def _step(target: Target, cache: RowCache, ids: list[int]) -> torch.Tensor:
    lengths_B = cache.lengths_B.to(target.device)
    found = target.run(
        torch.tensor([ids], device=target.device),
        position_ids=query_positions(lengths_B, len(ids)),
        attention_mask=attention_masks(target.config, lengths_B, len(ids), target.dtype),
        cache=cache,
    )
    cache.advance(len(ids))
    return found.last_BTH[0, -1:].float()


def _state(target: Target) -> str | None:
    """What of the target is no keys and values; None where all is."""
    for field in _KIND_FIELDS:
        kinds = {str(kind) for kind in getattr(target.config, field, None) or ()}
        carrying = sorted(kind for kind in kinds if not _attends(kind))
        if carrying:
            return f"its {field} hold {', '.join(carrying)}, which carry a running state"
    if getattr(type(target.model), "_is_stateful", False):
        return "transformers marks it as stateful: it carries a running state"
    return None


def _attends(kind: str) -> bool:
    """Whether a layer of this kind keeps keys and values alone."""
    return kind == "*" or ("attention" in kind and "linear" not in kind)
