"""Published layouts of draft heads: write, read, and what each engine assumes.

A layout is a module with four functions: config_json and tensors write a head, read_config and
rename read one.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from outrider.heads.base import DraftHead
from outrider.heads.config import HeadConfig
from outrider.heads.formats import hydra, medusa, mtp, native, speculators
from outrider.heads.formats.files import CONFIG, check_tensors, read_folder, write_folder
from outrider.heads.kinds import HEADS
from outrider.heads.tables import Tables

__all__ = ["load_head", "save_head"]

LAYOUTS: dict[str, ModuleType] = {
    "eagle3": native,
    "eagle1": native,
    "medusa": medusa,
    "hydra": hydra,
    "mtp": mtp,
}
"""The layout that heads of a kind are written in."""


def save_head(
    head: DraftHead,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write a head in its kind's layout, whole or not at all; returns the folder.

    dtype is that of the float tensors (the head's own when left out). provenance (target name and
    hash, recipe) goes under config.json's `outrider` key, beside the head's settings.
    """
    dtype, layout = dtype or head.dtype, LAYOUTS[head.config.kind]
    config = layout.config_json(head.config, dtype, provenance or {})
    write_folder(Path(folder), config, layout.tensors(head, dtype))
    return Path(folder)


def load_head(
    folder: str | Path,
    tables: Tables,
    dtype: torch.dtype = torch.float32,
) -> DraftHead:
    """Read a head of any kind, which its config tells, attached to its target's tables."""
    values, found = read_folder(Path(folder))
    if speculators.is_speculators(values):
        layout: ModuleType = native
        config: HeadConfig = speculators.read_config(values, found, tables)
    else:
        layout = _layout(values)
        config = layout.read_config(values, found, tables)
    named = _complete(layout.rename(found, config, tables), config, str(folder))
    draft_ids_W = None
    if config.is_reduced:
        draft_ids_W = named["d2t"] + torch.arange(config.draft_vocab_size)
    head = HEADS[config.kind](config, draft_ids_W).to(dtype)
    check_tensors(named, head.state_dict(), str(folder))
    head.load_state_dict(named)
    return head.attach(tables)


def _layout(values: Mapping[str, Any]) -> ModuleType:
    """The layout of a config.json: ours name the kind, others have keys of their own."""
    ours = values.get("outrider")
    if ours is None:
        if "hydra_num_heads" in values:
            raise ValueError(
                "config.json is that of a Hydra head made elsewhere, which does not say all that "
                "its head needs (rotary settings, head sizes); only Hydra heads written here are "
                "read: train one with train/hydra.py"
            )
        return medusa if medusa.is_medusa(values) else native
    kind = ours.get("head", {}).get("kind")
    if kind not in LAYOUTS:
        raise ValueError(
            f"config.json describes a head of kind {kind!r}; this version reads "
            f"{', '.join(sorted(LAYOUTS))}"
        )
    return LAYOUTS[kind]


def read_notes(folder: str | Path) -> dict[str, Any]:
    """The provenance that `save_head` was given; empty for heads of other makers."""
    path = Path(folder) / CONFIG
    if not path.is_file():
        return {}
    ours = json.loads(path.read_text(encoding="utf-8")).get("outrider") or {}
    return {key: value for key, value in ours.items() if key != "head"}


def _complete(named: dict[str, Tensor], config: HeadConfig, where: str) -> dict[str, Tensor]:
    """Check the maps; t2d follows from d2t, so engines ignore it and files may leave it out."""
    if not config.is_reduced:
        return named
    shape = (config.draft_vocab_size,)
    offset_W = named.get("d2t")
    if offset_W is None or offset_W.shape != shape or offset_W.dtype != torch.int64:
        have = "absent" if offset_W is None else f"{offset_W.dtype} {list(offset_W.shape)}"
        raise ValueError(
            f"{where}: d2t is {have}; a draft vocabulary of {config.draft_vocab_size} out of "
            f"{config.vocab_size} needs int64 {list(shape)}, or ids would be taken for target ids"
        )
    ids_W = offset_W + torch.arange(shape[0])
    if int(ids_W.min()) < 0 or int(ids_W.max()) >= config.vocab_size:
        raise ValueError(f"{where}: d2t leads to ids outside 0..{config.vocab_size - 1}")
    derived_V = torch.zeros(config.vocab_size, dtype=torch.bool)
    derived_V[ids_W] = True
    stored_V = named.setdefault("t2d", derived_V)
    if stored_V.shape != derived_V.shape or not torch.equal(stored_V.bool(), derived_V):
        raise ValueError(f"{where}: t2d and d2t name different ids; export the head again")
    return named
