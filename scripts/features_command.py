"""`outrider features`: compute and store the frozen target's features ahead of training."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from torch import Tensor

from outrider.data.capture import default_layers
from outrider.data.choices import TOP_K
from outrider.data.hidden_files import FileStates
from outrider.data.layout import RAW, Layout, layout_of
from outrider.data.options import parse_options
from outrider.data.rows import Reading, Row, read_rows
from outrider.data.store import FeatureStore, store_bytes
from outrider.data.target import Target
from outrider.train.vocabulary import draft_vocabulary, likely_vocabulary, read_vocabulary


@dataclass(frozen=True, kw_only=True)
class FeaturesSettings:
    """Which rows of which target to store, and where; training with the same ones finds them."""

    data: str
    """demo, a .jsonl, .json or .parquet file, a folder of those or saved by datasets, a Hub data
    set, or several mixed by weight: a.jsonl=0.7,b.parquet=0.3."""

    target: str
    """smollm2-demo, a Hub id, or a local folder."""

    out: str
    """Folder of stored features, or a URL that fsspec opens: what training calls its store."""

    layers: tuple[int, ...] | None = None
    """Decoder layers whose inputs are stored (0-based); 2, n/2, n-3 when left out."""

    last_only: bool = False
    """Store only the state after the final norm, as EAGLE-1 needs it."""

    target_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the target computes."""

    feature_dtype: Literal["bfloat16", "float16", "float32", "int8", "fp8", "int4"] = "bfloat16"
    """How features are stored: bfloat16, float16 and float32 keep the last state; int8, fp8 and
    int4 take at most 0.42, 0.42 and 0.25 times the bytes, and keep likely tokens instead."""

    top_k: int = TOP_K
    """int8, fp8, int4: likeliest tokens kept of the target's law before a supervised token."""

    draft_vocab: int | str | None = None
    """int8, fp8, int4: keep laws over the draft vocabulary of this size that training will choose,
    or of this file by outrider vocab; over all of the target's tokens (training's --teacher-over
    target) when left out."""

    draft_vocab_by: Literal["frequency", "mass"] = "frequency"
    """How training will choose it: by supervised frequency, or by the target's probability."""

    hidden_states: str | None = None
    """Folder of hidden states that vLLM extracted, or speculators' hs_*.safetensors: these are
    stored instead of states that the target computes here."""

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
        if self.draft_vocab is not None and self.feature_dtype in RAW:
            raise ValueError(
                f"draft_vocab is {self.draft_vocab} with feature_dtype {self.feature_dtype}, which "
                "keeps no laws; leave it out, or store int8, fp8 or int4"
            )
        if self.draft_vocab_by == "mass" and self.draft_vocab is None:
            raise ValueError("draft_vocab_by is 'mass' without draft_vocab; give it a size")
        if self.max_gigabytes is not None and self.max_gigabytes <= 0:
            raise ValueError(f"max_gigabytes is {self.max_gigabytes}; give a positive number")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the counts and the size, then build the store as far as it is missing."""
    settings = tyro.cli(FeaturesSettings, args=argv, prog="outrider features")
    reading = Reading(
        max_length=settings.max_length,
        policy=settings.on_long,
        limit_tokens=settings.max_tokens,
        max_unsupervised=settings.max_unsupervised,
        template_options=parse_options(settings.template_options),
        workers=settings.workers,
        cache=rows_folder(settings),
    )
    target = Target.load(settings.target, dtype=RAW[settings.target_dtype], device=settings.device)
    layers = settings.layers
    if layers is None:
        layers = () if settings.last_only else default_layers(target.num_layers)
    rows, counts = read_rows(settings.data, target, reading)
    print(counts)
    if settings.row_report is not None:
        counts.write(settings.row_report)
    layout = layout_of(
        target,
        layers,
        settings.feature_dtype,
        top_k=settings.top_k,
        draft_ids_W=draft_ids(settings, target, rows),
    )
    print(summary(settings, rows, layout))
    if settings.plan:
        return
    budget, states = settings.max_gigabytes, None
    if settings.hidden_states is not None:
        states = FileStates(settings.hidden_states, target, layers, rows)
    store = FeatureStore.build_or_open(
        target,
        rows,
        layout=layout,
        root=settings.out,
        states=states,
        max_bytes=None if budget is None else int(budget * 1e9),
    )
    print(f"{len(store)} rows in {store.folder.name}")


def rows_folder(settings: FeaturesSettings) -> Path | None:
    """Where the rows are kept that were read: nowhere when only planning or storing in a cloud."""
    return None if settings.plan or "://" in settings.out else Path(settings.out) / "rows"


def draft_ids(settings: FeaturesSettings, target: Target, rows: Sequence[Row]) -> Tensor | None:
    """The draft vocabulary that training over the same rows has; None for the whole one."""
    if settings.draft_vocab is None:
        return None
    if isinstance(settings.draft_vocab, str):
        return read_vocabulary(settings.draft_vocab, target)
    size, kept = settings.draft_vocab, rows_folder(settings)
    if settings.draft_vocab_by == "mass" and not settings.plan:
        folder = kept.parent / "vocabularies" if kept is not None else None
        chosen = likely_vocabulary(target, rows, size, folder).draft_ids_W
    else:
        chosen = draft_vocabulary(target, rows, size).draft_ids_W
    return chosen[chosen < target.tokenizer_size]


def summary(settings: FeaturesSettings, rows: Sequence[Row], layout: Layout) -> str:
    """What is stored and how much of it, in one line."""
    size, tokens = store_bytes(rows, layout), sum(len(row) for row in rows)
    is_raw = settings.feature_dtype in RAW
    what = "the last state" if is_raw else f"laws of {settings.top_k} tokens"
    return (
        f"features of layers {layout.layers or '(none)'} and {what}: {size / 1e9:.3f} GB, "
        f"{size / tokens:,.0f} bytes a token"
    )
