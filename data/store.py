"""The target's features on disk, one entry per row, under a key that names all they depend on.

A store is a folder of shards, each whole or absent: a killed build continues at its next shard, and
processes that run the same build share the shards among them.

Letters: T positions of a row, N rows of a shard's tensor.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import NoReturn, Self

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from outrider.data.batches import StoredRow
from outrider.data.files import sweep
from outrider.data.folders import CloudFolder, Folder, folder_at
from outrider.data.layout import Layout, Per, needed, num_bytes
from outrider.data.packing import passes
from outrider.data.room import check_budget, check_disk
from outrider.data.rows import Row
from outrider.data.states import States, TargetStates
from outrider.data.target import Target

STORE_VERSION = 1  # raise when the same key would hold other numbers than before
SHARD_TOKENS = 16_384  # a kill loses this much work at most
PASS_TOKENS = 2_048  # padded positions of one pass of the target
OPEN_SHARDS = 64
KEY_CLAIM = 1 << 40  # no shard's number: whoever holds it writes the key


def store_key(
    target: Target, rows: Sequence[Row], layout: Layout, states: States | None = None
) -> dict[str, object]:
    """Everything the stored numbers depend on."""
    data = hashlib.sha256()
    for row in rows:
        data.update(len(row).to_bytes(8, "little"))
        data.update(row.ids.to(torch.int64).numpy().tobytes())
        data.update(row.mask.to(torch.uint8).numpy().tobytes())
    template = "" if target.tokenizer is None else repr(target.tokenizer.chat_template)
    return {
        "store_version": STORE_VERSION,
        "data": data.hexdigest(),
        "max_length": max((len(row) for row in rows), default=0),
        "template": hashlib.sha256(template.encode()).hexdigest(),
        "tokenizer_size": target.tokenizer_size,
        "vocab_size": target.vocab_size,
        "target": target.fingerprint(),
        "target_dtype": str(target.dtype),
        "layers": list(layout.layers),
        **layout.key(rows),
        **({} if states is None else states.key()),
    }


def store_bytes(rows: Sequence[Row], layout: Layout) -> int:
    """Size of the store on disk, known before anything runs."""
    header = 8 + sum(72 + len(name) for name in layout.parts)
    return num_bytes(layout, rows) + header * len(_shards([len(row) for row in rows]))


def bytes_left(
    target: Target,
    rows: Sequence[Row],
    layout: Layout,
    root: str | Path,
    states: States | None = None,
) -> int:
    """Size of what a build has still to write: all of it in a cloud, or where nothing is yet."""
    if "://" in str(root) or not any(Path(root).glob("*/key.json")):
        return store_bytes(rows, layout)
    folder = folder_at(root, _name(store_key(target, rows, layout, states)))
    return store_bytes(_rows_of(_missing(folder, rows, layout)), layout)


class FeatureStore:
    """Rows with their features, read from shards that are mapped into memory."""

    def __init__(self, folder: Folder, rows: Sequence[Row], layout: Layout) -> None:
        self.folder = folder
        self.layout = layout
        self._rows = list(rows)
        self.lengths = [len(row) for row in rows]
        self.row_ids = [row.row_id for row in rows]
        self._places: list[tuple[int, dict[Per, slice]]] = []
        for number, span in enumerate(_shards(self.lengths)):
            starts: dict[Per, int] = {"position": 0, "law": 0}
            for index in span:
                ends = {per: at + layout.count(rows[index], per) for per, at in starts.items()}
                spans = {per: slice(at, ends[per]) for per, at in starts.items()}
                self._places.append((number, spans))
                starts = ends
        self._open = lru_cache(OPEN_SHARDS)(self._opened)

    @classmethod
    def build_or_open(
        cls,
        target: Target,
        rows: Sequence[Row],
        *,
        layout: Layout,
        root: str | Path,
        states: States | None = None,
        progress: bool = True,
        max_bytes: int | None = None,
    ) -> Self:
        """The store for exactly these rows, target, states and layout, built as far as missing.

        `root` is a folder or a URL that fsspec opens; `states` are the target's own when left out.
        Raises ValueError before any work when it would not fit into `max_bytes` or on the disk, and
        when the folder holds other features than its name says.
        """
        key = store_key(target, rows, layout, states)
        folder = folder_at(root, _name(key))
        folder.local.mkdir(parents=True, exist_ok=True)
        sweep(folder.local)
        _check_key(folder, key)
        missing = _missing(folder, rows, layout)
        wanted = _rows_of(missing)
        check_budget(store_bytes(rows, layout), max_bytes)
        if not isinstance(folder, CloudFolder):
            check_disk(store_bytes(wanted, layout), folder)
        with folder.claim(KEY_CLAIM, wait=True):
            if _read_key(folder) is None:
                folder.write("key.json", json.dumps(key, indent=1).encode())
        with tqdm(
            total=sum(len(row) for row in rows),
            initial=sum(len(row) for row in rows) - sum(len(row) for row in wanted),
            unit="tok",
            unit_scale=True,
            desc="target features",
            disable=not progress or not missing,
        ) as bar:
            of = states or TargetStates(target, layout.layers)
            _write(folder, missing, layout, lambda part: _shard(part, layout, of, bar))
        return cls(folder, rows, layout)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def row(self, index: int) -> StoredRow:
        """One row with its features."""
        return self.rows([index])[0]

    def rows(self, indices: Sequence[int]) -> list[StoredRow]:
        """The named rows with their features."""
        found = [self._share(index) for index in indices]
        return self.layout.decode([self._rows[index] for index in indices], found)

    def _share(self, index: int) -> dict[str, Tensor]:
        """A row's part of every tensor of its shard."""
        number, spans = self._places[index]
        shard = self._open(number)
        return {name: shard[name][spans[part.per]] for name, part in self.layout.parts.items()}

    def _opened(self, number: int) -> dict[str, Tensor]:
        """The shard's tensors, mapped: what is not looked at is not read."""
        with safe_open(self.folder.path(_shard_name(number)), framework="pt") as file:
            return {name: file.get_tensor(name) for name in self.layout.parts}


def _shards(lengths: Sequence[int]) -> list[range]:
    """Consecutive rows by shard: a shard is closed once it holds SHARD_TOKENS."""
    spans: list[range] = []
    start, tokens = 0, 0
    for index, length in enumerate(lengths):
        tokens += length
        if tokens >= SHARD_TOKENS or index == len(lengths) - 1:
            spans.append(range(start, index + 1))
            start, tokens = index + 1, 0
    return spans


def _name(key: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _rows_of(shards: Mapping[int, list[Row]]) -> list[Row]:
    return [row for part in shards.values() for row in part]


def _shard_name(number: int) -> str:
    return f"features-{number:06d}.safetensors"


def _missing(folder: Folder, rows: Sequence[Row], layout: Layout) -> dict[int, list[Row]]:
    """The rows of every shard that is not whole, by shard number."""
    spans = enumerate(_shards([len(row) for row in rows]))
    chosen = {number: [rows[index] for index in span] for number, span in spans}
    return {
        number: part
        for number, part in chosen.items()
        if not folder.has(_shard_name(number), needed(layout, part))
    }


def _write(
    folder: Folder,
    missing: Mapping[int, list[Row]],
    layout: Layout,
    make: Callable[[list[Row]], dict[str, Tensor]],
) -> None:
    """Write what no other process writes, then wait for what others do (or write it for them)."""
    todo = list(missing)
    if isinstance(folder, CloudFolder):  # no locks there: begin anywhere, meet others seldom
        random.shuffle(todo)
    with ThreadPoolExecutor(1, thread_name_prefix="store") as writer:
        for wait in (False, True):
            part = {number: missing[number] for number in todo}
            todo = _write_free(folder, part, layout, make, writer, wait=wait)


def _write_free(
    folder: Folder,
    missing: Mapping[int, list[Row]],
    layout: Layout,
    make: Callable[[list[Row]], dict[str, Tensor]],
    writer: Executor,
    *,
    wait: bool,
) -> list[int]:
    """Make and write the shards that can be claimed; returns the others.

    A shard goes to the disk while the next one is made. Its claim is held until it is there.
    """
    left: list[int] = []
    written: Future[None] | None = None
    for number, rows in missing.items():
        name = _shard_name(number)
        with ExitStack() as held:
            if not held.enter_context(folder.claim(number, wait=wait)):
                left.append(number)
            elif not folder.has(name, needed(layout, rows)):
                tensors = make(rows)
                if written is not None:
                    written.result()
                written = writer.submit(_put, folder, name, tensors, held.pop_all())
    if written is not None:
        written.result()
    return left


def _put(folder: Folder, name: str, tensors: Mapping[str, Tensor], claimed: ExitStack) -> None:
    with claimed:
        folder.write(name, tensors)


def _shard(
    rows: Sequence[Row], layout: Layout, states: States, bar: "tqdm[NoReturn]"
) -> dict[str, Tensor]:
    """The features of a shard's rows end to end, in their order."""
    found: list[dict[str, Tensor]] = [{} for _ in rows]
    for places in passes([len(row) for row in rows], PASS_TOKENS):
        made = states.of([rows[place] for place in places])
        for place, (aux_TF, last_TH) in zip(places, made, strict=True):
            found[place] = layout.encode(rows[place], aux_TF, last_TH)
        bar.update(sum(len(rows[place]) for place in places))
    return {name: torch.cat([one[name] for one in found]) for name in layout.parts}


def _check_key(folder: Folder, key: Mapping[str, object]) -> None:
    """The folder's name is made from its key: another key inside means someone moved files."""
    known = _read_key(folder)
    if known is None:
        return
    unlike = _unlike(known, json.loads(json.dumps(key)))
    if unlike:
        raise ValueError(
            f"{folder.name} was made with other settings ({'; '.join(unlike)}) than its name says; "
            "remove it, or name another store"
        )


def _read_key(folder: Folder) -> Mapping[str, object] | None:
    """The key in a folder; None where there is none yet, or a damaged one, to be written again."""
    written = folder.read("key.json")
    try:
        known = json.loads(written) if written is not None else None
    except ValueError:
        return None
    return known if isinstance(known, dict) else None


def _unlike(known: Mapping[str, object], wanted: Mapping[str, object]) -> Iterable[str]:
    names = sorted(known.keys() | wanted.keys())
    return [
        f"{name} {known.get(name)!r}, not {wanted.get(name)!r}"
        for name in names
        if known.get(name) != wanted.get(name)
    ]
