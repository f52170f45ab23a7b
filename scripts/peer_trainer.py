"""Runs the real trainer of speculators 0.9.0 on a CPU and reads its figures and heads.

The peer's norm flags are set to the published EAGLE-3 layout, which is what engines read; what is
not named stays at its default.
"""

import json
import os
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.scripts.peer_format import Offline, read_offline

WARMUP_STEPS = 2  # left out of the throughput: the first steps allocate memory


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """One run of the peer's trainer."""

    python: Path
    """Interpreter of the peer's environment."""
    target: str
    """Folder or Hub id of the target: the peer reads its tables."""
    layers: tuple[int, ...]
    """The fused layers: the peer's ids, like ours, name the state entering a layer."""
    offline: Path
    """Features in the peer's format, made by `write_offline`."""
    output: Path
    """Receives the heads, the log and what the trainer printed."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute precision; bfloat16 is autocast over fp32 weights."""
    threads: int = 1
    """CPU threads."""
    epochs: int = 1
    """Passes over the rows."""
    max_steps: int | None = None
    """Stop after so many optimiser steps."""
    pack_size: int = 512
    """Tokens that rows are packed to."""
    draft_vocab: int = 8192
    """Size of the draft vocabulary."""
    unroll_steps: int = 3
    """Draft steps trained in a row."""
    unroll_decay: float = 1.0
    """Weight of each further step (the peer's default: all the same)."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """The peer's default is muon."""
    lr: float = 1e-3
    """Peak learning rate of both parameter groups (the peer's default)."""
    schedule: Literal["linear", "cosine"] = "linear"
    """Decay after a warm-up of 1% of the steps (the peer's default is linear)."""


@dataclass(frozen=True, kw_only=True)
class PeerResult:
    """What came of a run, in the peer's own figures."""

    tokens_per_s: float
    """Median over steps of real tokens by the time of a step, fetching its batch included."""
    positions_per_s: float
    """The same with padding counted."""
    num_steps: int
    num_tokens: int
    """Real tokens over all steps; the peer drops one a row."""
    step_seconds: float
    """Sum of the time of all steps."""
    step_share: dict[str, float]
    """Share of that time in fetch, fwd, bwd and opt."""
    accuracy: list[list[float]]
    """Its training accuracy per unrolled step (all earlier ones right), one list an epoch."""
    heads: list[Path]
    """Exported head folders, one an epoch."""


def run_peer(run: PeerRun) -> PeerResult:
    """Train in the peer's environment and collect its figures and heads."""
    offline = read_offline(run.offline)
    if offline is None:
        raise ValueError(f"{run.offline} holds no finished features for the peer; write them first")
    if not run.python.exists():
        raise ValueError(
            f"peer-python is {run.python}, which is no file; make it with scripts/peer_venv.sh"
        )
    log = run.output / "log.jsonl"
    run.output.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    threads = {name: str(run.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    ours = {"PEER_THREADS": str(run.threads), "PEER_LOG": str(log.resolve())}
    command = [str(run.python), str(Path(__file__).with_name("peer_launch.py"))]
    with (run.output / "printed.txt").open("w") as printed:
        ended = subprocess.run(
            [*command, *arguments(run, offline)],
            env={**os.environ, **threads, **ours},
            stdout=printed,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if ended.returncode:
        raise ValueError(
            f"the peer's trainer ended with status {ended.returncode}; it says why at the end of "
            f"{run.output / 'printed.txt'}"
        )
    return read_log(log, run)


def arguments(run: PeerRun, offline: Offline) -> list[str]:
    """The peer's command line; what is not named here stays at its default."""
    rows = offline.num_train + offline.num_validation
    values = {
        "speculator-type": "eagle3",
        "verifier-name-or-path": run.target,
        "data-path": run.offline,
        "save-path": run.output / "heads",
        # The trainer cuts at int(rows * ratio): the half puts the cut beyond rounding.
        "train-data-ratio": (offline.num_train + 0.5) / rows,
        "total-seq-len": run.pack_size,
        "hidden-states-dtype": run.dtype,
        "draft-vocab-size": run.draft_vocab,
        "ttt-steps": run.unroll_steps,
        "ttt-step-loss-decay": run.unroll_decay,
        "epochs": run.epochs,
        "optimizer": run.optimizer,
        "lr": run.lr,
        "scheduler-type": run.schedule,
        "num-layers": 1,
        "full-attention-indices": 0,
        # Its default attention and loss are GPU kernels.
        "draft-attn-impl": "sdpa",
        "loss-implementation": "eager",
        "num-workers": 0,
        "on-missing": "raise",
        "log-freq": 1,
    }
    if run.max_steps is not None:
        values["max-steps"] = run.max_steps
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    words += ["--target-layer-ids", *map(str, run.layers)]
    published = ("norm-before-residual", "norm-before-fc", "norm-output")
    return [*words, *(f"--no-{name}" for name in published), "--no-resume-from-checkpoint"]


def read_log(log: Path, run: PeerRun) -> PeerResult:
    """The figures of a finished run from the lines that peer_launch.py kept."""
    lines = [json.loads(line) for line in log.read_text("ascii").splitlines()]
    steps = [line for line in lines if "profile" in line]
    if len(steps) <= WARMUP_STEPS:
        raise ValueError(
            f"the peer trained {len(steps)} steps; more than {WARMUP_STEPS} are needed"
        )
    profiles = [step["profile"] for step in steps]
    timed = profiles[WARMUP_STEPS:]
    total_ms = sum(profile["step_ms"] for profile in profiles)
    names = ("fetch", "fwd", "bwd", "opt")
    return PeerResult(
        tokens_per_s=statistics.median(profile["tokens_per_s"] for profile in timed),
        positions_per_s=run.pack_size * 1e3 / statistics.median(p["step_ms"] for p in timed),
        num_steps=len(steps),
        num_tokens=round(sum(p["tokens_per_s"] * p["step_ms"] / 1e3 for p in profiles)),
        step_seconds=total_ms / 1e3,
        step_share={name: sum(p[f"{name}_ms"] for p in profiles) / total_ms for name in names},
        accuracy=[
            [_mean_accuracy(steps, epoch, step) for step in range(run.unroll_steps)]
            for epoch in sorted({step["epoch"] for step in steps})
        ],
        heads=[run.output / "heads" / str(epoch) for epoch in sorted({s["epoch"] for s in steps})],
    )


def _mean_accuracy(steps: list[dict[str, Any]], epoch: int, unroll_step: int) -> float:
    name = f"full_acc_{unroll_step}"
    return statistics.fmean(step["train"][name] for step in steps if step["epoch"] == epoch)
