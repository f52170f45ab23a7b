"""A machine's rates, measured by the real code on random weights: a few seconds a piece.

The target has the plan's geometry, with as many layers as fit, and nothing of it is fetched. Its
passes fill a real store in a folder that is removed, and the real loop trains a new head from it.
"""

import copy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from typing_extensions import override

from outrider.data.batches import Batches
from outrider.data.layout import Layout, Packed, layout_of
from outrider.data.rows import Row
from outrider.data.states import RowStates, TargetStates
from outrider.data.store import FeatureStore
from outrider.data.target import Target
from outrider.eval.link import tables
from outrider.heads import HEADS
from outrider.train.assembly import DTYPES, ahead
from outrider.train.job import Job
from outrider.train.loop import Loop
from outrider.train.machine import Machine
from outrider.train.objectives import task_of
from outrider.train.parts import Parts
from outrider.train.plan import existing
from outrider.train.probe import probed
from outrider.train.start import settle
from outrider.train.work import forward_ops, law_ops, moment_bytes, muon_ops, step_ops

MOST_WEIGHTS = 4e8
"""Of the random target: a larger one is measured by its first layers."""
FORWARD_SECONDS, STEP_SECONDS = 6.0, 6.0
MOST_TOKENS = 40_000
WARM_STEPS, MOST_STEPS = 3, 200


class Written(NamedTuple):
    """A store, and what its making took."""

    store: FeatureStore
    rows: list[Row]
    layout: Layout
    forward: float
    """Seconds of the target's passes."""
    rest: float
    """Seconds of all else: encoding, and waiting for the disk."""


class TimedStates(TargetStates):
    """The target's passes, with their time kept apart."""

    seconds = 0.0

    @override
    def of(self, rows: Sequence[Row]) -> list[RowStates]:
        begun = time.perf_counter()
        found = super().of(rows)
        if found and found[0].last_TH.is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - begun
        return found


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an optimiser step by part, and micro-batches of a step."""

    data: float
    passes: float
    """Forward and backward."""
    optimiser: float
    muon: float
    """Of `optimiser`, Muon alone."""
    tokens: float
    micro_batches: int


def measure(job: Job) -> Machine:
    """The rates of this machine at a job of these sizes, precisions and optimiser."""
    settings = job.settings
    guess = probed(settings.run.threads, settings)
    torch.set_num_threads(guess.threads or torch.get_num_threads())
    parent = existing(Path(settings.data.store or settings.run.output))
    with tempfile.TemporaryDirectory(dir=parent, prefix=".measure-") as folder:
        target = random_target(job.target, guess.device)
        written = write(job, target, Path(folder))
        times = step_times(job, target, written, Path(folder))
    ops = forward_ops(target, written.rows)
    forward = ops / written.forward
    tokens = sum(written.store.lengths)
    a_token = 2 * (len(job.head.config.aux_layers) + 1) * target.hidden_size
    rest = max(written.rest - law_ops(written.rows, written.layout) / forward, 1e-4)
    passes = step_ops(job.head, settings, written.rows, written.layout)
    step = passes * times.micro_batches / times.passes
    optimiser = {
        "adamw": moment_bytes(job.head, settings) / max(times.optimiser - times.muon, 1e-4)
    }
    if settings.optim.optimizer == "muon":
        optimiser["muon"] = muon_ops(job.head, settings) / times.muon
    dtype, precision = settings.target.target_dtype, settings.run.precision
    slower = {"fp32": step * guess.step["fp32"] / guess.step[precision]}
    return replace(
        guess,
        source=f"measured with {guess.threads} threads, target {dtype}, head {precision}",
        is_measured=True,
        target_dtype=dtype,
        precision=precision,
        optimizer=settings.optim.optimizer,
        forward={dtype: forward},
        step={**slower, precision: step},
        optimiser=optimiser,
        write=tokens * a_token / rest,
        read=times.tokens * a_token / max(times.data, 1e-5),
        start=start_seconds(job.target),
    )


def random_target(target: Target, device: str) -> Target:
    """A target of this geometry with random weights, and of as many layers as MOST_WEIGHTS hold."""
    config = copy.deepcopy(target.model.config)
    text = config.get_text_config(decoder=True)
    a_layer = sum(value.numel() for value in target.blocks[-1].parameters())
    number = max(2, min(target.num_layers, int(MOST_WEIGHTS // max(a_layer, 1))))
    text.num_hidden_layers = number
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(text, name, None)
        if kinds is not None:
            setattr(text, name, kinds[:number])
    model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    return Target.from_model(model.to(device), name="random weights")


def write(job: Job, target: Target, folder: Path) -> Written:
    """A store of as many of the job's rows as some seconds of the target's passes take."""
    layers = [layer % target.num_layers for layer in range(len(job.head.config.aux_layers))]
    packed = job.layout if isinstance(job.layout, Packed) else None
    form = packed.form if packed else job.settings.data.feature_dtype
    ids_W = None if packed is None else packed.vocabulary.ids_W
    layout = layout_of(target, layers, form, top_k=packed.top_k if packed else 1, draft_ids_W=ids_W)
    states = TimedStates(target, layers)
    warm = spread_rows(job.rows, 2_048)
    states.of(warm)
    states.seconds = 0.0
    states.of(warm)
    rate = sum(len(row) for row in warm) / states.seconds
    rows = spread_rows(job.rows, min(MOST_TOKENS, int(rate * FORWARD_SECONDS)))
    target.fingerprint()  # hashed once, before the clock starts
    states.seconds, begun = 0.0, time.perf_counter()
    store = FeatureStore.build_or_open(
        target, rows, layout=layout, root=folder, states=states, progress=False
    )
    whole = time.perf_counter() - begun
    return Written(store, rows, layout, states.seconds, whole - states.seconds)


def spread_rows(rows: Sequence[Row], num_tokens: int) -> list[Row]:
    """Rows from all over the data that hold so many tokens, one at least."""
    mean = sum(len(row) for row in rows) / len(rows)
    number = min(len(rows), max(1, round(num_tokens / mean)))
    return [rows[place * len(rows) // number] for place in range(number)]


def step_times(job: Job, target: Target, written: Written, folder: Path) -> StepTimes:
    """Seconds of the real loop's steps."""
    settings = job.settings
    run = replace(settings.run, epochs=1_000_000, output=str(folder / "run"), track="none")
    settings = replace(settings, run=run)
    config = job.head.config
    ids_W = job.head.draft_ids_W.cpu() if config.is_reduced else None
    head = HEADS[config.kind](config, ids_W)
    settle(head, settings.head)
    accelerator = Accelerator(cpu=str(target.device) == "cpu")
    head.attach(tables(target)).to(accelerator.device)
    dtype = DTYPES[run.precision] if run.precision == "bf16" else None
    batches = Batches(
        written.store, size=settings.data.max_length, batch_size=run.batch_size, seed=run.seed
    )
    parts = Parts(
        task=task_of(head, settings.objective, num_steps=settings.num_steps, dtype=dtype),
        batches=ahead(batches, settings, accelerator.device),
        export=lambda _: None,
        score=None,
        data_claims={},
        identity={},
    )
    loop = Loop(parts=parts, settings=settings, accelerator=accelerator)
    for _ in range(WARM_STEPS):
        loop.step(asked=False)
    loop.watch.read()
    tokens, number, begun = loop.position.tokens, 0, time.perf_counter()
    while number < MOST_STEPS and (
        number < WARM_STEPS or time.perf_counter() - begun < STEP_SECONDS
    ):
        loop.step(asked=False)
        number += 1
    seconds = loop.watch.read()
    return StepTimes(
        data=seconds["data"] / number,
        passes=(seconds["forward"] + seconds["backward"]) / number,
        optimiser=seconds["optimiser"] / number,
        muon=muon_seconds(loop) if settings.optim.optimizer == "muon" else 0.0,
        tokens=(loop.position.tokens - tokens) / number,
        micro_batches=len(loop.window()),
    )


def muon_seconds(loop: Loop, repeats: int = 3) -> float:
    """Seconds of Muon's own update, AdamW's of the tables left out."""
    work = loop.window()[0].to(loop.accelerator.device)
    loop.accelerator.backward(loop.task(work).loss / max(work.weight, 1.0))
    begun = time.perf_counter()
    for _ in range(repeats):
        loop.optimizers[-1].step()
    if loop.accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / repeats


def start_seconds(target: Target) -> float:
    """Seconds until a trainer's first work: a new process, and the target read from a disk."""
    begun = time.perf_counter()
    words = [sys.executable, "-m", "outrider.train.eagle", "--help"]
    subprocess.run(words, capture_output=True, check=True)
    weights = sum(x.numel() * x.element_size() for x in target.model.parameters())
    return time.perf_counter() - begun + weights / 3e8
