"""The operator against plain-Python arithmetic, its messages, and its noise."""

import json
import math
import re
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from outrider.data.draws import BLOCK
from outrider.data.penalties import Prefix
from outrider.data.sampling import Sampling, Stream, draw, draw_rows, process, row_key, uniform

LOGITS = [2.0, -1.0, 0.5, 2.0, -3.0, 1.0]


def by_hand(logits: list[float], sampling: Sampling, seen: set[int]) -> list[float]:
    """`process` for one row, token by token."""
    penalty = sampling.repetition_penalty
    logits = [
        (x / penalty if x > 0 else x * penalty) if token in seen else x
        for token, x in enumerate(logits)
    ]
    if sampling.temperature < 1e-5:
        best = logits.index(max(logits))
        return [float(token == best) for token in range(len(logits))]
    weights = [math.exp(x / sampling.temperature) for x in logits]
    kept = set(range(len(weights)))
    order = sorted(kept, key=lambda token: (-weights[token], token))
    if sampling.top_k:
        kept = set(order[: sampling.top_k])
    total, nucleus, mass = sum(weights[token] for token in kept), set(), 0.0
    for token in order:
        if token in kept and mass < sampling.top_p:
            nucleus.add(token)
            mass += weights[token] / total
    top = max(weights[token] for token in nucleus)
    kept = {token for token in nucleus if weights[token] >= sampling.min_p * top}
    total = sum(weights[token] for token in kept)
    return [w / total if token in kept else 0.0 for token, w in enumerate(weights)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=0.3),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=0.8, top_p=0.7),
        Sampling(temperature=1.0, top_p=1e-9),
        Sampling(temperature=1.3, min_p=0.2),
        Sampling(temperature=1.0, repetition_penalty=1.5),
        Sampling(temperature=0.9, top_k=4, top_p=0.8, min_p=0.3, repetition_penalty=0.7),
        Sampling(repetition_penalty=3.0),
    ],
)
def test_process_is_the_documented_chain(sampling):
    seen = {0, 4}
    probs_NV = process(torch.tensor([LOGITS]), sampling, [Prefix([0, 4, 4], 2)])
    assert probs_NV.dtype == torch.float32
    assert probs_NV[0].tolist() == pytest.approx(by_hand(LOGITS, sampling, seen), abs=1e-6)
    assert probs_NV.sum().item() == pytest.approx(1.0, abs=1e-6)


def test_top_p_is_counted_within_what_top_k_left():
    logits_NV = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    probs_NV = process(logits_NV, Sampling(temperature=1.0, top_k=2, top_p=0.55))
    # 0.4 / 0.7 is already 0.571; over all four tokens the second would have been needed.
    assert probs_NV.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_greedy_takes_the_lowest_id_among_equals():
    logits_NV = torch.zeros(3, 5000)
    logits_NV[1, [17, 4000]] = 1.0
    logits_NV[2, 4999] = 1.0
    assert process(logits_NV, Sampling()).argmax(-1).tolist() == [0, 17, 4999]


def test_half_precision_logits_are_raised_before_the_division():
    logits_NV = torch.tensor([[3.0, 2.984375, -1.0]], dtype=torch.bfloat16)
    probs_NV = process(logits_NV, Sampling(temperature=0.001))
    assert probs_NV[0].tolist() == pytest.approx([1.0, math.exp(-15.625), 0.0], rel=1e-3)


def test_arguments_are_left_alone():
    logits_NV, prefix = torch.tensor([LOGITS]), Prefix([0, 1, 2, 3], 2)
    every = Sampling(
        temperature=0.5,
        top_k=2,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias=((1, 3.0),),
        bad_words=("5", "2,3,4"),
    )
    process(logits_NV, every, [prefix])
    assert logits_NV.tolist() == [LOGITS]


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("temperature", -0.5, "0 or more"),
        ("temperature", math.nan, "0 or more"),
        ("top_k", -1, "0 or more"),
        ("top_p", 0.0, r"\(0, 1\]"),
        ("top_p", 1.5, r"\(0, 1\]"),
        ("min_p", -0.1, r"\[0, 1\]"),
        ("repetition_penalty", 0.0, "above 0"),
        ("presence_penalty", math.inf, "a finite number"),
        ("frequency_penalty", math.nan, "a finite number"),
        ("logit_bias", ((3, -math.inf),), "to forbid a token name it in bad_words"),
        ("logit_bias", ((3, 1.0), (3, 2.0)), "once"),
        ("bad_words", ("one",), "joined by commas"),
        ("bad_words", ("",), "joined by commas"),
        ("filters", "both", "chain or joint"),
    ],
)
def test_settings_out_of_range_are_refused_with_the_remedy(field, value, remedy):
    with pytest.raises(ValueError, match=f"{field} is {re.escape(repr(value))}.*{remedy}"):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"bad_words": ("1,2",)},
    ],
)
def test_what_reads_the_path_is_refused_without_it(setting):
    with pytest.raises(ValueError, match="depends on the tokens before, but none were given"):
        process(torch.zeros(1, 4), Sampling(**setting))


def test_what_does_not_read_the_path_needs_none():
    sampling = Sampling(logit_bias=((2, 1.0),), bad_words=("0",))
    assert sampling.moves_logits
    assert process(torch.zeros(1, 4), sampling).tolist() == [[0, 0, 1, 0]]


def test_settings_survive_json():
    sampling = Sampling(temperature=0.7, logit_bias=((3, -1.5), (9, 2.0)), bad_words=("4", "5,6"))
    record = json.loads(json.dumps(sampling.record()))
    assert set(record) == {"temperature", "logit_bias", "bad_words"}
    assert Sampling.from_record(record) == sampling
    assert hash(Sampling.from_record(json.loads(json.dumps(asdict(sampling))))) == hash(sampling)
    assert Sampling().record() == {}


def test_noise_is_a_fixed_function_of_its_key():
    # Committed answers depend on these very numbers.
    assert uniform(0, row_key("chat-train-00000-t0"), 50, Stream.TARGET) == 0.21177895487355292
    assert uniform(7, -1, 3, Stream.DRAFT, slot=2) == 0.07301421937939456


def test_coins_of_different_keys_are_uniform_and_uncorrelated():
    keys = [(s, r, p, k, j) for s in range(3) for r in range(10) for p in range(100)
            for k in Stream for j in range(2)]  # fmt: skip
    coins = torch.tensor([uniform(*key) for key in keys], dtype=torch.float64)
    assert len(set(coins.tolist())) == len(keys)
    assert coins.min() >= 0
    assert coins.max() < 1
    counts = torch.histc(coins, 16, 0, 1)
    expected = len(keys) / 16
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi-square, 15 degrees, p = 1e-4
    for step in (1, 2, 8, 800):  # neighbours in slot, stream, position, row
        pairs = torch.stack([coins[:-step], coins[step:]])
        assert abs(torch.corrcoef(pairs)[0, 1]) < 4.5 / math.sqrt(len(keys))


def test_draw_inverts_the_distribution_function():
    probs_V = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    coins = [0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53]
    assert [draw(probs_V, coin) for coin in coins] == [1, 1, 3, 3, 4, 4]
    assert draw_rows(probs_V.expand(6, -1), coins).tolist() == [1, 1, 3, 3, 4, 4]
    assert draw(probs_V * 3, 0.75) == 4  # what a rejection leaves need not sum to one


def test_no_coin_reaches_a_token_of_probability_zero():
    probs_V = torch.rand(50_000, generator=torch.Generator().manual_seed(0))
    probs_V[::2] = 0
    probs_V[-1000:] = 0
    probs_V /= probs_V.sum()
    coins = [0.0, 1 - 2**-53, *(uniform(0, 0, i, Stream.TARGET) for i in range(200))]
    tokens = draw_rows(probs_V.expand(len(coins), -1), coins)
    assert (probs_V[tokens] > 0).all()


@pytest.mark.parametrize("size", [5, BLOCK, BLOCK + 1, 3 * BLOCK, 10_000])
def test_a_draw_by_blocks_falls_where_a_running_sum_does(size):
    """On units of 2^-16, so that sums are exact and coins can fall on the very edges."""
    generator = torch.Generator().manual_seed(size)
    weights_V = torch.randn(size, generator=generator).mul(2).softmax(-1)
    drawn_N = torch.multinomial(weights_V, 1 << 16, replacement=True, generator=generator)
    counts_V = torch.bincount(drawn_N, minlength=size)
    cdf_V = counts_V.cumsum(0)
    points_N = torch.cat([cdf_V[:-1], cdf_V - 1, torch.tensor([0])]).clamp(0, (1 << 16) - 1)
    expected_N = torch.searchsorted(cdf_V, points_N, right=True)
    for dtype in (torch.float32, torch.float64):
        probs_V = (counts_V.double() / (1 << 16)).to(dtype)
        for first in range(0, len(points_N), 1000):
            some_N = points_N[first : first + 1000]
            found_N = draw_rows(probs_V.expand(len(some_N), -1), some_N.double() / (1 << 16))
            assert torch.equal(found_N, expected_N[first : first + 1000])


def test_draws_follow_the_probabilities():
    probs_V = process(torch.tensor([LOGITS]), Sampling(temperature=1.0))[0]
    n = 20_000
    coins = [uniform(1, 2, position, Stream.TARGET) for position in range(n)]
    counts = Counter(draw_rows(probs_V.expand(n, -1), coins).tolist())
    for token, p in enumerate(probs_V.tolist()):
        assert abs(counts[token] - n * p) < 4.5 * math.sqrt(n * p * (1 - p)) + 1


def test_an_empty_distribution_is_refused():
    with pytest.raises(ValueError, match="positive, finite sum"):
        draw(torch.zeros(4), 0.5)
