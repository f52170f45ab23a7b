"""What `outrider plan` says of a run, and what the run then takes: disk, memory and time.

    python -m outrider.scripts.plan_bench --recipe demo-quick --output runs/plan-bench

All other flags are the trainer's, such as --max-tokens 90000.
Each round measures this machine anew (`outrider plan --measure`), then trains in a fresh folder,
one process after the other, so that a machine whose speed changes over minutes does not spoil the
comparison; the median of the rounds is what counts. Memory is the peak of a process's own pages
(RssAnon of Linux): those of a store that is mapped from the disk can be taken back at any time.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from outrider.data.files import write_whole

POLL = 0.02
"""Seconds between looks at a process's memory."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which run."""

    output: Path = Path("runs/plan-bench")
    """Receives a folder a round and plan-bench.json; not there yet, so that nothing is reused."""
    kind: str = "eagle"
    """The trainer."""
    recipe: str = "demo-quick"
    """Recipe file, or the name of a shipped one."""
    rounds: int = 1
    """Plans and runs, in turn."""


class Run(NamedTuple):
    """What a run took."""

    seconds: float
    peak: int


def main(argv: Sequence[str] | None = None) -> None:
    """Plan, run, print and write."""
    settings, more = tyro.cli(Settings, args=argv, prog="plan_bench", return_unknown_args=True)
    rounds = [one_round(settings, more, number) for number in range(settings.rounds)]
    settings.output.mkdir(parents=True, exist_ok=True)
    write_whole(settings.output / "plan-bench.json", json.dumps(rounds, indent=1) + "\n")
    print(table(rounds))


def one_round(settings: Settings, more: Sequence[str], number: int) -> dict[str, Any]:
    """The plan's figures and the run's, by name: pairs of estimate and measurement."""
    folder = settings.output / f"round-{number}"
    if folder.exists():
        raise SystemExit(f"error: {folder} is there already; name another output")
    flags = ["--recipe", settings.recipe, *more]
    flags += ["--output", str(folder / "run"), "--store", str(folder / "features")]
    command = [sys.executable, "-m", "outrider.scripts.cli", "plan", settings.kind, "--measure"]
    folder.mkdir(parents=True)
    machine = ["--json", "--save-machine", str(folder / "machine.json")]
    done = subprocess.run([*command, *machine, *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    plan = json.loads(done.stdout[done.stdout.index("{") :])
    write_whole(folder / "plan.json", json.dumps(plan, indent=1) + "\n")
    took = watched([sys.executable, "-m", f"outrider.train.{settings.kind}", *flags])
    found = {
        "features, bytes": [
            plan["disk_bytes"]["features"],
            size_of(folder / "features", "*/features-*.safetensors"),
        ],
        "last and best head, bytes": [
            plan["disk_bytes"]["exports"],
            size_of(folder / "run", "last/*") + size_of(folder / "run", "best/*"),
        ],
        "peak memory, bytes": [plan["memory_bytes"]["peak"], took.peak],
        "steps, seconds": [plan["seconds"]["steps"], step_seconds(folder / "run")],
        "whole run, seconds": [plan["seconds"]["total"], took.seconds],
    }
    print(table([found]), flush=True)
    return found


def watched(command: Sequence[str]) -> Run:
    """Run a command to its end; SystemExit where it fails."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak = 0
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        peak = max(peak, own_pages(status))
        time.sleep(POLL)
    seconds = time.perf_counter() - begun
    assert process.stderr is not None
    said = process.stderr.read()
    if process.returncode:
        raise SystemExit(said.decode())
    return Run(seconds, peak)


def own_pages(status: Path) -> int:
    """Bytes of anonymous memory by a process's status file; 0 once it has gone."""
    try:
        lines = status.read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = [int(line.split()[1]) for line in lines if line.startswith("RssAnon:")]
    return 1024 * sum(found)


def size_of(folder: Path, pattern: str) -> int:
    """Bytes of the files of a pattern."""
    return sum(path.stat().st_size for path in folder.glob(pattern) if path.is_file())


def step_seconds(run: Path) -> float:
    """Seconds of all optimiser steps, by the run's own watch."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return sum(sum(json.loads(line)["seconds"].values()) for line in lines)


def table(rounds: Sequence[dict[str, Any]]) -> str:
    """Median estimate, median measurement and the median of their ratios, by name."""
    lines = [
        f"load {os.getloadavg()[0]:.1f}, {len(rounds)} rounds",
        "| | plan | run | plan / run |",
        "|---|---|---|---|",
    ]
    for name in rounds[0]:
        pairs = [one[name] for one in rounds]
        plan, run = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
        ratio = statistics.median(a / b for a, b in pairs)
        lines.append(f"| {name} | {plan:,.0f} | {run:,.0f} | {ratio:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
