"""What a run would do, take and need: disk, memory and time, told before anything is spent.

`--plan` of the trainers and `outrider plan` print the same figures from the same functions.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from outrider.train.assembly import Ground, is_stored, layout
from outrider.train.duration import Time, clock, time_of
from outrider.train.job import NO_NEEDS, Disk, Job, Steps, disk_of, steps_of
from outrider.train.joint_plan import joint_needs
from outrider.train.machine import Machine
from outrider.train.memory import Memory, count, memory_of
from outrider.train.preflight import notes
from outrider.train.probe import probed
from outrider.train.recipe import to_yaml
from outrider.train.work import blank_head

GIB = 1024**3


class Section(NamedTuple):
    """One need of a run."""

    name: str
    basis: str
    """What the figures are, or are of."""
    total: str
    parts: tuple[str, ...]

    def lines(self) -> list[str]:
        """A line for the total, and its parts below it."""
        title = " ".join(word for word in (self.name, self.basis) if word)
        return [f"{title}: {self.total}", *(f"  {part}" for part in self.parts)]

    def told(self) -> str:
        """All but its name, in one line."""
        total = " ".join(word for word in (self.total, self.basis) if word)
        return "; ".join((total, *self.parts))


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

    def sections(self) -> list[Section]:
        """Memory, disk and time."""
        memory, disk, time = self.memory, self.disk, self.time
        average = " and average" if self.has_average else ""
        throughout = (
            f"target {gib(memory.target)}; head with gradients, moments{average} "
            f"{gib(memory.state)}; activations of a step {gib(memory.activations)}"
        )
        above = (
            f"above these: computing features {gib(memory.features)}, a new head's start "
            f"{gib(memory.start)}, judging {gib(memory.heldout)}; the process itself "
            f"{gib(memory.process)}"
        )
        files = (
            f"features {gib(disk.features)}, checkpoints {gib(disk.checkpoints)}, best and last "
            f"head {gib(disk.exports)}"
        )
        kind = "measured rates" if self.machine.is_measured else "an estimate"
        where = f"on {self.machine.name} ({kind}; {self.machine.source})"
        phases = ", ".join(f"{name} {clock(getattr(time, name))}" for name in time._fields)
        return [
            Section("memory", "(estimate)", f"peak {gib(memory.peak)}", (throughout, above)),
            Section("disk", "", gib(disk.total), (files,)),
            Section("time", where, clock(time.total), (phases,)),
        ]

    def lines(self) -> list[str]:
        """Memory, disk and time as text."""
        return [line for section in self.sections() for line in section.lines()]

    @property
    def work(self) -> str:
        """Steps and tokens."""
        steps = self.steps
        return (
            f"{steps.per_epoch} optimiser steps an epoch, {steps.total} in all, "
            f"{self.tokens} tokens"
        )


def describe(ground: Ground) -> str:
    """Resolved settings, counts, steps, parameters, memory, disk and time of a trainer's run."""
    settings, head = ground.settings, ground.head
    job = job_of(ground)
    plan = plan_here(job)
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
        f"  {plan.work}",
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


def plan_here(job: Job) -> Plan:
    """The plan of a job on this machine, whose rates are guessed at in half a second."""
    return plan_of(job, probed(job.settings.run.threads, job.settings))


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / GIB:.2f} GiB"


def existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return path if path.exists() else existing(path.absolute().parent)
