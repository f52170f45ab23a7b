"""Trace once, score many: the target's own text with the states that draft heads read.

A trace is a folder: meta.json and shards of rows. Shards appear whole or not at all, so a stopped
build goes on where it was. N answer tokens, T prompt and answer tokens, F fused features, H hidden
size, V vocabulary, M most likely tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from outrider.data.files import locked, write_whole
from outrider.data.packed_linears import packed_linears
from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.offline.policy import OnPolicy
from outrider.eval.offline.recorded import answer_law, groups
from outrider.eval.offline.texts import Text, check_texts, hash_texts
from outrider.eval.offline.trace_info import (
    TraceInfo,
    check_shard,
    made_from,
    read_info,
    read_meta,
)

_SHARD_ROWS = 16


class TraceRow(NamedTuple):
    """One prompt with its answer; index j of an [N] tensor belongs to answer token j."""

    row_id: str
    kind: str
    prompt_length: int
    ids_T: Tensor
    aux_TF: Tensor
    last_TH: Tensor
    log_normaliser_N: Tensor
    """Logarithm of the sum of exp(raw logit)."""
    logprob_N: Tensor
    """Of the answer token under the processed law."""
    entropy_N: Tensor
    """Nats of the processed law; of greedy text, of the raw law at temperature 1."""
    top_ids_NM: Tensor
    top_logits_NM: Tensor

    @property
    def num_tokens(self) -> int:
        """Answer tokens, the prefill's included."""
        return len(self.ids_T) - self.prompt_length


class Trace:
    """Rows of a finished trace folder, read when asked for."""

    def __init__(self, folder: Path, *, allow_off_policy: bool = False) -> None:
        """Open a folder; ValueError when it is not a finished trace of this format.

        So for a trace of text that is not the target's own, unless `allow_off_policy`.
        """
        meta = read_meta(folder)
        if meta is None or "policy" not in meta:
            raise ValueError(
                f"{folder} is not a finished trace (no complete meta.json); build it, or finish it "
                "with the command that started it: outrider trace"
            )
        self.folder = folder
        self.info, self.policy = read_info(meta, folder)
        self.template_options: tuple[str, ...] = tuple(meta.get("template_options", ()))
        """Modes of the chat template that the text states, by `state_options`; none if unknown."""
        if not allow_off_policy:
            self.policy.refuse_off_policy(str(folder))
        self.sampling = Sampling.from_record(self.info.sampling)
        self._rows: list[dict[str, Any]] = meta["rows"]
        self._key = made_from(meta)
        self.row_ids = tuple(row["row_id"] for row in self._rows)
        self.kinds = tuple(row["kind"] for row in self._rows)
        self.lengths = tuple(row["prompt"] + row["answer"] for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int, layers: Sequence[int] | None = None) -> TraceRow:
        """One row, with the features of `layers` in that order (all stored ones by default)."""
        row = self._rows[index]
        path = self.folder / _shard_name(index // _SHARD_ROWS)
        try:
            with safe_open(path, "pt") as shard:
                check_shard(shard.metadata(), self._key, path)
                part = {name: shard.get_tensor(f"{index}.{name}") for name in _TENSORS}
        except SafetensorError as error:
            raise ValueError(
                f"{path} is damaged ({error}); remove the folder and trace again"
            ) from error
        return TraceRow(
            row_id=row["row_id"],
            kind=row["kind"],
            prompt_length=row["prompt"],
            **{**part, "aux_TF": self._pick(part["aux_TF"], layers)},
        )

    def _pick(self, aux_TF: Tensor, layers: Sequence[int] | None) -> Tensor:
        if layers is None or tuple(layers) == self.info.layers:
            return aux_TF
        if not layers:
            return aux_TF[:, :0]
        missing = [layer for layer in layers if layer not in self.info.layers]
        if missing:
            raise ValueError(
                f"the head reads layers {list(layers)}, the trace {self.folder} holds "
                f"{list(self.info.layers)}; trace again with --layers {' '.join(map(str, layers))}"
            )
        parts = aux_TF.chunk(len(self.info.layers), dim=-1)
        return torch.cat([parts[self.info.layers.index(layer)] for layer in layers], -1)


_TENSORS = (
    "ids_T",
    "aux_TF",
    "last_TH",
    "log_normaliser_N",
    "logprob_N",
    "entropy_N",
    "top_ids_NM",
    "top_logits_NM",
)


def build_trace(
    target: Target,
    texts: Sequence[Text],
    folder: Path,
    *,
    sampling: Sampling,
    layers: Sequence[int],
    seed: int | None = None,
    allow_off_policy: bool = False,
) -> Trace:
    """Run the target once over its own text and store what scoring needs.

    A finished folder with the same inputs is reused, an unfinished one is continued. ValueError
    when the folder holds another trace, or when the text did not come from this target at this
    sampling: every figure scored on it would be that of no decoding. With `allow_off_policy` such
    text is traced, and the trace says so.
    """
    check_texts(texts, target.vocab_size)
    info = TraceInfo(
        target=target.name,
        fingerprint=target.fingerprint(),
        sampling=sampling.record(),
        layers=tuple(layers),
        dtype=str(target.dtype).removeprefix("torch."),
        text=hash_texts(texts),
        seed=seed,
        code=version("outrider"),
    )
    meta = {
        "info": asdict(info),
        "rows": [_row_meta(text) for text in texts],
        "template_options": sorted({text.template_options for text in texts}),
    }
    if not _is_finished(folder, meta["info"]):
        with locked(folder / ".lock"):
            if not _is_finished(folder, meta["info"]):
                _finish(target, texts, folder, info, meta, allow_off_policy=allow_off_policy)
    return Trace(folder, allow_off_policy=allow_off_policy)


def _finish(
    target: Target,
    texts: Sequence[Text],
    folder: Path,
    info: TraceInfo,
    meta: dict[str, Any],
    *,
    allow_off_policy: bool,
) -> None:
    write_whole(folder / "meta.json", json.dumps(meta, indent=1))
    policies = []
    starts = range(0, len(texts), _SHARD_ROWS)
    with packed_linears(target):
        for start in tqdm(starts, unit="shard", desc="trace", leave=False, disable=None):
            shard = folder / _shard_name(start // _SHARD_ROWS)
            if not shard.exists():
                part = texts[start : start + _SHARD_ROWS]
                _write_shard(target, part, start, info, shard, key=made_from(meta))
            with safe_open(shard, "pt") as file:
                check_shard(file.metadata(), made_from(meta), shard)
                policies.append(OnPolicy(**json.loads(file.metadata()["policy"])))
    policy = sum(policies[1:], policies[0])
    if not allow_off_policy:
        policy.refuse_off_policy(str(folder))
    write_whole(folder / "meta.json", json.dumps({**meta, "policy": asdict(policy)}, indent=1))


def _write_shard(
    target: Target,
    texts: Sequence[Text],
    start: int,
    info: TraceInfo,
    path: Path,
    *,
    key: str,
) -> None:
    sampling = Sampling.from_record(info.sampling)
    tensors: dict[str, Tensor] = {}
    policy = OnPolicy(is_greedy=sampling.is_greedy)
    for group in groups([len(text.prompt_ids) + len(text.answer_ids) for text in texts]):
        rows = [texts[i] for i in group]
        lengths = [len(row.prompt_ids) + len(row.answer_ids) for row in rows]
        ids_BT = torch.zeros(len(rows), max(lengths), dtype=torch.long)
        for b, row in enumerate(rows):
            ids_BT[b, : lengths[b]] = torch.tensor(row.prompt_ids + row.answer_ids)
        # Padding sits on the right, where a causal model cannot see it.
        captured = target.run(ids_BT.to(target.device), layers=info.layers)
        aux_BTF, last_BTH = (states.cpu() for states in captured)
        for b, (index, row) in enumerate(zip(group, rows, strict=True)):
            ids_T = ids_BT[b, : lengths[b]]
            last_TH = last_BTH[b, : lengths[b]]
            parts, found = answer_law(target, ids_T, last_TH, len(row.prompt_ids), sampling)
            parts |= {"ids_T": ids_T, "aux_TF": aux_BTF[b, : lengths[b]]}
            parts |= {"last_TH": last_TH}
            name = start + index
            tensors |= {f"{name}.{key}": part.contiguous().clone() for key, part in parts.items()}
            policy += found
    notes = {"policy": json.dumps(asdict(policy)), "made_from": key}
    draft = path.with_suffix(".tmp")
    try:
        save_file(tensors, draft, notes)
    except (OSError, SafetensorError) as error:
        draft.unlink(missing_ok=True)
        raise OSError(
            f"{path} cannot be written: {error}; free some space and run the same command again, "
            "and it continues from there"
        ) from error
    draft.replace(path)


def _is_finished(folder: Path, info: dict[str, Any]) -> bool:
    """Whether the folder is done; ValueError when it belongs to something else."""
    meta = read_meta(folder)
    if meta is None:
        return False
    wanted, found = json.loads(json.dumps(info)), dict(meta["info"])
    # Files of earlier versions list the defaults too.
    found["sampling"] = json.loads(json.dumps(Sampling.from_record(found["sampling"]).record()))
    unlike = [
        f"{key} is {found.get(key)!r}, asked for {value!r}"
        for key, value in wanted.items()
        if key != "code" and found.get(key) != value
    ]
    if unlike:
        raise ValueError(
            f"{folder} holds another trace ({'; '.join(unlike)}); delete it or name another folder"
        )
    return "policy" in meta


def _row_meta(text: Text) -> dict[str, Any]:
    return {
        "row_id": text.row_id,
        "kind": text.kind,
        "prompt": len(text.prompt_ids),
        "answer": len(text.answer_ids),
    }


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"
