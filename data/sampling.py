"""The one sampling operator of plain and speculative decoding: from logits to p to a token.

Noise is keyed by (seed, row, position, stream), so a draw does not depend on batch or order.
Dimensions: N rows, V vocabulary.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, Literal, Self

import torch
from torch import Tensor

from outrider.data.draws import block_sums, fall
from outrider.data.penalties import Prefix, add_bias, ban, penalise_counts, penalise_repeats

# Below this temperature sampling is greedy: dividing by it would overflow fp32 logits to no use.
GREEDY_BELOW = 1e-5

_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the target's logits become the distribution that decoding draws from."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the most likely token, the lowest id among equals."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens with at least this probability; 1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 drops none."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens already in the row; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens already in the answer; 0 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is already in the answer; 0 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids and what is added to their logits, such as 345 -2.5."""
    bad_words: tuple[str, ...] = ()
    """Token sequences never to complete, each as ids joined by commas, such as 345,12."""
    filters: Literal["chain", "joint"] = "chain"
    """chain: top-k, top-p, min-p in turn, each on what the last one left, renormalised. joint: each
    on the whole law, and a token stays that passes all three."""

    def __post_init__(self) -> None:
        # Lists, as JSON gives them, would compare unequal and cannot be hashed.
        pairs = tuple((token, float(amount)) for token, amount in self.logit_bias)
        object.__setattr__(self, "logit_bias", pairs)
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        for name, is_allowed, remedy in _checks(self):
            if not is_allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; pick {remedy}")

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Read what `record` or `asdict` gave; settings that it lacks are at their defaults."""
        return cls(**record)

    def record(self) -> dict[str, Any]:
        """The settings that differ from their defaults, for files."""
        default = asdict(Sampling())
        return {key: value for key, value in asdict(self).items() if value != default[key]}

    @property
    def is_greedy(self) -> bool:
        """Whether the distribution is one-hot."""
        return self.temperature < GREEDY_BELOW

    @property
    def bad_word_ids(self) -> tuple[tuple[int, ...], ...]:
        """`bad_words` as token ids."""
        return tuple(tuple(map(int, word.split(","))) for word in self.bad_words)

    @property
    def reads_path(self) -> bool:
        """Whether the law depends on the tokens before, beyond the logits."""
        is_penalised = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return is_penalised != (1.0, 0.0, 0.0) or any("," in word for word in self.bad_words)

    @property
    def moves_logits(self) -> bool:
        """Whether logits are changed before the temperature, so that even their order may be."""
        return self.reads_path or bool(self.logit_bias or self.bad_words)


def _checks(sampling: Sampling) -> list[tuple[str, bool, str]]:
    """Field, whether its value is allowed, and what is."""
    penalties = ("presence_penalty", "frequency_penalty")
    biased = [token for token, _ in sampling.logit_bias]
    finite = all(math.isfinite(amount) for _, amount in sampling.logit_bias)
    return [
        ("temperature", 0 <= sampling.temperature < math.inf, "0 or more, 0 meaning greedy"),
        ("top_k", sampling.top_k >= 0, "0 or more, 0 meaning every token"),
        ("top_p", 0 < sampling.top_p <= 1, "a value in (0, 1], 1 meaning every token"),
        ("min_p", 0 <= sampling.min_p <= 1, "a value in [0, 1], 0 meaning every token"),
        (
            "repetition_penalty",
            0 < sampling.repetition_penalty < math.inf,
            "a value above 0, 1 meaning no penalty",
        ),
        *(
            (name, math.isfinite(getattr(sampling, name)), "a finite number, 0 meaning no penalty")
            for name in penalties
        ),
        (
            "logit_bias",
            finite and len(set(biased)) == len(biased),
            "a finite number for each token, once; to forbid a token name it in bad_words",
        ),
        (
            "bad_words",
            all(re.fullmatch(r"\d+(,\d+)*", word) for word in sampling.bad_words),
            "token ids joined by commas, such as 345,12",
        ),
        ("filters", sampling.filters in ("chain", "joint"), "chain or joint"),
    ]


class Stream(IntEnum):
    """What a coin is for; coins of different streams are independent."""

    TARGET = 0
    """A token from the target: plain decoding, and a round's bonus token."""
    ACCEPT = 1
    """Whether a drafted token is accepted."""
    RESIDUAL = 2
    """A token from what is left of the target after a rejection."""
    DRAFT = 3
    """A token from the draft."""


def process(
    logits_NV: Tensor, sampling: Sampling, prefixes: Sequence[Prefix] | None = None
) -> Tensor:
    """The distribution decoding draws from: float32 [N, V], rows summing to one.

    Order, all in float32: logit bias, repetition penalty, presence and frequency penalties, bad
    words, temperature, then top-k, top-p and min-p. `prefixes` holds the tokens before each row's
    context. Raises ValueError when a setting that reads them has none.
    """
    logits_NV = logits_NV.float()
    if sampling.reads_path and prefixes is None:
        raise ValueError(
            f"sampling is {sampling.record()}, which depends on the tokens before, but none were "
            "given; pass prefixes, one for each row, or leave penalties and bad words out"
        )
    logits_NV = move_logits(logits_NV, sampling, prefixes)
    if sampling.is_greedy:
        # torch.argmax does not promise the lowest id among equals, so take it over the ids.
        ids_V = torch.arange(logits_NV.shape[-1], device=logits_NV.device)
        is_best_NV = logits_NV == logits_NV.max(dim=-1, keepdim=True).values
        first_N = torch.where(is_best_NV, ids_V, len(ids_V)).min(dim=-1).values
        return torch.zeros_like(logits_NV).scatter_(-1, first_N[:, None], 1.0)
    return _filter((logits_NV / sampling.temperature).softmax(dim=-1), sampling)


def move_logits(logits_NV: Tensor, sampling: Sampling, prefixes: Sequence[Prefix] | None) -> Tensor:
    """The logits after bias, penalties and bad words: greedy decoding takes the largest."""
    if sampling.logit_bias:
        logits_NV = add_bias(logits_NV, sampling.logit_bias)
    if sampling.repetition_penalty != 1.0:
        assert prefixes is not None
        logits_NV = penalise_repeats(logits_NV, prefixes, sampling.repetition_penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        assert prefixes is not None
        penalties = (sampling.presence_penalty, sampling.frequency_penalty)
        logits_NV = penalise_counts(logits_NV, prefixes, *penalties)
    if sampling.bad_words:
        logits_NV = ban(logits_NV, sampling.bad_word_ids, prefixes)
    return logits_NV


def _filter(probs_NV: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, top-p and min-p: in turn, or each on the law that came in."""
    whole_NV, is_kept_NV = probs_NV, torch.ones_like(probs_NV, dtype=torch.bool)
    chained = sampling.filters == "chain"
    if 0 < sampling.top_k < probs_NV.shape[-1]:
        is_kept_NV = _in_top_k(probs_NV, sampling.top_k)
        probs_NV = _renormalise(probs_NV, is_kept_NV)
    if sampling.top_p < 1.0:
        is_kept_NV = is_kept_NV & _in_top_p(probs_NV if chained else whole_NV, sampling.top_p)
        probs_NV = _renormalise(probs_NV, is_kept_NV)
    if sampling.min_p > 0.0:
        # A share of the largest: the same tokens pass, renormalised before or not.
        floor_N1 = sampling.min_p * probs_NV.max(dim=-1, keepdim=True).values
        probs_NV = _renormalise(probs_NV, probs_NV >= floor_N1)
    return probs_NV


def row_key(name: str) -> int:
    """A 64-bit integer that stands for a row's name in `uniform`."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def uniform(seed: int, row: int, position: int, stream: Stream, slot: int = 0) -> float:
    """A coin in [0, 1), a pure function of its key (SplitMix64's finaliser chained over it).

    `position` is the place in the row of the token being decided, prompt included; `slot` tells
    apart several coins for one position.
    """
    state = 0
    for part in (seed, row, position, int(stream) | slot << 8):
        state = _mix((state ^ (part & _MASK)) + 0x9E3779B97F4A7C15)
    return (state >> 11) * 2.0**-53


def draw(probs_V: Tensor, coin: float) -> int:
    """The token whose share of [0, total) holds `coin * total`; never one of probability zero.

    Probabilities need not sum to one. Raises ValueError when there is nothing to draw.
    """
    return int(draw_rows(probs_V[None], [coin])[0])


def draw_rows(probs_NV: Tensor, coins_N: Tensor | Sequence[float]) -> Tensor:
    """`draw` for each row: token ids, int64 [N]."""
    sums_NG = block_sums(probs_NV, torch.float64)
    total_N = sums_NG.sum(-1)
    if not bool(((total_N > 0) & (total_N < math.inf)).all()):
        raise ValueError(
            f"probabilities sum to {total_N.tolist()}; every row needs a positive, finite sum"
        )
    coins_N = torch.as_tensor(coins_N, dtype=torch.float64, device=probs_NV.device)
    return fall(probs_NV, sums_NG, coins_N)


def _in_top_k(probs_NV: Tensor, k: int) -> Tensor:
    order_NV = probs_NV.sort(dim=-1, descending=True, stable=True).indices
    is_kept_NV = torch.zeros_like(probs_NV, dtype=torch.bool)
    return is_kept_NV.scatter_(-1, order_NV[:, :k], True)


def _in_top_p(probs_NV: Tensor, top_p: float) -> Tensor:
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True, stable=True)
    before_NV = sorted_NV.double().cumsum(dim=-1) - sorted_NV.double()
    # The most likely token is always kept: nothing comes before it.
    is_kept_NV = torch.zeros_like(probs_NV, dtype=torch.bool)
    return is_kept_NV.scatter(-1, order_NV, before_NV < top_p)


def _renormalise(probs_NV: Tensor, is_kept_NV: Tensor) -> Tensor:
    kept_NV = torch.where(is_kept_NV, probs_NV, torch.zeros_like(probs_NV))
    return kept_NV / kept_NV.sum(dim=-1, keepdim=True)


def _mix(state: int) -> int:
    state &= _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
