"""A slow reference of drafting: every root from scratch, plain loops, float64.

It shares no code with the heads but their parameters.
"""

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from outrider.heads import CONFIGS, HEADS, DraftHead, EagleHead, RowPlan, Tables

VOCAB, WIDTH, STEPS = 50, 32, 3
Pairs = dict[tuple[int, int, int], Tensor]
"""Logits by (batch row, position of the predicted token, step)."""
TARGET = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 64,
}
FLAGS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1"},
    "eagle3": {},
    "residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "all": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "narrow": {"hidden_size": 24},
    "reduced": {"draft_vocab_size": 20},
    "own_embedding": {"own_embedding": True},
    "one_fused": {"aux_layers": (8,)},
    "five_fused": {"aux_layers": (0, 2, 4, 6, 7), "fc_norm": True},
    "own_heads": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 8, "intermediate_size": 20},
    "two_layers": {"num_layers": 2},
    "three_layers": {"num_layers": 3, "norm_output": True, "norm_before_residual": True},
    "window_1": {"sliding_window": 1},
    "window_2": {"sliding_window": 2},
    "window_4": {"sliding_window": 4},
    "deep_window": {"num_layers": 2, "sliding_window": 3, "draft_vocab_size": 20},
    "mixed_window": {"num_layers": 3, "sliding_window": 2, "full_attention_layers": (1,)},
    "deep_narrow": {"num_layers": 2, "sliding_window": 2, "hidden_size": 24, "fc_norm": True},
    "medusa": {"kind": "medusa", "num_draft_heads": 3},
    "medusa_shared": {"kind": "medusa", "num_draft_layers": 2, "shared_output": True},
    "medusa_reduced": {"kind": "medusa", "draft_vocab_size": 20},
    "hydra": {"kind": "hydra", "num_draft_heads": 3, "embed_gain": 4.0},
    "hydra_reduced": {"kind": "hydra", "draft_vocab_size": 20, "num_draft_layers": 1},
    "hydra_prefix": {"kind": "hydra", "prefix_layer": True, "shared_output": True},
    "mtp": {"kind": "mtp"},
    "mtp_reduced": {"kind": "mtp", "draft_vocab_size": 20},
}


def make_head(**settings: Any) -> DraftHead:
    torch.manual_seed(0)
    kind = settings.get("kind", "eagle3")
    config = CONFIGS[kind].from_target(TARGET, **settings)
    ids = torch.randperm(VOCAB)[:20].sort().values if config.is_reduced else None
    head = HEADS[kind](config, ids).double()
    for parameter in head.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    tables = Tables(
        embedding_VH=torch.randn(VOCAB, WIDTH, dtype=torch.float64),
        output_VH=torch.randn(VOCAB, WIDTH, dtype=torch.float64),
        tokenizer_size=VOCAB,
        num_layers=8,
    )
    return head.attach(tables)


class Packed:
    """Two batch rows with five documents, padding and a ragged mask."""

    def __init__(self, num_fused: int = 3) -> None:
        torch.manual_seed(1)
        self.lengths = [[5, 7, 2], [9, 7]]
        rows, size = 2, 16
        self.ids = torch.randint(0, VOCAB, (rows, size))
        self.aux = torch.randn(rows, size, num_fused * WIDTH, dtype=torch.float64)
        self.last = torch.randn(rows, size, WIDTH, dtype=torch.float64)
        self.document = torch.zeros(rows, size, dtype=torch.int64)
        self.position = torch.zeros(rows, size, dtype=torch.int64)
        for row, lengths in enumerate(self.lengths):
            start = 0
            for number, length in enumerate(lengths, start=1):
                self.document[row, start : start + length] = number
                self.position[row, start : start + length] = torch.arange(length)
                start += length
        self.mask = (torch.rand(rows, size) < 0.6) & (self.document > 0)

    def documents(self) -> list[tuple[int, int, int]]:
        """(batch row, first, stop) of every document."""
        found: list[tuple[int, int, int]] = []
        for row, lengths in enumerate(self.lengths):
            edges = list(itertools.accumulate(lengths, initial=0))
            found += [(row, a, b) for a, b in itertools.pairwise(edges)]
        return found


def packed_for(name: str) -> Packed:
    """The batch with as many fused states as the head with these settings reads."""
    return Packed(len(FLAGS[name].get("aux_layers", "123")))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-5) * weight


def turn(x: Tensor, position: int) -> Tensor:
    """Rotate one head's vector as complex numbers."""
    half = x.shape[0] // 2
    # The inverse frequency is an fp32 number in every implementation.
    inverse = 1.0 / (500.0 ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half)))
    angle = inverse.double() * position
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag])


def finish_layer(
    config: Any,
    part: dict[str, Tensor],
    residual: Tensor,
    query: list[Tensor],
    seen: tuple[list[list[Tensor]], list[Tensor]],
) -> Tensor:
    """Attention of one row over all keys and values, and the MLP."""
    keys, values = seen
    out: list[Tensor] = []
    for index, one in enumerate(query):
        group = index // (config.num_heads // config.num_kv_heads)
        scores = torch.stack([one @ key[group] for key in keys]) / math.sqrt(config.head_dim)
        weights = torch.exp(scores - scores.max())
        weights = weights / weights.sum()
        out.append(weights @ torch.stack([value[group] for value in values]))
    hidden = residual + part["self_attn.o_proj.weight"] @ torch.cat(out)
    x = norm(hidden, part["post_attention_layernorm.weight"])
    gate = part["mlp.gate_proj.weight"] @ x
    up = part["mlp.up_proj.weight"] @ x
    return hidden + part["mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)


def plain_layer(config: Any, part: dict[str, Tensor], rows: list[Tensor]) -> Tensor:
    """The last row of a Llama layer over rows at positions 0, 1, ..."""
    keys: list[list[Tensor]] = []
    values: list[Tensor] = []
    query: list[Tensor] = []
    for place, row in enumerate(rows):
        x = norm(row, part["input_layernorm.weight"])
        key = (part["self_attn.k_proj.weight"] @ x).view(config.num_kv_heads, -1)
        keys.append([turn(one, place) for one in key])
        values.append((part["self_attn.v_proj.weight"] @ x).view(config.num_kv_heads, -1))
        query = [turn(one, place) for one in (part["self_attn.q_proj.weight"] @ x).view(4, -1)]
    return finish_layer(config, part, rows[-1], query, (keys, values))


def under(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def layer_outputs(
    config: Any,
    part: dict[str, Tensor],
    rows: list[tuple[Tensor, Tensor]],
    places: list[int],
    window: int | None,
) -> list[Tensor]:
    """Output of every row of a causal layer over (attention input, residual) rows.

    A row at place p sees the rows before it and itself, of places after p - window.
    """
    keys: list[list[Tensor]] = []
    values: list[Tensor] = []
    out: list[Tensor] = []
    for (x, residual), place in zip(rows, places, strict=True):
        key = (part["self_attn.k_proj.weight"] @ x).view(config.num_kv_heads, -1)
        keys.append([turn(one, place) for one in key])
        values.append((part["self_attn.v_proj.weight"] @ x).view(config.num_kv_heads, -1))
        query = (part["self_attn.q_proj.weight"] @ x).view(config.num_heads, -1)
        turned = [turn(one, place) for one in query]
        seen = [i for i in range(len(keys)) if window is None or places[i] > place - window]
        near = ([keys[i] for i in seen], [values[i] for i in seen])
        out.append(finish_layer(config, part, residual, turned, near))
    return out


def reference_output(
    head: EagleHead, features: list[Tensor], tokens: list[int], places: list[int]
) -> tuple[Tensor, Tensor]:
    """The last row's output of a plain causal stack over (feature, token, position) rows."""
    config = head.config
    state = {k.replace("layers.0.", "midlayer."): v for k, v in head.state_dict().items()}
    table = state.get("embed_tokens.weight", head.lent().embedding_VH)
    first = {k.removeprefix("midlayer."): v for k, v in state.items()}
    rows: list[tuple[Tensor, Tensor]] = []
    for feature, token in zip(features, tokens, strict=True):
        embed = table[token]
        if config.kind == "eagle1":
            x = residual = first["fc.weight"] @ torch.cat([embed, feature])
        else:
            normed = norm(feature, first["hidden_norm.weight"])
            x = torch.cat([norm(embed, first["input_layernorm.weight"]), normed])
            residual = normed if config.norm_before_residual else feature
        rows.append((x, residual))
    for layer in range(config.num_layers):
        part = under(state, f"layers.{layer}.") if layer else first
        is_full = layer in config.full_attention_layers
        window = None if is_full else config.sliding_window
        out = layer_outputs(config, part, rows, places, window)
        later = state.get(f"layers.{layer + 1}.input_layernorm.weight")
        rows = [(norm(hidden, later), hidden) for hidden in out] if later is not None else []
    hidden = out[-1]
    if config.kind == "eagle1":
        return hidden, head.lent().output_VH @ hidden
    normed = norm(hidden, state["norm.weight"])
    return (normed if config.norm_output else hidden), state["lm_head.weight"] @ normed


def reference_features(head: EagleHead, aux: Tensor, last: Tensor) -> list[Tensor]:
    config, state = head.config, head.state_dict()
    if config.kind == "eagle1":
        return list(last)
    out: list[Tensor] = []
    for x in aux:
        if config.norm_before_fc:
            x = norm(x, state["input_norm.weight"])
        if config.fc_norm:
            parts = x.split(WIDTH)
            x = torch.cat([norm(y, state[f"fc_norm.{i}.weight"]) for i, y in enumerate(parts)])
        out.append(state["fc.weight"] @ x)
    return out


def eagle_drafts(head: EagleHead, data: "Document", root: int) -> Iterator[Tensor]:
    """Every row's output joins the rows, and the last one's is the next feature."""
    features = reference_features(head, data.aux, data.last)[: root + 1]
    tokens, places = data.ids[1 : root + 2], list(range(root + 1))
    while True:
        hidden, logits = reference_output(head, features, tokens, places)
        yield logits
        features, places = [*features, hidden], [*places, places[-1] + 1]
        tokens = data.ids[1 : len(features) + 1]


def residual_blocks(state: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """x + silu(W x + b), layer by layer, while there are layers of this prefix."""
    for layer in itertools.count():
        if f"{prefix}{layer}.weight" not in state:
            return x
        z = state[f"{prefix}{layer}.weight"] @ x + state[f"{prefix}{layer}.bias"]
        x = x + z / (1 + torch.exp(-z))
    raise AssertionError


def medusa_drafts(head: DraftHead, data: "Document", root: int) -> Iterator[Tensor]:
    """Head i reads the state at the root and nothing else."""
    state = head.state_dict()
    shared = head.lent().output_VH[head.draft_ids_W]
    for depth in range(head.config.max_drafts):
        x = residual_blocks(state, f"blocks.{depth}.layers.", data.last[root])
        yield state.get(f"lm_heads.{depth}.weight", shared) @ x


def hydra_drafts(head: DraftHead, data: "Document", root: int) -> Iterator[Tensor]:
    """Head i reads the state at the root and every token since."""
    config, state, table = head.config, head.state_dict(), head.lent().embedding_VH
    shared = head.lent().output_VH[head.draft_ids_W]
    first = data.last[root]
    if config.prefix_layer:
        hidden = plain_layer(config, under(state, "prefix_layer."), list(data.last[: root + 1]))
        first = norm(hidden, state["prefix_norm.weight"])
    for depth in range(min(config.max_drafts, len(data.ids) - root - 1)):
        tokens = data.ids[root + 1 : root + 2 + depth]
        x = torch.cat([first, *(config.embed_gain * table[token] for token in tokens)])
        for layer in range(config.num_draft_layers):
            part = under(state, f"hydra_mlp.{depth}.{layer}.")
            z = part["linear.weight"] @ x + part["linear.bias"]
            if layer == 0:
                x = part["res_connection.weight"] @ x + part["res_connection.bias"]
            x = x + z / (1 + torch.exp(-z))
        yield state.get(f"hydra_lm_head.{depth}.weight", shared) @ x


def mtp_drafts(head: DraftHead, data: "Document", root: int) -> Iterator[Tensor]:
    """Every row's output joins the rows in place of a state."""
    state, table = head.state_dict(), head.lent().embedding_VH
    output = head.lent().output_VH[head.draft_ids_W]
    states, fused = list(data.last[: root + 1]), []
    for place, token in enumerate(data.ids[1:]):
        if place == len(states):
            hidden = plain_layer(head.config, under(state, "mtp_block."), fused)
            yield output @ norm(hidden, state["shared_head.norm.weight"])
            states.append(hidden)
        embed = norm(table[token], state["enorm.weight"])
        both = torch.cat([embed, norm(states[place], state["hnorm.weight"])])
        fused.append(state["eh_proj.weight"] @ both)


DRAFTS: dict[str, Callable[..., Iterator[Tensor]]] = {
    "eagle3": eagle_drafts,
    "eagle1": eagle_drafts,
    "medusa": medusa_drafts,
    "hydra": hydra_drafts,
    "mtp": mtp_drafts,
}


@functools.cache
def expected(name: str) -> Pairs:
    """Brute-force logits of the head with these settings on the packed batch."""
    with torch.no_grad():
        return brute_force(make_head(**FLAGS[name]), packed_for(name))


class Document(NamedTuple):
    """One document alone."""

    ids: list[int]
    aux: Tensor
    last: Tensor


def brute_force(head: DraftHead, data: Packed) -> Pairs:
    """Logits by (batch row, position of the predicted token, step), every root from scratch."""
    found: Pairs = {}
    for row, first, stop in data.documents():
        span = (row, slice(first, stop))
        one = Document(data.ids[span].tolist(), data.aux[span], data.last[span])
        for root in range(len(one.ids) - 2):
            targets = range(root + 2, min(root + 2 + STEPS, len(one.ids)))
            drafts = DRAFTS[head.config.kind](head, one, root)
            for target, logits in zip(targets, drafts, strict=False):
                if data.mask[row, first + target]:
                    found[row, first + target, target - root - 2] = logits
    return found


def teacher_forced(head: DraftHead, data: Packed) -> Pairs:
    """The same dictionary from the fast unrolled pass."""
    plan = RowPlan.from_mask(data.mask, data.document, STEPS)
    feature = head.project(data.aux, data.last)
    columns = plan.columns(head.unroll(feature, data.ids, data.position, plan))
    logits = [head.draft_logits(column, step) for step, column in enumerate(columns)]
    width = data.ids.shape[1]
    return {
        (int(m) // width, int(m) % width, k): logits[k][p]
        for p, m in enumerate(plan.predicted_P)
        for k in range(STEPS)
        if plan.valid_PK[p, k]
    }


def difference(ours: Pairs, theirs: Pairs) -> float:
    """Largest difference, or infinity when other pairs are covered."""
    if ours.keys() != theirs.keys():
        return math.inf
    return max(float((ours[key] - theirs[key]).abs().max()) for key in theirs)


@pytest.fixture(scope="session")
def ref() -> ModuleType:
    """This file: test files cannot import each other."""
    return sys.modules[__name__]
