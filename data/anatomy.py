"""Where a target's files lie, and where transformers' models keep the parts a draft head needs.

Letters: V rows of a table, H hidden size.
"""

import hashlib
import inspect
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from outrider.data.demo_target import DEMO_TARGET, smollm2_demo
from outrider.data.files import sha256_of

WEIGHTS = "*.safetensors"
MODEL_FILES = ("*.json", WEIGHTS, "*.jinja", "*.model", "*.txt")


class Tables(NamedTuple):
    """What a draft head may share with its target."""

    embedding_VH: Tensor
    embed_scale: float
    output_VH: Tensor
    softcap: float | None


def find_folder(name: str, *, weights: bool = True) -> Path:
    """The local folder of a target name, fetched first where it has to be, `weights` too."""
    if name == DEMO_TARGET:
        return smollm2_demo()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"target folder {name!r} has no config.json; name a model's folder")
        return path
    if name.count("/") != 1 or path.is_absolute() or name.startswith("."):
        raise ValueError(
            f"target {name!r} is neither {DEMO_TARGET!r}, nor an existing folder, nor a Hub id "
            f"(owner/name); check the spelling"
        )
    wanted = [pattern for pattern in MODEL_FILES if weights or pattern != WEIGHTS]
    return Path(snapshot_download(name, allow_patterns=wanted))


def files_hash(folder: Path) -> str:
    """SHA-256 over names and bytes of a model's files: config, weights, tokenizer, template."""
    digest = hashlib.sha256()
    patterns = (*MODEL_FILES, "*.bin")  # a local folder may hold weights of the older form
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        digest.update(f"\n{path.name}\n".encode())
        digest.update(bytes.fromhex(sha256_of(path)))
    return digest.hexdigest()


def find_blocks(
    model: PreTrainedModel, config: PretrainedConfig, name: str
) -> tuple[nn.Module, nn.ModuleList]:
    """The decoder and its list of layers: the outermost list as long as the config says."""
    num_layers = getattr(config, "num_hidden_layers", None)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"target {name!r} is an encoder-decoder; draft heads need a decoder-only LM"
        )
    decoder = model.get_decoder()
    for module in decoder.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                return module, child
    raise ValueError(
        f"target {name!r} ({type(model).__name__}): no list of {num_layers} decoder layers found; "
        f"only decoder-only language models in transformers' layout can be targets"
    )


def find_tables(model: PreTrainedModel, config: PretrainedConfig, name: str) -> Tables:
    """The embedding and output tables with their scale and soft cap."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    rows = [getattr(table, "weight", None) for table in (embedding, output)]
    if not isinstance(rows[0], Tensor) or not isinstance(rows[1], Tensor):
        raise ValueError(f"target {name!r} has no output head; load it as a causal LM")
    if getattr(output, "bias", None) is not None:
        raise ValueError(f"target {name!r} has a bias on its output head; not supported")
    scale: Any = getattr(embedding, "embed_scale", None)  # a buffer or a number
    if isinstance(scale, Tensor) and scale.is_meta:  # a model without weights has the number, too
        scale = getattr(embedding, "scalar_embed_scale", None)
    if scale is None:
        scale = getattr(config, "embedding_multiplier", None)
    cap = getattr(config, "final_logit_softcapping", None)
    return Tables(
        embedding_VH=rows[0].detach(),
        embed_scale=1.0 if scale is None else float(scale),
        output_VH=rows[1].detach(),
        softcap=None if cap is None else float(cap),
    )


def non_finite(model: nn.Module) -> list[str]:
    """Names of a module's weights that hold a NaN or an infinity."""
    return [
        name
        for name, value in model.state_dict().items()
        if value.is_floating_point() and not _is_finite(value)
    ]


def _is_finite(value: Tensor) -> bool:
    """Whether all numbers are finite.

    A NaN or an infinity never sums to a finite number, and a sum is 40 times as fast as a look at
    each. Finite numbers may sum to more than their type holds: then each is looked at.
    """
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def eos_ids(
    generation: GenerationConfig | None,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[int, ...]:
    """The ids that end a text, from where generation looks first."""
    places = (generation, config, tokenizer)
    for found in (getattr(place, "eos_token_id", None) for place in places):
        if isinstance(found, int):
            return (found,)
        if found is not None:
            return tuple(int(token) for token in found)
    return ()


def tokenizer_size(tokenizer: PreTrainedTokenizerBase | None, rows: int, name: str) -> int:
    if tokenizer is None:
        return rows
    size = 1 + max(tokenizer.get_vocab().values())
    if size > rows:
        raise ValueError(
            f"target {name!r}: the tokenizer makes ids to {size - 1}, the output head has {rows} "
            f"rows; use the tokenizer this model was trained with"
        )
    return size


def cache_keyword(decoder: nn.Module) -> str:
    """`cache`, or `past_key_values` as transformers called it before 5.2x."""
    return (
        "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"
    )
