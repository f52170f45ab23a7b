"""What a run tells: metrics.jsonl, heldout.jsonl, the progress bar, an optional tracker."""

import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from outrider.data.files import write_whole

PARTS = ("data", "forward", "backward", "optimiser")


def check_tracker(name: str) -> None:
    """Refuse a tracker that is not installed; an unrelated folder may answer to its import."""
    if name == "none":
        return
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"track is {name!r}, which is not installed; pip install {name}, or use --track none"
        ) from None


class Stopwatch:
    """Seconds by part of a step; on a GPU by events, read only when a line is written."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Count the time of the block under `name`."""
        if self.is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self.events.append((name, start, end))
        else:
            begun = time.perf_counter()
            yield
            self.seconds[name] += time.perf_counter() - begun

    def read(self) -> dict[str, float]:
        """Seconds since the last reading."""
        for name, start, end in self.events:
            end.synchronize()
            self.seconds[name] += start.elapsed_time(end) / 1000
        result = self.seconds
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.events.clear()
        return result


class Meter:
    """Sums of measures between two lines; nothing is read from the device before then."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.tokens = 0
        self.grad_norm: Tensor | None = None
        self.begun = time.perf_counter()

    def add(self, name: str, total: Tensor, count: Tensor) -> None:
        """Add one micro-batch's sum and count."""
        total, count = total.detach(), count.detach()
        self.sums[name] = self.sums[name] + total if name in self.sums else total
        self.counts[name] = self.counts[name] + count if name in self.counts else count

    def means(self, accelerator: Accelerator) -> dict[str, Any]:
        """Every measure's mean over all ranks."""
        result: dict[str, Any] = {}
        for name in self.sums:
            both = torch.stack([self.sums[name].double(), self.counts[name].double()])
            both = accelerator.reduce(both, reduction="sum")
            result[name] = (both[0] / both[1].clamp(min=1e-9)).tolist()
        return result


class Journal:
    """Files and bar of one run; only the main process writes."""

    def __init__(self, output: Path, accelerator: Accelerator, step: int, num_steps: int) -> None:
        self.output, self.accelerator, self.num_steps = output, accelerator, num_steps
        if accelerator.is_main_process:
            for name in ("metrics.jsonl", "heldout.jsonl"):
                forget_after(output / name, step)
        self.bar = tqdm(
            total=num_steps,
            initial=step,
            unit="step",
            disable=None if accelerator.is_main_process else True,
        )

    def line(self, name: str, values: dict[str, Any]) -> None:
        """Append one line to a file of the run, and pass its numbers to the tracker."""
        if self.accelerator.is_main_process:
            with (self.output / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        prefix = "heldout/" if name == "heldout.jsonl" else ""
        self.accelerator.log(
            {prefix + key: value for key, value in numbers(values).items()}, step=values["step"]
        )

    def show(self, values: dict[str, Any]) -> None:
        """Put the current figures on the bar, or print them where there is no terminal."""
        words = {
            "loss": f"{values['loss']:.3f}",
            "accept": "/".join(f"{x:.2f}" for x in values["accept"]),
            "tok/s": f"{values['tokens_per_s']:.0f}",
        }
        self.bar.set_postfix(words, refresh=False)
        if self.bar.disable and self.accelerator.is_main_process:
            text = "  ".join(f"{key} {value}" for key, value in words.items())
            self.say(f"step {values['step']}/{self.num_steps}  {text}")

    def say(self, text: str) -> None:
        """One line for the reader, past the bar."""
        if self.accelerator.is_main_process:
            self.bar.write(text)

    def close(self) -> None:
        """Finish bar and tracker."""
        self.bar.close()
        self.accelerator.end_training()


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """Flat numbers of a line: lists and groups get numbered or dotted names."""
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": number for inner, number in numbers(value).items()}
        elif isinstance(value, list):
            flat |= {f"{key}_{index + 1}": number for index, number in enumerate(value)}
        elif isinstance(value, int | float) and key != "step":
            flat[key] = value
    return flat


def forget_after(path: Path, step: int) -> None:
    """Drop the lines that a killed run wrote after the checkpoint it continues from."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            break
    write_whole(path, "".join(kept))
