"""`--plan`: what a run would do and need, printed before anything is spent."""

import math
import shutil
from pathlib import Path

from outrider.data.packing import shuffled_packs
from outrider.data.store import store_bytes
from outrider.train.assembly import Ground, layout
from outrider.train.optim import state_bytes
from outrider.train.preflight import notes
from outrider.train.recipe import to_yaml

GIB = 1024**3


def describe(ground: Ground) -> str:
    """Resolved settings, counts, steps, parameters, memory and disk."""
    settings, head = ground.settings, ground.head
    run, data = settings.run, settings.data
    packs = len(shuffled_packs([len(row) for row in ground.rows], data.max_length, run.seed))
    per_epoch = math.ceil(math.ceil(packs / run.batch_size) / run.accumulation)
    tokens = sum(len(row) for row in ground.rows)
    fill = tokens / (packs * data.max_length)
    parameters = sum(value.numel() for value in head.parameters() if value.requires_grad)
    disk = feature_bytes(ground)
    checkpoints = (run.keep_last + 1) * parameters * 12 + 2 * parameters * 4
    free = shutil.disk_usage(existing(Path(run.output))).free
    lines = [
        "settings (a recipe that repeats this run):",
        *("  " + line for line in to_yaml(settings).splitlines()),
        "data:",
        *("  " + line for line in str(ground.counts).splitlines()),
        *("  " + line for line in notes(ground.vocabulary, settings, head.config, ground.target)),
        f"  packs: {packs} of {data.max_length} positions, {fill:.1%} filled",
        "steps:",
        (
            f"  {per_epoch} optimiser steps an epoch, {run.epochs * per_epoch} in all, "
            f"{run.epochs * tokens} tokens"
        ),
        "head:",
        (
            f"  {parameters / 1e6:.2f} M trainable parameters, layers {list(ground.layers)}, "
            f"{settings.num_steps} unrolled steps"
        ),
        "memory (estimate):",
        (
            f"  weights, gradients and moments {state_bytes(parameters) / GIB:.2f} GiB, target "
            f"{target_bytes(ground) / GIB:.2f} GiB, activations of a step "
            f"{activation_bytes(ground) / GIB:.2f} GiB"
        ),
        "disk (estimate):",
        (
            f"  features {disk / GIB:.2f} GiB in {ground.store_folder}, checkpoints "
            f"{checkpoints / GIB:.2f} GiB in {run.output}; free: {free / GIB:.1f} GiB"
        ),
    ]
    return "\n".join(lines)


def feature_bytes(ground: Ground) -> int:
    """Bytes of all stored features; zero when they are computed in every step."""
    if ground.settings.data.online:
        return 0
    return store_bytes(ground.rows, layout(ground))


def target_bytes(ground: Ground) -> int:
    """Bytes of the frozen target's weights."""
    return sum(value.numel() * value.element_size() for value in ground.target.model.parameters())


def activation_bytes(ground: Ground) -> int:
    """Bytes kept for the backward pass of one micro-batch, by layer widths; a rough figure."""
    settings, config = ground.settings, ground.head.config
    item = 2 if settings.run.precision == "bf16" else 4
    positions = settings.run.batch_size * settings.data.max_length
    logits = 4 * min(1 << 23, positions * settings.num_steps * config.draft_vocab_size)
    return positions * settings.num_steps * config.activation_width * item + 3 * logits


def existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return path if path.exists() else existing(path.absolute().parent)
