"""Writes stored features in the offline format of speculators: both trainers read the same numbers.

T positions of a row, H hidden size of the target, F = 3 H fused states, S the peer's four states.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch import Tensor

from outrider.data.batches import StoredRow

DESCRIPTION = "outrider.json"  # written last: a folder that holds it is complete


@dataclass(frozen=True, kw_only=True)
class Offline:
    """What an offline folder holds."""

    num_train: int
    """Rows trained on."""
    num_validation: int
    """Rows after them, only ever evaluated."""
    num_tokens: int
    """Tokens of the rows trained on."""
    num_supervised: int
    """Supervised ones among them."""
    num_drawn: int
    """Distinct supervised tokens: the peer fills its draft vocabulary with these first."""
    dtype: str
    """Number format of the stored states."""


def write_offline(
    train: Iterable[StoredRow],
    validation: Iterable[StoredRow],
    norm_weight_H: Tensor,
    folder: Path,
    dtype: torch.dtype,
) -> Offline:
    """Write all rows in the order given; an unfinished folder is redone, a complete one refused."""
    if (folder / DESCRIPTION).exists():
        raise ValueError(f"{folder} already holds features for the peer; remove it or name another")
    states = folder / "hidden_states"
    states.mkdir(parents=True, exist_ok=True)
    columns: dict[str, list[list[int]]] = {"input_ids": [], "loss_mask": []}
    num_train = 0
    for part, rows in enumerate((train, validation)):
        for row in rows:
            index = len(columns["input_ids"])
            content = {
                "hidden_states": peer_states(row.aux_TF, row.last_TH, norm_weight_H).to(dtype),
                "token_ids": row.ids_T.long().contiguous(),
            }
            save_file(content, states / f"hs_{index}.safetensors")
            columns["input_ids"].append(row.ids_T.tolist())
            columns["loss_mask"].append(row.mask_T.long().tolist())
            num_train += part == 0
    if num_train == 0:
        raise ValueError("no rows to train the peer on; the feature store is empty")
    return _write_table(columns, num_train, folder, dtype)


def read_offline(folder: Path) -> Offline | None:
    """The description of a complete folder; None when there is none yet."""
    path = folder / DESCRIPTION
    return Offline(**json.loads(path.read_text("ascii"))) if path.exists() else None


def peer_states(aux_TF: Tensor, last_TH: Tensor, norm_weight_H: Tensor) -> Tensor:
    """The fused states, and one from which the peer's own final norm gives `last_TH` back.

    The peer stores the last layer's output before the final norm and applies that norm itself. An
    RMS norm forgets its input's scale (up to its epsilon), so `last_TH / weight`, whose mean square
    is 1, gives the same teacher as the true state.
    """
    smallest = norm_weight_H.abs().min().item()
    if smallest < 1e-4:
        raise ValueError(
            f"the target's final norm has a weight of {smallest:g}; below 1e-4 the state before "
            "the norm cannot be recovered from the stored one: compare on another target"
        )
    num_positions, hidden_size = last_TH.shape
    if aux_TF.shape != (num_positions, 3 * hidden_size):
        raise ValueError(
            f"fused states have shape {tuple(aux_TF.shape)}; the peer's EAGLE-3 takes three states "
            f"of {hidden_size} a position, {(num_positions, 3 * hidden_size)}: store three layers"
        )
    fused_TSH = aux_TF.float().unflatten(-1, (3, hidden_size))
    before_norm_TH = last_TH.float() / norm_weight_H.float()
    return torch.cat([fused_TSH, before_norm_TH[:, None]], dim=1)


def _write_table(
    columns: dict[str, list[list[int]]], num_train: int, folder: Path, dtype: torch.dtype
) -> Offline:
    ids, masks = columns["input_ids"], columns["loss_mask"]
    table = Dataset.from_dict({**columns, "seq_len": [len(row) for row in ids]})
    table.with_format("torch").save_to_disk(str(folder))
    counts = _supervised_counts(ids[:num_train], masks[:num_train])
    torch.save(dict(counts), folder / "token_freq.pt")
    offline = Offline(
        num_train=num_train,
        num_validation=len(ids) - num_train,
        num_tokens=sum(map(len, ids[:num_train])),
        num_supervised=counts.total(),
        num_drawn=len(counts),
        dtype=str(dtype).removeprefix("torch."),
    )
    (folder / DESCRIPTION).write_text(json.dumps(vars(offline)), "ascii")
    return offline


def _supervised_counts(ids: Sequence[list[int]], masks: Sequence[list[int]]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for row, mask in zip(ids, masks, strict=True):
        counts.update(token for token, kept in zip(row, mask, strict=True) if kept)
    return counts
