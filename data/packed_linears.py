"""Linear layers of a float32 target on a CPU, multiplied by weights that were packed once.

torch packs a float32 weight anew in every product; oneDNN takes half the time for a batch of rows
where it is packed beforehand, with sums in float32 as before, in another order.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from outrider.data.target import Target

MOST_BYTES = 4 << 30
"""Of weights that are packed, which are in memory a second time then."""
ROWS = 32
"""Rows of a product that weights are packed for; others may be multiplied by them too."""


@contextmanager
def packed_linears(target: Target) -> Generator[bool]:
    """Within, the target's linear layers multiply by packed copies of their weights.

    Yields whether they do: other precisions, devices and builds of torch, and weights of more than
    MOST_BYTES, stay as they are. No gradient flows through them.
    """
    linears = [one for one in target.decoder.modules() if type(one) is nn.Linear]
    size = sum(one.weight.numel() * one.weight.element_size() for one in linears)
    if not can_pack(target) or size > MOST_BYTES:
        yield False
        return
    try:
        for one in linears:
            vars(one)["forward"] = product(one)  # before the class's own
        yield True
    finally:
        for one in linears:
            vars(one).pop("forward", None)


def can_pack(target: Target) -> bool:
    """Whether its weights are of a kind that this build of torch can pack."""
    is_plain = target.dtype == torch.float32 and target.device.type == "cpu"
    return is_plain and torch.backends.mkldnn.is_available()


def product(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The layer's product with a packed copy of its weight."""
    weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
    bias = None if linear.bias is None else linear.bias.detach()
    # The operation that torch.compile emits for frozen CPU models; torch has no public name for it.
    return partial(_multiply, weight=weight, bias=bias)


def _multiply(given: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(given, weight, bias, "none", [], "")
