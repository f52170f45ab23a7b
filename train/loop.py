"""The training loop: accumulate, clip, step, log, validate, save. It knows no head by name.

Every supervised prediction weighs the same over rows, micro-batches and ranks: the weights of a
whole accumulation window are added up first, and each micro-batch is divided by that sum.
"""

import math
import signal
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from outrider.train import checkpoint, optim
from outrider.train.checkpoint import Claims, Position, Stateful
from outrider.train.drift import text_of
from outrider.train.ema import WeightAverage
from outrider.train.journal import Journal, Meter, Stopwatch
from outrider.train.parts import Parts, Score, StepOutput, Stopped, TrainingStopped, Work
from outrider.train.settings import Settings


@dataclass(kw_only=True)
class Loop:
    """One run in progress."""

    parts: Parts
    settings: Settings
    accelerator: Accelerator
    position: Position = field(default_factory=Position)
    pending: tuple[Tensor, list[Tensor], list[Work]] | None = None

    def __post_init__(self) -> None:
        run, parts = self.settings.run, self.parts
        self.output = Path(run.output)
        self.world = self.accelerator.num_processes
        self.per_epoch = math.ceil(parts.batches.epoch_length() / run.accumulation)
        self.num_steps = run.epochs * self.per_epoch
        self.head = parts.task.trained
        built = parts.task.optimizers(self.settings.optim, self.num_steps)
        self.task, *self.optimizers = self.accelerator.prepare(parts.task, *built)
        decay = self.settings.optim.ema
        self.average = None if decay is None else WeightAverage(self.head, decay)
        self.live = Stateful(
            head=self.head, optimizers=self.optimizers, average=self.average, world=self.world
        )
        self.claims = Claims(
            settings=parts.identity,
            schedule={"num_steps": self.num_steps, "per_epoch": self.per_epoch},
            data=parts.data_claims,
        )
        self.watch = Stopwatch(self.accelerator.device)
        self.meter = Meter()

    def fit(self) -> Position:
        """Train to the end, or until asked to stop; resume() comes first."""
        run = self.settings.run
        self.journal = Journal(self.output, self.accelerator, self.position.step, self.num_steps)
        with listen() as asked, closing(self.journal):
            while self.position.step < self.num_steps:
                is_asked = self.step(asked=bool(asked))
                is_last = self.position.step == self.num_steps
                stop = not is_last and (is_asked or self.position.step == run.stop_after_steps)
                if self.position.step % run.log_every == 0 or is_last or stop:
                    self.report()
                if self.is_due(run.eval_every) or is_last:
                    self.evaluate()
                if self.is_due(run.save_every) or is_last or stop:
                    self.save()
                if stop:
                    raise Stopped(
                        f"stopped after step {self.position.step} of {self.num_steps}; the same "
                        "command continues from there",
                        is_planned=not is_asked,
                    )
        return self.position

    def resume(self) -> None:
        """Continue from the newest checkpoint of the output folder, if there is one."""
        for name in ("best", "last"):
            checkpoint.recover_folder(self.output / name)
        folder = checkpoint.latest(self.output)
        if folder is None:
            return
        self.position = checkpoint.restore(folder, self.live, self.claims, self.settings.run.waive)
        if self.accelerator.is_main_process:
            done = f"{self.position.step} of {self.num_steps} steps"
            is_done = self.position.step == self.num_steps
            print(f"already trained: {done} in {folder}" if is_done else f"continuing: {done}")

    def step(self, *, asked: bool) -> bool:
        """One optimiser step over a window of micro-batches; true if any rank wants to stop."""
        step = self.position.step
        torch.manual_seed(step_seed(self.settings.run.seed, step, self.accelerator.process_index))
        optim.set_rate(self.optimizers, step, self.num_steps, self.settings.schedule)
        self.parts.task.begin(step, self.num_steps)
        with self.watch.part("data"):
            window = self.window()
            weight, tokens, stop = self.agree(window, asked=asked)
        losses = []
        for index, work in enumerate(window):
            with self.sync_only_at(index == len(window) - 1):
                with self.watch.part("forward"):
                    out: StepOutput = self.task(work.to(self.accelerator.device))
                with self.watch.part("backward"):
                    self.accelerator.backward(out.loss * (self.world / weight))
            losses.append(out.loss.detach())
            for name in out.sums:
                self.meter.add(name, out.sums[name], out.counts[name])
        with self.watch.part("optimiser"):
            norm = optim.clip(self.head.parameters(), self.settings.optim.clip)
            self.check_finite(norm, losses, window)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if self.average is not None:
                self.average.update(step)
        self.meter.grad_norm = norm
        self.meter.tokens += tokens
        self.advance(tokens)
        return stop

    def window(self) -> list[Work]:
        """The micro-batches of this rank that the coming optimiser step uses."""
        last = min(
            self.position.index + self.settings.run.accumulation,
            self.parts.batches.epoch_length(),
        )
        rank = self.accelerator.process_index
        return [
            self.parts.task.prepare(
                self.parts.batches.batch(self.position.epoch, index, rank, self.world)
            )
            for index in range(self.position.index, last)
        ]

    def agree(self, window: list[Work], *, asked: bool) -> tuple[float, int, bool]:
        """Weight, tokens and wish to stop, summed over all ranks."""
        weight = sum(work.weight for work in window)
        tokens = sum(work.num_tokens for work in window)
        if self.world > 1:
            mine = torch.tensor([weight, tokens, float(asked)], dtype=torch.float64)
            mine = self.accelerator.reduce(mine.to(self.accelerator.device), reduction="sum")
            weight, tokens, asked = float(mine[0]), int(mine[1]), bool(mine[2] > 0)
        return max(weight, 1e-9), tokens, asked

    def sync_only_at(self, is_last: bool) -> AbstractContextManager[Any]:
        """Ranks exchange gradients in the window's last micro-batch only."""
        return nullcontext() if is_last else self.accelerator.no_sync(self.task)

    def check_finite(self, norm: Tensor, losses: list[Tensor], window: list[Work]) -> None:
        """Stop on a non-finite gradient; on a GPU one step late, so that nothing waits."""
        now = (norm, losses, window)
        self.pending, due = (now, self.pending) if norm.is_cuda else (None, now)
        if due is not None:
            raise_if_broken(*due)

    def flush(self) -> None:
        """Check the step that is still unchecked."""
        if self.pending is not None:
            raise_if_broken(*self.pending)
            self.pending = None

    def advance(self, tokens: int) -> None:
        """Move the position to the next window."""
        step = self.position.step + 1
        epoch, inside = divmod(step, self.per_epoch)
        self.position = replace(
            self.position,
            step=step,
            epoch=epoch,
            index=inside * self.settings.run.accumulation,
            tokens=self.position.tokens + tokens,
        )

    def is_due(self, every: int | None) -> bool:
        """Whether something that happens every so many steps, or once an epoch, is due now."""
        return self.position.step % (every or self.per_epoch) == 0

    def report(self) -> None:
        """One line of metrics: means since the last line."""
        self.flush()
        seconds = self.watch.read()
        means = self.meter.means(self.accelerator)
        tokens, busy = self.meter.tokens, sum(seconds.values())
        values = {
            "step": self.position.step,
            "epoch": round(self.position.step / self.per_epoch, 6),
            "tokens": self.position.tokens,
            **means,
            "lr": self.optimizers[0].param_groups[0]["lr"],
            "grad_norm": float(self.meter.grad_norm) if self.meter.grad_norm is not None else None,
            "tokens_per_s": round(tokens / max(busy, 1e-9), 1),
            "seconds": {name: round(value, 4) for name, value in seconds.items()},
            "time": round(time.time(), 3),
        }
        self.meter = Meter()
        self.journal.line("metrics.jsonl", values)
        self.journal.show(values)
        self.journal.bar.update(self.position.step - self.journal.bar.n)

    def evaluate(self) -> None:
        """Score the exported files on held-out rows; keep them as best/ if they are."""
        self.flush()
        if self.accelerator.is_main_process:
            candidate = self.output / ".candidate"
            with nullcontext() if self.average is None else self.average.applied():
                self.parts.export(candidate)
            if self.parts.score is not None:
                self.judge(candidate, self.parts.score(candidate))
            checkpoint.replace_folder(candidate, self.output / "last")
        self.accelerator.wait_for_everyone()

    def judge(self, candidate: Path, score: Score) -> None:
        """Write the score down, and keep the candidate if it is the best so far."""
        best = self.position.best_score
        is_best = best is None or score.value > best
        details = {"step": self.position.step, "is_best": is_best, **score.details}
        checkpoint.write_json(candidate / "heldout.json", details)
        self.journal.line("heldout.jsonl", details)
        self.journal.say(f"held-out after step {self.position.step}: {describe(score)}")
        if is_best:
            self.position = replace(
                self.position, best_step=self.position.step, best_score=score.value
            )
            checkpoint.copy_folder(candidate, self.output / "best")

    def save(self) -> None:
        """Write a checkpoint and drop the oldest ones."""
        self.flush()
        if self.accelerator.is_main_process:
            checkpoint.save(self.output, self.position, self.live, self.claims)
            checkpoint.prune(self.output, self.settings.run.keep_last)
        self.accelerator.wait_for_everyone()


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of one step's random numbers on one rank: no generator state to carry along."""
    return ((seed * 1_000_003 + step) * 65_537 + rank) % 2**63


def raise_if_broken(norm: Tensor, losses: list[Tensor], window: list[Work]) -> None:
    """Stop when the gradient norm is not finite, naming the rows of the broken micro-batches."""
    if bool(torch.isfinite(norm)):
        return
    pairs = zip(losses, window, strict=True)
    broken = [work for loss, work in pairs if not bool(torch.isfinite(loss))]
    rows = [name for work in broken or window for name in work.row_ids]
    what = "loss" if broken else "gradient"
    raise TrainingStopped(
        f"the {what} is not finite in a step over the rows {', '.join(rows)}; checkpoints "
        "are intact. Check the features of these rows, lower --lr, or use --precision fp32"
    )


@contextmanager
def listen() -> Generator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying; a second one ends the process at once."""
    asked: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, note)
    except ValueError:  # not the main thread: signals stay with whoever has it
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def closing(journal: Journal) -> Generator[None]:
    """Close the bar and the tracker however the run ends."""
    try:
        yield
    finally:
        journal.close()


def describe(score: Score) -> str:
    """A held-out result in one line."""
    lengths = score.details.get("tau_by_length", {})
    by_length = ", ".join(f"{length}: {tau:.3f}" for length, tau in lengths.items())
    text = f"tau by length of chain {by_length}" if by_length else f"{score.value:.4f}"
    drift = score.details.get("drift")
    return f"{text}; {text_of(drift)}" if drift else text
