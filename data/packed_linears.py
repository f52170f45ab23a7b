"""Products with weights that were packed once, on a CPU: what decoding a few rows at a time needs.

torch hands a weight to the BLAS as it lies, in every product, and reads it at a third of the
memory's speed where few rows are multiplied. oneDNN reads one that was packed beforehand at full
speed, so that verifying six tokens takes hardly longer than one. Sums are of the precision they
had, in another order.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.data.target import Target

MOST_BYTES = 4 << 30
"""Of packed copies that are held at once, those of all contexts together."""
ROWS = 32
"""Rows of a product that weights are packed for; others may be multiplied by them too."""

_Key = tuple[int, torch.Size, tuple[int, ...]]


class _Weight:
    """A weight that may be packed; holding it keeps its address its own."""

    def __init__(self, plain: Tensor) -> None:
        self._plain = plain
        self._packed: Tensor | None = None
        self._version = -1

    @property
    def size(self) -> int:
        """Bytes of the packed copy."""
        return self._plain.numel() * self._plain.element_size()

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return 0 if self._packed is None else self.size

    def packed(self) -> Tensor:
        """The copy; made anew where the weight was written to since."""
        version = 0 if self._plain.is_inference() else self._plain._version
        if self._packed is None or version != self._version:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._plain, ROWS)
            self._version = version
        return self._packed


_contexts: list[dict[_Key, _Weight]] = []
"""Of every context that is open, the outermost first."""
_plain_linear = F.linear


@contextmanager
def packed_linears(target: Target) -> Generator[bool]:
    """Within, the target's linear layers and output head multiply by packed weights.

    Yields whether they can; see `packed_weights`.
    """
    with packed_weights(weights_of(target)) as can:
        yield can


def weights_of(target: Target) -> list[Tensor]:
    """The matrices that a target may multiply by, the output head among them."""
    return [target.output_VH, *(one for one in target.model.parameters() if one.ndim == 2)]


@contextmanager
def packed_weights(weights: Iterable[Tensor]) -> Generator[bool]:
    """Within, `torch.nn.functional.linear` multiplies by packed copies of these weights.

    A weight is packed when it is first multiplied by. Yields whether any can be: weights of
    precisions and devices that this build of torch cannot pack stay as they are, and so do those
    that would go beyond MOST_BYTES, and every product that a gradient flows through.
    """
    chosen = {_key(one): _Weight(one.detach()) for one in weights if can_pack(one)}
    _contexts.append(chosen)
    F.linear = _linear
    try:
        yield bool(chosen)
    finally:
        _contexts[:] = [one for one in _contexts if one is not chosen]
        if not _contexts:
            F.linear = _plain_linear


def can_pack(weight: Tensor) -> bool:
    """Whether it is a matrix of a kind that this build of torch can pack."""
    if weight.device.type != "cpu" or weight.ndim != 2 or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _key(weight: Tensor) -> _Key:
    return weight.data_ptr(), weight.shape, weight.stride()


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
    packed = _packed_copy(input, weight)
    if packed is None:
        return _plain_linear(input, weight, bias)
    # What torch.compile emits for frozen models on a CPU; it has no public name.
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


def _packed_copy(given: Tensor, weight: Tensor) -> Tensor | None:
    key = _key(weight)
    found = next((known[key] for known in _contexts if key in known), None)
    if found is None or given.dtype != weight.dtype or given.ndim < 2 or not given.numel():
        return None
    if torch.is_grad_enabled() and (given.requires_grad or weight.requires_grad):
        return None
    if not found.held:
        held = sum(one.held for known in _contexts for one in known.values())
        if held + found.size > MOST_BYTES:
            return None
    return found.packed()
