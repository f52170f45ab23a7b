"""A head's folder on disk: config.json and model.safetensors, replaced whole and checked by key."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
OTHER_WEIGHTS = ("medusa_lm_head.safetensors",)
"""What other makers call their file of weights."""


class Folder(NamedTuple):
    """A head as read: nothing is interpreted yet."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a head so that no reader ever sees half of one.

    The new folder is complete before it takes the old one's place; a kill between the two renames
    leaves the old one beside it, and the next write or read puts it back. Raises OSError, and
    leaves the old one, where the disk has no room.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _recover(folder)
    fresh = folder.with_name(f".{folder.name}.new-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, fresh / WEIGHTS, metadata={"format": "pt"})
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in (WEIGHTS, CONFIG):
            with (fresh / name).open("rb") as file:
                os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise OSError(
            f"head {folder} cannot be written: {error}; free some space and run the same command "
            "again"
        ) from error
    old = _old(folder)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def read_folder(folder: Path) -> Folder:
    """Read config and tensors; a folder in another container format is refused."""
    _recover(folder)
    others = [folder / name for name in OTHER_WEIGHTS if (folder / name).is_file()]
    weights = others[0] if others else folder / WEIGHTS
    missing = [path.name for path in (folder / CONFIG, weights) if not path.is_file()]
    if missing:
        found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else "no folder"
        raise ValueError(
            f"{folder} lacks {' and '.join(missing)} (found {found}); give a folder with "
            "config.json and model.safetensors, and convert pickled .bin weights first"
        )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{folder / CONFIG} is damaged ({error}); fetch or train the head again"
        ) from error
    try:
        return Folder(config, load_file(weights))
    except SafetensorError as error:
        raise ValueError(f"{weights} is damaged ({error}); fetch or train it again") from error


def check_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> None:
    """Refuse unless names, shapes and kinds of number agree both ways, listing every fault."""
    faults = [
        f"missing {name} {list(wanted[name].shape)}" for name in sorted(wanted.keys() - found)
    ]
    faults += [f"unexpected {name}" for name in sorted(found.keys() - wanted)]
    for name in sorted(found.keys() & wanted):
        have, want = found[name], wanted[name]
        if have.shape != want.shape:
            faults.append(f"{name} is {list(have.shape)}, not {list(want.shape)}")
        elif not _same_kind(have.dtype, want.dtype):
            faults.append(f"{name} is {have.dtype}, not {want.dtype}")
    if faults:
        raise ValueError(
            f"{where} does not hold the head its config describes: {'; '.join(faults)}; "
            "nothing is filled in at random, so export or download it again"
        )


def check_unedited(values: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
    """Refuse a config.json whose engine keys are not those that its outrider block leads to."""
    skipped = ("dtype", "torch_dtype", "outrider")
    faults = [
        f"{key} is {values.get(key)!r}, not {engine[key]!r}"
        for key in engine
        if key not in skipped and values.get(key) != engine[key]
    ]
    if faults:
        raise ValueError(
            f"config.json was edited: {'; '.join(faults)}; its outrider block describes another "
            "head, so change both or export again"
        )


def floats_in(dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, those of floats in this dtype."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _same_kind(have: torch.dtype, want: torch.dtype) -> bool:
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return have == want or (have in floats and want in floats)


def _old(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _recover(folder: Path) -> None:
    old = _old(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    elif old.exists():
        shutil.rmtree(old)
