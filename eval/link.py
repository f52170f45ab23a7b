"""Heads and data do not know each other; this is where a target lends its tables to a head."""

from torch import Tensor

from outrider.data.target import Target
from outrider.heads.config import Tables


def tables(target: Target) -> Tables:
    """What a draft head borrows from a loaded target."""
    return Tables(
        embedding_VH=target.embedding_VH,
        output_VH=target.output_VH,
        tokenizer_size=target.tokenizer_size,
        num_layers=target.num_layers,
        norm_H=final_norm(target),
        embed_scale=target.embed_scale,
        softcap=target.softcap,
    )


def final_norm(target: Target) -> Tensor | None:
    """The final norm's weight; None where it is not a plain RMS norm called `norm`."""
    norm = getattr(target.decoder, "norm", None)
    weight = getattr(norm, "weight", None)
    is_plain = isinstance(weight, Tensor) and getattr(norm, "bias", None) is None
    return weight.detach() if is_plain and weight.shape == (target.hidden_size,) else None
