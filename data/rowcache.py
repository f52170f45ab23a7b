"""What was read, kept for the next run, under a key that covers all it depends on.

Letters: N tokens of all rows, R rows.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from outrider.data.counts import Counts
from outrider.data.files import sweep
from outrider.data.folders import write_whole
from outrider.data.forms import RecordReader
from outrider.data.mixture import parts_of
from outrider.data.reading import Reading, Row
from outrider.data.sources import source_digest
from outrider.data.template import writes_the_date

# The files of this package that decide what a row becomes.
CODE = (
    *(
        "chat",
        "collect",
        "counts",
        "forms",
        "messages",
        "mixture",
        "reading",
        "rendered",
        "restated",
    ),
    *("rows", "rowcache", "said", "sources", "template", "workers"),
)
LIBRARIES = ("jinja2", "tokenizers", "transformers")


class Read(NamedTuple):
    """Rows that train, and what became of all."""

    rows: list[Row]
    counts: Counts


def read_key(source: str, reader: RecordReader, reading: Reading) -> str | None:
    """A hash of data, tokenizer, template, settings and code; None when some cannot be hashed.

    That is so for Hub data sets, which may change under their name, and for slow tokenizers.
    """
    parts = parts_of(source)
    digests = [source_digest(part.name) for part in parts]
    tokenizer = reader.tokenizer
    if None in digests or (tokenizer is not None and not tokenizer.is_fast):
        return None
    settings = asdict(reading)
    del settings["workers"], settings["cache"]
    made: dict[str, Any] = {
        "data": [
            [part.name, part.weight, digest] for part, digest in zip(parts, digests, strict=True)
        ],
        "settings": settings,
        "eos_ids": reader.eos_ids,
        "tokenizer_size": reader.tokenizer_size,
        "code": [hashlib.sha256(_source(name)).hexdigest() for name in CODE],
        "libraries": [version(name) for name in LIBRARIES],
    }
    if tokenizer is not None:
        made["tokenizer"] = hashlib.sha256(
            tokenizer.backend_tokenizer.to_str().encode()
        ).hexdigest()
        made["special"] = repr(tokenizer.special_tokens_map)
        made["template"] = str(tokenizer.chat_template)
        if writes_the_date(tokenizer):
            made["date"] = date.today().isoformat()
    return hashlib.sha256(json.dumps(made, sort_keys=True, default=str).encode()).hexdigest()[:32]


def save_read(path: Path, read: Read) -> None:
    """Keep rows and counts; the file appears whole or not at all.

    Raises ValueError where the disk has no room for it.
    """
    names = [[row.row_id, row.kind, row.prompt_length] for row in read.rows]
    notes = json.dumps({"rows": names, "counts": read.counts.to_dict()}).encode()
    tensors = {
        "ids_N": torch.cat([row.ids for row in read.rows]).to(torch.int32),
        "mask_N": torch.cat([row.mask for row in read.rows]),
        "lengths_R": torch.tensor([len(row) for row in read.rows]),
        "notes": torch.frombuffer(bytearray(notes), dtype=torch.uint8),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent)
    write_whole(path, tensors)


def load_read(path: Path) -> Read | None:
    """What was kept; None when there is nothing, or it is damaged."""
    if not path.is_file():
        return None
    try:
        return _unpacked(load_file(path))
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError):
        return None


def _unpacked(found: Mapping[str, Tensor]) -> Read:
    notes = json.loads(found["notes"].numpy().tobytes())
    lengths: Sequence[int] = found["lengths_R"].tolist()
    ids, masks = found["ids_N"].long().split(lengths), found["mask_N"].split(lengths)
    rows = [
        Row(ids_T.clone(), mask_T.clone(), name, kind, prompt_length)
        for ids_T, mask_T, (name, kind, prompt_length) in zip(
            ids, masks, notes["rows"], strict=True
        )
    ]
    return Read(rows, Counts.from_dict(notes["counts"]))


def _source(name: str) -> bytes:
    return files("outrider.data").joinpath(f"{name}.py").read_bytes()
