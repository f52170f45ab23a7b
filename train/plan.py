"""What a run would do, take and need: disk, memory and time, told before anything is spent.

`--plan` of the trainers and `outrider plan` print the same figures from the same functions.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from outrider.data.layout import Layout, num_bytes
from outrider.data.packing import shuffled_packs
from outrider.data.rows import Row
from outrider.data.sampling import Sampling
from outrider.data.store import store_bytes
from outrider.data.target import Target
from outrider.eval.offline.texts import read_texts
from outrider.heads import DraftHead
from outrider.train.assembly import Ground, is_stored, layout
from outrider.train.joint_plan import JointNeeds, joint_needs
from outrider.train.machine import DISK, Machine
from outrider.train.memory import Memory, count, memory_of
from outrider.train.optim import inner_matrices, state_bytes
from outrider.train.preflight import notes
from outrider.train.probe import probed
from outrider.train.recipe import to_yaml
from outrider.train.settings import Settings
from outrider.train.validate import spread
from outrider.train.work import (
    blank_head,
    forward_ops,
    law_ops,
    moment_bytes,
    muon_ops,
    pass_ops,
    step_ops,
)

GIB = 1024**3
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


class Time(NamedTuple):
    """Seconds of each part of a run."""

    start: float
    rows: float
    features: float
    heldout: float
    """The held-out text's trace, and every evaluation."""
    steps: float
    saving: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run takes."""

    steps: Steps
    tokens: int
    """Trained on, all epochs together."""
    trained: int
    frozen: int
    has_average: bool
    disk: Disk
    memory: Memory
    time: Time
    machine: Machine

    def record(self) -> dict[str, Any]:
        """Ready for JSON: bytes and seconds."""
        return {
            "steps": self.steps._asdict(),
            "tokens": self.tokens,
            "parameters": {"trained": self.trained, "frozen": self.frozen},
            "disk_bytes": {**self.disk._asdict(), "total": self.disk.total},
            "memory_bytes": {**self.memory._asdict(), "peak": self.memory.peak},
            "seconds": {**self.time._asdict(), "total": self.time.total},
            "machine": {
                "name": self.machine.name,
                "source": self.machine.source,
                "is_measured": self.machine.is_measured,
            },
        }

    def lines(self) -> list[str]:
        """Memory, disk and time as text."""
        memory, disk, time = self.memory, self.disk, self.time
        kind = "measured rates" if self.machine.is_measured else "an estimate"
        parts = [(name, getattr(time, name)) for name in time._fields]
        return [
            f"memory (estimate): peak {gib(memory.peak)}",
            (
                f"  target {gib(memory.target)}; head with gradients, moments"
                f"{' and average' if self.has_average else ''} {gib(memory.state)}; activations of "
                f"a step {gib(memory.activations)}"
            ),
            (
                f"  above these: computing features {gib(memory.features)}, a new head's start "
                f"{gib(memory.start)}, judging {gib(memory.heldout)}; the process itself "
                f"{gib(memory.process)}"
            ),
            f"disk: {gib(disk.total)}",
            (
                f"  features {gib(disk.features)}, checkpoints {gib(disk.checkpoints)}, best and "
                f"last head {gib(disk.exports)}"
            ),
            f"time on {self.machine.name} ({kind}; {self.machine.source}): {clock(time.total)}",
            "  " + ", ".join(f"{name} {clock(value)}" for name, value in parts),
        ]


def describe(ground: Ground) -> str:
    """Resolved settings, counts, steps, parameters, memory, disk and time of a trainer's run."""
    settings, head = ground.settings, ground.head
    job = job_of(ground)
    plan = plan_of(job, probed(settings.run.threads, settings))
    free = shutil.disk_usage(existing(Path(settings.run.output))).free
    steps = plan.steps
    lines = [
        "settings (a recipe that repeats this run):",
        *("  " + line for line in to_yaml(settings).splitlines()),
        "data:",
        *("  " + line for line in str(ground.counts).splitlines()),
        *("  " + line for line in notes(ground.vocabulary, settings, head.config, ground.target)),
        f"  packs: {steps.packs} of {settings.data.max_length} positions, {steps.fill:.1%} filled",
        "steps:",
        (
            f"  {steps.per_epoch} optimiser steps an epoch, {steps.total} in all, "
            f"{plan.tokens} tokens"
        ),
        "head:",
        (
            f"  {plan.trained / 1e6:.2f} M trainable parameters, {plan.frozen / 1e6:.2f} M frozen, "
            f"layers {list(ground.layers)}, {settings.num_steps} unrolled steps"
        ),
        *(job.joint.lines(settings, steps.total) if ground.tuning else ()),
        *plan.lines(),
        (
            f"  features in {ground.store_folder}, the rest in {settings.run.output}; free: "
            f"{free / GIB:.1f} GiB"
        ),
    ]
    return "\n".join(lines)


def job_of(ground: Ground) -> Job:
    """The job of a run whose ground is laid."""
    settings, config = ground.settings, ground.head.config
    ids_W = ground.head.draft_ids_W.cpu() if config.is_reduced else None
    return Job(
        settings=settings,
        target=ground.target,
        head=blank_head(config, ids_W, settings, ground.target),
        rows=ground.rows,
        layout=layout(ground),
        joint=joint_needs(ground.tuning, settings, ground.rows) if ground.tuning else NO_NEEDS,
    )


def plan_of(job: Job, machine: Machine) -> Plan:
    """Disk, memory and time of a job on a machine.

    Raises ValueError where the machine was not measured for the job's precision or optimiser.
    """
    settings = job.settings
    steps = steps_of(job)
    stored = job.layout if is_stored(settings) else None
    return Plan(
        steps=steps,
        tokens=settings.run.epochs * job.num_tokens,
        trained=count(job.head, is_trained=True),
        frozen=count(job.head, is_trained=False),
        has_average=settings.optim.ema is not None,
        disk=disk_of(job),
        memory=memory_of(job.head, job.target, stored, settings, job.joint, job.num_tokens),
        time=time_of(job, steps, machine),
        machine=machine,
    )


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


def time_of(job: Job, steps: Steps, machine: Machine) -> Time:
    """Seconds of each part: operations over the machine's rate of such operations."""
    settings, rows, target = job.settings, job.rows, job.target
    precision, dtype = settings.run.precision, settings.target.target_dtype
    forward = machine.rate("forward", dtype)
    ops = job.scale * forward_ops(target, rows)
    raw = 2 * (len(job.head.config.aux_layers) + 1) * target.hidden_size * job.num_tokens
    features = 0.0
    if is_stored(settings):
        laws = job.scale * law_ops(rows, job.layout) / forward
        features = ops / forward + laws + raw / machine.write
    a_batch = step_ops(job.head, settings, rows, job.layout) / machine.rate("step", precision)
    reading = settings.run.epochs * raw / machine.read
    if not is_stored(settings):
        reading = settings.run.epochs * ops * (4 if settings.tuning is not None else 1) / forward
    a_step = moment_bytes(job.head, settings) / machine.rate("optimiser", "adamw")
    if settings.optim.optimizer == "muon":
        a_step += muon_ops(job.head, settings) / machine.rate("optimiser", "muon")
    evaluations = steps.total // (settings.run.eval_every or steps.per_epoch)
    saves = steps.total // (settings.run.save_every or steps.per_epoch)
    disk = disk_of(job)
    return Time(
        start=machine.start,
        rows=job.rows_seconds or job.scale * len(rows) / machine.rows,
        features=features,
        heldout=heldout_seconds(job, machine, evaluations),
        steps=steps.micro_batches * a_batch + steps.total * a_step + reading,
        saving=saves * disk.checkpoints / (settings.run.keep_last + 1) / DISK,
    )


def heldout_seconds(job: Job, machine: Machine, evaluations: int) -> float:
    """The trace of the held-out text, and a chain scored on it so many times, in float32."""
    data, run = job.settings.data, job.settings.run
    if data.heldout is None or (Path(data.heldout) / "meta.json").is_file():
        return 0.0
    texts = spread(read_texts(data.heldout, Sampling(temperature=0.0)), data.heldout_rows)
    answers = sum(len(text.answer_ids) for text in texts)
    lengths = [len(text.prompt_ids) + len(text.answer_ids) for text in texts]
    target, config = job.target, job.head.config
    table = 2 * target.hidden_size * target.vocab_size
    layers = sum(pass_ops(target, [length]) for length in lengths)
    forward = machine.rate("forward", job.settings.target.target_dtype)
    trace = layers / forward + answers * table / forward
    head = 2 * count(job.head, is_trained=True) + 2 * count(job.head, is_trained=False)
    outputs = 2 * config.hidden_size * config.draft_vocab_size
    chain = run.eval_depth * answers * (head + outputs) + answers * table
    return trace + evaluations * chain / machine.rate("step", "fp32")


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / GIB:.2f} GiB"


def clock(seconds: float) -> str:
    """Seconds in the units that people use."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min"


def existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return path if path.exists() else existing(path.absolute().parent)
