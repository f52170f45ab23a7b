"""What a trace says of itself, and whether its files are of one trace."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.data.sampling import Sampling
from outrider.eval.offline.policy import OnPolicy

FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class TraceInfo:
    """What a trace is a trace of; two traces with equal fields hold the same figures."""

    target: str
    """Name of the target as the user gave it."""
    fingerprint: str
    """Hash of the target's config, weights and tokenizer."""
    sampling: dict[str, Any]
    """How the target's logits became the law that the text was drawn from: `Sampling.record`."""
    layers: tuple[int, ...]
    """Decoder layers whose inputs are stored, in order."""
    dtype: str
    """Precision in which the target ran."""
    text: str
    """Hash of row names, prompts and answers."""
    seed: int | None
    """Seed that the text was sampled with, where known."""
    format: int = FORMAT
    """Layout and meaning of the shards."""
    code: str = ""
    """Version of this package; another one reads the trace if the format is the same."""


def made_from(meta: Mapping[str, Any]) -> str:
    """A short hash of what a shard's rows depend on: the trace's fields and its list of rows."""
    info = dict(meta["info"])
    info.pop("code", None)
    info["sampling"] = Sampling.from_record(info["sampling"]).record()
    text = json.dumps([info, meta["rows"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_shard(notes: Mapping[str, str] | None, key: str, path: Path) -> None:
    """ValueError for a shard of another trace; those of earlier versions do not say."""
    found = (notes or {}).get("made_from", key)
    if found != key:
        raise ValueError(
            f"{path} and meta.json beside it are not of one trace (made from {found} and "
            f"{key}); remove the folder and trace again"
        )


def read_info(meta: Mapping[str, Any], folder: Path) -> tuple[TraceInfo, OnPolicy]:
    """What meta.json says; ValueError where it is damaged or of another format."""
    try:
        found = meta["info"]["format"]
        if found != FORMAT:
            raise ValueError(
                f"{folder} has trace format {found!r}, this version reads {FORMAT}; delete the "
                "folder and build it again"
            )
        fields: dict[str, Any] = {**meta["info"], "layers": tuple(meta["info"]["layers"])}
        info = TraceInfo(**fields)
        places = [
            (row["row_id"], row["kind"], row["prompt"], row["answer"]) for row in meta["rows"]
        ]
        Sampling.from_record(info.sampling)
        if not places:
            raise KeyError("rows")
        return info, OnPolicy(**meta["policy"])
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(
            f"{folder / 'meta.json'} is damaged ({type(problem).__name__}: {problem}); remove the "
            "folder and trace again"
        ) from problem


def read_meta(folder: Path) -> dict[str, Any] | None:
    path = folder / "meta.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(
            f"{path} is damaged ({problem}); remove the folder and trace again"
        ) from problem
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (no object); remove the folder and trace again")
    return found
