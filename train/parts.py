"""What a training run is made of: a task, a source of batches, an export and a judge."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outrider.data.batches import Batch
from outrider.train.optim import OptimSettings


class TrainingStopped(RuntimeError):  # noqa: N818 - it names an outcome
    """Training cannot go on; checkpoints are intact."""


class StepOutput(NamedTuple):
    """What a task makes of one micro-batch."""

    loss: Tensor
    """Weighted sum over predictions; the loop divides it by the window's total weight."""
    sums: dict[str, Tensor]
    """Sums of measures, some with one entry per unrolled step."""
    counts: dict[str, Tensor]
    """Predictions behind each sum."""


class Work(Protocol):
    """A micro-batch made ready on the CPU: what it weighs is known before anything runs."""

    @property
    def weight(self) -> float:
        """Total weight of its predictions."""
        ...

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding excluded."""
        ...

    @property
    def row_ids(self) -> list[str]:
        """Names of its rows."""
        ...

    def to(self, device: torch.device) -> "Work":
        """The same on a device."""
        ...


class Task(Protocol):
    """A module that prepares batches and whose forward turns prepared ones into a StepOutput."""

    @property
    def trained(self) -> nn.Module:
        """What is trained and kept in checkpoints."""
        ...

    def optimizers(self, settings: OptimSettings, num_steps: int) -> list[Optimizer]:
        """Optimisers over it; each group remembers its peak rate."""
        ...

    def begin(self, step: int, num_steps: int) -> None:
        """Called before every optimiser step (from 0), for what depends on it."""
        ...

    def prepare(self, batch: Batch) -> Work:
        """Everything about a batch that needs no device."""
        ...


class Source(Protocol):
    """Batches as a pure function of epoch and index."""

    def epoch_length(self) -> int:
        """Micro-batches in an epoch; ranks share each of them."""
        ...

    def batch(self, epoch: int, index: int, rank: int = 0, world: int = 1) -> Batch:
        """This rank's part of a micro-batch."""
        ...


class Score(NamedTuple):
    """Held-out result of exported files."""

    value: float
    """The figure that picks the best head; higher is better."""
    details: dict[str, Any]
    """What else is written down."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of."""

    task: Task
    batches: Source
    export: Callable[[Path], None]
    """Writes the head as it will be served."""
    score: Callable[[Path], Score] | None
    """Judges an exported folder on held-out rows."""
    data_claims: dict[str, Any]
    """Fingerprints that a continuation must share."""
    identity: dict[str, Any]
    """Settings that a continuation must share."""


class Stopped(Exception):  # noqa: N818 - it names an outcome
    """The run was asked to stop and has saved its state."""

    def __init__(self, message: str, *, is_planned: bool) -> None:
        super().__init__(message)
        self.is_planned = is_planned
        """By --stop-after-steps rather than by a signal."""
