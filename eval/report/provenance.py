"""What a figure was measured on (versions, machine, threads, commit), in JSON that all read."""

import importlib.metadata
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from outrider.data.files import sha256_of

_PACKAGES = ("outrider", "torch", "transformers", "accelerate", "safetensors", "scipy", "numpy")


def provenance() -> dict[str, Any]:
    """Everything about here and now that a figure may depend on."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "commit": commit(Path(__file__).parent),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }


def plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Figures that JSON can hold: a NaN (nothing to divide) becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def commit(folder: Path) -> str | None:
    """Commit of the checkout around a folder, marked when files differ; None outside one."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of a head's files, shortened, by name."""
    found = sorted([*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.bin")])
    return {path.name: sha256_of(path)[:16] for path in found}


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
