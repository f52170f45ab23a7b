"""Where rows come from: the demo's file, JSON lines, parquet, saved datasets, the Hub."""

import gzip
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

DEMO_FILES = {"demo": "train.jsonl.xz", "demo:heldout": "heldout.jsonl.xz"}
_OPENERS = {".xz": lzma.open, ".gz": gzip.open}

Record = Mapping[str, Any]


def records(source: str) -> Iterator[Record | str]:
    """The rows of a source as mappings; a line that is not a JSON object comes as a message.

    `demo`, `demo:heldout`, a .jsonl file (plain, .gz, .xz), a .json or .parquet file, a folder
    written by `datasets`, or a Hub data set as owner/name or owner/name:split.
    """
    if source in DEMO_FILES:
        packed = files("outrider.data.demo").joinpath(DEMO_FILES[source])
        with packed.open("rb") as raw, lzma.open(raw) as file:
            yield from _lines(file)
        return
    path = Path(source).expanduser()
    if path.is_file() and ".jsonl" in path.suffixes[-2:]:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            try:
                yield from _lines(file)
            except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                raise ValueError(_damaged(path, error)) from error
        return
    yield from _through_datasets(source, path)


def _lines(file: Iterable[bytes]) -> Iterator[Record | str]:
    for line in file:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            yield f"not JSON: {error}"
            continue
        yield record if isinstance(record, dict) else "not a JSON object"


def _damaged(path: Path, error: BaseException) -> str:
    return f"data {str(path)!r} cannot be read to its end ({error}); write the file again"


def _through_datasets(source: str, path: Path) -> Iterator[Record]:
    import datasets  # slow to import, and most sources do without

    name, _, split = source.partition(":")
    if path.suffix in (".jsonl", ".json", ".parquet", ".gz", ".xz") and not path.is_file():
        raise ValueError(f"data {source!r}: there is no such file; check the spelling")
    if path.is_file() and path.suffix in (".json", ".parquet"):
        try:
            loaded = datasets.load_dataset(path.suffix[1:], data_files=str(path), split="train")
        except Exception as error:  # whatever datasets, pyarrow or json raise
            raise ValueError(_damaged(path, error.__cause__ or error)) from error
    elif Path(name).is_dir():
        loaded = datasets.load_from_disk(name)
        if isinstance(loaded, datasets.DatasetDict):
            loaded = loaded[split or "train"]
    elif name.count("/") == 1 and not Path(name).is_absolute() and not name.startswith("."):
        loaded = datasets.load_dataset(name, split=split or "train", streaming=True)
    else:
        raise ValueError(
            f"data {source!r} is neither 'demo', 'demo:heldout', an existing .jsonl (.gz, .xz), "
            f".json or .parquet file, a folder saved by datasets, nor a Hub data set (owner/name, "
            f"owner/name:split); check the spelling"
        )
    for record in loaded:  # columns that a row lacks come as None
        yield {key: value for key, value in dict(record).items() if value is not None}
