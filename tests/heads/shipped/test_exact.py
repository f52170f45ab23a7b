"""Modules that targets ship give the logits of the engines' own modules, and faults are seen."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from outrider.heads import HeadCache, MtpHead

NAMES = ["mimo", "qwen3", "qwen3_5", "deepseek"]


@pytest.mark.parametrize("name", NAMES)
def test_teacher_forced_logits_equal_the_engines_module(
    name: str, folder: Callable[[str], Path], ref: ModuleType, kit: ModuleType
) -> None:
    head = kit.make_head(name, folder(name))
    wanted = kit.reference(name, kit.module_tensors(name), ref, kit.STYLES[name])
    assert {key[2] for key in wanted} == {0, 1, 2}
    with torch.no_grad():
        assert ref.difference(ref.teacher_forced(head, ref.Packed()), wanted) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_drafting_recursively_equals_the_engines_module(
    name: str, folder: Callable[[str], Path], kit: ModuleType
) -> None:
    """Its own greedy drafts, five deep, one row at a time over a cache."""
    head, lent, style = kit.make_head(name, folder(name)), kit.tables(), kit.STYLES[name]
    made = torch.Generator().manual_seed(8)
    ids = torch.randint(0, kit.VOCAB, (6,), generator=made).tolist()
    states = torch.randn(5, kit.WIDTH, generator=made, dtype=torch.float64)
    cache, drafted = HeadCache(), []
    with torch.no_grad():
        hidden = head.step(states[None], torch.tensor([ids[1:]]), torch.arange(5)[None], cache)
        for depth in range(5):
            logits = head.draft_logits(hidden[0, -1], depth)
            drafted.append(logits)
            token, place = int(logits.argmax()), torch.tensor([[5 + depth]])
            ids.append(token)
            hidden = head.step(hidden[:, -1:], torch.tensor([[token]]), place, cache)
        drafts = kit.reference_drafts(kit.module_tensors(name), style, lent, ids, states, 4)
        for ours, theirs in zip(drafted, drafts, strict=False):
            assert float((ours - theirs).abs().max()) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_layer_is_transformers_layer(name: str, kit: ModuleType) -> None:
    """The block of the reference against the family's own code, in its float32 precision."""
    style, layer = kit.STYLES[name], kit.layer_of(name).float()
    found, start = kit.module_tensors(name), style.prefix + style.block
    state = layer.state_dict()
    layer.load_state_dict({key: found[start + key].float() for key in state})
    rows = torch.randn(7, kit.WIDTH, dtype=torch.float64)
    rotary = style.rotary(kit.config_of(name))
    position = torch.arange(7)[None]
    with torch.no_grad():
        embeddings = rotary(rows[None].float(), position)
        mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
        theirs = layer(rows[None].float(), position_embeddings=embeddings, attention_mask=mask)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    part = {key: found[start + key] for key in state}
    ours = kit.reference_layer(part, list(rows), style)
    assert float((theirs[0, -1].double() - ours).abs().max()) < 1e-4


def swap_halves(head: MtpHead) -> None:
    head.config = dataclasses.replace(head.config, hidden_first=not head.config.hidden_first)


def swap_norms(head: MtpHead) -> None:
    head.enorm, head.hnorm = head.hnorm, head.enorm


def feed_the_other_state(head: MtpHead) -> None:
    head.config = dataclasses.replace(head.config, norm_output=not head.config.norm_output)


def shift_the_offset(head: MtpHead) -> None:
    head.config = dataclasses.replace(head.config, norm_offset=1 - head.config.norm_offset)


def swap_block_norms(head: MtpHead) -> None:
    block = head.mtp_block
    first, second = block.input_layernorm, block.post_attention_layernorm
    block.input_layernorm, block.post_attention_layernorm = second, first


def drop_q_norm(head: MtpHead) -> None:
    head.mtp_block.self_attn.q_norm.weight.data.fill_(1.0)


def drop_bias(head: MtpHead) -> None:
    head.mtp_block.self_attn.v_proj.bias.data.zero_()


def swap_gate(head: MtpHead) -> None:
    """All queries first, then all gates, instead of head by head."""
    weight = head.mtp_block.self_attn.q_proj.weight
    weight.data = (
        weight.data.unflatten(0, (head.config.num_heads, 2, head.config.head_dim))
        .transpose(0, 1)
        .flatten(0, 2)
    )


FAULTS = [
    *itertools.product(
        NAMES, [swap_halves, swap_norms, feed_the_other_state, shift_the_offset, swap_block_norms]
    ),
    ("qwen3", drop_q_norm),
    ("qwen3_5", drop_q_norm),
    ("mimo", drop_bias),
    ("qwen3_5", swap_gate),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_a_module_run_wrongly_is_seen(
    name: str,
    fault: Callable[[MtpHead], None],
    folder: Callable[[str], Path],
    ref: ModuleType,
    kit: ModuleType,
) -> None:
    head = kit.make_head(name, folder(name))
    fault(head)
    wanted = kit.reference(name, kit.module_tensors(name), ref, kit.STYLES[name])
    with torch.no_grad():
        assert ref.difference(ref.teacher_forced(head, ref.Packed()), wanted) > 1e-3
