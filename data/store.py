"""The target's features on disk, one entry per row, under a key that names all they depend on.

A store is a folder of shards, each whole or absent: a killed build continues at its next shard.

Letters: B rows of one pass, T positions, N positions of a shard, F captured layers times H,
H hidden size.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from outrider.data.batches import StoredRow
from outrider.data.files import locked, settle
from outrider.data.packing import passes
from outrider.data.rows import Row
from outrider.data.target import Target, check_layers

STORE_VERSION = 1  # raise when the same key would hold other numbers than before
SHARD_TOKENS = 16_384  # a kill loses this much work at most
PASS_TOKENS = 2_048  # padded positions of one pass of the target


def store_key(
    target: Target, rows: Sequence[Row], layers: Sequence[int], dtype: torch.dtype
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
        "layers": list(layers),
        "dtype": str(dtype),
    }


def store_bytes(
    target: Target, rows: Sequence[Row], layers: Sequence[int], dtype: torch.dtype
) -> int:
    """Size of the store on disk, known before anything runs."""
    width = (len(layers) + 1) * target.hidden_size
    return sum(len(row) for row in rows) * width * dtype.itemsize


class OnlineFeatures:
    """Rows whose features the target computes when asked: no disk, one pass per pack."""

    def __init__(
        self,
        target: Target,
        rows: Sequence[Row],
        *,
        layers: Sequence[int],
        dtype: torch.dtype | None = None,
    ) -> None:
        self.target = target
        self.layers = check_layers(layers, target.num_layers)
        self.dtype = dtype or target.dtype
        self._rows = list(rows)
        self.lengths = [len(row) for row in rows]
        self.row_ids = [row.row_id for row in rows]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def row(self, index: int) -> StoredRow:
        """One row with its features."""
        return self.rows([index])[0]

    def rows(self, indices: Sequence[int]) -> list[StoredRow]:
        """The named rows with their features, from one padded pass."""
        chosen = [self._rows[index] for index in indices]
        return _features(self.target, chosen, self.layers, self.dtype)


class BareRows:
    """Rows without features, for those who run the target themselves; states are of width 0."""

    def __init__(self, rows: Sequence[Row], *, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._rows = list(rows)
        self.lengths = [len(row) for row in rows]
        self.row_ids = [row.row_id for row in rows]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def rows(self, indices: Sequence[int]) -> list[StoredRow]:
        """The named rows."""
        chosen = [self._rows[index] for index in indices]
        empty = [torch.empty(len(row), 0, dtype=self.dtype) for row in chosen]
        return [
            StoredRow(row.ids, row.mask, none, none)
            for row, none in zip(chosen, empty, strict=True)
        ]


class FeatureStore:
    """Rows with their features, read from shards that are mapped into memory."""

    def __init__(self, folder: Path, rows: Sequence[Row]) -> None:
        self.folder = folder
        self._rows = list(rows)
        self.lengths = [len(row) for row in rows]
        self.row_ids = [row.row_id for row in rows]
        self._places: list[tuple[Path, int]] = []
        for number, span in enumerate(_shards(self.lengths)):
            start = 0
            for index in span:
                self._places.append((_shard_path(folder, number), start))
                start += self.lengths[index]

    @classmethod
    def build_or_open(
        cls,
        target: Target,
        rows: Sequence[Row],
        *,
        layers: Sequence[int],
        dtype: torch.dtype,
        root: str | Path,
        progress: bool = True,
        max_bytes: int | None = None,
    ) -> Self:
        """The store for exactly these rows, target, layers and precision, built as far as missing.

        Raises ValueError before any work when it would not fit into `max_bytes` or on the disk.
        """
        layers = check_layers(layers, target.num_layers)
        key = store_key(target, rows, layers, dtype)
        folder = Path(root) / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        with locked(folder.with_suffix(".lock")):
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob("*.tmp"):  # of a build that was killed
                left.unlink()
            missing = _missing(folder, rows, target, layers)
            wanted = [row for span in missing.values() for row in span]
            _check_budget(store_bytes(target, rows, layers, dtype), max_bytes)
            _check_disk(store_bytes(target, wanted, layers, dtype), folder)
            _write(folder / "key.json", json.dumps(key, indent=1).encode())
            with tqdm(
                total=sum(len(row) for row in rows),
                initial=sum(len(row) for row in rows) - sum(len(row) for row in wanted),
                unit="tok",
                unit_scale=True,
                desc="target features",
                disable=not progress or not missing,
            ) as bar:
                for number, span in missing.items():
                    _write(_shard_path(folder, number), _shard(target, span, layers, dtype, bar))
        return cls(folder, rows)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def row(self, index: int) -> StoredRow:
        """One row with its features."""
        path, start = self._places[index]
        row, span = self._rows[index], slice(start, start + self.lengths[index])
        with safe_open(path, framework="pt") as file:
            aux_TF, last_TH = file.get_slice("aux")[span], file.get_slice("last")[span]
        return StoredRow(row.ids, row.mask, aux_TF, last_TH)

    def rows(self, indices: Sequence[int]) -> list[StoredRow]:
        """The named rows with their features."""
        return [self.row(index) for index in indices]


def _features(
    target: Target, rows: Sequence[Row], layers: Sequence[int], dtype: torch.dtype
) -> list[StoredRow]:
    """One pass over rows padded on the right: a causal target needs no mask for that."""
    ids_BT = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.int64)
    for place, row in enumerate(rows):
        ids_BT[place, : len(row)] = row.ids
    states = target.run(ids_BT.to(target.device), layers=layers)
    aux_BTF, last_BTH = (state.to("cpu", dtype) for state in states)
    return [
        StoredRow(row.ids, row.mask, aux_BTF[place, : len(row)], last_BTH[place, : len(row)])
        for place, row in enumerate(rows)
    ]


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


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"features-{number:06d}.safetensors"


def _missing(
    folder: Path, rows: Sequence[Row], target: Target, layers: Sequence[int]
) -> dict[int, list[Row]]:
    """The rows of every shard that is not whole, by shard number."""
    missing: dict[int, list[Row]] = {}
    for number, span in enumerate(_shards([len(row) for row in rows])):
        chosen = [rows[index] for index in span]
        tokens = sum(len(row) for row in chosen)
        width = target.hidden_size
        shapes = {"aux": [tokens, len(layers) * width], "last": [tokens, width]}
        if not _is_whole(_shard_path(folder, number), shapes):
            missing[number] = chosen
    return missing


def _is_whole(path: Path, shapes: Mapping[str, list[int]]) -> bool:
    """Whether the file is there in full; its header knows its length and the shapes."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            return all(file.get_slice(name).get_shape() == shape for name, shape in shapes.items())
    except SafetensorError:  # cut short: "incomplete metadata, file not fully covered"
        return False


def _shard(
    target: Target,
    rows: Sequence[Row],
    layers: Sequence[int],
    dtype: torch.dtype,
    bar: "tqdm[NoReturn]",
) -> dict[str, Tensor]:
    """The features of a shard's rows end to end, in their order."""
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row))
    aux_NF = torch.empty(starts[-1], len(layers) * target.hidden_size, dtype=dtype)
    last_NH = torch.empty(starts[-1], target.hidden_size, dtype=dtype)
    for places in passes([len(row) for row in rows], PASS_TOKENS):
        for place, done in zip(
            places, _features(target, [rows[place] for place in places], layers, dtype), strict=True
        ):
            span = slice(starts[place], starts[place] + len(done.ids_T))
            aux_NF[span], last_NH[span] = done.aux_TF, done.last_TH
        bar.update(sum(len(rows[place]) for place in places))
    return {"aux": aux_NF, "last": last_NH}


def _write(path: Path, content: Mapping[str, Tensor] | bytes) -> None:
    """Write beside the place, wait for the disk, then move there in one step."""
    temporary = path.with_suffix(".tmp")
    if isinstance(content, bytes):
        temporary.write_bytes(content)
    else:
        save_file(dict(content), temporary)
    settle(temporary)
    temporary.replace(path)


def _check_budget(size: int, max_bytes: int | None) -> None:
    if max_bytes is not None and size > max_bytes:
        raise ValueError(
            f"max_bytes is {max_bytes:,}, the features need {size:,} bytes; allow more, read fewer "
            f"tokens (limit_tokens, max_length), store bfloat16, or compute features online"
        )


def _check_disk(size: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ValueError(
            f"the features need {size:,} bytes, {folder} has {free:,} free; free some space, read "
            f"fewer tokens (limit_tokens, max_length), or store bfloat16"
        )
