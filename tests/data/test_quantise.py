"""Rounded states against references that share no code: scipy's transforms, brute-force levels."""

import hashlib
from functools import reduce

import numpy as np
import pytest
import scipy.fft
import scipy.linalg
import scipy.stats
import torch

from outrider.data.quantise import CODECS, MAX_LEVELS, rotate

FACTORS = {32: (32,), 48: (16, 3), 576: (64, 9), 4096: (64, 64), 720: (16, 45)}


def states(count=40, layers=3, width=48, seed=0):
    """Normal channels of unlike sizes, and one that holds nearly all energy at position 0."""
    made = torch.Generator().manual_seed(seed)
    sizes = torch.randn(width, generator=made).abs() * 3 + 0.1
    state = torch.randn(count, layers, width, generator=made) * sizes
    state[:, :, 5] += 40
    state[0, :, 7] = 24_900
    return state


def rotation(width):
    """The rotation as one dense matrix."""
    parts = [
        scipy.linalg.hadamard(size) / np.sqrt(size)
        if size & (size - 1) == 0
        else scipy.fft.dct(np.eye(size), axis=0, norm="ortho")
        for size in FACTORS[width]
    ]
    bits = "".join(
        f"{byte:08b}"[::-1]
        for block in range(-(-width // 256))
        for byte in hashlib.sha256(f"signs {block}".encode()).digest()
    )
    return reduce(np.kron, parts) * np.array([1 - 2 * int(bit) for bit in bits[:width]])


def kept_apart(state, number):
    """The largest channels, and the state without them."""
    order = np.argsort(-np.abs(state), axis=-1)[..., :number]
    rest = state.copy()
    np.put_along_axis(rest, order, 0, -1)
    return state - rest, rest


@pytest.mark.parametrize("width", FACTORS)
def test_the_rotation_is_scipys_and_is_undone(width):
    state = torch.randn(3, 2, width, dtype=torch.float64)
    dense = rotation(width)
    np.testing.assert_allclose(rotate(state), state.numpy() @ dense.T, atol=1e-6)
    torch.testing.assert_close(rotate(rotate(state), back=True), state, rtol=0, atol=1e-6)


def test_int8_is_rotate_round_and_rotate_back():
    state = states()
    codec = CODECS["int8"]
    exact, rest = kept_apart(state.double().numpy(), 1)
    rotated = rest @ rotation(48).T
    found = codec.encode(state)
    scale = found["scale"].double().numpy()
    least = np.abs(rotated).max(-1) / 127
    assert (scale >= least * (1 - 1e-6)).all()
    assert (scale <= least * 1.01).all()
    codes = np.round(rotated / scale[..., None])
    off = np.abs(codes - found["codes"].numpy())
    assert off.max() <= 1  # a tie
    assert (off > 0).mean() < 1e-3
    rounded = exact.astype(np.float32)
    again = (found["codes"].numpy() * scale[..., None]) @ rotation(48)
    expected = np.where(exact != 0, torch.tensor(rounded).bfloat16().double().numpy(), again)
    np.testing.assert_allclose(codec.decode(found), expected, rtol=1e-4, atol=1e-3)


def test_int4_takes_the_nearest_of_16_levels_and_the_best_scale():
    state = states(width=576, count=12)
    codec = CODECS["int4"]
    _, rest = kept_apart(state.double().numpy(), 6)
    rotated = rest @ rotation(576).T
    levels = np.array([-x for x in MAX_LEVELS[::-1]] + list(MAX_LEVELS))
    unit = rotated / np.sqrt((rotated**2).mean(-1, keepdims=True))
    codes = np.abs(unit[..., None] - levels).argmin(-1)
    found = codec.encode(state)
    packed = found["codes"].numpy()
    ours = np.stack([packed & 15, packed >> 4], -1).reshape(codes.shape)
    assert (ours != codes).mean() < 1e-3
    best = [
        np.linalg.lstsq(levels[c][:, None], x, rcond=None)[0][0]
        for c, x in zip(codes.reshape(-1, 576), rotated.reshape(-1, 576), strict=True)
    ]
    np.testing.assert_allclose(found["scale"].float().flatten(), best, rtol=2**-8)


def test_the_16_levels_are_the_centroids_of_a_normal_law():
    levels = np.array([-x for x in MAX_LEVELS[::-1]] + list(MAX_LEVELS))
    bounds = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
    normal = scipy.stats.norm
    mass = np.diff(normal.cdf(bounds))
    centroids = -np.diff(normal.pdf(bounds)) / mass
    np.testing.assert_allclose(levels, centroids, atol=1e-3)
    distortion = 1 - (mass * centroids**2).sum()
    assert distortion == pytest.approx(0.009497, abs=1e-5)  # Max 1960, table I, N = 16


def test_fp8_takes_the_nearest_number_that_there_is():
    state = states()
    found = CODECS["fp8"].encode(state)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()]
    scaled = state / found["scale"].float()[..., None]
    gap = (scaled[..., None] - numbers).abs()
    ours = (scaled - found["codes"].float()).abs()
    torch.testing.assert_close(ours, gap.amin(-1), rtol=1e-5, atol=1e-7)


def error_bound(form, state, found):
    """Largest distance that a state may have from what was stored, by state."""
    norm = state.norm(dim=-1)
    if form == "int8":
        largest = state.abs().amax(-1)
        return found["scale"].float() * state.shape[-1] ** 0.5 / 2 + largest * 2**-8
    if form == "fp8":
        return norm * 2**-4 + found["scale"].float() * 2**-9 * state.shape[-1] ** 0.5
    rest = state.norm(dim=-1) ** 2 - found["exact"].float().square().sum(-1)
    share = 0.12 + state.shape[-1] ** -0.5  # a state of few channels is not quite normal
    return share * rest.clamp(min=0).sqrt() + found["exact"].float().norm(dim=-1) * 2**-8 + 1e-3


@pytest.mark.parametrize("form", CODECS)
@pytest.mark.parametrize("width", [32, 48, 576])
def test_a_round_trip_stays_within_its_bound_and_a_wrong_scale_does_not(form, width):
    codec, state = CODECS[form], states(width=width, count=300)
    found = codec.encode(state)
    bound = error_bound(form, state, found)
    assert ((codec.decode(found) - state).norm(dim=-1) <= bound).all()
    found["scale"] = found["scale"].roll(1, 0)  # the scale of the token before
    assert not ((codec.decode(found) - state).norm(dim=-1) <= bound).all()


def test_one_huge_channel_does_not_drown_the_others():
    """|x| near 24,900 in one channel, as at a row's first position: the rest keeps its digits."""
    state = states(width=576)
    rest = torch.arange(576) != 7

    def lost(form):
        decoded = CODECS[form].decode(CODECS[form].encode(state))[0, :, rest]
        gap = (decoded - state[0, :, rest]).norm(dim=-1) / state[0, :, rest].norm(dim=-1)
        return float(gap.max())

    assert lost("int8") < 0.02
    assert lost("int4") < 0.12
    scale = state[0].abs().amax(-1, keepdim=True) / 127  # one plain scale for the whole state
    plain = ((state[0] / scale).round() * scale)[:, rest]
    assert (plain - state[0, :, rest]).norm() / state[0, :, rest].norm() > 0.5


@pytest.mark.parametrize("form", CODECS)
def test_positions_do_not_depend_on_each_other_and_zeros_stay_zeros(form):
    codec, state = CODECS[form], states()
    state[3] = 0
    whole, alone = codec.encode(state), codec.encode(state[3:5])
    for name, field in codec.fields(3, 48).items():
        assert whole[name].dtype == alone[name].dtype == field.dtype
        assert tuple(whole[name].shape) == (40, *field.shape)
        assert torch.equal(whole[name][3:5].float(), alone[name].float())
    assert not codec.decode(alone)[0].any()


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="hidden size is 33; states of an even size"):
        CODECS["int4"].fields(1, 33)
