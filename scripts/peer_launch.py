"""Runs speculators' own `train` command on a CPU; started with the peer's Python.

Knows nothing of Outrider, which that environment does not have. The trainer is used as released:
the substitutions below replace only its wish for an accelerator, and add a log of what it reports.

    PEER_THREADS=1 PEER_LOG=log.jsonl python scripts/peer_launch.py ARGUMENTS OF `speculators train`
"""

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def keep_lines(path: Path) -> Callable[[logging.LogRecord], bool]:
    """A log filter that hides nothing and appends records of metrics to a file, one JSON a line."""

    def keep(record: logging.LogRecord) -> bool:
        if isinstance(record.msg, Mapping):
            line = json.dumps({"time": time.time(), **record.msg}, default=str)
            with path.open("a", encoding="ascii") as file:
                file.write(line + "\n")
        return True

    return keep


def stand_in_for_accelerator() -> None:
    """Make the CPU the device the trainer asks for."""

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        # With check_available the trainer is about to empty the device's cache: a CPU has none.
        return None if check_available else torch.device("cpu")

    # The trainer reads autocast's device type from here and falls back to "cuda".
    torch.accelerator.current_accelerator = current_accelerator
    torch.accelerator.is_available = lambda: False  # true would pin the batches' memory
    torch.accelerator.synchronize = _nothing_to_wait_for  # called around every timed phase
    # The device every batch and the model are moved to: an integer means a GPU.
    trainer: Any = importlib.import_module("speculators.train.trainer")
    trainer.get_local_rank = lambda: torch.device("cpu")


def _nothing_to_wait_for(*_device: object) -> None:
    """A CPU's work is done when the call returns."""


def main(argv: list[str]) -> None:
    """Train with the peer's arguments."""
    torch.set_num_threads(int(os.environ["PEER_THREADS"]))
    stand_in_for_accelerator()
    config: Any = importlib.import_module("speculators.train.config")
    cli: Any = importlib.import_module("speculators.train.cli")
    set_up = cli.setup_metric_logger

    def set_up_and_listen(*arguments: object, **options: object) -> None:
        set_up(*arguments, **options)  # configures the logger anew: ours goes on after it
        lines = keep_lines(Path(os.environ["PEER_LOG"]))
        logging.getLogger("speculators.metrics").addFilter(lines)

    cli.setup_metric_logger = set_up_and_listen
    cli.main(config.TrainConfig.resolve(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
