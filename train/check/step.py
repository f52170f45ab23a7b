"""One step on the user's own rows: features, forward, backward, all of it finite."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from outrider.data.batches import Batch, Batches, Features
from outrider.data.rows import FIRST_LABEL, Row
from outrider.data.states import BareRows, OnlineFeatures
from outrider.data.store import FeatureStore
from outrider.data.target import Target
from outrider.train.assembly import DTYPES, Ground, is_stored, layout, task_for
from outrider.train.check.finding import Finding, fail, failed, ok, warn
from outrider.train.objectives import DraftTask
from outrider.train.refusals import check_features

MOST_ROWS = 8
MOST_TOKENS = 512
LEAST_TOKENS = 32
OPERATIONS = 5e11
"""Of the target's pass: a few seconds of one core."""


def pick(rows: Sequence[Row], target: Target) -> list[Row]:
    """Rows evenly spaced over the data, few enough for one core; long ones are cut."""
    size = sum(value.numel() for value in target.model.parameters())
    room = int(min(MOST_TOKENS, max(LEAST_TOKENS, OPERATIONS / (2 * size))))
    places = sorted({len(rows) * number // MOST_ROWS for number in range(MOST_ROWS)})
    chosen: list[Row] = []
    for row in sorted((rows[place] for place in places), key=len):
        short = row if len(row) <= room else replace(row, ids=row.ids[:room], mask=row.mask[:room])
        if bool(short.mask[FIRST_LABEL:].any()):
            chosen.append(short)
            room -= len(short)
        if room < LEAST_TOKENS:
            break
    return chosen or [min(rows, key=len)]


def batch_of(ground: Ground) -> Batch:
    """The ground's rows in one pack with their features, stored and read as the run will do it.

    States that others extracted (hidden_states) are computed here instead.
    """
    size = sum(len(row) for row in ground.rows)
    with tempfile.TemporaryDirectory() as name:
        source = _source(ground, Path(name))
        return Batches(source, size=size, batch_size=1, seed=ground.settings.run.seed).batch(0, 0)


def _source(ground: Ground, folder: Path) -> Features:
    if ground.tuning is not None or ground.settings.tuning is not None:
        return BareRows(ground.rows, dtype=ground.target.dtype)
    if not is_stored(ground.settings):
        return OnlineFeatures(ground.target, ground.rows, layers=ground.layers)
    return FeatureStore.build_or_open(
        ground.target, ground.rows, layout=layout(ground), root=str(folder), progress=False
    )


def check_states(ground: Ground, batch: Batch) -> Iterator[Finding]:
    """The features of the rows are numbers."""
    name = "features"
    try:
        check_features(batch)
    except ValueError as error:
        half = ground.settings.target.target_dtype != "float32"
        yield failed(name, error, **({"target_dtype": "float32"} if half else {}))
        return
    width = batch.aux_BTF.shape[-1] + batch.last_BTH.shape[-1]
    yield ok(name, f"{batch.num_tokens} tokens of {len(ground.rows)} rows, {width} numbers a token")


def check_step(ground: Ground, batch: Batch) -> Iterator[Finding]:
    """A forward and a backward pass with finite loss and gradients; the rows to blame if not."""
    name, settings = "one step", ground.settings
    dtype = DTYPES[settings.run.precision] if settings.run.precision == "bf16" else None
    task = task_for(ground, dtype).train()
    task.begin(0, 1)
    loss = _loss(task, batch)
    if loss is None:
        yield fail(
            name,
            "no supervised token of the sample can be predicted",
            "give a larger draft vocabulary, or rows whose answers are longer",
        )
        return
    loss.backward()
    loss = loss.detach()
    named = {key: x for key, x in task.trained.named_parameters() if x.requires_grad}
    grads = {key: x.grad for key, x in named.items() if x.grad is not None}
    broken = [key for key, grad in grads.items() if not bool(torch.isfinite(grad).all())]
    if not bool(torch.isfinite(loss)) or broken:
        rows = ", ".join(_to_blame(task, ground)) or "none alone, all together"
        what = "the loss is" if not bool(torch.isfinite(loss)) else f"gradients of {broken[0]} are"
        yield fail(
            name,
            f"{what} not finite; rows that alone do it: {rows}",
            "remove these rows, use --precision fp32 and --target-dtype float32, or start from "
            "another head",
        )
    else:
        norm = torch.stack([grad.float().norm() for grad in grads.values()]).norm()
        seen = (
            f"loss {float(loss):.3f}, gradient norm {float(norm):.3g} over {len(grads)} tensors, "
            f"all finite"
        )
        idle = sorted(set(named) - set(grads))
        if idle:
            yield warn(name, seen, f"{len(idle)} tensors get no gradient, {idle[0]} first")
        elif float(norm) == 0:
            yield fail(name, seen, "nothing can be learned from these rows: look at their masks")
        else:
            yield ok(name, seen)
    for value in task.trained.parameters():
        value.grad = None


def _loss(task: DraftTask, batch: Batch) -> torch.Tensor | None:
    work = task.prepare(batch)
    if work.weight == 0:
        return None
    torch.manual_seed(0)
    return task(work.to(task.head.device)).loss / work.weight


def _to_blame(task: DraftTask, ground: Ground) -> Iterator[str]:
    """Rows that alone give a loss or a gradient that is not finite."""
    for row in ground.rows:
        for value in task.trained.parameters():
            value.grad = None
        loss = _loss(task, batch_of(replace(ground, rows=[row])))
        if loss is None:
            continue
        loss.backward()
        grads = [x.grad for x in task.trained.parameters() if x.grad is not None]
        if not all(bool(torch.isfinite(one).all()) for one in (loss.detach(), *grads)):
            yield row.row_id
