"""Checkpoints that continue bit for bit: written whole or not at all, checked before use.

checkpoints/step-N holds head.safetensors (weights and vocabulary map), optimizer.pt,
schedule.json, ema.safetensors where weights are averaged, and state.json (position, settings, sizes
of the other files). Random numbers need no state: each step seeds its own from (seed, step, rank).
"""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from outrider.data.files import write_whole
from outrider.train.ema import WeightAverage

T = TypeVar("T")

FILES = {
    "head": "head.safetensors",
    "optimizer": "optimizer.pt",
    "schedule": "schedule.json",
    "average": "ema.safetensors",
}
WAIVABLE = ("optimizer", "schedule")


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands: steps done, and the next micro-batch."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    tokens: int = 0
    best_step: int | None = None
    best_score: float | None = None


@dataclass(frozen=True, kw_only=True)
class Stateful:
    """The live objects that a checkpoint captures and restores."""

    head: nn.Module
    optimizers: list[Optimizer]
    average: WeightAverage | None = None
    world: int = 1


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What a continuation must agree on, field by field."""

    settings: dict[str, Any]
    schedule: dict[str, Any]
    data: dict[str, Any]


def latest(output: Path) -> Path | None:
    """The newest whole checkpoint of a run folder."""
    found = [(step_of(path), path) for path in (output / "checkpoints").glob("step-*")]
    return max(found)[1] if found else None


def step_of(folder: Path) -> int:
    """The optimiser step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step-"))


def save(output: Path, position: Position, live: Stateful, claims: Claims) -> Path:
    """Write checkpoints/step-N through a temporary folder; the main process calls this.

    Raises OSError, and leaves nothing behind, where the disk has no room for it.
    """
    final = output / "checkpoints" / f"step-{position.step:08d}"
    draft = final.with_name(f".writing-{final.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    weights = {name: value.detach().cpu() for name, value in live.head.state_dict().items()}
    tensors = {name: value.contiguous() for name, value in weights.items()}
    stored: dict[str, Tensor] | None = None
    if live.average is not None:
        stored = {name: value.cpu() for name, value in live.average.average.items()}
    try:
        save_file(tensors, draft / FILES["head"])
        torch.save([item.state_dict() for item in live.optimizers], draft / FILES["optimizer"])
        if stored is not None:
            save_file(stored, draft / FILES["average"])
        write_json(draft / FILES["schedule"], claims.schedule | {"step": position.step})
        sizes = {path.name: path.stat().st_size for path in sorted(draft.iterdir())}
        state = {"position": asdict(position), "world": live.world, "files": sizes}
        write_json(draft / "state.json", state | asdict(claims))
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError
        shutil.rmtree(draft, ignore_errors=True)
        raise OSError(
            f"checkpoint {final} cannot be written: {error}; free some space, or keep fewer "
            "(--keep-last), and run the same command again: it goes on from the last whole one"
        ) from error
    replace_folder(draft, final)
    return final


def restore(folder: Path, live: Stateful, claims: Claims, waive: Iterable[str] = ()) -> Position:
    """Put a checkpoint's state into the live objects; refuse whatever does not fit."""
    state = read_state(folder)
    check_claims(folder, state, claims)
    waived = set(waive)
    if state["world"] != live.world:
        raise ValueError(
            f"checkpoint {folder} was written by {state['world']} processes and this run has "
            f"{live.world}; launch as many, or start over in another --output"
        )
    check_files(folder, state, waived)
    live.head.load_state_dict(load_weights(folder, live.head))
    if live.average is not None:
        live.average.load(whole(folder, "average", load_file))
    if "optimizer" not in waived:
        stored = whole(folder, "optimizer", lambda path: torch.load(path, weights_only=True))
        for optimizer, values in zip(live.optimizers, stored, strict=True):
            optimizer.load_state_dict(values)
    position = Position(**state["position"])
    if "schedule" not in waived:
        check_schedule(folder, position, claims)
    return position


def read_state(folder: Path) -> dict[str, Any]:
    """The checkpoint's state.json."""
    path = folder / "state.json"
    if not path.is_file():
        raise ValueError(f"checkpoint {folder} lacks state.json; delete the folder to go back one")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"checkpoint {folder}: state.json is damaged ({error}); delete the folder to go back "
            "to the checkpoint before"
        ) from error


def whole(folder: Path, piece: str, read: Callable[[Path], T]) -> T:
    """Read one file of a checkpoint; damage is an error that names it."""
    try:
        return read(folder / FILES[piece])
    except Exception as error:  # whatever pickle, zip, safetensors or json raise
        raise ValueError(
            f"checkpoint {folder}: {FILES[piece]} (the {piece}) is damaged ({error}); delete "
            "the folder to go back to the checkpoint before"
        ) from error


def check_claims(folder: Path, state: dict[str, Any], claims: Claims) -> None:
    """Refuse a continuation whose settings or rows differ, naming the first difference."""
    for part, now in (("settings", claims.settings), ("data", claims.data)):
        before = state[part]
        for name in sorted(before.keys() | now.keys()):
            old, new = plain(before.get(name)), plain(now.get(name))
            if old != new:
                raise ValueError(
                    f"{name} is {new!r}, but the run in {folder.parent.parent} was started with "
                    f"{old!r}; give the old value to continue it, or another --output to start over"
                )


def check_files(folder: Path, state: dict[str, Any], waived: set[str]) -> None:
    """Refuse missing or cut files unless their piece is waived by name."""
    for name, size in state["files"].items():
        piece = next(piece for piece, file in FILES.items() if file == name)
        path = folder / name
        if piece in waived:
            continue
        if not path.is_file() or path.stat().st_size != size:
            fault = "lacks" if not path.is_file() else "holds a cut"
            remedy = "put it back or delete the folder to go back to the checkpoint before"
            if piece in WAIVABLE:
                remedy += f", or go on without it by --waive {piece}"
            raise ValueError(f"checkpoint {folder} {fault} {name} (the {piece}); {remedy}")


def check_schedule(folder: Path, position: Position, claims: Claims) -> None:
    """Refuse a schedule file that tells of another course."""
    stored = whole(folder, "schedule", lambda path: json.loads(path.read_text(encoding="utf-8")))
    wanted = claims.schedule | {"step": position.step}
    for name, value in wanted.items():
        if plain(stored.get(name)) != plain(value):
            raise ValueError(
                f"schedule {name} is {value!r} now and {stored.get(name)!r} in {folder}; continue "
                "with the same data and schedule, or choose another --output"
            )


def load_weights(folder: Path, head: nn.Module) -> dict[str, Tensor]:
    """The head's tensors, with names and shapes compared both ways."""
    stored = whole(folder, "head", load_file)
    wanted = head.state_dict()
    for name in sorted(stored.keys() ^ wanted.keys()):
        where = "the checkpoint" if name in wanted else "this head"
        raise ValueError(f"tensor {name} is missing from {where} ({folder})")
    return stored


def prune(output: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what a killed writer left."""
    folder = output / "checkpoints"
    for path in sorted(folder.glob("step-*"), key=step_of)[:-keep]:
        shutil.rmtree(path)
    for path in folder.glob(".*-step-*"):
        shutil.rmtree(path)


def replace_folder(draft: Path, final: Path) -> None:
    """Move `draft` to `final`; a folder that was there survives until the new one stands."""
    old = final.with_name(f".old-{final.name}")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.replace(old)
    draft.replace(final)
    shutil.rmtree(old, ignore_errors=True)


def copy_folder(source: Path, final: Path) -> None:
    """Copy a folder to `final` as replace_folder moves one."""
    draft = final.with_name(f".writing-{final.name}")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(source, draft)
    replace_folder(draft, final)


def recover_folder(final: Path) -> None:
    """Bring back the old folder when a kill fell between the two moves of replace_folder."""
    old = final.with_name(f".old-{final.name}")
    if old.exists() and not final.exists():
        old.replace(final)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON file in one step."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def plain(value: object) -> object:
    """A value as JSON gives it back (tuples become lists)."""
    return json.loads(json.dumps(value))
