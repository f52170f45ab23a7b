"""`--plan`: what a run would do and need, printed before anything is spent."""

import math
import shutil
from pathlib import Path

import torch

from outrider.data.packing import shuffled_packs
from outrider.data.store import store_bytes
from outrider.heads import HeadConfig
from outrider.heads.fused import CHUNK_ELEMENTS
from outrider.train.assembly import DTYPES, Ground, is_stored, layout
from outrider.train.joint_plan import JointNeeds, joint_needs
from outrider.train.optim import inner_matrices, state_bytes
from outrider.train.preflight import notes
from outrider.train.recipe import to_yaml

GIB = 1024**3
NO_NEEDS = JointNeeds(parameters=0, activations=0, export=0)


def describe(ground: Ground) -> str:
    """Resolved settings, counts, steps, parameters, memory and disk."""
    settings, head = ground.settings, ground.head
    run, data = settings.run, settings.data
    packs = len(shuffled_packs([len(row) for row in ground.rows], data.max_length, run.seed))
    per_epoch = math.ceil(math.ceil(packs / run.batch_size) / run.accumulation)
    tokens = sum(len(row) for row in ground.rows)
    fill = tokens / (packs * data.max_length)
    parameters = sum(value.numel() for value in head.parameters() if value.requires_grad)
    joint = joint_needs(ground.tuning, settings) if ground.tuning else NO_NEEDS
    trained = parameters + joint.parameters
    frozen = sum(value.numel() for value in head.parameters()) - parameters
    disk = feature_bytes(ground)
    has_average = settings.optim.ema is not None
    inner = sum(value.numel() for value in inner_matrices(head, settings.optim))
    state = state_bytes(trained, num_inner=inner, has_average=has_average)
    exports = 2 * (parameters + frozen) * 4 + 3 * joint.export
    checkpoints = (run.keep_last + 1) * (state - trained * 4 + frozen * 4) + exports
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
            f"  {parameters / 1e6:.2f} M trainable parameters, {frozen / 1e6:.2f} M frozen, layers "
            f"{list(ground.layers)}, {settings.num_steps} unrolled steps"
        ),
        *(joint.lines(settings, run.epochs * per_epoch) if ground.tuning else ()),
        "memory (estimate):",
        (
            f"  weights, gradients, moments{' and average' if has_average else ''} "
            f"{(state + 4 * frozen) / GIB:.2f} GiB, target {target_bytes(ground) / GIB:.2f} GiB, "
            f"activations of a step {(activation_bytes(ground) + joint.activations) / GIB:.2f} GiB"
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
    if not is_stored(ground.settings):
        return 0
    return store_bytes(ground.rows, layout(ground))


def target_bytes(ground: Ground) -> int:
    """Bytes of the frozen target's weights, or of the original's beside a tuned one."""
    frozen = (value for value in ground.target.model.parameters() if not value.requires_grad)
    return sum(value.numel() * value.element_size() for value in frozen)


def activation_bytes(ground: Ground) -> int:
    """Bytes that a micro-batch needs above weights and gradients; a rough figure."""
    settings = ground.settings
    positions = settings.run.batch_size * settings.data.max_length
    dtype = DTYPES[settings.run.precision]
    return step_bytes(ground.head.config, positions, settings.num_steps, dtype)


def step_bytes(config: HeadConfig, positions: int, num_steps: int, dtype: torch.dtype) -> int:
    """Bytes of a training step over so many supervised positions, by the widths of what is kept.

    The logits are a chunk's, with what is made of them. scripts/memory_bench.py measures the same.
    """
    logits = 4 * min(CHUNK_ELEMENTS, positions * num_steps * config.draft_vocab_size)
    return positions * num_steps * config.activation_width * dtype.itemsize + 3 * logits


def existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return path if path.exists() else existing(path.absolute().parent)
