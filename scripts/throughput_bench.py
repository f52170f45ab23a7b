"""Measures training throughput on a recipe's stored features, ours and the peer's in turn.

    python -m outrider.scripts.throughput_bench --recipe demo --output runs/bench
    python -m outrider.scripts.throughput_bench --recipe demo --peer-python .peer/bin/python

Tokens are real packed tokens. The table gives the median over steps, where a step's time goes, and
the floor: the step's matrix products at the speed that a plain large product reaches here.
"""

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from accelerate import Accelerator
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from outrider.heads.base import Predicted
from outrider.heads.fused import Teacher
from outrider.heads.top_teacher import TopTeacher
from outrider.scripts import peer_speculators
from outrider.scripts.peer_trainer import run_peer
from outrider.train import muon
from outrider.train.assembly import DTYPES, build, features, lay_ground
from outrider.train.kinds import EagleRun
from outrider.train.loop import Loop
from outrider.train.muon import Muon
from outrider.train.objectives import DraftTask, DraftWork
from outrider.train.parts import StepOutput
from outrider.train.recipe import parse, to_yaml
from outrider.train.settings import Settings as Recipe

MODES = {"fp32-1": ("fp32", 1), "fp32-2": ("fp32", 2), "bf16-1": ("bf16", 1), "bf16-2": ("bf16", 2)}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure training throughput of one of our recipes, and of the peer's trainer beside it."""

    output: Path = Path("runs/bench")
    """Receives throughput.json, and the peer's files."""
    recipe: str = "demo"
    """Recipe file, or the name of a shipped one."""
    data: str | None = None
    """Other rows than the recipe's."""
    max_tokens: int = 16_000
    """Tokens of the recipe's rows to use."""
    store: Path | None = None
    """Stored features; by default a folder `features` beside --output."""
    modes: tuple[str, ...] = ("fp32-1", "bf16-2")
    """Precision and threads: fp32-1, fp32-2, bf16-1, bf16-2."""
    optimizers: tuple[Literal["muon", "adamw"], ...] = ("muon", "adamw")
    """Of both trainers alike; the peer takes torch's Muon."""
    steps: int = 12
    """Measured steps a round; three more warm up."""
    rounds: int = 2
    """Ours and the peer's are measured in turn so many times."""
    peer_python: Path | None = None
    """Interpreter of the peer's environment (scripts/peer_venv.sh); without it only ours."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One round of our trainer."""

    tokens_per_s: float
    """Median over steps."""
    step_ms: float
    share: dict[str, float]
    """Of step time: data, head, loss (output head with its gradients), backward, optimiser."""
    cpu_tokens_per_s: float
    """Tokens by seconds of processor time and thread: what a quiet machine would approach."""
    mflop_per_token: float
    """Matrix products only."""
    peak_gflops: float
    floor_tokens_per_s: float
    """Throughput if matrix products ran at the peak and nothing else took time."""
    load: float
    """Load average when the round began."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    settings = tyro.cli(Settings, args=argv, prog="throughput_bench")
    unknown = set(settings.modes) - MODES.keys()
    if unknown:
        raise SystemExit(f"error: mode {sorted(unknown)[0]!r}; choose of {', '.join(MODES)}")
    settings.output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for mode, optimizer in product(settings.modes, settings.optimizers):
        measured = measure(settings, mode, optimizer)
        rows.append({"mode": mode, "optimizer": optimizer, **measured})
        print(line(rows[-1]), flush=True)
    result = {"target_tokens_per_s": target_speed(settings), "modes": rows}
    print(f"target features: {result['target_tokens_per_s']} tokens/s with the recipe's threads")
    text = json.dumps(result, indent=1, default=str)
    (settings.output / "throughput.json").write_text(text + "\n", encoding="ascii")


def measure(settings: Settings, mode: str, optimizer: str) -> dict[str, Any]:
    """All rounds of one mode: ours, then the peer's, then ours again."""
    recipe = recipe_of(settings, mode, optimizer)
    ours: list[Measured] = []
    theirs: list[float] = []
    for number in range(settings.rounds):
        ours.append(run_ours(recipe, settings.steps))
        if settings.peer_python is not None:
            theirs.append(run_theirs(settings, recipe, f"{mode}-{optimizer}-{number}"))
    result: dict[str, Any] = {"ours": [asdict(one) for one in ours], "peer": theirs}
    if theirs:
        mine = statistics.median(one.tokens_per_s for one in ours)
        result["ratio"] = round(mine / statistics.median(theirs), 2)
    return result


def recipe_of(settings: Settings, mode: str, optimizer: str) -> Recipe:
    """The recipe on few rows in this mode, without held-out rows."""
    precision, threads = MODES[mode]
    store = settings.store or settings.output.parent / "features"
    words = ["--recipe", settings.recipe, "--store", str(store), "--heldout", "None"]
    words += ["--max-tokens", str(settings.max_tokens), "--optimizer", optimizer]
    words += ["--output", str(settings.output / f"{mode}-{optimizer}")]
    words += ["--precision", precision, "--threads", str(threads), "--device", "cpu"]
    if settings.data is not None:
        words += ["--data", settings.data]
    return parse(words, EagleRun)


class TimedTask(DraftTask):
    """The task, with the time of its loss kept apart."""

    loss_seconds = 0.0

    @override
    def score(self, made: Predicted, teacher: Teacher | TopTeacher, work: DraftWork) -> StepOutput:
        begun = time.perf_counter()
        out = super().score(made, teacher, work)
        self.loss_seconds += time.perf_counter() - begun
        return out


def run_ours(recipe: Recipe, num_steps: int) -> Measured:
    """The real loop's steps, timed one by one."""
    torch.set_num_threads(recipe.run.threads or 1)
    accelerator = Accelerator(cpu=True)
    parts = build(recipe, accelerator)
    task = TimedTask(
        parts.task.trained,  # pyrefly: ignore[bad-argument-type]
        recipe.objective,
        num_steps=recipe.num_steps,
        dtype=DTYPES["bf16"] if recipe.run.precision == "bf16" else None,
    )
    loop = Loop(parts=replace(parts, task=task), settings=recipe, accelerator=accelerator)
    load = os.getloadavg()[0]
    for _ in range(3):
        step_tokens(loop)
    loop.watch.read()
    task.loss_seconds, begun = 0.0, time.process_time()
    timed = [timed_step(loop) for _ in range(num_steps)]
    cpu, loss = time.process_time() - begun, task.loss_seconds
    parts_s = loop.watch.read()
    with FlopCounterMode(display=False) as counter:
        counted = step_tokens(loop)
    busy = sum(parts_s.values())
    parts_s |= {"head": parts_s.pop("forward") - loss, "loss": loss}
    tokens = sum(tokens for tokens, _ in timed)
    flop = counter.get_total_flops()
    in_bf16 = muon_flop(loop)
    peak = matmul_peak(DTYPES[recipe.run.precision])
    floor_s = (flop - in_bf16) / peak + in_bf16 / matmul_peak(torch.bfloat16)
    return Measured(
        tokens_per_s=round(statistics.median(n / s for n, s in timed), 1),
        step_ms=round(1e3 * statistics.median(s for _, s in timed), 1),
        share={name: round(value / busy, 3) for name, value in parts_s.items()},
        cpu_tokens_per_s=round(tokens / cpu, 1),
        mflop_per_token=round(flop / counted / 1e6, 1),
        peak_gflops=round(peak / 1e9, 1),
        floor_tokens_per_s=round(counted / floor_s, 1),
        load=load,
    )


def muon_flop(loop: Loop) -> int:
    """Operations of Muon's matrix products in one step."""
    found = 0
    for wrapped in loop.optimizers:
        optimizer = getattr(wrapped, "optimizer", wrapped)
        for group in optimizer.param_groups if isinstance(optimizer, Muon) else ():
            found += sum(muon.flop(value, group["split"]) for value in group["params"])
    return found


def step_tokens(loop: Loop) -> int:
    """One optimiser step; its real tokens. Epochs go round for ever."""
    before = loop.position.tokens
    loop.position = replace(loop.position, step=loop.position.step % loop.num_steps)
    if loop.position.index >= loop.parts.batches.epoch_length():
        loop.position = replace(loop.position, index=0)
    loop.step(asked=False)
    return loop.position.tokens - before


def timed_step(loop: Loop) -> tuple[int, float]:
    """Tokens and seconds of one step."""
    begun = time.perf_counter()
    tokens = step_tokens(loop)
    return tokens, time.perf_counter() - begun


def matmul_peak(dtype: torch.dtype) -> float:
    """Operations per second of a large product, the best of several."""
    a, b = torch.randn(512, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    best = float("inf")
    for _ in range(12):
        begun = time.perf_counter()
        _ = a @ b
        best = min(best, time.perf_counter() - begun)
    return 2 * 512 * 2048 * 2048 / best


def run_theirs(settings: Settings, recipe: Recipe, name: str) -> float:
    """The peer's own figure on the same rows and stored features."""
    assert settings.peer_python is not None
    folder = settings.output / f"peer-{recipe.run.precision}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(to_yaml(recipe), encoding="utf-8")
    run = peer_speculators.prepare(
        peer_speculators.Settings(
            output=folder,
            recipe=str(path),
            store=Path(str(recipe.data.store)),
            peer_python=settings.peer_python,
            threads=recipe.run.threads,
            epochs=1,
            optimizer=recipe.optim.optimizer,
            max_steps=settings.steps + 3,
        )
    )
    return run_peer(replace(run, output=folder / name)).tokens_per_s


def target_speed(settings: Settings) -> float:
    """Tokens per second of computing features with the recipe's threads."""
    recipe = parse(["--recipe", settings.recipe, "--output", str(settings.output)], EagleRun)
    torch.set_num_threads(recipe.run.threads or torch.get_num_threads())
    words = ["--recipe", settings.recipe, "--output", str(settings.output), "--online"]
    words += ["--data", settings.data] if settings.data else []
    ground = lay_ground(parse([*words, "--max-tokens", "3000"], EagleRun), torch.device("cpu"))
    source = features(ground)
    begun = time.perf_counter()
    for first in range(0, len(source), 8):
        source.rows(range(first, min(first + 8, len(source))))
    return round(sum(source.lengths) / (time.perf_counter() - begun), 1)


def line(row: dict[str, Any]) -> str:
    """One mode in a few words."""
    best = max(row["ours"], key=lambda one: one["tokens_per_s"])
    share = ", ".join(f"{name} {value:.0%}" for name, value in best["share"].items())
    text = (
        f"{row['mode']} {row['optimizer']}: {best['tokens_per_s']:.0f} tokens/s "
        f"(step {best['step_ms']:.0f} ms: {share}); "
        f"floor {best['floor_tokens_per_s']:.0f} at {best['peak_gflops']:.0f} GFLOP/s and "
        f"{best['mflop_per_token']:.0f} MFLOP a token"
    )
    if row["peer"]:
        text += f"; peer {statistics.median(row['peer']):.0f}, ratio {row['ratio']}"
    return text


if __name__ == "__main__":
    main()
