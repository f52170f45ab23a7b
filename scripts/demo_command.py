"""`outrider demo`: train a real head on the embedded target, measure it, and write a report."""

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import tyro

from outrider.data.anatomy import find_folder
from outrider.data.files import write_whole
from outrider.data.target import Target
from outrider.eval.bench import BenchSettings, bench
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.link import judged_head
from outrider.eval.offline.evaluate import evaluate
from outrider.eval.offline.texts import read_texts
from outrider.eval.packing import packed
from outrider.eval.report.page import build_report, read_training
from outrider.eval.report.passage import passage
from outrider.eval.report.provenance import file_hashes
from outrider.eval.trees.plans import plan_named
from outrider.scripts.bench_command import bench_prompts
from outrider.scripts.eval_command import demo_trace

TARGET = "smollm2-demo"
OFFLINE = ("chain:1", "chain:2", "chain:3", "chain:4", "chain:5", "tree:4,4,16")
HELDOUT = "demo:heldout"
# The passage that the report colours: the first held-out prompt of this kind.
PASSAGE_KIND, PASSAGE_DRAFT = "code_edit", "chain:3"


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Train, measure and report a head on SmolLM2-135M-Instruct."""

    quick: bool = False
    """The same code on less data, about three minutes."""

    output: Path | None = None
    """Folder of the run; runs/demo or runs/demo-quick by default."""

    threads: int = 2
    """CPU threads for everything but training, whose recipe says its own."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of everything a demo takes."""

    recipe: str
    traced_per_kind: int | None
    timed_per_kind: int
    timed_drafts: tuple[str, ...]
    timed_tokens: int


FULL = Size(
    recipe="demo",
    traced_per_kind=None,
    timed_per_kind=3,
    timed_drafts=("chain:1", "chain:2", "chain:3", "tree:3,2,6"),
    timed_tokens=48,
)
QUICK = Size(
    recipe="demo-quick",
    traced_per_kind=2,
    timed_per_kind=1,
    timed_drafts=("chain:2",),
    timed_tokens=16,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the stages in order; a stage whose inputs have not changed is reused."""
    settings = tyro.cli(
        DemoSettings, args=argv, prog="outrider demo", config=(tyro.conf.FlagCreatePairsOff,)
    )
    size = QUICK if settings.quick else FULL
    output = settings.output or Path("runs") / size.recipe
    torch.set_num_threads(settings.threads)
    begun = time.perf_counter()
    say(f"target: {find_folder(TARGET)}")
    best = train(size, output)
    stages = Stages(output / "stages", file_hashes(best), size)
    evaluation = stages.get("evaluation", lambda: measure(best, size))
    timing = stages.get("bench", lambda: race(best, size))
    shown = stages.get("passage", lambda: colour(best, size))
    paths = build_report(
        output,
        evaluation=evaluation,
        bench=timing,
        training=read_training(output),
        passage=shown["passage"],
        notes={"target": TARGET, "head": file_hashes(best), "recipe": size.recipe},
        title="An EAGLE-3 head for SmolLM2-135M-Instruct",
    )
    print(summary(evaluation, timing, shown))
    minutes = (time.perf_counter() - begun) / 60
    print(f"report: {paths.html} and {paths.json}   ({minutes:.1f} minutes)")


def say(text: str) -> None:
    """One line of progress."""
    print(f"demo: {text}", flush=True)


def train(size: Size, output: Path) -> Path:
    """Train through the public entry point and return the best head's folder.

    A finished run is reused and an interrupted one continued, both by the trainer itself.
    """
    say(f"training by recipe {size.recipe} into {output}")
    entry = [sys.executable, "-m", "outrider.train.eagle", "--recipe", size.recipe]
    done = subprocess.run([*entry, "--output", str(output)], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return output / "best"


class Stages:
    """Results of the stages, kept with a hash of what they were made from."""

    def __init__(self, folder: Path, head: dict[str, str], size: Size) -> None:
        self.folder = folder
        made_from = f"{version('outrider')} {head} {size} {torch.get_num_threads()}"
        self.key = hashlib.sha256(made_from.encode()).hexdigest()[:16]

    def get(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The stage's result, made unless the same one is there."""
        path = self.folder / f"{name}.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["key"] == self.key:
                say(f"{name}: reused from {path}")
                return kept["value"]
        say(f"{name}: measuring")
        begun = time.perf_counter()
        value = make()
        text = json.dumps({"key": self.key, "value": value}, default=str)
        write_whole(path, text)
        say(f"{name}: done in {time.perf_counter() - begun:.0f} s")
        return value


def measure(best: Path, size: Size) -> dict[str, Any]:
    """Exact offline acceptance on held-out text, greedy and sampled, in float32."""
    target = Target.load(TARGET)
    head = judged_head(best, target)
    traces = {
        f"T={temperature:g}": demo_trace(target, [head], temperature, size.traced_per_kind)
        for temperature in (0.0, 1.0)
    }
    return evaluate(target, {"demo head": head}, traces, OFFLINE)


def race(best: Path, size: Size) -> dict[str, Any]:
    """Wall clock against plain decoding, in bfloat16."""
    target = Target.load(TARGET, dtype=torch.bfloat16)
    head = judged_head(best, target, dtype=torch.bfloat16)
    settings = BenchSettings(
        drafts=size.timed_drafts, repeats=1, max_new_tokens=size.timed_tokens, ignore_eos=False
    )
    prompts = bench_prompts(HELDOUT, size.timed_per_kind, settings.sampling)
    return bench(target, head, prompts, settings)


def colour(best: Path, size: Size) -> dict[str, Any]:
    """One held-out answer in float32, which must be plain decoding's, token for token."""
    target = Target.load(TARGET)
    head = judged_head(best, target)
    drafter = HeadDrafter(head, plan_named(PASSAGE_DRAFT))
    decoding = Decoding(max_new_tokens=2 * size.timed_tokens)
    text = next(
        text for text in read_texts(HELDOUT, decoding.sampling) if text.kind == PASSAGE_KIND
    )
    with packed(target, head):
        drafted = decode(target, text.prompt_ids, drafter, decoding)
        plain = decode(target, text.prompt_ids, None, decoding)
    if drafted.ids != plain.ids:
        raise ValueError(
            f"row {text.row_id}: greedy float32 text with the head differs from plain decoding; "
            "this must not happen, please report it with runs/*/report.json"
        )
    tokenizer = target.tokenizer
    assert tokenizer is not None, "a target loaded from a folder has one"
    shown = passage(
        f"{text.kind}, {PASSAGE_DRAFT}, greedy",
        str(tokenizer.decode(text.prompt_ids)),
        drafted.ids,
        drafted.rounds,
        tokenizer,
        depth=plan_named(PASSAGE_DRAFT).depth,
    )
    return {"passage": shown, "tokens": len(plain.ids), "calls": 1 + len(drafted.rounds)}


def summary(evaluation: dict[str, Any], timing: dict[str, Any], shown: dict[str, Any]) -> str:
    """The short table that ends the demo."""
    lines = ["", "tokens per target call (tau, 95% interval by prompt), exact, held-out prompts"]
    for result in evaluation["results"]:
        tau = result["tau"]
        survival = " ".join(f"{depth['value']:.3f}" for depth in result["survival"])
        lines.append(
            f"  {result['sampling']:<7} {result['draft']:<12} {tau['value']:.3f} "
            f"[{tau['low']:.3f}, {tau['high']:.3f}]   accepts at least i drafts: {survival}"
        )
    drafts = list(dict.fromkeys(row["draft"] for row in timing["rows"]))
    lines += ["", "speed-up over plain decoding, bfloat16, same loop, by kind"]
    lines.append("  " + "".join(f"{name:<12}" for name in ("", *drafts)))
    for kind in dict.fromkeys(row["kind"] for row in timing["rows"]):
        cells = [row for row in timing["rows"] if row["kind"] == kind]
        found = "".join(f"{row['speedup']['value']:.2f}x       " for row in cells)
        lines.append(f"  {kind:<12}{found}".rstrip())
    lines.append("")
    lines.append(
        f"float32 greedy text with the head equals plain decoding: {shown['tokens']} tokens, "
        f"{shown['calls']} target calls"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
