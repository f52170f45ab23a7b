"""Where rows come from: the demo's file, JSON lines, JSON, parquet, folders, the Hub."""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from outrider.data.files import sha256_of

DEMO_FILES = {"demo": "train.jsonl.xz", "demo:heldout": "heldout.jsonl.xz"}
FILES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".json", ".parquet")
# What `outrider generate` keeps beside its rows.
NOT_ROWS = (".partial.jsonl", ".manifest.json")
BOM = b"\xef\xbb\xbf"
"""The byte order mark that some editors put before UTF-8."""
ROW_FIELDS = (
    *("messages", "conversations", "conversation", "prompt", "completion", "text"),
    *("input_ids", "prompt_ids"),
)
"""An object with one of these is a row, though it may hold a list of objects."""
_OPENERS = {".xz": lzma.open, ".gz": gzip.open}

Record = Mapping[str, Any]


def records(source: str) -> Iterator[Record | str]:
    """The rows of a source as mappings; a line that is not a JSON object comes as a message.

    `demo`, `demo:heldout`, a .jsonl file (plain, .gz, .xz), a .json or .parquet file, a folder of
    such files or one written by `datasets` (FOLDER:SPLIT), or a Hub data set, which is streamed:
    OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT.
    """
    path = Path(source).expanduser()
    if source in DEMO_FILES:
        packed = files("outrider.data.demo").joinpath(DEMO_FILES[source])
        with packed.open("rb") as raw, lzma.open(raw) as file:
            yield from _lines(file)
    elif path.is_file() and path.name.endswith(FILES):
        yield from _from_file(path)
    elif path.is_dir() and not _is_saved(path):
        for one in _files_in(path):
            yield from _from_file(one)
    else:
        yield from _through_datasets(source)


def source_digest(source: str) -> str | None:
    """A hash of all bytes that `records` reads; None where they are not on this machine."""
    path = Path(source).expanduser()
    if source in DEMO_FILES:
        packed = files("outrider.data.demo").joinpath(DEMO_FILES[source])
        return hashlib.sha256(packed.read_bytes()).hexdigest()
    if path.is_file():
        return sha256_of(path)
    folder = Path(source.partition(":")[0]).expanduser()
    if not folder.is_dir():
        return None
    digest = hashlib.sha256(source.encode())
    for one in sorted(each for each in folder.rglob("*") if each.is_file()):
        digest.update(f"\n{one.relative_to(folder)} {sha256_of(one)}".encode())
    return digest.hexdigest()


def _from_file(path: Path) -> Iterator[Record | str]:
    if path.name.endswith(".parquet"):
        yield from _parquet(path)
        return
    try:
        if path.name.endswith(".json"):
            yield from _json_file(path)
            return
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            yield from _lines(file)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(_damaged(path, error)) from error


def _lines(file: Iterable[bytes]) -> Iterator[Record | str]:
    for line in file:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield f"not JSON: {error}"
            continue
        yield _object(record)


def _json_file(path: Path) -> Iterator[Record | str]:
    """A list of objects, an object that holds one, or one object a line as many name .json too."""
    raw = path.read_bytes().removeprefix(BOM)
    is_list = raw.lstrip().startswith(b"[")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        if is_list:
            raise ValueError(_damaged(path, error)) from error
        yield from _lines(raw.splitlines())
        return
    yield from map(_object, found if is_list else _held(found, path))


def _held(found: object, path: Path) -> list[Any]:
    """The rows of a file that is one JSON value: itself where it is a row, else its one list."""
    if not isinstance(found, dict) or any(name in found for name in ROW_FIELDS):
        return [found]
    lists = {
        key: value
        for key, value in found.items()
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
    }
    if len(lists) != 1:
        raise ValueError(
            f"data {str(path)!r} is one object with fields {sorted(found)[:12]}, of which "
            f"{len(lists)} hold a list of objects; give a list of rows, an object with one such "
            "list, or one row a line"
        )
    return next(iter(lists.values()))


def _object(found: object) -> Record | str:
    return found if isinstance(found, dict) else "not a JSON object"


def _parquet(path: Path) -> Iterator[Record]:
    import datasets  # slow to import, and most sources do without

    try:
        loaded = datasets.load_dataset(
            "parquet", data_files=str(path), split="train", streaming=True
        )
        yield from map(_without_nones, loaded)
    except Exception as error:  # whatever datasets or pyarrow raise
        raise ValueError(_damaged(path, error.__cause__ or error)) from error


def _damaged(path: Path, error: BaseException) -> str:
    return f"data {str(path)!r} cannot be read to its end ({error}); write the file again"


def _is_saved(folder: Path) -> bool:
    """Whether `datasets` wrote the folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _files_in(folder: Path) -> list[Path]:
    named = sorted(path for path in folder.iterdir() if path.name.endswith(FILES))
    found = [path for path in named if not path.name.endswith(NOT_ROWS)]
    if not found:
        raise ValueError(
            f"data {str(folder)!r} is a folder with none of {', '.join(FILES)} in it, and not one "
            "that datasets saved; name the file or another folder"
        )
    return found


def _through_datasets(source: str) -> Iterator[Record]:
    import datasets

    name, *rest = source.split(":")
    split = rest[-1] if rest else None
    folder = Path(name).expanduser()
    if name.endswith((*FILES, ".gz", ".xz")):
        raise ValueError(f"data {source!r}: there is no such file; check the spelling")
    if folder.is_dir() and _is_saved(folder):
        loaded = datasets.load_from_disk(str(folder))
        if isinstance(loaded, datasets.DatasetDict):
            _check_split(source, split or "train", list(map(str, loaded)))
            loaded = loaded[split or "train"]
    elif name.count("/") == 1 and not folder.is_absolute() and not name.startswith("."):
        loaded = _from_hub(source, name, rest)
    else:
        raise ValueError(
            f"data {source!r} is neither 'demo', 'demo:heldout', an existing .jsonl (.gz, .xz), "
            f".json or .parquet file, a folder of those or one saved by datasets, nor a Hub data "
            f"set (owner/name, owner/name:split); check the spelling"
        )
    for record in loaded:
        yield _without_nones(record)


def _check_split(source: str, split: str, found: list[str]) -> None:
    if split not in found:
        raise ValueError(
            f"data {source!r} has no split {split!r}; it has {', '.join(found)}: name one after a "
            "colon"
        )


def _from_hub(source: str, name: str, rest: list[str]) -> Iterable[Any]:
    import datasets

    config = rest[0] if len(rest) > 1 else None
    split = rest[-1] if rest else "train"
    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # network, names, configs: datasets has many words for it
        raise ValueError(
            f"data {source!r} does not load from the Hub ({type(error).__name__}: {error}); check "
            "the name (owner/name:config:split) and the connection"
        ) from error


def _without_nones(found: Any) -> Any:  # noqa: ANN401
    """Without None fields: columns and struct fields that a row lacks come as None from Arrow."""
    if isinstance(found, Mapping):
        return {key: _without_nones(one) for key, one in found.items() if one is not None}
    if isinstance(found, list):
        return [_without_nones(one) for one in found]
    return found
