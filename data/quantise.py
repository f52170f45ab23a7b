"""Hidden states in 8 or 4 bits: the largest channels exact, the rest rotated, then rounded.

A few channels of a transformer's residual stream outweigh all others (at a row's first position one
channel may hold nearly all of the energy), and one scale for a whole state would round the rest
away. So the largest channels of every state are kept apart in bfloat16, and a fixed orthogonal
rotation spreads what is left evenly over all coordinates, which then look normal: one scale a state
serves, and for 4 bits the 16 levels are the best ones for a normal law (J. Max, Quantizing for
Minimum Distortion, 1960, table I). Rotation before quantising: QuaRot (Ashkboos et al. 2024).

Letters: N positions, L states of a position (one for each layer kept), H hidden size, O channels
kept exactly, C bytes of codes.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

MAX_LEVELS = (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733)
"""Positive half of the 16 levels for a standard normal law."""
FACTOR = 64
"""Channels that are mixed in one product, at most."""
LARGEST_FP8 = 448.0


class Field(NamedTuple):
    """One tensor of an encoding, for one position."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes for one position."""
        return math.prod(self.shape) * self.dtype.itemsize


class Codec(Protocol):
    """States to compact tensors and back; position by position, so rows can be cut anywhere."""

    def fields(self, num_states: int, width: int) -> dict[str, Field]:
        """Name, shape and dtype of every tensor of an encoding."""
        ...

    def encode(self, state_NLH: Tensor) -> dict[str, Tensor]:
        """The tensors named by `fields`, each with N first."""
        ...

    def decode(self, found: Mapping[str, Tensor]) -> Tensor:
        """States [N, L, H] in float32."""
        ...


@dataclass(frozen=True)
class Fp8(Codec):
    """One float8 (e4m3) a channel and one scale a state; no rotation, as its steps are relative."""

    @override
    def fields(self, num_states: int, width: int) -> dict[str, Field]:
        return {
            "codes": Field((num_states, width), torch.float8_e4m3fn),
            "scale": Field((num_states,), torch.bfloat16),
        }

    @override
    def encode(self, state_NLH: Tensor) -> dict[str, Tensor]:
        scale_NL = _scale_above(state_NLH.abs().amax(-1) / LARGEST_FP8)
        codes = state_NLH / scale_NL.float()[..., None]
        return {"codes": codes.to(torch.float8_e4m3fn), "scale": scale_NL}

    @override
    def decode(self, found: Mapping[str, Tensor]) -> Tensor:
        return found["codes"].float() * found["scale"].float()[..., None]


@dataclass(frozen=True)
class Rotated(Codec):
    """8 bits (even steps) or 4 bits (Max's levels) a rotated channel; the largest channels exact.

    8 bits: the error of a state is at most sqrt(H) / 2 times its scale, which is at most 1.01 / 127
    of the largest rotated channel. 4 bits: about 0.097 times the norm of what is rotated.
    """

    bits: int
    exact_share: int
    """One channel in so many is kept exactly, and one at least."""

    def num_exact(self, width: int) -> int:
        """Channels of a state that are kept exactly."""
        return max(1, width // self.exact_share)

    @override
    def fields(self, num_states: int, width: int) -> dict[str, Field]:
        if width % 2 or width > 1 << 16:
            raise ValueError(
                f"the hidden size is {width}; states of an even size up to 65,536 can be stored in "
                "int8 or int4: store them as bfloat16"
            )
        codes = Field((num_states, width), torch.int8)
        if self.bits == 4:
            codes = Field((num_states, width // 2), torch.uint8)
        exact = (num_states, self.num_exact(width))
        return {
            "codes": codes,
            "scale": Field((num_states,), torch.bfloat16),
            "exact": Field(exact, torch.bfloat16),
            "exact_channels": Field(exact, torch.uint16),
        }

    @override
    def encode(self, state_NLH: Tensor) -> dict[str, Tensor]:
        channels_NLO = state_NLH.abs().topk(self.num_exact(state_NLH.shape[-1]), dim=-1).indices
        exact_NLO = state_NLH.gather(-1, channels_NLO)
        rotated_NLH = rotate(state_NLH.scatter(-1, channels_NLO, 0.0))
        round_ = _round_to_8 if self.bits == 8 else _round_to_4
        codes, scale_NL = round_(rotated_NLH)
        return {
            "codes": codes,
            "scale": scale_NL,
            "exact": exact_NLO.to(torch.bfloat16),
            "exact_channels": channels_NLO.to(torch.uint16),
        }

    @override
    def decode(self, found: Mapping[str, Tensor]) -> Tensor:
        codes, scale_NL1 = found["codes"], found["scale"].float()[..., None]
        # In place where it can be: fresh memory for a batch costs as much as the arithmetic.
        scaled = codes * scale_NL1 if self.bits == 8 else _levels(codes).mul_(scale_NL1)
        state_NLH = rotate(scaled, back=True)
        return state_NLH.scatter_(-1, found["exact_channels"].long(), found["exact"].float())


CODECS: dict[str, Codec] = {
    "int8": Rotated(bits=8, exact_share=576),
    "fp8": Fp8(),
    "int4": Rotated(bits=4, exact_share=96),
}


def rotate(state: Tensor, *, back: bool = False) -> Tensor:
    """Random signs, then an orthogonal mix of all channels [..., H]; `back` undoes it.

    The mix is a Kronecker product of a Hadamard matrix and, for the odd part of H, a cosine
    transform, applied in blocks: H times the sum of their sizes multiplications, not H squared.
    """
    width, device = state.shape[-1], state.device
    signs_H = _signs(width).to(state)
    mixed, inner = (state if back else state * signs_H).reshape(-1, width), width
    for block in _blocks(width):
        mix = block.to(device, state.dtype)
        mix, size = mix.T if back else mix, len(mix)
        inner //= size
        if inner == 1:
            mixed = mixed.reshape(-1, size) @ mix.T
        else:
            parts = mixed.reshape(-1, size, inner)
            mixed = torch.bmm(mix.expand(len(parts), size, size), parts)
    mixed = mixed.reshape(state.shape)
    return mixed.mul_(signs_H) if back else mixed


@cache
def _blocks(width: int) -> tuple[Tensor, ...]:
    """Factors of the mix, the outermost first; the last one holds the odd part, if any.

    All have about FACTOR rows at most, but for a larger odd part.
    """
    rest = width & -width
    odd, inner = width // rest, 1
    while inner < rest and 2 * inner * odd <= FACTOR:
        inner *= 2
    last = torch.kron(_hadamard(inner), _cosines(odd))
    exponent = (rest // inner).bit_length() - 1
    number = -(-exponent // (FACTOR.bit_length() - 1))
    shares = [exponent // number + (i < exponent % number) for i in range(number)]
    return (*(_hadamard(1 << share) for share in shares), last)


def _hadamard(size: int) -> Tensor:
    """An orthogonal matrix of a power of two rows, of one size of number (Sylvester's)."""
    mix = torch.ones(1, 1, dtype=torch.float64)
    while len(mix) < size:
        mix = torch.cat([torch.cat([mix, mix], 1), torch.cat([mix, -mix], 1)])
    return mix / math.sqrt(size)


def _cosines(size: int) -> Tensor:
    """The orthogonal cosine transform (DCT-II)."""
    order = torch.arange(size, dtype=torch.float64)
    mix = torch.cos(math.pi * order[:, None] * (order + 0.5) / size) * math.sqrt(2 / size)
    mix[0] /= math.sqrt(2)
    return mix


@cache
def _signs(width: int) -> Tensor:
    """Fixed random signs: the bits of SHA-256, the same with every library version."""
    blocks = [hashlib.sha256(b"signs %d" % block).digest() for block in range(-(-width // 256))]
    bits = [byte >> place & 1 for block in blocks for byte in block for place in range(8)]
    return 1.0 - 2.0 * torch.tensor(bits[:width], dtype=torch.float32)


def _scale_above(scale: Tensor) -> Tensor:
    """As bfloat16, never below what was asked, so that nothing is clipped; one for zeros."""
    rounded = scale.where(scale > 0, 1.0).to(torch.bfloat16)
    below = rounded.float() < scale
    return torch.where(below, (rounded.float() * (1 + 2**-7)).to(torch.bfloat16), rounded)


def _round_to_8(rotated_NLH: Tensor) -> tuple[Tensor, Tensor]:
    scale_NL = _scale_above(rotated_NLH.abs().amax(-1) / 127)
    codes = (rotated_NLH / scale_NL.float()[..., None]).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scale_NL


def _round_to_4(rotated_NLH: Tensor) -> tuple[Tensor, Tensor]:
    """Two codes a byte, the even channel's in the low half; the scale with the least error."""
    levels = _all_levels().to(rotated_NLH)
    spread_NL1 = rotated_NLH.square().mean(-1, keepdim=True).sqrt()
    unit = rotated_NLH / spread_NL1.where(spread_NL1 > 0, 1.0)
    codes = torch.zeros_like(unit, dtype=torch.uint8)
    for bound in ((levels[1:] + levels[:-1]) / 2).tolist():  # a sixth of the time of bucketize
        codes += (unit > bound).view(torch.uint8)
    chosen = levels.index_select(0, codes.flatten().int()).view_as(rotated_NLH)
    scale_NL = (rotated_NLH * chosen).sum(-1) / chosen.square().sum(-1)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale_NL.to(torch.bfloat16)


def _levels(codes_NLC: Tensor) -> Tensor:
    """The levels [N, L, H] that packed codes stand for."""
    found = _pairs().to(codes_NLC.device).index_select(0, codes_NLC.flatten().int())
    return found.view(torch.float32).view(*codes_NLC.shape[:-1], 2 * codes_NLC.shape[-1])


@cache
def _pairs() -> Tensor:
    """The two levels of every byte of codes, side by side in one number of 64 bits.

    To look up numbers takes a quarter of the time of looking up rows of two.
    """
    byte, levels = torch.arange(256), _all_levels()
    return torch.stack([levels[byte & 15], levels[byte >> 4]], dim=-1).view(torch.int64).flatten()


@cache
def _all_levels() -> Tensor:
    half = torch.tensor(MAX_LEVELS)
    return torch.cat([-half.flip(0), half])
