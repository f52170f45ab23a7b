"""The target: whole files, captured layers, tables, vocabulary, rotary positions.

Letters: B rows, T positions, F captured layers times H, H hidden size, R rotated pairs,
V rows of the output head.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outrider.data.anatomy import non_finite
from outrider.data.target import Target
from outrider.heads import DraftHead
from outrider.heads.config import DecoderConfig, HeadConfig
from outrider.heads.rope import rotary
from outrider.train.check.finding import Finding, fail, ok, warn

ROUNDING = 1e-3
"""Relative distance up to which two passes of one device may differ; layers differ by far more."""
CAPTURED = 64
"""Tokens on which captured states are compared."""


def check_weights(target: Target) -> Iterator[Finding]:
    """No weight is NaN or infinite."""
    broken, name = non_finite(target.model), "target weights"
    config = target.model.config
    about = (
        f"{target.name}: {type(target.model).__name__}, {target.num_layers} layers of "
        f"{target.hidden_size} channels, {config.dtype or target.dtype}".replace("torch.", "")
    )
    if broken:
        yield fail(
            name,
            f"{about}; {len(broken)} weights hold NaN or infinity: {', '.join(broken[:3])}",
            "fetch the target's files again; rows through these weights cannot train",
        )
    else:
        yield ok(name, f"{about}; all weights are there and finite")


def check_vocabulary(target: Target) -> Iterator[Finding]:
    """Rows of the tables, tokens of the tokenizer, ends of text."""
    rows, tokens, name = target.vocab_size, target.tokenizer_size, "vocabulary"
    padding = f", {rows - tokens} of them padding that is never proposed" if rows > tokens else ""
    stated = getattr(target.config, "vocab_size", rows)
    if stated != rows or target.embedding_VH.shape[0] < tokens:
        yield fail(
            name,
            f"config.json says {stated} tokens, the output head has {rows} rows and the embedding "
            f"{target.embedding_VH.shape[0]}, the tokenizer {tokens} tokens",
            "write the size of the output head into the target's config.json (vocab_size)",
        )
    else:
        yield ok(name, f"{rows} rows of the output head{padding}; tokenizer of {tokens} tokens")
    ends, name = target.eos_ids, "ends of text"
    beyond = [token for token in ends if token >= tokens]
    if not ends or beyond:
        yield fail(
            name,
            f"end tokens {list(ends)} of a tokenizer with {tokens} tokens",
            "put the ids at which generation stops into eos_token_id of the target's "
            "generation_config.json",
        )
    else:
        shown = "" if target.tokenizer is None else f" ({target.tokenizer.decode(list(ends))})"
        yield ok(name, f"generation stops at {list(ends)}{shown}")


def check_tables(target: Target) -> Iterator[Finding]:
    """Whether embedding and output head are one table, as the config says."""
    tied = bool(getattr(target.config, "tie_word_embeddings", False))
    one = target.embedding_VH.data_ptr() == target.output_VH.data_ptr()
    name, scale = "tables", f", embedding times {target.embed_scale:g}"
    more = scale if target.embed_scale != 1 else ""
    more += f", logits capped at {target.softcap:g}" if target.softcap is not None else ""
    if tied and not one and not torch.equal(target.embedding_VH, target.output_VH):
        yield fail(
            name,
            "config.json ties embedding and output head, and their rows differ",
            "set tie_word_embeddings to false in the target's config.json, or engines will lend "
            "the head another table than it was trained with",
        )
    else:
        held = "one tied table" if one else "two tables, of their own"
        yield ok(name, f"embedding and output head are {held}{more}; the head is lent both")


def check_capture(
    target: Target, ids_T: Tensor, layers: tuple[int, ...] | None
) -> Iterator[Finding]:
    """Captured states equal those of hooks that are independent of the capturing code.

    All layers are compared; `layers`, the head's, are named, None where there is no head. Where a
    device is not deterministic, the distance is told instead of "bit for bit".
    """
    name, ids_BT = "layer capture", ids_T[None, :CAPTURED].to(target.device)
    every = tuple(range(target.num_layers + 1))
    wanted, logits = independent_states(target, ids_BT)
    aux_BTF, last_BTH = target.run(ids_BT, layers=every)
    ours = aux_BTF.split(target.hidden_size, dim=-1)
    far = {layer: distance(ours[layer], wanted[layer]) for layer in every}
    if layers:
        alone = target.run_inner(ids_BT, layers=layers).split(target.hidden_size, dim=-1)
        again = {x: distance(one, wanted[x]) for x, one in zip(layers, alone, strict=True)}
        far |= {x: max(far[x], again[x]) for x in layers}
    wrong = [layer for layer in every if far[layer] > ROUNDING]
    if wrong:
        yield fail(
            name,
            f"states captured for layers {wrong} are not those that enter these layers",
            "this target's layers cannot be captured: report it with its config.json",
        )
        return
    if distance(target.logits(last_BTH), logits) > 30 * ROUNDING:
        yield fail(
            name,
            "the last state does not give the target's logits: it is on the wrong side of a norm",
            "this target's final norm cannot be told: report it with its config.json",
        )
        return
    used = "" if layers is None else f"; this head reads {list(layers) or 'none of them'}"
    exact = "bit for bit" if not max(far.values()) else f"to {max(far.values()):.1g}"
    yield ok(
        name,
        f"ids 0..{target.num_layers} equal independent hooks {exact} on {ids_BT.shape[1]} tokens, "
        f"and the last state, after the final norm, gives the logits{used} (id i is the state that "
        f"enters decoder layer i, before its norm; {target.num_layers} leaves the last layer, "
        "before the final norm)",
    )


def distance(one: Tensor, other: Tensor) -> float:
    """Largest relative distance of two positions' states; 0 where they are equal bit for bit.

    A NaN equals a NaN: that states are finite is another check.
    """
    one, other = one.nan_to_num().double(), other.nan_to_num().double()
    if torch.equal(one, other):
        return 0.0
    apart_BT = (one - other).norm(dim=-1)
    return float((apart_BT / other.norm(dim=-1).clamp(min=1e-12)).max())


class Independent(NamedTuple):
    """What the model itself states, and hooks of our own saw."""

    states: list[Tensor]
    """Those entering every layer, then the last one's output, [B, T, H] each."""
    logits_BTV: Tensor


@torch.no_grad()
def independent_states(target: Target, ids_BT: Tensor) -> Independent:
    """The state entering every layer and the last one's output, by outputs of the modules before.

    A layer's input is read as the output of what stands before it: the layer before, and for
    layer 0 what the model states as hidden_states[0].
    """
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: object, output: Tensor | tuple[Tensor, ...]) -> None:
        outputs.append((output if isinstance(output, Tensor) else output[0]).clone())

    hooks = [block.register_forward_hook(keep) for block in target.blocks]
    try:
        stated = target.model(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
    finally:
        for hook in hooks:
            hook.remove()
    states = getattr(stated, "hidden_states", None)
    first = states[0] if states else target.embedding_VH[ids_BT] * target.embed_scale
    return Independent([first, *outputs], stated.logits)


def check_rotary(head: DraftHead, target: Target) -> Iterator[Finding]:
    """The draft turns its channels as the target does: same inverse frequencies, same factor."""
    name, config = "rotary positions", head.config
    if not isinstance(config, DecoderConfig):
        yield ok(name, f"a {config.kind} head has none")
        return
    ours = rotary(config.rope, config.head_dim)
    found = list(target_frequencies(target))
    shown = f"{config.rope['rope_type']}, base {config.rope['rope_theta']:g}"
    for where, inverse_R, factor in found:
        fits = inverse_R.shape == ours.inverse_R.shape and abs(factor - ours.factor) < 1e-6
        if fits and torch.allclose(inverse_R, ours.inverse_R, rtol=1e-5, atol=0):
            size = len(inverse_R)
            yield ok(name, f"{shown}; {size} inverse frequencies equal the target's {where}")
            return
    if not found:
        yield warn(
            name,
            f"the target has no rotary positions that can be read; the draft takes {shown}",
            "a head with positions of another kind than its target's may draft worse",
        )
        return
    sizes = ", ".join(f"{where} of {len(inverse_R)}" for where, inverse_R, _ in found)
    yield fail(
        name,
        f"the draft's {len(ours.inverse_R)} inverse frequencies ({shown}) are none of the target's "
        f"({sizes})",
        "the head must turn as its target does: leave init and head_dim out, or report the "
        "target's config.json",
    )


def target_frequencies(target: Target) -> Iterator[tuple[str, Tensor, float]]:
    """Inverse frequencies [R] in the target's own modules, with their factors."""
    for prefix, module in target.decoder.named_modules():
        for key, value in module.named_buffers(recurse=False):
            if key.endswith("inv_freq") and "original" not in key:
                kind = key.removesuffix("inv_freq")
                factor = getattr(module, f"{kind}attention_scaling", 1.0)
                yield f"{prefix}.{key}".strip("."), value.float().cpu(), float(factor)


def check_positions(config: HeadConfig, target: Target, max_length: int) -> Iterator[Finding]:
    """Rows must not be longer than what target and head have positions for."""
    limit, name = config.max_position_embeddings, "position limits"
    has = getattr(target.config, "max_position_embeddings", None) or limit
    seen = f"rows to {max_length}, head {limit}, target {has}"
    if max_length > has:
        yield warn(
            name,
            f"{seen}: rows may be longer than what the target was made for",
            f"give --max-length {has}",
            max_length=has,
        )
    elif limit < max_length:
        yield warn(
            name,
            f"the head's max_positions is {limit} and rows go up to max_length {max_length}",
            "engines will not draft past the former: raise --max-positions",
        )
    elif limit > has:
        yield warn(name, f"the head's max_positions is {limit}, beyond the target's own {has}")
    else:
        yield ok(name, seen)
