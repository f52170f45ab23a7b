"""What a finished file of rows was made with, in FILE.manifest.json beside it.

The manifest is written last, so a file with one is whole, and its hash tells later changes.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.data.files import sha256_of
from outrider.data.folders import write_whole
from outrider.data.rowfile import differences

MANIFEST = ".manifest.json"


def manifest_path(out: Path) -> Path:
    """Where the manifest of a file lies."""
    return out.with_name(out.name + MANIFEST)


def write_manifest(
    out: Path,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> None:
    """Say what `out`, which holds `rows`, was made with; `facts` are not compared later."""
    content = {
        "file": out.name,
        "sha256": sha256_of(out),
        **facts,
        "settings": settings,
        "counts": count(rows),
    }
    # One name for the temporary file: the next run replaces what a killed one left.
    write_whole(manifest_path(out), (json.dumps(content, indent=1) + "\n").encode())


def count(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many rows and answer tokens there are, and of which sort."""
    finish = Counter(row["finish"] for row in rows)
    temperature = Counter(f"{row['temperature']:g}" for row in rows)
    return {
        "rows": len(rows),
        "answer_tokens": sum(len(row["answer_ids"]) for row in rows),
        "finish": dict(sorted(finish.items())),
        "temperature": dict(sorted(temperature.items())),
        "retokenised": sum("retokenised" in row for row in rows),
        "retokenised_to_other_ids": sum(row.get("retokenised") == "other" for row in rows),
        "text_gives_other_ids": sum(bool(row.get("text_gives_other_ids")) for row in rows),
    }


def read_counts(out: Path) -> dict[str, Any]:
    """The counts that the manifest of a finished file holds."""
    return dict(json.loads(manifest_path(out).read_text(encoding="utf-8"))["counts"])


def check_finished(out: Path, settings: Mapping[str, Any]) -> bool:
    """Whether `out` is there, whole, and made with just these settings; None there means any.

    Raises ValueError where it is there and is not that: nothing is overwritten without being asked.
    """
    if not out.exists():
        return False
    path = manifest_path(out)
    remedy = "give overwrite to replace it, or name another output"
    if not path.is_file():
        raise ValueError(
            f"{out} is there without {path.name}, so nobody can say what it was made with; {remedy}"
        )
    known = _read(path)
    if known is None:
        raise ValueError(
            f"{path} is damaged, so nobody can say what {out.name} was made with; {remedy}"
        )
    unlike = differences(known["settings"], settings)
    if unlike:
        raise ValueError(f"{out} was made with other settings ({'; '.join(unlike)}); {remedy}")
    if sha256_of(out) != known["sha256"]:
        raise ValueError(f"{out} was changed after it was finished; {remedy}")
    return True


def _read(path: Path) -> dict[str, Any] | None:
    """A manifest; None where it is none that `write_manifest` wrote."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    kinds = {"sha256": str, "settings": dict, "counts": dict}
    is_whole = isinstance(known, dict) and all(
        isinstance(known.get(name), kind) for name, kind in kinds.items()
    )
    return known if is_whole and known["counts"].keys() >= count([]).keys() else None


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Short hash of what turns text into ids: vocabulary, merges, normaliser, special tokens."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        for name in ("padding", "truncation"):  # set by whoever used it last
            state.pop(name, None)
    else:
        state = sorted(tokenizer.get_vocab().items())
    text = json.dumps(state, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
