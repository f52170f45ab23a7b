"""Hidden states that another engine extracted: one safetensors file a row.

vLLM's `extract_hidden_states` (its ExampleHiddenStatesConnector) and speculators' offline folders
(`hs_{row}.safetensors`) hold the same two tensors: `hidden_states` [T, L, H] and `token_ids` [T].
The L states are those *entering* the layers asked for (our layer ids); speculators puts the last
layer's output, *before* the final norm, behind them (layer id = number of layers; vLLM documents
it so under Hidden State Extraction), and that is what a teacher needs.

Letters: T positions, L states of a file, H hidden size, F captured layers times H.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from typing_extensions import override

from outrider.data.capture import check_layers
from outrider.data.files import sha256_of
from outrider.data.rows import Row
from outrider.data.states import RowStates, States, TargetStates
from outrider.data.target import Target

SLACK = 0.1  # relative distance to the target's own states: another engine, perhaps in bfloat16
WORST = 0.5  # at a single position: a state that is missing or another token's is further off
CHECKED = 4  # rows, evenly spaced


class FileStates(States):
    """States of rows from a folder of files, found by their tokens and checked on some rows.

    Raises ValueError where a row has no file, where a file does not hold the layers and the last
    layer's output of every token as finite numbers, and where a checked row's states are not those
    of the target.
    """

    def __init__(
        self, folder: str | Path, target: Target, layers: Sequence[int], rows: Sequence[Row]
    ) -> None:
        self.folder = Path(folder)
        self.target = target
        self.layers = check_layers(layers, target.num_layers)
        self._norm = _final_norm(target)
        self._files = self._match(rows)
        for place in sorted({k * (len(rows) - 1) // (CHECKED - 1) for k in range(CHECKED)}):
            self._check(rows[place])

    @override
    def key(self) -> dict[str, object]:
        digest = hashlib.sha256()
        for path in self._files.values():
            digest.update(f"{path.name} {sha256_of(path)}\n".encode())
        return {"hidden_states": digest.hexdigest()}

    @override
    def of(self, rows: Sequence[Row]) -> list[RowStates]:
        return [self._read(self._files[_tokens(row.ids)], len(row)) for row in rows]

    def _match(self, rows: Sequence[Row]) -> dict[bytes, Path]:
        """A file for the tokens of every row: the same ones, or the same and more after them."""
        if not self.folder.is_dir():
            raise ValueError(
                f"hidden_states {self.folder} is no folder; give the one that holds the "
                "*.safetensors files of vLLM or speculators"
            )
        by_start: dict[bytes, list[tuple[bytes, Path]]] = {}
        shortest = min(len(row) for row in rows)
        for path in sorted(self.folder.glob("*.safetensors")):
            tokens = _open(path, "token_ids").flatten()
            by_start.setdefault(_tokens(tokens[:shortest]), []).append((_tokens(tokens), path))
        found: dict[bytes, Path] = {}
        for row in rows:
            wanted = _tokens(row.ids)
            candidates = by_start.get(_tokens(row.ids[:shortest]), [])
            paths = [path for tokens, path in candidates if tokens.startswith(wanted)]
            if not paths:
                raise ValueError(
                    f"hidden_states {self.folder} has no file whose token_ids begin with row "
                    f"{row.row_id}'s {len(row)} tokens ({len(by_start)} different starts among its "
                    "files); extract the states of the same rows, tokenised with the same template"
                )
            found[wanted] = paths[0]
        return found

    def _read(self, path: Path, length: int) -> RowStates:
        state_TLH = _open(path, "hidden_states")
        expected = len(self.layers) + 1
        if state_TLH.dim() != 3 or state_TLH.shape[1:] != (expected, self.target.hidden_size):
            raise ValueError(
                f"{path} holds hidden_states of shape {tuple(state_TLH.shape)}; layers "
                f"{self.layers} and the last layer's output need [tokens, {expected}, "
                f"{self.target.hidden_size}]: extract layers "
                f"{[*self.layers, self.target.num_layers]}, or name the layers that the file holds"
            )
        if len(state_TLH) < length:
            raise ValueError(
                f"{path} holds hidden_states of {len(state_TLH)} tokens for a row of {length}; "
                "extract its row again, without a prefix cache, whose tokens an engine leaves out"
            )
        state_TLH = state_TLH[:length].to(self.target.device)
        if not state_TLH.is_floating_point() or not bool(torch.isfinite(state_TLH).all()):
            raise ValueError(
                f"{path} holds hidden_states of {state_TLH.dtype} that are not all finite floats; "
                "extract its row again, in bfloat16 or float32"
            )
        with torch.no_grad():
            last_TH = self._norm(state_TLH[:, -1].to(self.target.dtype))
        return RowStates(state_TLH[:, :-1].flatten(1), last_TH)

    def _check(self, row: Row) -> None:
        """A row's states against the target's own: a layer off by one is seen here."""
        read = self._read(self._files[_tokens(row.ids)], len(row))
        known = TargetStates(self.target, self.layers).of([row])[0]
        pairs = zip(
            [f"layer {layer}" for layer in self.layers] + ["the last state"],
            [*_split(read.aux_TF, len(self.layers)), read.last_TH],
            [*_split(known.aux_TF, len(self.layers)), known.last_TH],
            strict=True,
        )
        for what, ours, theirs in pairs:
            gap_T = (ours.float() - theirs.float()).norm(dim=-1) / theirs.float().norm(dim=-1)
            found, allowed, where = float(gap_T.median()), SLACK, ""
            if found < SLACK:
                found, allowed, where = float(gap_T.max()), WORST, f" at token {gap_T.argmax()}"
            if not found < allowed:
                raise ValueError(
                    f"hidden_states {self.folder}: {what} of row {row.row_id} differs from the "
                    f"target's own by {found:.2f} of its length{where} (allowed {allowed}); "
                    "layer ids name the state that enters a layer, and the last layer's output "
                    "comes last, before the final norm: extract those from the same target"
                )


def _split(aux_TF: Tensor, parts: int) -> list[Tensor]:
    return list(aux_TF.chunk(parts, dim=-1)) if parts else []


def _tokens(ids: Tensor) -> bytes:
    return ids.to("cpu", torch.int64).numpy().tobytes()


def _open(path: Path, name: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            found: Any = file.get_tensor(name)
            return found
    except SafetensorError as error:
        raise ValueError(
            f"{path} is damaged or holds no {name} ({error}); extract its row again"
        ) from error


def _final_norm(target: Target) -> nn.Module:
    norm = getattr(target.decoder, "norm", None)
    if not isinstance(norm, nn.Module):
        raise ValueError(
            f"target {target.name!r} has no final norm called `norm`, which states from files "
            "still need; let the target compute its states here"
        )
    return norm
