"""Trains EAGLE-3 heads that differ in one setting and compares them on one trace: one table.

    python -m outrider.scripts.ablate --output runs/ablate

Every run is the recipe with the flags of its line in RUNS; the first is what the others are
compared with. A stopped ablation goes on where it was, and a finished run is not trained again.
All heads are then judged at once, by the exact offline evaluator, on the same held-out answers;
differences are paired by prompt. The results are table.md and ablation.json in the output folder.
"""

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import tyro

from outrider.data.files import write_whole
from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.link import judged_head
from outrider.eval.offline.evaluate import evaluate
from outrider.eval.offline.texts import hash_texts, read_texts
from outrider.eval.offline.traces import Trace, build_trace
from outrider.eval.report.provenance import file_hashes, provenance
from outrider.eval.report.tables import table
from outrider.eval.trees.plans import plan_named
from outrider.heads import DraftHead
from outrider.scripts.compare_heads import run_notes
from outrider.scripts.trained_runs import SharedSettings, train

RUNS = {
    "base": "",
    "plain_start": "--start target",
    "no_average": "--ema None",
    "no_dropout": "--feature-dropout 0",
    "tv": "--loss tv",
    "lk_alpha": "--loss lk_alpha",
    "lk_lambda": "--loss lk_lambda",
    "decay_0.8": "--unroll-decay 0.8",
    "document": "--normalise document",
    "adamw": "--optimizer adamw",
    "late_layers": "--aux-layers 2 21 27",
    "reverse_kl": "--loss reverse_kl",
    "cosine": "--schedule cosine",
    "unroll_5": "--unroll-steps 5",
    "early_layers": "--aux-layers 2 8 15",
    "jsd": "--loss jsd",
    "tv_ce": "--loss tv:0.9,soft_ce:0.1",
    "top_64": "--teacher-top-k 64",
    "noise": "--feature-noise-std 0.1",
}
"""What each run adds to the recipe; the first MOST_RUNS are the ablation unless others are asked
for. Layers are those of the demo's target, which has 30."""

MOST_RUNS, MOST_MINUTES = 12, 12.0
"""What one ablation may hold, and how long a run may train; a longer one is marked."""

Cell: TypeAlias = tuple[str, str]
"""Sampling and draft of a figure."""


@dataclass(frozen=True, kw_only=True)
class Settings(SharedSettings):
    """Which runs, on how much text."""

    output: Path = Path("runs/ablate")
    """Receives a folder a run, traces, table.md and ablation.json."""
    runs: tuple[str, ...] = tuple(RUNS)[:MOST_RUNS]
    """Names of the runs to compare; the first is what the others are compared with."""
    list: bool = False
    """Print the runs and their flags, and stop."""
    heldout: str = "demo:heldout"
    """The target's answers at every temperature: they pick each run's best head and judge it."""
    epochs: int = 3
    threads: int = 2
    """CPU threads."""
    drafts: tuple[str, ...] = ("chain:1", "chain:3", "chain:5")
    """Draft plans to judge with."""
    per_kind: int | None = None
    """Judge on the first so many prompts of each kind."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of the held-out text."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.runs if name not in RUNS]
        if unknown or not self.runs or len(set(self.runs)) < len(self.runs):
            raise ValueError(f"runs is {[*self.runs]}; choose of {', '.join(RUNS)}, each once")
        if len(self.runs) > MOST_RUNS:
            raise ValueError(f"runs names {len(self.runs)} runs; choose at most {MOST_RUNS}")
        for draft in self.drafts:
            plan_named(draft)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, judge, print and write."""
    settings = tyro.cli(Settings, args=argv, prog="ablate")
    if settings.list:
        print("\n".join(f"{name:14}{flags or '(the recipe)'}" for name, flags in RUNS.items()))
        return
    for name in settings.runs:
        train(settings.output / name, command_of(settings, name))
    torch.set_num_threads(settings.threads)
    target = Target.load(settings.target)
    folders = {name: settings.output / name / "best" for name in settings.runs}
    heads = {name: judged_head(folder, target) for name, folder in folders.items()}
    traces = {
        f"T={temperature:g}": held_trace(settings, target, heads.values(), temperature)
        for temperature in settings.temperatures
    }
    evaluation = evaluate(target, heads, traces, settings.drafts)
    print(table(evaluation))
    runs = {name: run_record(settings.output / name) for name in settings.runs}
    text = markdown(evaluation, {name: minutes(run) for name, run in runs.items()})
    record = {
        "provenance": provenance(),
        "target": {"name": target.name, "hash": target.fingerprint()},
        "runs": {name: run | {"flags": RUNS[name]} for name, run in runs.items()},
        "heads": {name: file_hashes(folder) for name, folder in folders.items()},
        "evaluation": evaluation,
    }
    write_whole(settings.output / "ablation.json", json.dumps(record, indent=1) + "\n")
    write_whole(settings.output / "table.md", text)
    print(f"\n{text}\n{settings.output}/table.md and ablation.json")


def command_of(settings: Settings, name: str) -> list[str]:
    """Flags of a run of outrider.train.eagle."""
    return [*settings.command(name), *shlex.split(RUNS[name])]


def held_trace(
    settings: Settings, target: Target, heads: Iterable[DraftHead], temperature: float
) -> Trace:
    """The target's held-out answers of one temperature with the states that any head reads."""
    sampling = Sampling(temperature=temperature)
    texts = read_texts(settings.heldout, sampling, per_kind=settings.per_kind)
    layers = sorted({layer for head in heads for layer in head.config.aux_layers})
    key = hashlib.sha256(f"{target.fingerprint()} {layers} {hash_texts(texts)}".encode())
    folder = settings.output / "traces" / f"t{temperature:g}-{key.hexdigest()[:12]}"
    return build_trace(target, texts, folder, sampling=sampling, layers=layers)


def run_record(folder: Path) -> dict[str, Any]:
    """A run's settings, last figures, held-out course and seconds of training."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    course = (folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = sum(sum(json.loads(line)["seconds"].values()) for line in lines)
    return {
        **run_notes(folder),
        "heldout": [json.loads(line) for line in course],
        "training_seconds": round(seconds, 3),
    }


def minutes(run: Mapping[str, Any]) -> float:
    """Minutes that a run trained."""
    return float(run["training_seconds"]) / 60


def markdown(evaluation: Mapping[str, Any], minutes: Mapping[str, float]) -> str:
    """Runs down; tau by draft and temperature across, with the difference to the first run."""
    sampling = {result["trace"]: result["sampling"] for result in evaluation["results"]}
    columns = list(dict.fromkeys((r["sampling"], r["draft"]) for r in evaluation["results"]))
    tau: dict[str, dict[Cell, float]] = {}
    for one in evaluation["results"]:
        cell = (one["sampling"], one["draft"])
        tau.setdefault(one["head"], {})[cell] = one["tau"]["value"]
    apart = {
        (one["head"], (sampling[one["trace"]], one["draft"])): one["tau"]
        for one in evaluation["differences"]
    }
    head = ["run", "flags", "minutes", *(f"{law}, {draft}" for law, draft in columns)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, found in tau.items():
        spent = f"{minutes[name]:.1f}" + (" (too long)" if minutes[name] > MOST_MINUTES else "")
        flags = f"`{RUNS[name]}`" if RUNS[name] else "the recipe"
        cells = [_cell(found[column], apart.get((name, column))) for column in columns]
        lines.append("| " + " | ".join([name, flags, spent, *cells]) + " |")
    first = next(iter(tau))
    note = (
        f"Tau, and its difference to {first} with a 95% interval (bootstrap by prompt, paired); "
        "differences whose interval leaves out zero are bold."
    )
    return "\n".join([*lines, "", note, ""])


def _cell(tau: float, apart: Mapping[str, float] | None) -> str:
    if apart is None:
        return f"{tau:.3f}"
    text = f"{apart['value']:+.3f}"
    if apart["low"] > 0 or apart["high"] < 0:
        text = f"**{text}**"
    return f"{tau:.3f}, {text} [{apart['low']:+.3f}, {apart['high']:+.3f}]"


if __name__ == "__main__":
    main()
