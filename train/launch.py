"""What all entry points do: parse, prepare, train, and end with the right exit code."""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs

from outrider.data.files import alone_in
from outrider.train.assembly import build, lay_ground
from outrider.train.journal import check_tracker
from outrider.train.loop import Loop
from outrider.train.parts import Stopped, TrainingStopped
from outrider.train.plan import describe
from outrider.train.provenance import write_provenance
from outrider.train.recipe import parse
from outrider.train.settings import Settings

KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
MOST_KERNELS = "64"
"""Matrix kernels that oneDNN keeps on a CPU. Every step has its own number of supervised rows, so
that its default of 1,024 is never used again and takes more than the rest of a step."""


def launch(kind: type[Settings], argv: Sequence[str] | None = None) -> None:
    """Train a head of the kind that these are the settings of.

    Wrong input exits with 2, an interrupted run with 130.
    """
    with ExitStack() as held:
        run(kind, argv, held)


def run(kind: type[Settings], argv: Sequence[str] | None, held: ExitStack) -> None:
    """Parse, prepare and train; `held` keeps what must last until the end."""
    os.environ.setdefault(KERNELS, MOST_KERNELS)  # read when the first product is made
    try:
        settings = parse(argv, kind)
        if settings.run.plan:
            print(describe(lay_ground(settings, torch.device("cpu"))))
            return
        loop = prepare(settings, held)
    except (ValueError, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the same command continues from what is stored", file=sys.stderr)
        sys.exit(130)
    try:
        loop.fit()
    except Stopped as outcome:
        print(outcome)
        sys.exit(0 if outcome.is_planned else 130)
    except (TrainingStopped, OSError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(1)


def prepare(settings: Settings, held: ExitStack) -> Loop:
    """Everything up to the first optimiser step; `held` keeps the run's folder to this process."""
    check_tracker(settings.run.track)
    if settings.run.threads is not None:
        torch.set_num_threads(settings.run.threads)
    accelerator = accelerate(settings)
    output = Path(settings.run.output)
    output.mkdir(parents=True, exist_ok=True)
    if accelerator.is_main_process:
        held.enter_context(alone_in(output))
    parts = build(settings, accelerator)
    loop = Loop(parts=parts, settings=settings, accelerator=accelerator)
    loop.resume()
    if accelerator.is_main_process:
        write_provenance(output, settings)
    return loop


def accelerate(settings: Settings) -> Accelerator:
    """Devices and processes; precision is the head's own affair, so accelerate casts nothing."""
    run = settings.run
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda' and torch sees no GPU; use --device cpu or auto")
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", run.precision):
        print(f"note: accelerate's mixed precision {asked!r} is ignored; --precision decides")
    accelerator = Accelerator(
        cpu=run.device == "cpu" or not torch.cuda.is_available(),
        mixed_precision="no",
        log_with=None if run.track == "none" else run.track,
        project_dir=run.output,
        # While heads learn alone, what learns of the target later gets no gradient.
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
        if settings.tuning is not None
        else None,
    )
    if run.track != "none":
        start_tracker(accelerator, settings)
    return accelerator


def start_tracker(accelerator: Accelerator, settings: Settings) -> None:
    """Begin the tracker's run. Raises ValueError where it cannot, such as for want of a key."""
    flat = {key: str(value) for key, value in settings.flat().items()}
    try:
        accelerator.init_trackers("outrider", config=flat)
    except Exception as problem:
        raise ValueError(
            f"track is {settings.run.track!r}, which did not start: {problem}; for wandb log in, "
            "or set WANDB_MODE=offline"
        ) from problem
