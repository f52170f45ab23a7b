"""What made a head: settings, command, code and package versions, saved beside the weights."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outrider.train.checkpoint import write_json
from outrider.train.recipe import to_yaml
from outrider.train.settings import Settings

PACKAGES = ("outrider", "torch", "transformers", "accelerate", "safetensors", "numpy")


def write_provenance(output: Path, settings: Settings) -> None:
    """Write settings.yaml (a recipe that repeats the run) and provenance.json."""
    (output / "settings.yaml").write_text(to_yaml(settings), encoding="utf-8")
    write_json(output / "provenance.json", provenance())


def provenance() -> dict[str, Any]:
    """Command, commit, versions and machine."""
    return {
        "command": sys.argv,
        "git": git_state(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": {name: found(name) for name in PACKAGES},
    }


def git_state() -> str | None:
    """Commit of the checkout this code runs from, with a mark for local changes."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def found(name: str) -> str | None:
    """A package's version; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
