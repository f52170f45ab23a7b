"""A slow reference of drafting: every root from scratch, plain loops, float64.

It shares no code with the heads but their parameters.
"""

import functools
import itertools
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.heads import EagleConfig, EagleHead, RowPlan, Tables, unroll

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
}


def make_head(**settings: Any) -> EagleHead:
    torch.manual_seed(0)
    config = EagleConfig.from_target(TARGET, **settings)
    ids = torch.randperm(VOCAB)[:20].sort().values if config.is_reduced else None
    head = EagleHead(config, ids).double()
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

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.lengths = [[5, 7, 2], [9, 7]]
        rows, size = 2, 16
        self.ids = torch.randint(0, VOCAB, (rows, size))
        self.aux = torch.randn(rows, size, 3 * WIDTH, dtype=torch.float64)
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


def reference_output(
    head: EagleHead, features: list[Tensor], tokens: list[int], places: list[int]
) -> tuple[Tensor, Tensor]:
    """The last row's output of a plain causal layer over (feature, token, position) rows."""
    config = head.config
    state = {k.replace("layers.0.", "midlayer."): v for k, v in head.state_dict().items()}
    table = state.get("embed_tokens.weight", head.lent().embedding_VH)
    part = {k.removeprefix("midlayer."): v for k, v in state.items()}
    keys: list[list[Tensor]] = []
    values: list[Tensor] = []
    query: list[Tensor] = []
    residual = features[0]
    for feature, token, place in zip(features, tokens, places, strict=True):
        embed = table[token]
        if config.kind == "eagle1":
            x = residual = part["fc.weight"] @ torch.cat([embed, feature])
        else:
            normed = norm(feature, part["hidden_norm.weight"])
            x = torch.cat([norm(embed, part["input_layernorm.weight"]), normed])
            residual = normed if config.norm_before_residual else feature
        key = (part["self_attn.k_proj.weight"] @ x).view(config.num_kv_heads, -1)
        keys.append([turn(one, place) for one in key])
        values.append((part["self_attn.v_proj.weight"] @ x).view(config.num_kv_heads, -1))
        query = [turn(one, place) for one in (part["self_attn.q_proj.weight"] @ x).view(4, -1)]
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
    hidden = hidden + part["mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
    if config.kind == "eagle1":
        return hidden, head.lent().output_VH @ hidden
    normed = norm(hidden, part["norm.weight"])
    return (normed if config.norm_output else hidden), part["lm_head.weight"] @ normed


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


@functools.cache
def expected(name: str) -> Pairs:
    """Brute-force logits of the head with these settings on the packed batch."""
    with torch.no_grad():
        return brute_force(make_head(**FLAGS[name]), Packed())


def brute_force(head: EagleHead, data: Packed) -> Pairs:
    """Logits by (batch row, position of the predicted token, step), every root from scratch."""
    found: Pairs = {}
    for row, first, stop in data.documents():
        ids = data.ids[row, first:stop].tolist()
        features = reference_features(head, data.aux[row, first:stop], data.last[row, first:stop])
        for root in range(len(ids) - 2):
            feats, tokens = features[: root + 1], ids[1 : root + 2]
            places = list(range(root + 1))
            for step in range(STEPS):
                target = root + step + 2
                if target >= len(ids):
                    break
                hidden, logits = reference_output(head, feats, tokens, places)
                if data.mask[row, first + target]:
                    found[row, first + target, step] = logits
                feats, tokens = [*feats, hidden], [*tokens, ids[target]]
                places = [*places, places[-1] + 1]
    return found


def teacher_forced(head: EagleHead, data: Packed) -> Pairs:
    """The same dictionary from the fast unrolled pass."""
    plan = RowPlan.from_mask(data.mask, data.document, STEPS)
    feature = head.project(data.aux, data.last)
    hidden = unroll(head, feature, data.ids, data.position, plan)
    logits = head.draft_logits(plan.pairs(hidden))
    width = data.ids.shape[1]
    return {
        (int(m) // width, int(m) % width, k): logits[p, k]
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
