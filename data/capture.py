"""States of the target's layers by their ids, copied out of a forward pass by hooks.

A layer id counts as in transformers' `hidden_states`: id i is the state *entering* decoder layer i
(0 is the embedding). The one difference: id `num_layers` is the last layer's output *before* the
final norm, where `hidden_states[-1]` is after it.

Letters: B rows, T positions, H hidden size, F captured layers times H.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's three layers: an early, the middle, and a late one."""
    layers = (2, num_layers // 2, num_layers - 3)
    if not layers[0] < layers[1] < layers[2]:
        raise ValueError(
            f"num_layers is {num_layers}: EAGLE-3's default layers would be {layers}, not three "
            f"distinct ones in order (from 7 layers on they are); name the layers explicitly"
        )
    return layers


def check_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layer ids as a tuple, refused when out of range or repeated."""
    wrong = [layer for layer in layers if not 0 <= layer <= num_layers]
    if wrong:
        raise ValueError(
            f"layers holds {wrong}; this target has ids 0 (the embedding) to {num_layers} "
            f"(the last layer's output before the final norm): leave those out"
        )
    if len(set(layers)) != len(layers):
        raise ValueError(f"layers is {tuple(layers)}; name each layer once")
    return tuple(layers)


@contextmanager
def captured(
    blocks: nn.ModuleList, ids_BT: Tensor, layers: tuple[int, ...]
) -> Generator[list[Tensor]]:
    """A list that a pass within fills with the layers' states side by side [B, T, F].

    Hooks copy each wanted state into its slice at once: no in-place residual spoils it.
    """
    kept: list[Tensor] = []

    def keep(slot: int, hidden_BTH: Tensor) -> None:
        width = hidden_BTH.shape[-1]
        if not kept:
            kept.append(hidden_BTH.new_empty(*ids_BT.shape, len(layers) * width))
        kept[0][..., slot * width : (slot + 1) * width] = hidden_BTH

    with ExitStack() as stack:
        for slot, layer in enumerate(layers):
            stack.callback(hook(blocks, layer, slot, keep).remove)
        yield kept


def hook(
    blocks: nn.ModuleList, layer: int, slot: int, keep: Callable[[int, Tensor], None]
) -> torch.utils.hooks.RemovableHandle:
    """Give `keep` the state that enters a decoder layer, or leaves the last one."""
    if layer < len(blocks):

        def before(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            keep(slot, args[0] if args else kwargs["hidden_states"])

        return blocks[layer].register_forward_pre_hook(before, with_kwargs=True)

    def after(_: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        keep(slot, output if isinstance(output, Tensor) else output[0])

    return blocks[-1].register_forward_hook(after)
