"""`outrider prepare`: compute and store the frozen target's features ahead of training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

from outrider.data.options import parse_options
from outrider.data.rows import Reading, read_rows
from outrider.data.store import FeatureStore, store_bytes
from outrider.data.target import Target, default_layers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """Which rows of which target to store, and where; training with the same ones finds them."""

    data: str
    """demo, a .jsonl, .json or .parquet file, a folder of those or saved by datasets, a Hub data
    set, or several mixed by weight: a.jsonl=0.7,b.parquet=0.3."""

    target: str
    """smollm2-demo, a Hub id, or a local folder."""

    out: Path
    """Folder of stored features: what training calls its store."""

    layers: tuple[int, ...] | None = None
    """Decoder layers whose inputs are stored (0-based); 2, n/2, n-3 when left out."""

    last_only: bool = False
    """Store only the state after the final norm, as EAGLE-1 needs it."""

    target_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the target computes."""

    feature_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of the stored features."""

    max_length: int = 2048
    """Longest row in tokens."""

    on_long: Literal["cut", "drop"] = "cut"
    """What happens to a longer row; the counts are printed."""

    max_tokens: int | None = None
    """Stop reading once this many tokens are kept."""

    max_unsupervised: float = 0.1
    """Refuse data of which a larger share of rows has nothing to train on."""

    template_options: tuple[str, ...] = ()
    """Mode of the chat template, as enable_thinking=false."""

    workers: int = 1
    """Processes that render and tokenise rows; any number gives the same rows."""

    row_report: Path | None = None
    """Write what became of every row, with the reason, to this file of JSON lines."""

    max_gigabytes: float | None = None
    """Refuse to store more than this."""

    device: str = "cpu"
    """Where the target runs: cpu, cuda, cuda:1, ..."""

    plan: bool = False
    """Print counts and the size, then stop."""

    def __post_init__(self) -> None:
        if self.last_only and self.layers is not None:
            raise ValueError("last_only is set and layers too; leave one of them out")
        if self.max_gigabytes is not None and self.max_gigabytes <= 0:
            raise ValueError(f"max_gigabytes is {self.max_gigabytes}; give a positive number")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the counts and the size, then build the store as far as it is missing."""
    settings = tyro.cli(PrepareSettings, args=argv, prog="outrider prepare")
    reading = Reading(
        max_length=settings.max_length,
        policy=settings.on_long,
        limit_tokens=settings.max_tokens,
        max_unsupervised=settings.max_unsupervised,
        template_options=parse_options(settings.template_options),
        workers=settings.workers,
        cache=None if settings.plan else settings.out / "rows",
    )
    target = Target.load(
        settings.target, dtype=DTYPES[settings.target_dtype], device=settings.device
    )
    layers = settings.layers
    if layers is None:
        layers = () if settings.last_only else default_layers(target.num_layers)
    dtype = DTYPES[settings.feature_dtype]
    rows, counts = read_rows(settings.data, target, reading)
    print(counts)
    if settings.row_report is not None:
        counts.write(settings.row_report)
    size = store_bytes(target, rows, layers, dtype)
    print(f"features of layers {layers or '(none)'} and the last state: {size / 1e9:.3f} GB")
    if settings.plan:
        return
    budget = settings.max_gigabytes
    store = FeatureStore.build_or_open(
        target,
        rows,
        layers=layers,
        dtype=dtype,
        root=settings.out,
        max_bytes=None if budget is None else int(budget * 1e9),
    )
    print(f"{len(store)} rows in {store.folder}")
