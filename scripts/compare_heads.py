"""Trains every kind of head on the same rows and compares them on one trace: one table.

    python -m outrider.scripts.compare_heads --output runs/compare

Each kind has its recipe; rows, tokens and epochs are the same for all. A stopped comparison goes on
where it was, and trained heads are not trained again. The table is written as Markdown beside the
report; differences are paired by prompt.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from outrider.data.target import Target
from outrider.eval.link import judged_head
from outrider.eval.offline.evaluate import evaluate
from outrider.eval.report.page import write_report
from outrider.eval.report.provenance import file_hashes
from outrider.eval.report.tables import table
from outrider.eval.trees.plans import plan_named
from outrider.scripts.eval_command import demo_trace

KINDS = {
    "eagle3": ("eagle", "demo"),
    "eagle1": ("eagle", "eagle1"),
    "hydra": ("hydra", "hydra-demo"),
    "mtp": ("mtp", "mtp-demo"),
    "medusa": ("medusa", "medusa-demo"),
}
"""Kind of head: its entry point in train/, and its recipe."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which kinds, on how much text."""

    output: Path = Path("runs/compare")
    """Receives a run folder a kind, report.json, report.html and table.md."""
    kinds: tuple[str, ...] = tuple(KINDS)
    """Kinds of heads; the first is what the others are compared with."""
    drafts: tuple[str, ...] = ("chain:3", "chain:4", "tree:4,4,16")
    """Draft plans."""
    lookup: str = "lookup:4"
    """Prompt lookup, which needs no training, beside them."""
    data: str = "demo"
    """Rows for all kinds."""
    max_tokens: int = 280_000
    """Tokens of the rows to use."""
    epochs: int = 3
    threads: int = 2
    """CPU threads of training; measured acceptance does not depend on them."""
    store: Path | None = None
    """Stored features; by default a folder `features` in --output."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    """Of the held-out text, of 0 and 1."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.kinds if name not in KINDS]
        if unknown or not self.kinds:
            raise ValueError(f"kinds is {list(self.kinds)}; choose of {', '.join(KINDS)}")
        for draft in (*self.drafts, self.lookup):
            plan_named(draft)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, evaluate, print and write."""
    settings = tyro.cli(Settings, args=argv, prog="compare_heads")
    for kind in settings.kinds:
        train(settings, kind)
    torch.set_num_threads(settings.threads)
    target = Target.load("smollm2-demo")
    folders = {kind: settings.output / kind / "best" for kind in settings.kinds}
    heads = {kind: judged_head(folder, target) for kind, folder in folders.items()}
    traces = {
        f"T={temperature:g}": demo_trace(target, heads.values(), temperature, None)
        for temperature in settings.temperatures
    }
    evaluation = evaluate(target, heads, traces, settings.drafts)
    looked_up = evaluate(target, {}, traces, [settings.lookup])
    for result in looked_up["results"]:
        evaluation["results"].append({**result, "head": "prompt lookup"})
    print(table(evaluation))
    sizes = {kind: sum(v.numel() for v in head.parameters()) for kind, head in heads.items()}
    text = markdown(evaluation, sizes)
    (settings.output / "table.md").write_text(text, encoding="utf-8")
    notes = {
        "target": {"name": target.name, "hash": target.fingerprint()},
        "heads": {str(folder): file_hashes(folder) for folder in folders.values()},
        "runs": {kind: run_notes(settings.output / kind) for kind in settings.kinds},
    }
    record = {"evaluation": evaluation}
    paths = write_report(
        settings.output / "report.json", record, notes=notes, title="Kinds of heads"
    )
    print(f"\n{text}\n{paths.json} and {paths.html}")


def train(settings: Settings, kind: str) -> None:
    """Train one kind; a finished run says so and stays as it is."""
    entry, recipe = KINDS[kind]
    flags: dict[str, Any] = {
        "recipe": recipe,
        "data": settings.data,
        "heldout": "demo:heldout",
        "heldout-rows": 48,
        "max-tokens": settings.max_tokens,
        "epochs": settings.epochs,
        "threads": settings.threads,
        "store": settings.store or settings.output / "features",
        "output": settings.output / kind,
    }
    command = [sys.executable, "-m", f"outrider.train.{entry}"]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    print(" ".join(command), flush=True)
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def run_notes(folder: Path) -> dict[str, Any]:
    """The run's own settings and last figures."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "settings": (folder / "settings.yaml").read_text(encoding="utf-8"),
        "last": json.loads(lines[-1]),
    }


def markdown(evaluation: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """A table: heads down, drafts and temperatures across, best first by the first column."""
    columns = list(dict.fromkeys((r["sampling"], r["draft"]) for r in evaluation["results"]))
    columns = [one for one in columns if not one[1].startswith("lookup")]
    found: dict[str, dict[tuple[str, str], str]] = {}
    rank: dict[str, float] = {}
    for result in evaluation["results"]:
        tau, head = result["tau"], result["head"]
        cell = f"{tau['value']:.3f} [{tau['low']:.3f}, {tau['high']:.3f}]"
        is_lookup = result["draft"].startswith("lookup")
        at = [one for one in columns if one[0] == result["sampling"]]
        for column in at[:1] if is_lookup else [(result["sampling"], result["draft"])]:
            found.setdefault(head, {})[column] = cell
            rank.setdefault(head, tau["value"])
    lines = ["| head | parameters | " + " | ".join(f"{s}, {d}" for s, d in columns) + " |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for head in sorted(found, key=lambda name: -rank[name]):
        size = f"{sizes[head] / 1e6:.1f} M" if head in sizes else "none"
        cells = " | ".join(found[head].get(column, "") for column in columns)
        lines.append(f"| {head} | {size} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
