"""From a target to the tables its draft heads borrow: the one place where data and heads meet."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.data.options import mode_difference
from outrider.data.target import Target
from outrider.data.template import template_hash
from outrider.heads import DraftHead, Tables, load_head
from outrider.heads.formats import read_notes


def judged_head(
    folder: str | Path, target: Target, *, dtype: torch.dtype = torch.float32
) -> DraftHead:
    """An exported head beside its target, on the target's device, ready to draft.

    Warns where the head's notes name another target or chat template. Output stays exact then and
    acceptance falls, which may be what is being measured: a base model's head on a fine-tuned
    target.
    """
    notes = read_notes(folder)
    name, trained_on = notes.get("target"), notes.get("target_fingerprint")
    # Hashing a large target takes a while: only where the names differ.
    if trained_on is not None and name != target.name and trained_on != target.fingerprint():
        warnings.warn(
            f"{folder} was trained for {name} (hash {trained_on[:12]}), and this target is "
            f"{target.name} (hash {target.fingerprint()[:12]}); what is drafted stays exact, but "
            "may seldom be accepted",
            stacklevel=2,
        )
    ours, theirs = (notes.get("chat") or {}).get("template"), template_hash(target.tokenizer)
    if ours is not None and theirs is not None and ours != theirs:
        warnings.warn(
            f"{folder} was trained with chat template {ours}, and this target's is {theirs}; what "
            "is drafted stays exact, but may seldom be accepted",
            stacklevel=2,
        )
    return load_head(folder, tables(target), dtype=dtype).to(target.device).eval()


def head_options(folder: str | Path) -> dict[str, Any]:
    """The chat template's options that a head was trained with; empty where it says none."""
    return dict((read_notes(folder).get("chat") or {}).get("template_options") or {})


def check_mode(folder: str | Path, stated: Iterable[str], where: str) -> None:
    """Warn where a head was trained in another mode of the chat template than `where` states.

    `stated` holds modes by `state_options`. Heads that note no mode differ from none.
    """
    notes = read_notes(folder).get("chat") or {}
    for mode in stated:
        found = mode_difference(notes, mode, where)
        if found is not None:
            warnings.warn(
                f"{folder}: {found}; output stays exact, the figures are those of another mode",
                stacklevel=2,
            )


def tables(target: Target) -> Tables:
    """The frozen tables of a target, for `DraftHead.attach`."""
    return Tables(
        embedding_VH=target.embedding_VH,
        output_VH=target.output_VH,
        tokenizer_size=target.tokenizer_size,
        num_layers=target.num_layers,
        norm_H=_final_norm(target),
        embed_scale=target.embed_scale,
        softcap=target.softcap,
    )


def norm_offset(target: Target) -> float:
    """What the target's norms add to their weights: 1 in families that store them less one."""
    found = _final_norm_parts(target)
    return 0.0 if found is None else found[1]


def _final_norm(target: Target) -> Tensor | None:
    """The final norm's effective weight; None where it is not an RMS norm over the hidden size."""
    found = _final_norm_parts(target)
    return None if found is None else found[0] + found[1]


@torch.no_grad()
def _final_norm_parts(target: Target) -> tuple[Tensor, float] | None:
    """The final norm's stored weight and what is added to it."""
    norm = getattr(target.decoder, "norm", None)
    weight = getattr(norm, "weight", None)
    is_rms = isinstance(weight, Tensor) and getattr(norm, "bias", None) is None
    if not isinstance(norm, torch.nn.Module) or not is_rms or weight.shape != (target.hidden_size,):
        return None
    # Ask the module what it does to a vector of ones, whose norm is itself.
    applied_H = norm(torch.ones_like(weight))
    return weight, float((applied_H - weight).round().mean())
