"""What a plan is made from, the steps it has and the disk it fills: nothing of it holds weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.data.layout import Layout, num_bytes
from outrider.data.packing import shuffled_packs
from outrider.data.rows import Row
from outrider.data.store import store_bytes
from outrider.data.target import Target
from outrider.heads import DraftHead
from outrider.train.assembly import is_stored
from outrider.train.joint_plan import JointNeeds
from outrider.train.memory import count
from outrider.train.optim import inner_matrices, state_bytes
from outrider.train.settings import Settings

NO_NEEDS = JointNeeds(parameters=0, activations=0, logits=0, export=0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a plan is made from: nothing of it need hold weights."""

    settings: Settings
    target: Target
    head: DraftHead
    rows: Sequence[Row]
    layout: Layout
    scale: float = 1.0
    """How many times as many rows there are as in `rows`, which stand for them."""
    rows_seconds: float | None = None
    """What reading the rows took, where they were read."""
    joint: JointNeeds = NO_NEEDS

    @property
    def num_tokens(self) -> int:
        """Tokens of an epoch."""
        return round(self.scale * sum(len(row) for row in self.rows))


class Steps(NamedTuple):
    """How rows fall into packs and steps."""

    packs: int
    fill: float
    micro_batches: int
    per_epoch: int
    total: int


class Disk(NamedTuple):
    """Bytes."""

    features: float
    checkpoints: float
    """Those kept, and one in the making."""
    exports: float
    """best/ and last/."""

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def steps_of(job: Job) -> Steps:
    """Packs and steps of an epoch and in all."""
    run, data = job.settings.run, job.settings.data
    lengths = [len(row) for row in job.rows]
    packs = math.ceil(job.scale * len(shuffled_packs(lengths, data.max_length, run.seed)))
    batches = math.ceil(packs / run.batch_size)
    per_epoch = math.ceil(batches / run.accumulation)
    fill = job.num_tokens / (packs * data.max_length)
    return Steps(packs, fill, run.epochs * batches, per_epoch, run.epochs * per_epoch)


def disk_of(job: Job) -> Disk:
    """Bytes of the store, of checkpoints and of exported heads."""
    settings, head = job.settings, job.head
    features = 0.0
    if is_stored(settings):
        whole = store_bytes(job.rows, job.layout)
        features = whole if job.scale == 1 else job.scale * num_bytes(job.layout, job.rows)
    trained = count(head, is_trained=True)
    weights = 4 * (trained + count(head, is_trained=False))
    inner = sum(value.numel() for value in inner_matrices(head, settings.optim))
    parameters = trained + job.joint.parameters
    has_average = settings.optim.ema is not None
    state = state_bytes(parameters, num_inner=inner, has_average=has_average)
    kept = state - 4 * parameters + weights - 4 * trained  # gradients are not saved
    copies = 2 if settings.data.heldout is not None else 1
    return Disk(
        features=features,
        checkpoints=(settings.run.keep_last + 1) * kept,
        exports=copies * weights + 3 * job.joint.export,
    )
