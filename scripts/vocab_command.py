"""`outrider vocab`: choose draft vocabularies, and tell what acceptance each of them can reach."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from torch import Tensor

from outrider.data.batches import Features
from outrider.data.capture import default_layers
from outrider.data.files import write_whole
from outrider.data.layout import RAW, layout_of
from outrider.data.rows import Reading, Row, read_rows
from outrider.data.states import OnlineFeatures
from outrider.data.store import FeatureStore
from outrider.data.target import Target
from outrider.eval.ceiling import MEASURES, Cost, costs, law_sums, tally
from outrider.eval.report.lines import aligned
from outrider.heads.vocab import choose
from outrider.train.vocabulary import count, safe_ids, supervised, write_vocabulary

HEADINGS = {"covered": "tokens inside", "mass": "ceiling T=1", "best": "ceiling T=0"}


@dataclass(frozen=True, kw_only=True)
class VocabSettings:
    """For which target and rows, how many tokens, and by what they are chosen."""

    target: str
    """smollm2-demo, a Hub id, or a local folder."""

    data: str
    """Rows to choose from: demo, a .jsonl, .json or .parquet file, a folder saved by datasets, or
    a Hub data set."""

    out: Path
    """Folder for report.json and one file a vocabulary, BY-SIZE.json, for --draft-vocab."""

    sizes: tuple[int, ...]
    """Tokens of the draft vocabularies, such as 8192 16384 32768."""

    by: tuple[Literal["frequency", "mass"], ...] = ("frequency",)
    """frequency counts the supervised tokens of the rows, mass adds up the target's laws there."""

    temperature: float = 1.0
    """For mass: of the target's laws; 0 counts their likeliest tokens."""

    heldout: str | None = None
    """Other rows to measure on: a vocabulary looks best on the rows it was chosen from."""

    store: str | None = None
    """Folder or URL of stored features, as outrider features and training have it; those of the
    rows are read from there or written there. int8, fp8 and int4 stores keep no last states and do
    not serve. Without it the target runs again in every pass."""

    layers: tuple[int, ...] | None = None
    """With store: the layers stored beside the last state; 2, n/2, n-3 when left out."""

    last_only: bool = False
    """With store: only the last state is stored."""

    target_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the target computes."""

    feature_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of stored features."""

    max_length: int = 2048
    """Longest row in tokens."""

    on_long: Literal["cut", "drop"] = "cut"
    """What happens to a longer row; the counts are printed."""

    max_tokens: int | None = None
    """Stop reading data once this many tokens are kept; held-out rows are read whole."""

    max_unsupervised: float = 0.1
    """Refuse data of which a larger share of rows has nothing to train on."""

    device: str = "cpu"
    """Where the target runs: cpu, cuda, cuda:1, ..."""

    seed: int = 0
    """Of the intervals' bootstrap."""

    def __post_init__(self) -> None:
        for name in ("sizes", "by"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} is {values}; name one or more, each once")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; give a number from 0 up")
        if self.last_only and self.layers is not None:
            raise ValueError("last_only is set and layers too; leave one of them out")


class Choice(NamedTuple):
    """A draft vocabulary and how it was chosen."""

    by: str
    ids_W: Tensor

    @property
    def name(self) -> str:
        """What its file is called."""
        return f"{self.by}-{len(self.ids_W)}"


def main(argv: Sequence[str] | None = None) -> None:
    """Choose, measure, write, print."""
    settings = tyro.cli(VocabSettings, args=argv, prog="outrider vocab")
    target = Target.load(settings.target, dtype=RAW[settings.target_dtype], device=settings.device)
    always = safe_ids(target.tokenizer, target.eos_ids)
    for size in settings.sizes:  # refused before anything runs
        choose(torch.zeros(target.vocab_size), size, always, target.tokenizer_size)
    rows, heldout = read(settings, target)
    source = features(settings, target, rows)
    choices = list(choose_all(settings, target, rows, source))
    found = measure(settings, target, choices, rows, source, "chosen from")
    if settings.heldout is not None:
        other = features(settings, target, heldout)
        found += measure(settings, target, choices, heldout, other, "held out")
    for choice in choices:
        about: dict[str, Any] = {"by": choice.by, "data": settings.data}
        if choice.by == "mass":
            about["temperature"] = settings.temperature
        write_vocabulary(settings.out / f"{choice.name}.json", choice.ids_W, target, about)
    report = {
        "target": {"name": target.name, "hash": target.fingerprint()},
        "settings": {key: str(value) for key, value in asdict(settings).items()},
        "results": found,
    }
    write_whole(settings.out / "report.json", json.dumps(report, indent=1) + "\n")
    print(table(found))
    print(f"{settings.out}: report.json, {', '.join(f'{choice.name}.json' for choice in choices)}")


def read(settings: VocabSettings, target: Target) -> tuple[list[Row], list[Row]]:
    """The rows to choose from and the held-out ones, none of which may be among the former."""
    reading = Reading(
        max_length=settings.max_length,
        policy=settings.on_long,
        limit_tokens=settings.max_tokens,
        max_unsupervised=settings.max_unsupervised,
    )
    rows, counts = read_rows(settings.data, target, reading)
    print(counts)
    if settings.heldout is None:
        return rows, []
    whole = Reading(max_length=settings.max_length, policy=settings.on_long)
    heldout, counts = read_rows(settings.heldout, target, whole)
    print(f"held out, {counts}")
    known = {row.ids.numpy().tobytes(): row.row_id for row in rows}
    for row in heldout:
        if (twin := known.get(row.ids.numpy().tobytes())) is not None:
            raise ValueError(
                f"held-out row {row.row_id} is also row {twin} of the data; remove it from one of "
                "the two, or the held-out figures measure memory"
            )
    return rows, heldout


def features(settings: VocabSettings, target: Target, rows: Sequence[Row]) -> Features:
    """The rows' last states: stored, or computed in every pass."""
    if settings.store is None:
        return OnlineFeatures(target, rows, layers=())
    layers = settings.layers
    if layers is None:
        layers = () if settings.last_only else default_layers(target.num_layers)
    layout = layout_of(target, layers, settings.feature_dtype)
    return FeatureStore.build_or_open(target, rows, layout=layout, root=settings.store)


def choose_all(
    settings: VocabSettings, target: Target, rows: Sequence[Row], source: Features
) -> Iterator[Choice]:
    """Every size by every way of choosing."""
    always = safe_ids(target.tokenizer, target.eos_ids)
    for by in settings.by:
        if by == "frequency":
            scores_V = count(supervised(rows), target.vocab_size)
        else:
            scores_V = law_sums(target, source, settings.temperature)
        for size in settings.sizes:
            yield Choice(by, choose(scores_V, size, always, target.tokenizer_size))


def measure(
    settings: VocabSettings,
    target: Target,
    choices: Sequence[Choice],
    rows: Sequence[Row],
    source: Features,
    name: str,
) -> list[dict[str, Any]]:
    """What each vocabulary covers of these rows, by kind of content; ready for JSON."""
    sums = tally(target, source, [choice.ids_W for choice in choices], title=name)
    kinds = [row.kind for row in rows]
    return [
        {"by": choice.by, "size": len(choice.ids_W), "rows_of": name, **plain(cost)}
        for index, choice in enumerate(choices)
        for cost in costs(sums, kinds, index, seed=settings.seed)
    ]


def plain(cost: Cost) -> dict[str, Any]:
    """A cost as JSON has it."""
    shares = {name: getattr(cost, name)._asdict() for name in MEASURES}
    return {"kind": cost.kind, "rows": cost.rows, "positions": cost.positions, **shares}


def table(found: Sequence[dict[str, Any]]) -> str:
    """A line for each set of rows, way of choosing, kind of content and size."""
    lines = [("rows", "chosen by", "kind", "size", *HEADINGS.values())]
    order = sorted(found, key=lambda one: (one["rows_of"], one["kind"] != "all", one["kind"]))
    for one in order:
        shares = [
            f"{one[name]['value']:.4f} [{one[name]['low']:.4f}, {one[name]['high']:.4f}]"
            for name in HEADINGS
        ]
        lines.append((one["rows_of"], one["by"], one["kind"], str(one["size"]), *shares))
    return "\n".join(aligned(lines))
