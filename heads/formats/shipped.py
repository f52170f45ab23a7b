"""The MTP module that a target's own checkpoint ships: found by name, read without the rest.

transformers drops these tensors when it loads the target, so they are read from its files.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from outrider.heads.formats.files import WEIGHTS, check_tensors
from outrider.heads.formats.mtp import BLOCK, FAMILIES, MAPS, our_name
from outrider.heads.mtp import MtpConfig, MtpHead
from outrider.heads.tables import Tables

INDEX = "model.safetensors.index.json"
PATTERNS = {
    "deepseek": r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)\.",
    "qwen": r"(?:language_model\.)?mtp\.",
    "mimo": r"model\.mtp_layers\.(\d+)\.",
}
"""Prefixes of modules by family; a number counts modules, after the target's own layers."""
REFUSED = {
    r"weight_scale|scale_inv|qweight|qzeros|\.scales$|weight_packed": "is quantised",
    r"experts?\.|\.mlp\.gate\.weight$|e_score_correction": "is a mixture of experts",
    r"kv_a_proj|kv_b_proj|q_a_proj|q_b_proj|kv_a_layernorm": "has latent attention (MLA)",
    r"linear_attn\.|\.mamba\.|\.conv1d\.": "has linear attention",
    r"self_attn\.(o_proj\.bias|sinks|indexer)": "has an attention of its own kind",
}
"""What a block may be that the head cannot hold, by its tensors' names."""
TABLES = {"embed_tokens.weight": "embedding_VH", "shared_head.head.weight": "output_VH"}
"""Copies of the target's tables that a module may bear."""


class Shipped(NamedTuple):
    """A module as the checkpoint has it."""

    names: str
    """Its family."""
    prefix: str
    """Of its tensors' names."""
    modules: int
    """How many modules the checkpoint has; this is the first."""
    tensors: dict[str, Tensor]
    """By our names."""
    flags: dict[str, Any]
    """What its config needs beside sizes."""


def read_shipped(
    folder: Path, num_layers: int, tables: Tables, *, norm_offset: float = 0.0
) -> Shipped:
    """The first MTP module in a target's folder of safetensors.

    num_layers counts the target's decoder layers. norm_offset is what the target's own norms add
    to their weights. Raises ValueError where there is none, or where this head cannot hold it.
    """
    places = _places(folder)
    names, prefix, modules = _find(places, num_layers, folder)
    later = re.compile(re.escape(prefix) + r"layers\.[1-9]")  # modules after the first
    wanted = [name for name in places if name.startswith(prefix) and not later.match(name)]
    _refuse(wanted, folder)
    loaded = _read(folder, {name: places[name] for name in wanted})
    _check_tables(loaded, prefix, tables)
    copies = tuple(prefix + name for name in TABLES)
    named: dict[str, Tensor] = {}
    for name, tensor in loaded.items():
        if name in copies:
            continue
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ValueError(
                f"{name} of {folder} is {tensor.dtype}, so the MTP module is quantised; start from "
                "an unquantised checkpoint, or leave init out to train a new module"
            )
        named[our_name(name, prefix, names) or name] = tensor
    flags = {
        "names": names,
        "norm_offset": norm_offset,
        **FAMILIES[names].flags,
        "attention_bias": f"{BLOCK}self_attn.q_proj.bias" in named,
        "qk_norm": f"{BLOCK}self_attn.q_norm.weight" in named,
        "output_gate": _has_gate(named),
        "extra": {"started_from": f"{prefix}* of the target, module 1 of {modules}"},
    }
    return Shipped(names, prefix, modules, named, flags)


def shipped_head(
    shipped: Shipped,
    target: PreTrainedConfig | Mapping[str, Any],
    draft_ids_W: Tensor | None,
    **sizes: Any,  # noqa: ANN401 - as MtpConfig.from_target takes them
) -> MtpHead:
    """The module as a head; sizes are those that `MtpConfig.from_target` takes."""
    width = shipped.tensors.get(f"{BLOCK}mlp.gate_proj.weight")
    own = sizes.pop("intermediate_size", None)
    if width is not None and own not in (None, len(width)):
        raise ValueError(
            f"head_intermediate is {own} but the target's MTP module has {len(width)}; leave it out"
        )
    sizes["intermediate_size"] = None if width is None else len(width)
    head = MtpHead(MtpConfig.from_target(target, **sizes, **shipped.flags), draft_ids_W)
    wanted = {name: value for name, value in head.state_dict().items() if name not in MAPS}
    check_tensors(shipped.tensors, wanted, f"the MTP module {shipped.prefix}* of the target")
    head.load_state_dict(shipped.tensors, strict=False)
    return head


def _places(folder: Path) -> dict[str, str]:
    """The file of every tensor, by the index or by the one file's header."""
    index = folder / INDEX
    if index.is_file():
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"{folder} has neither {INDEX} nor {WEIGHTS}; MTP modules are read from safetensors"
        )
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return dict.fromkeys(file.keys(), WEIGHTS)


def _find(names: Iterable[str], num_layers: int, folder: Path) -> tuple[str, str, int]:
    """Family, prefix of the first module, and how many modules there are."""
    for family, pattern in PATTERNS.items():
        least = num_layers if family == "deepseek" else 0
        found: dict[int, str] = {}
        for name in names:
            match = re.match(pattern, name)
            number = int(match[1]) if match and match.groups() else least
            if match and number >= least:
                found[number] = match[0]
        if found:
            modules = len(found)
            if family == "qwen":
                inner = {re.match(r".*?mtp\.layers\.(\d+)\.", name) for name in names}
                modules = len({match[1] for match in inner if match}) or 1
            return family, found[min(found)], modules
    looked = ", ".join(family.prefix.format(n=num_layers) for family in FAMILIES.values())
    raise ValueError(
        f"init is 'target', but the checkpoint {folder} ships no MTP module (none of its tensors "
        f"begins with {looked}); leave init out to train a new one"
    )


def _refuse(names: Iterable[str], folder: Path) -> None:
    """Blocks that the head cannot hold."""
    for pattern, what in REFUSED.items():
        found = [name for name in names if re.search(pattern, name)]
        if found:
            raise ValueError(
                f"the MTP module of {folder} {what} ({found[0]} and {len(found) - 1} more such "
                "tensors); this head holds one dense block with plain attention, so leave init "
                "out to train a new one"
            )


def _read(folder: Path, places: Mapping[str, str]) -> dict[str, Tensor]:
    """These tensors; other files are not opened, and other tensors not read."""
    loaded: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        with safe_open(folder / shard, framework="pt") as file:
            present = set(file.keys())
            mine = [name for name, place in places.items() if place == shard]
            missing = [name for name in mine if name not in present]
            if missing:
                raise ValueError(
                    f"{folder / shard} lacks {missing[0]}, which {INDEX} places there; fetch the "
                    "target again"
                )
            loaded |= {name: file.get_tensor(name) for name in mine}
    return loaded


def _check_tables(loaded: Mapping[str, Tensor], prefix: str, tables: Tables) -> None:
    """A module's own embedding or output head must be the target's, which is what the head uses."""
    for name, field in TABLES.items():
        theirs, ours = loaded.get(prefix + name), getattr(tables, field)
        if theirs is None:
            continue
        if theirs.shape != ours.shape or not torch.equal(theirs.to(ours.device, ours.dtype), ours):
            raise ValueError(
                f"{prefix}{name} is not the target's own table; this head drafts with the target's "
                "embedding and output head, so leave init out to train a new one"
            )


def _has_gate(named: Mapping[str, Tensor]) -> bool:
    """Queries twice as wide as what the output projection reads."""
    q, o = (named.get(f"{BLOCK}self_attn.{name}_proj.weight") for name in "qo")
    return q is not None and o is not None and q.shape[0] == 2 * o.shape[1]
