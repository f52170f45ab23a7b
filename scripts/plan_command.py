"""`outrider plan`: disk, memory and time of a training run before anything runs.

Nothing of the target is loaded but its config, and its tokenizer where rows are read.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor

from outrider.data.layout import layout_of
from outrider.data.outline import outline
from outrider.data.rows import Reading, Row, read_rows
from outrider.data.target import Target
from outrider.heads import CONFIGS
from outrider.train.assembly import DTYPES, reading_of
from outrider.train.calibrate import measure
from outrider.train.job import Job
from outrider.train.kinds import EagleRun, HydraRun, MedusaRun, MtpRun
from outrider.train.machine import Machine, machine_named
from outrider.train.plan import Plan, plan_of
from outrider.train.probe import probed
from outrider.train.recipe import parse
from outrider.train.settings import Settings
from outrider.train.start import fresh_vocabulary
from outrider.train.vocabulary import read_vocabulary
from outrider.train.work import blank_head

RUNS: dict[str, type[Settings]] = {
    "eagle": EagleRun,
    "medusa": MedusaRun,
    "hydra": HydraRun,
    "mtp": MtpRun,
}
STAND_INS = 4_000
"""Rows that stand for any larger number of invented ones."""


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Disk, memory and time of a run of train/KIND.py. All its flags follow those below.

    outrider plan eagle --target ORG/MODEL --rows 100000 --mean-length 900 --machine h100
    """

    kind: tyro.conf.Positional[Literal["eagle", "medusa", "hydra", "mtp"]]
    """The trainer."""

    rows: int | None = None
    """Plan for so many rows, of which nothing else is known, instead of --data."""

    mean_length: float | None = None
    """With rows: their mean length in tokens; lengths are spread from half to one and a half of it,
    and cut at max_length, or dropped with --on-long drop; --max-tokens holds."""

    supervised: float = 0.5
    """With rows: the share of tokens that is supervised, at the end of each row."""

    machine: str | None = None
    """A GPU (a100, h100, h200, b200, l40s, rtx4090), or a file that --measure wrote; a guess at
    this machine when left out."""

    efficiency: float | None = None
    """With a GPU's name: share of its data sheet's peak that matrix products reach."""

    measure: bool = False
    """Measure this machine first, by the real code at this size: about half a minute."""

    save_machine: Path | None = None
    """With measure: keep the machine's rates in this file, for --machine."""

    json: bool = False
    """Print JSON instead of text."""

    def __post_init__(self) -> None:
        if (self.rows is None) != (self.mean_length is None):
            raise ValueError(
                "rows and mean_length go together: give both, or read rows from --data"
            )
        if self.rows is not None and self.rows < 1:
            raise ValueError(f"rows is {self.rows}; give at least 1")
        if self.mean_length is not None and not 4 <= self.mean_length < math.inf:
            raise ValueError(f"mean_length is {self.mean_length}; rows have at least 4 tokens")
        if not 0 < self.supervised <= 1:
            raise ValueError(f"supervised is {self.supervised}; it is a share above 0, up to 1")
        if self.measure and self.machine is not None:
            raise ValueError("measure is set and machine too; leave one of them out")
        if self.save_machine is not None and not self.measure:
            raise ValueError("save_machine is given without measure, so there is nothing to save")
        if self.efficiency is not None and not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is {self.efficiency}; it is a share above 0, up to 1")
        if self.efficiency is not None and self.machine is None:
            raise ValueError(
                f"efficiency is {self.efficiency} without machine; it is the share of a named "
                "GPU's peak: give --machine, or leave it out"
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; nothing is trained, and nothing is stored but what --measure removes."""
    asked, rest = tyro.cli(PlanSettings, args=argv, prog="outrider plan", return_unknown_args=True)
    job = job_for(asked, trainer_settings(asked, rest))
    plan = plan_of(job, machine_for(asked, job))
    if asked.json:
        print(json.dumps(plan.record(), indent=1))
        return
    print("\n".join(text(job, plan)))


def trainer_settings(asked: PlanSettings, flags: Sequence[str]) -> Settings:
    """The run's settings, from its own flags; data and output are filled in where not needed."""
    words = [*flags]
    names = {word.split("=")[0] for word in words if word.startswith("--")}
    if asked.rows is not None:
        if "--data" in names:
            raise ValueError("rows is given and --data too; leave one of them out")
        words += ["--data", f"({asked.rows} rows)"]
    if "--output" not in names:
        words += ["--output", "runs/plan"]
    settings = parse([*words, "--plan"], RUNS[asked.kind])
    if settings.tuning is not None:
        raise ValueError(
            "joint is set, whose needs are measured on the target itself; use train/medusa.py with "
            "--plan"
        )
    if settings.head.init is not None:
        raise ValueError(
            f"init is {settings.head.init!r}; a plan from a config alone is of a new head: use "
            f"train/{asked.kind}.py with --plan, or leave --init out"
        )
    return settings


def job_for(asked: PlanSettings, settings: Settings) -> Job:
    """What is planned: the rows read or invented, and a head without weights."""
    invents = asked.rows is not None
    dtype = DTYPES[settings.target.target_dtype]
    target = outline(settings.target.target, dtype=dtype, reads_rows=not invents)
    begun = time.perf_counter()
    rows = invented(asked, settings) if invents else read(settings, target, reading_of(settings))
    seconds = None if invents else time.perf_counter() - begun
    choice = settings.head
    ids_W = draft_ids(settings, target, None if invents else rows)
    sizes = {"tokenizer_size": target.tokenizer_size, **choice.geometry()}
    sizes["draft_vocab_size"] = None if ids_W is None else len(ids_W)
    config = CONFIGS[choice.head].from_target(target.config, **sizes)
    data = settings.data
    over_draft = config.is_reduced and data.teacher_over == "draft"
    layout = layout_of(
        target,
        config.aux_layers,
        data.feature_dtype,
        top_k=data.top_k,
        draft_ids_W=ids_W if over_draft else None,
    )
    return Job(
        settings=settings,
        target=target,
        head=blank_head(config, ids_W, settings, target),
        rows=rows,
        layout=layout,
        scale=stands_for(asked, rows, data.max_tokens),
        rows_seconds=seconds,
    )


def read(settings: Settings, target: Target, reading: Reading) -> list[Row]:
    """The rows of --data."""
    return read_rows(settings.data.data, target, reading).rows


def invented(asked: PlanSettings, settings: Settings) -> list[Row]:
    """Rows of the asked number and mean length, or some that stand for them."""
    assert asked.rows is not None
    assert asked.mean_length is not None
    number = min(asked.rows, STAND_INS)
    found: list[Row] = []
    for place in range(number):
        wanted = round(asked.mean_length * (0.5 + (place + 0.5) / number))
        if wanted > settings.data.max_length and settings.data.on_long == "drop":
            continue
        length = min(max(wanted, 4), settings.data.max_length)
        mask = torch.arange(length) >= round(length * (1 - asked.supervised))
        start = int((~mask).sum())
        ids = torch.zeros(length, dtype=torch.int64)
        found.append(Row(ids, mask, f"row-{place}", "invented", start))
    if not found:
        raise ValueError(
            f"mean_length is {asked.mean_length} and on_long is 'drop', which leaves no row of at "
            f"most max_length {settings.data.max_length}; give a larger --max-length"
        )
    return found


def stands_for(asked: PlanSettings, rows: Sequence[Row], max_tokens: int | None) -> float:
    """Rows of the run for each of these: those read are all, invented ones stand for more."""
    if asked.rows is None:
        return 1.0
    scale = asked.rows / min(asked.rows, STAND_INS)
    tokens = sum(len(row) for row in rows)
    return scale if max_tokens is None else min(scale, max_tokens / tokens)


def draft_ids(settings: Settings, target: Target, rows: Sequence[Row] | None) -> Tensor | None:
    """The draft vocabulary; its lowest ids where no rows tell which. None for the whole one."""
    wanted = settings.head.draft_vocab
    if isinstance(wanted, str):
        return read_vocabulary(wanted, target)
    if wanted is None or wanted == target.vocab_size:
        return None
    if rows is None:
        if wanted > target.vocab_size:
            raise ValueError(
                f"draft_vocab is {wanted}; the target has {target.vocab_size} tokens: give at most "
                "that many, or leave it out for the full vocabulary"
            )
        return torch.arange(wanted)
    vocabulary = fresh_vocabulary(settings.head, None, target, rows)
    return None if vocabulary is None else vocabulary.draft_ids_W


def machine_for(asked: PlanSettings, job: Job) -> Machine:
    """The machine that was named, measured, or guessed at."""
    if asked.machine is not None:
        return machine_named(asked.machine, asked.efficiency)
    if not asked.measure:
        return probed(job.settings.run.threads, job.settings)
    machine = measure(job)
    if asked.save_machine is not None:
        machine.save(asked.save_machine)
    return machine


def text(job: Job, plan: Plan) -> list[str]:
    """The plan for a reader."""
    steps, settings, target = plan.steps, job.settings, job.target
    rows = round(job.scale * len(job.rows))
    lines = [
        (
            f"target {target.name}: {target.num_layers} layers of {target.hidden_size}, "
            f"{target.vocab_size} tokens; head {job.head.config.kind}, layers "
            f"{list(job.head.config.aux_layers)}: {plan.trained / 1e6:.2f} M trainable parameters, "
            f"{plan.frozen / 1e6:.2f} M frozen"
        ),
        (
            f"data: {rows:,} rows, {job.num_tokens:,} tokens; {steps.packs:,} packs of "
            f"{settings.data.max_length} positions, {steps.fill:.1%} filled"
        ),
        f"steps: {steps.per_epoch:,} an epoch, {steps.total:,} in all",
        *plan.lines(),
    ]
    has = plan.machine.memory
    if has is not None and plan.memory.peak > has:
        lines.append(
            f"note: the peak of {plan.memory.peak / 2**30:.1f} GiB exceeds this machine's "
            f"{has / 2**30:.1f} GiB"
        )
    return lines


if __name__ == "__main__":
    main()
