"""Modules that targets ship, under their published names, and a reference of how they run.

The reference runs straight from the published tensors, in float64 and one root at a time, as the
engines' modules do (vllm/model_executor/models/{mimo,qwen3_next,deepseek}_mtp.py).
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3_5TextConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5TextRotaryEmbedding,
)

from outrider.heads import MtpHead, Tables
from outrider.heads.formats.shipped import INDEX, read_shipped, shipped_head

VOCAB, WIDTH, INNER, LAYERS, HEADS, SIZE = 50, 32, 48, 4, 4, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": SIZE,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


class Style(NamedTuple):
    """What a family does, written anew."""

    config: type
    layer: type
    rotary: type
    prefix: str
    block: str
    embed_norm: str
    state_norm: str
    projection: str
    last_norm: str
    is_state_first: bool = False
    feeds_normed: bool = False
    offset: float = 0.0
    rotated: int = SIZE
    theta: float = 500.0


STYLES = {
    "mimo": Style(
        config=Qwen2Config,
        layer=Qwen2DecoderLayer,
        rotary=Qwen2RotaryEmbedding,
        prefix="model.mtp_layers.0.",
        block="",
        embed_norm="token_layernorm",
        state_norm="hidden_layernorm",
        projection="input_proj",
        last_norm="final_layernorm",
        is_state_first=True,
        feeds_normed=True,
    ),
    "qwen3": Style(
        config=Qwen3Config,
        layer=Qwen3DecoderLayer,
        rotary=Qwen3RotaryEmbedding,
        prefix="mtp.",
        block="layers.0.",
        embed_norm="pre_fc_norm_embedding",
        state_norm="pre_fc_norm_hidden",
        projection="fc",
        last_norm="norm",
        feeds_normed=True,
    ),
    "qwen3_5": Style(
        config=Qwen3_5TextConfig,
        layer=Qwen3_5DecoderLayer,
        rotary=Qwen3_5TextRotaryEmbedding,
        prefix="mtp.",
        block="layers.0.",
        embed_norm="pre_fc_norm_embedding",
        state_norm="pre_fc_norm_hidden",
        projection="fc",
        last_norm="norm",
        feeds_normed=True,
        offset=1.0,
        rotated=SIZE // 4,
    ),
    "deepseek": Style(
        config=LlamaConfig,
        layer=LlamaDecoderLayer,
        rotary=LlamaRotaryEmbedding,
        prefix=f"model.layers.{LAYERS}.",
        block="",
        embed_norm="enorm",
        state_norm="hnorm",
        projection="eh_proj",
        last_norm="shared_head.norm",
    ),
}


def config_of(name: str) -> Any:
    style = STYLES[name]
    more: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": style.theta}}
    if name == "mimo":
        del more["rope_parameters"]
        more |= {"rope_theta": style.theta}
    if name == "qwen3_5":
        more["rope_parameters"] |= {
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        }
        more["layer_types"] = ["full_attention"] * LAYERS
    return style.config(**SIZES, **more)


def layer_of(name: str) -> Any:
    torch.manual_seed(5)
    config = config_of(name)
    config._attn_implementation = "eager"
    return STYLES[name].layer(config, 0).eval()


def tables() -> Tables:
    torch.manual_seed(2)
    return Tables(
        embedding_VH=torch.randn(VOCAB, WIDTH, dtype=torch.float64),
        output_VH=torch.randn(VOCAB, WIDTH, dtype=torch.float64),
        tokenizer_size=VOCAB,
        num_layers=LAYERS,
    )


def module_tensors(name: str) -> dict[str, Tensor]:
    """Random weights under the published names; the block's own come from transformers' layer."""
    style, layer = STYLES[name], layer_of(name)
    shapes = {f"{style.block}{key}": value.shape for key, value in layer.state_dict().items()}
    for norm in (style.embed_norm, style.state_norm, style.last_norm):
        shapes[f"{norm}.weight"] = torch.Size([WIDTH])
    shapes[f"{style.projection}.weight"] = torch.Size([WIDTH, 2 * WIDTH])
    torch.manual_seed(3)
    found: dict[str, Tensor] = {}
    for key, shape in shapes.items():
        center = 1.0 - style.offset if key.endswith("norm.weight") else 0.0
        values = torch.randn(shape, dtype=torch.float64) * 0.3 + center
        found[style.prefix + key] = values.bfloat16().double()  # published precision, exact here
    return found


def write_target(folder: Path, found: dict[str, Tensor]) -> Path:
    """Two shards: the module's, and one of the target's own that must never be opened."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in found.items()}, folder / "two.safetensors")
    (folder / "one.safetensors").write_bytes(b"these are no safetensors")
    places = dict.fromkeys(found, "two.safetensors") | {
        "model.embed_tokens.weight": "one.safetensors",
        f"model.layers.{LAYERS - 1}.self_attn.q_proj.weight": "one.safetensors",
        "model.norm.weight": "one.safetensors",
    }
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def make_head(name: str, folder: Path, **sizes: Any) -> MtpHead:
    lent, style = tables(), STYLES[name]
    found = read_shipped(folder, LAYERS, lent, norm_offset=style.offset)
    size = sizes.get("draft_vocab_size")
    ids = None if size is None else torch.arange(size) * 2
    head = shipped_head(found, config_of(name), ids, **sizes).double()
    head.load_state_dict(found.tensors, strict=False)  # again: made in float32
    head.attach(lent)
    return head


# The reference


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def turn(x: Tensor, position: int, style: Style) -> Tensor:
    """Rotate the first channels of one head's vector as complex numbers."""
    half = style.rotated // 2
    exponent = torch.arange(0, style.rotated, 2, dtype=torch.float32) / style.rotated
    angle = (1.0 / style.theta**exponent).double() * position
    turned = torch.complex(x[:half], x[half : 2 * half])
    turned = turned * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag, x[2 * half :]])


def reference_layer(part: dict[str, Tensor], rows: list[Tensor], style: Style) -> Tensor:
    """The last row of the decoder layer over rows at positions 0, 1, ..."""

    def weight(key: str) -> Tensor:
        return part[f"{key}.weight"]

    def normed(x: Tensor, key: str) -> Tensor:
        return norm(x, weight(key) + style.offset)

    def heads(x: Tensor, name: str, count: int) -> Tensor:
        made = weight(f"self_attn.{name}_proj") @ x
        return (made + part.get(f"self_attn.{name}_proj.bias", 0.0)).view(count, -1)

    def shaped(x: Tensor, name: str, place: int) -> Tensor:
        if f"self_attn.{name}_norm.weight" in part:
            x = normed(x, f"self_attn.{name}_norm")
        return torch.stack([turn(one, place, style) for one in x])

    keys, values = [], []
    for place, row in enumerate(rows):
        x = normed(row, "input_layernorm")
        keys.append(shaped(heads(x, "k", 2), "k", place))
        values.append(heads(x, "v", 2))
    x, last = normed(rows[-1], "input_layernorm"), len(rows) - 1
    wide = heads(x, "q", HEADS)
    query = shaped(wide[:, :SIZE], "q", last)
    out = []
    for index in range(HEADS):
        group = index // (HEADS // 2)
        scores = torch.stack([query[index] @ key[group] for key in keys]) / SIZE**0.5
        mixed = scores.softmax(-1) @ torch.stack([value[group] for value in values])
        gate = wide[index, SIZE:]
        out.append(mixed * torch.sigmoid(gate) if len(gate) else mixed)
    hidden = rows[-1] + weight("self_attn.o_proj") @ torch.cat(out)
    x = normed(hidden, "post_attention_layernorm")
    gate = weight("mlp.gate_proj") @ x
    return hidden + weight("mlp.down_proj") @ (gate * gate.sigmoid() * (weight("mlp.up_proj") @ x))


def reference_drafts(
    found: dict[str, Tensor], style: Style, lent: Tables, ids: list[int], states: Tensor, root: int
) -> Iterator[Tensor]:
    """Logits of the drafts from one root, fed back as the engine feeds them."""

    def own(key: str) -> Tensor:
        return found[f"{style.prefix}{key}.weight"]

    start = style.prefix + style.block
    part = {key.removeprefix(start): value for key, value in found.items() if start in key}
    fed, rows = list(states[: root + 1]), []
    for place in range(len(ids) - 1):
        if place == len(fed):
            hidden = reference_layer(part, rows, style)
            normed = norm(hidden, own(style.last_norm) + style.offset)
            yield lent.output_VH @ normed
            fed.append(normed if style.feeds_normed else hidden)
        embed = norm(lent.embedding_VH[ids[place + 1]], own(style.embed_norm) + style.offset)
        state = norm(fed[place], own(style.state_norm) + style.offset)
        pair = [state, embed] if style.is_state_first else [embed, state]
        rows.append(own(style.projection) @ torch.cat(pair))


Pairs = dict[tuple[int, int, int], Tensor]


def reference(name: str, found: dict[str, Tensor], ref: ModuleType, style: Style) -> Pairs:
    data, lent, pairs = ref.Packed(), tables(), {}
    for row, first, stop in data.documents():
        ids, states = data.ids[row, first:stop].tolist(), data.last[row, first:stop]
        for root in range(len(ids) - 2):
            drafts = reference_drafts(found, style, lent, ids, states, root)
            targets = range(root + 2, min(root + 2 + ref.STEPS, len(ids)))
            for target, logits in zip(targets, drafts, strict=False):
                if data.mask[row, first + target]:
                    pairs[row, first + target, target - root - 2] = logits
    return pairs


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: write_target(tmp_path / name, module_tensors(name))


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """This file: test files cannot import each other."""
    return sys.modules[__name__]
