"""Runs of one recipe that a script trains and compares: what they share, and each trained once."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.data.files import write_whole


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """What all runs of a comparison share."""

    output: Path
    """Receives a folder a run, and what the script writes."""
    recipe: str = "demo"
    """What all runs share."""
    target: str = "smollm2-demo"
    """The target, a folder or Hub id."""
    data: str = "demo"
    """Rows to train on."""
    heldout: str = "demo:heldout"
    """The target's answers that judge all heads."""
    max_tokens: int = 280_000
    """Tokens of the rows to use."""
    epochs: int = 1
    threads: int = 1
    """CPU threads."""
    store: Path | None = None
    """Stored features; by default a folder `features` in --output."""

    def command(self, name: str, **changes: object) -> list[str]:
        """Flags of outrider.train.eagle for the run of this name.

        `changes` are flags, with underscores, that this run has instead or besides.
        """
        shared: dict[str, Any] = {
            "recipe": self.recipe,
            "target": self.target,
            "data": self.data,
            "heldout": self.heldout,
            "max_tokens": self.max_tokens,
            "epochs": self.epochs,
            "threads": self.threads,
        }
        places = {"store": self.store or self.output / "features", "output": self.output / name}
        return words({**shared, **changes, **places})


def words(flags: Mapping[str, object]) -> list[str]:
    """Flags as a command line has them."""
    pairs = ((f"--{key.replace('_', '-')}", str(value)) for key, value in flags.items())
    return [word for pair in pairs for word in pair]


def train(folder: Path, flags: Sequence[str]) -> None:
    """Train one EAGLE run, or go on with it; the very same run is not begun again once done."""
    done = folder / "done.json"
    if done.is_file() and json.loads(done.read_text(encoding="utf-8")) == [*flags]:
        print(f"{folder.name}: done already in {folder}", flush=True)
        return
    command = [sys.executable, "-m", "outrider.train.eagle", *flags]
    print(shlex.join(command), flush=True)
    ended = subprocess.run(command, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)
    write_whole(done, json.dumps([*flags]) + "\n")
