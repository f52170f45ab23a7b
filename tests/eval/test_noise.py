"""Keyed noise: the race draws by weight, and small changes of the weights hardly ever move it."""

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch

from outrider.data.draws import BLOCK
from outrider.data.sampling import Stream, draw, uniform
from outrider.eval.certificate.keyed import KeyedByPosition, judge_keys
from outrider.eval.noise import _AT_ONCE, KeyedNoise, _least_times, race, race_times


def coins(count):
    return [uniform(0, 1, position, Stream.TARGET) for position in range(count)]


def test_the_race_draws_by_weight():
    weights_V = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    counts = Counter(race(weights_V, coin) for coin in coins(20_000))
    assert counts[1] == 0
    for token, weight in enumerate(weights_V.tolist()):
        spread = math.sqrt(20_000 * weight * (1 - weight))
        assert abs(counts[token] - 20_000 * weight) <= 4.5 * spread


def test_the_races_times_are_splitmix_by_hand():
    mask = (1 << 64) - 1
    coin = 0.21177895487355292
    times = []
    for token in range(4):
        state = (token * 0x9E3779B97F4A7C15 + int(coin * 2**53)) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
        times.append(-math.log(((state >> 12) + 0.5) / 2**52))
    for only in range(4):
        # Weights that make all but one token hopeless unless its time is the least.
        weights = torch.tensor([1.0 if token == only else times[token] / times[only] * 0.999
                                for token in range(4)], dtype=torch.float64)  # fmt: skip
        assert race(weights, coin) == only


def test_scaled_weights_give_the_same_token():
    weights_V = torch.rand(500, generator=torch.Generator().manual_seed(0))
    for coin in coins(50):
        assert race(weights_V, coin) == race(weights_V * 7, coin)


def test_rounding_moves_the_race_far_less_than_the_cumulative_draw():
    generator = torch.Generator().manual_seed(0)
    weights_V = torch.randn(20_000, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    noise_V = 1 + 1e-5 * torch.randn(20_000, generator=generator, dtype=torch.float64)
    moved = {
        how: sum(how(weights_V, coin) != how(weights_V * noise_V, coin) for coin in coins(1000))
        for how in (race, draw)
    }
    assert moved[race] == 0
    assert moved[draw] > 5


@pytest.mark.parametrize("length", [1, 2, 61])
def test_a_certain_token_is_always_drawn(length):
    weights_V = torch.zeros(length)
    weights_V[length // 2] = 1e-30
    assert {race(weights_V, coin) for coin in coins(20)} == {length // 2}
    assert race(weights_V, 0.0) == race(weights_V, 1 - 2**-53) == length // 2


def _spread(generator, size):
    return torch.randn(size, generator=generator).mul(3).softmax(-1)


def _peaked(generator, size):
    return torch.randn(size, generator=generator).mul(100).softmax(-1)


def _flat(generator, size):
    return torch.full((size,), 1 / size)


def _sparse(generator, size):
    weights_V = torch.zeros(size, dtype=torch.float64)
    weights_V[torch.randperm(size, generator=generator)[:5]] = 0.2
    return weights_V


def _tiny(generator, size):
    """Times over weights that float32 has no room for."""
    return torch.rand(size, generator=generator) * 10.0 ** -int(
        torch.randint(30, 45, (), generator=generator)
    )


@pytest.mark.parametrize("size", [_AT_ONCE + 1, 40_000, 2 * _AT_ONCE + BLOCK, 100_001])
@pytest.mark.parametrize("weights", [_spread, _peaked, _flat, _sparse, _tiny])
def test_bounds_spare_logarithms_but_change_no_winner(weights, size):
    generator = torch.Generator().manual_seed(size)
    for coin in [0.0, 1 - 2**-53, *coins(10)]:
        weights_V = weights(generator, size)
        times_V = race_times(weights_V, coin)
        assert race(weights_V, coin) == int((times_V / weights_V).argmin())


def test_no_time_is_below_its_blocks_bound():
    weights_V = torch.rand(100_001, generator=torch.Generator().manual_seed(0))
    for coin in coins(20):
        times_V = race_times(weights_V, coin) / weights_V
        found = torch.stack([block.min() for block in times_V.split(BLOCK)])
        least_G = torch.from_numpy(_least_times(weights_V.numpy(), coin))
        assert (least_G <= found * (1 + 2.0**-20)).all()
        assert (least_G > 0.5 * found).any()


def test_weights_that_are_none_are_raced_as_ever():
    for odd in (0.0, math.nan, math.inf):
        weights_V = torch.zeros(50_000)
        weights_V[40_000] = odd
        assert race(weights_V, 0.3) == int((race_times(weights_V, 0.3) / weights_V).argmin())


def test_streams_depths_and_slots_are_apart():
    noise = KeyedNoise(3, 4, 5)
    drafts = {noise.draft(depth) for depth in range(10)}
    assert len(drafts) == 10
    assert noise.draft(2) != KeyedNoise(3, 4, 7).draft(0)
    assert noise.draft(0) == uniform(3, 4, 5, Stream.DRAFT)
    weights_V = torch.rand(50, generator=torch.Generator().manual_seed(0))
    assert noise.draw(2, weights_V) == KeyedNoise(3, 4, 7).draw(0, weights_V)
    assert len({noise.draft(depth, slot) for depth in range(9) for slot in range(9)}) == 81
    coin = uniform(3, 4, 5, Stream.ACCEPT, 1 << 32 | 2)
    assert noise.coin(1, 2, coin + 1e-9)
    assert not noise.coin(1, 2, coin)
    assert not noise.coin(1, 2, torch.tensor(0.0))
    assert noise.coin(1, 2, torch.tensor(1.0))


@pytest.fixture(scope="module")
def judged():
    return list(judge_keys())


def test_whole_texts_follow_the_law_under_the_decoders_keys(judged):
    assert {one.rule for one in judged} >= {"rejection", "match", "block", "without", "traversal"}
    assert all(one.distance == 0 for one in judged)


def test_coins_that_rounds_share_are_seen_for_rules_that_judge_from_the_leaf():
    found = {(one.rule, one.plan): one.distance for one in judge_keys(KeyedByPosition)}
    assert {rule for (rule, _), distance in found.items() if distance} == {"block", "traversal"}
    assert found["block", "chain:3"] > Fraction(1, 100)
