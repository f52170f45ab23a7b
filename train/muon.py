"""Muon: momentum whose matrices are replaced by their nearest orthogonal ones.

Orthogonalising is half of a training step of a small head, so it is done with few products:
attention projections a head at a time, which is both cheaper and what each head is (heads are
separate maps), and four iterations that start from a tight bound of the largest singular value.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

Split: TypeAlias = tuple[Literal["rows", "columns"], int]
"""Blocks of so many rows (queries, keys, values) or columns (attention's output) each."""

COEFFICIENTS = (  # the last three intervals follow from the first, [0.02, 1]
    (7.7110, -22.1138, 16.2487),
    (3.2153, -2.4112, 0.5013),
    (2.2183, -1.5940, 0.4107),
    (1.8842, -1.2602, 0.3760),
)
"""a x + b x^3 + c x^5, each the nearest to 1 in the largest deviation over the interval that the
one before leaves (Amsel et al. 2025, "The Polar Express", section 3): together they send every
singular value from 0.02 to 1 within 0.001 of 1, and never above 1.001 of it."""

CUSHION = 1.03
"""What the bound is stretched by: rounded products may pass 1, where the first polynomial climbs
23 times as fast as its argument."""


def orthogonalise(x_BMN: Tensor, scale: float = 1.0) -> Tensor:
    """`scale` times the nearest matrices with orthonormal rows (M <= N) or columns (M > N), nearly.

    Singular values are divided by the Schatten 8-norm, (sum of sigma^8)^(1/8): it exceeds the
    largest by at most rank^(1/8), where the usual Frobenius norm exceeds it by up to rank^(1/2),
    and the first iteration computes it anyway. Zero matrices stay zero.

    Two iterations at a time are taken on the Gram matrix G = X X^T, M x M: with
    P = a + b G + c G^2 the next one is P G P. More than two would lose small singular values to
    rounding.

    Returns:
        [..., M, N] of the type of `x_BMN`, in which all products are taken.
    """
    is_tall = x_BMN.shape[-2] > x_BMN.shape[-1]
    x = x_BMN.mT if is_tall else x_BMN
    x = x * _power_of_two_near(x.norm(dim=(-2, -1), keepdim=True).float()).to(x.dtype)
    pairs = list(zip(COEFFICIENTS[::2], COEFFICIENTS[1::2], strict=True))
    for index, ((a, b, c), (d, e, f)) in enumerate(pairs):
        gram = x @ x.mT
        square = gram @ gram
        s = torch.ones((), device=x.device)
        if index == 0:
            bound = square.float().norm(dim=(-2, -1), keepdim=True).pow(0.25)
            s = torch.where(bound > 0, 1 / (CUSHION * bound), 0.0)
        first = ((b * s**2) * gram + (c * s**4) * square).to(x.dtype)
        first.diagonal(dim1=-2, dim2=-1).add_(a)
        gram = (s**2).to(x.dtype) * (first @ gram @ first)
        second = e * gram + f * (gram @ gram)
        second.diagonal(dim1=-2, dim2=-1).add_(d)
        k = scale if index + 1 == len(pairs) else 1.0
        x = (second @ first * (s * k).to(x.dtype)) @ x
    return x.mT if is_tall else x


def _power_of_two_near(norm_B: Tensor) -> Tensor:
    """1 / norm to within a factor of 2, exact in any floating type; 0 for 0."""
    _, exponent = torch.frexp(norm_B)
    return torch.where(norm_B > 0, torch.ldexp(torch.ones_like(norm_B), -exponent), 0.0)


def blocks(value: Tensor, split: Split | None) -> Tensor:
    """What is orthogonalised: a view of [out, in], as it is or as [B, M, N] of smaller blocks."""
    if split is None:
        return value
    kind, size = split
    if kind == "rows":
        return value.unflatten(0, (-1, size))
    return value.unflatten(1, (-1, size)).transpose(0, 1)


class Muon(Optimizer):
    """Nesterov momentum, orthogonalised; decoupled weight decay.

    Updates are scaled to the root mean square that AdamW's have, 0.2 (Liu et al. 2025, "Muon is
    scalable for LLM training", section 2.2), so that rates carry over.

    Args:
        groups: parameter groups; "split" of a group says into which blocks its matrices fall.
        lr: rate.
        momentum: of the gradient average.
        weight_decay: a step's share lr * weight_decay of each weight is taken off.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "split": None}
        super().__init__(list(groups), defaults)
        self._dtype = product_dtype()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; `closure`, if given, computes the loss and the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    self._update(value, value.grad, group)
        return loss

    def _update(self, value: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[value]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(value)
        average, momentum = state["momentum_buffer"], group["momentum"]
        average.lerp_(grad, 1 - momentum)
        ahead = torch.lerp(grad, average, momentum)
        x_BMN = blocks(ahead, group["split"]).to(self._dtype)
        rms = 0.2 * max(x_BMN.shape[-2:]) ** 0.5
        change_BMN = orthogonalise(x_BMN, -group["lr"] * rms)
        value.mul_(1 - group["lr"] * group["weight_decay"])
        blocks(value, group["split"]).add_(change_BMN)


def flop(value: Tensor, split: Split | None) -> int:
    """Operations of the products that one update of `value` takes."""
    shape = blocks(value, split).shape
    short, long = sorted(shape[-2:])
    count = shape[0] if len(shape) > 2 else 1
    return count * len(COEFFICIENTS) // 2 * (4 * short**2 * long + 10 * short**3)


def product_dtype() -> torch.dtype:
    """bfloat16 where the machine multiplies it fast, else float32."""
    fast = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32
