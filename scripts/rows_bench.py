"""How fast rows are rendered, tokenised and masked: the demo's conversations, as messages.

python -m outrider.scripts.rows_bench --rows 6000 --workers 1 2
"""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import torch
import tyro

from outrider.data.rows import Reading, read_rows
from outrider.data.sources import records
from outrider.data.target import Target


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to read, and how often."""

    target: str = "smollm2-demo"
    """Whose tokenizer and template: smollm2-demo, a Hub id, or a local folder."""

    rows: int = 6000
    """Rows to read; the demo's 3,120 are repeated as often as that takes."""

    workers: tuple[int, ...] = (1, 2)
    """Numbers of processes to compare; the rows must be the same for all."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print rows a minute for each number of workers, and from the cache."""
    settings = tyro.cli(Settings, args=argv, prog="rows_bench")
    target = Target.load(settings.target)
    talks = [row["messages"] for row in records("demo") if not isinstance(row, str)]
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "rows.jsonl"
        with data.open("w", encoding="utf-8") as file:
            for talk in islice(cycle(talks), settings.rows):
                file.write(json.dumps({"messages": talk}) + "\n")
        first = None
        for workers in settings.workers:
            reading = Reading(workers=workers)
            begun, used = time.perf_counter(), time.process_time()
            found = read_rows(str(data), target, reading)
            seconds, busy = time.perf_counter() - begun, time.process_time() - used
            line = f"workers {workers}: {60 * settings.rows / seconds:,.0f} rows a minute"
            if workers == 1:  # on a busy machine, what one core would do
                line += f" ({60 * settings.rows / busy:,.0f} a minute of processor time)"
            print(line)
            first = first or found
            assert found.counts == first.counts
            for ours, theirs in zip(found.rows, first.rows, strict=True):
                assert torch.equal(ours.ids, theirs.ids)
                assert torch.equal(ours.mask, theirs.mask)
        cached = Reading(cache=Path(name) / "cache")
        read_rows(str(data), target, cached)
        begun = time.perf_counter()
        read_rows(str(data), target, cached)
        print(f"from the cache: {60 * settings.rows / (time.perf_counter() - begun):,.0f} a minute")


if __name__ == "__main__":
    main()
