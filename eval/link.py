"""From a target to the tables its draft heads borrow: the one place where data and heads meet."""

import torch
from torch import Tensor

from outrider.data.target import Target
from outrider.heads import Tables


def tables(target: Target) -> Tables:
    """The frozen tables of a target, for `EagleHead.attach`."""
    return Tables(
        embedding_VH=target.embedding_VH,
        output_VH=target.output_VH,
        tokenizer_size=target.tokenizer_size,
        num_layers=target.num_layers,
        norm_H=_final_norm(target),
        embed_scale=target.embed_scale,
        softcap=target.softcap,
    )


@torch.no_grad()
def _final_norm(target: Target) -> Tensor | None:
    """The final norm's effective weight; None where it is not an RMS norm over the hidden size."""
    norm = getattr(target.decoder, "norm", None)
    weight = getattr(norm, "weight", None)
    is_rms = isinstance(weight, Tensor) and getattr(norm, "bias", None) is None
    if not isinstance(norm, torch.nn.Module) or not is_rms or weight.shape != (target.hidden_size,):
        return None
    # Some families store the weight less one: ask the module what it does to a unit vector.
    applied_H = norm(torch.ones_like(weight))
    offset = (applied_H - weight).round()
    return weight + offset
