"""Trains the EAGLE-3 head of speculators 0.9.0 on a recipe's rows and stored features.

    bash scripts/peer_venv.sh                    # once: the peer's own environment, in .peer
    python -m outrider.scripts.peer_speculators --recipe demo --output runs/peer

Its heads, runs/peer/heads/N, are then judged by `outrider eval` on the same trace as ours. Both
trainers read the same numbers; a store made by the recipe before is reused (`--store`).
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import tyro

from outrider.data.batches import Features
from outrider.data.layout import RAW, layout_of
from outrider.data.store import store_key
from outrider.data.target import Target
from outrider.eval.link import tables
from outrider.scripts.peer_format import read_offline, write_offline
from outrider.scripts.peer_trainer import PeerRun, run_peer
from outrider.train.assembly import Ground, features, lay_ground
from outrider.train.kinds import EagleRun
from outrider.train.recipe import parse


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train speculators' EAGLE-3 head on the rows of one of our recipes.

    Epochs, packing, draft vocabulary, unrolled steps and precision are the recipe's.
    """

    output: Path
    """Receives heads/N (one an epoch), result.json, log.jsonl and the features in its format."""
    peer_python: Path = Path(".peer/bin/python")
    """Interpreter of the environment that scripts/peer_venv.sh makes."""
    recipe: str = "demo"
    """Recipe file, or the name of a shipped one, whose rows and features are used."""
    store: Path | None = None
    """The recipe's stored features; by default a folder `features` beside --output."""
    threads: int | None = None
    """CPU threads; the recipe's by default."""
    epochs: int | None = None
    """Passes over the rows; the recipe's by default."""
    max_steps: int | None = None
    """Stop after so many optimiser steps."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """The peer's default is muon."""
    lr: float = 1e-3
    """Peak learning rate; the peer's default."""
    schedule: Literal["linear", "cosine"] = "linear"
    """Decay after the warm-up; the peer's default is linear."""
    unroll_decay: float = 1.0
    """Weight of each further unrolled step; the peer's default is 1, the EAGLE-3 paper's 0.8."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare, train, and print what came of it."""
    settings = tyro.cli(Settings, args=argv, prog="peer_speculators")
    try:
        run = prepare(settings)
        result = run_peer(run)
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    text = json.dumps({"run": asdict(run), "result": asdict(result)}, indent=2, default=str)
    (settings.output / "result.json").write_text(text + "\n", "ascii")
    print(text)


def prepare(settings: Settings) -> PeerRun:
    """The recipe's features in the peer's format, and the run that trains on them."""
    store = settings.store or settings.output.parent / "features"
    words = ["--recipe", settings.recipe, "--store", str(store), "--output", str(settings.output)]
    ground = lay_ground(parse(words, EagleRun), torch.device("cpu"))
    run = plan(settings, ground)
    if read_offline(run.offline) is None:
        write_peer_rows(features(ground), ground.target, run.offline, run.dtype)
    return run


def plan(settings: Settings, ground: Ground) -> PeerRun:
    """The peer's settings: the recipe's numbers, with what was asked for by hand."""
    ours = ground.settings
    if ours.head.head != "eagle3" or len(ground.layers) != 3:
        raise ValueError(
            f"recipe {settings.recipe} trains {ours.head.head} on {len(ground.layers)} layers; "
            "the peer trains eagle3 on three: choose another recipe"
        )
    if ours.data.feature_dtype not in RAW:
        raise ValueError(
            f"feature_dtype is {ours.data.feature_dtype}; the peer needs the last state, which "
            f"only {', '.join(RAW)} keep"
        )
    if ground.target.folder is None:
        raise ValueError(f"target {ground.target.name} has no folder for the peer to read")
    run = PeerRun(
        python=settings.peer_python,
        target=str(ground.target.folder),
        layers=ground.layers,
        offline=settings.output / f"offline-{origin(ground)}",
        output=settings.output,
        dtype="bfloat16" if ours.run.precision == "bf16" else "float32",
        threads=settings.threads or ours.run.threads or torch.get_num_threads(),
        epochs=settings.epochs or ours.run.epochs,
        max_steps=settings.max_steps,
        pack_size=ours.data.max_length,
        draft_vocab=ground.head.config.draft_vocab_size,
        unroll_steps=ours.num_steps,
    )
    return replace(
        run,
        optimizer=settings.optimizer,
        lr=settings.lr,
        schedule=settings.schedule,
        unroll_decay=settings.unroll_decay,
    )


def origin(ground: Ground) -> str:
    """Short hash of all that the peer's copy of the features depends on, so that none is stale."""
    data = ground.settings.data
    layout = layout_of(ground.target, ground.layers, data.feature_dtype)
    key = store_key(ground.target, ground.rows, layout)
    words = json.dumps([key, ground.settings.run.precision])
    return hashlib.sha256(words.encode()).hexdigest()[:12]


def write_peer_rows(source: Features, target: Target, folder: Path, dtype: str) -> None:
    """All rows of `source` train; the peer insists on validation and gets the last row again."""
    norm_weight_H = tables(target).norm_H
    if norm_weight_H is None:
        raise ValueError(
            f"target {target.name} has no RMS norm before its output head; the peer applies one: "
            "compare on a Llama-like target"
        )
    last = len(source) - 1
    train = (source.rows([index])[0] for index in range(len(source)))
    write_offline(train, source.rows([last]), norm_weight_H, folder, getattr(torch, dtype))


if __name__ == "__main__":
    main()
