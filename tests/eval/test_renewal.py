"""The renewal recursion against the full law of decoding, enumerated on a toy language.

The reference decodes every text with every draft and every coin; it shares no code with the
recursion. Figures are exact expectations, so equality is to rounding.
"""

import functools
import itertools

import numpy as np
import pytest
import torch

from outrider.eval.offline.renewal import Renewal, outcome, renewal, survival

VOCAB, BUDGET, EOS, ROOT = 3, 5, 0, 1
RULES = ("rejection", "match", "point")
Law = dict[tuple[int, ...], np.ndarray]


class Toy:
    """Laws that depend on the last two tokens; a draft's also on its depth in the round."""

    def __init__(self, seed: int, rule: str) -> None:
        rng = np.random.default_rng(seed)
        self.p_table = rng.dirichlet(np.full(VOCAB, 0.7), size=(VOCAB, VOCAB))
        noise = rng.dirichlet(np.full(VOCAB, 0.7), size=(4, VOCAB, VOCAB))
        self.q_table = 0.6 * self.p_table[None] + 0.4 * noise
        self.rule = rule

    def p(self, text: tuple[int, ...]) -> np.ndarray:
        return self.p_table[text[-2], text[-1]]

    def q(self, text: tuple[int, ...], depth: int) -> np.ndarray:
        soft = self.q_table[depth, text[-2], text[-1]]
        return np.eye(VOCAB)[soft.argmax()] if self.rule == "point" else soft

    def accept(self, text: tuple[int, ...], depth: int, token: int) -> float:
        p, q = self.p(text), self.q(text, depth)
        if self.rule == "rejection":
            return min(1.0, q[token] / p[token]) if p[token] else 0.0
        return float(q[token])

    def alpha(self, text: tuple[int, ...], depth: int) -> float:
        p, q = self.p(text), self.q(text, depth)
        return float(np.minimum(p, q).sum() if self.rule == "rejection" else (p * q).sum())


def node(toy: Toy, text: tuple[int, ...], depth: int) -> list[tuple[float, int, bool]]:
    """(chance, token, accepted) of one judged draft, over draws of the draft and of the coin."""
    p, q = toy.p(text), toy.q(text, depth)
    found = []
    if toy.rule == "rejection":
        left = np.maximum(p - q, 0)
        left = left / left.sum() if left.sum() else p
        for x in range(VOCAB):
            yes = min(1.0, p[x] / q[x]) if q[x] else 0.0
            found.append((q[x] * yes, x, True))
            found += [(q[x] * (1 - yes) * left[y], y, False) for y in range(VOCAB)]
        return found
    return [(q[x] * p[t], t, x == t) for x in range(VOCAB) for t in range(VOCAB)]


def decode_law(toy: Toy, length: int) -> Law:
    """Text -> chance times (1, rounds, rounds that kept 1.., judged at depth 1..)."""

    def ended(text: tuple[int, ...]) -> bool:
        return len(text) - 2 >= BUDGET or (len(text) > 2 and text[-1] == EOS)

    def add(law: Law, text: tuple[int, ...], value: np.ndarray) -> None:
        law[text] = law.get(text, np.zeros_like(value)) + value

    @functools.cache
    def from_round(text: tuple[int, ...]) -> Law:
        return inside(text, 0, np.eye(1, 2 + 2 * length, 1)[0])

    @functools.cache
    def tail(text: tuple[int, ...]) -> Law:
        if ended(text):
            return {text: np.eye(1, 2 + 2 * length)[0]}
        return from_round(text)

    def inside(text: tuple[int, ...], depth: int, seen: np.ndarray) -> Law:
        law: Law = {}
        if ended(text):
            return {text: seen + np.eye(1, len(seen))[0]}
        if depth == length:
            steps = [(chance, x, False) for x, chance in enumerate(toy.p(text))]
        else:
            steps = node(toy, text, depth)
        for chance, token, accepted in steps:
            now = seen.copy()
            if depth < length:
                now[2 + length + depth] += 1
                now[2 + depth] += accepted
            after = (*text, token)
            rest = inside(after, depth + 1, now) if accepted else tail(after)
            for full, value in rest.items():
                # After a rejection the rest brings the counts of its own rounds only.
                add(law, full, chance * (value if accepted else value + now * value[0]))
        return law

    return from_round((ROOT, ROOT))


def solve(
    toy: Toy, texts: list[tuple[int, ...]], depth: int
) -> tuple[torch.Tensor, torch.Tensor, Renewal]:
    """The recursion's inputs and outputs; place 0 is the prefill's token, the second of ROOT."""
    accept = torch.zeros(len(texts), BUDGET + 1, depth, dtype=torch.float64)
    alpha = torch.zeros_like(accept)
    for b, text in enumerate(texts):
        for t, i in itertools.product(range(1, BUDGET + 1), range(depth)):
            if t + i < len(text) - 1:
                prefix = text[: t + i + 1]
                accept[b, t, i] = toy.accept(prefix, i, text[t + i + 1])
                alpha[b, t, i] = toy.alpha(prefix, i)
    tokens = torch.tensor([len(text) - 1 for text in texts])
    return accept, alpha, renewal(accept, tokens)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", [0, 1])
def test_rounds_of_every_text_and_length_equal_enumeration(rule: str, seed: int) -> None:
    toy = Toy(seed, rule)
    for length in (1, 2, 3):
        law = decode_law(toy, length)
        assert sum(value[0] for value in law.values()) == pytest.approx(1)
        texts = [text for text, value in law.items() if value[0] > 0]
        _, _, result = solve(toy, texts, 3)
        expected = [law[text][1] / law[text][0] for text in texts]
        assert result.rounds_BL[:, length].numpy() == pytest.approx(expected, abs=1e-12)
        assert result.rounds_BL[:, 0].tolist() == [len(text) - 2 for text in texts]


@pytest.mark.parametrize("rule", RULES)
def test_rao_blackwell_survival_equals_enumeration(rule: str) -> None:
    toy, length = Toy(3, rule), 3
    law = decode_law(toy, length)
    texts = [text for text, value in law.items() if value[0] > 0]
    chance = torch.tensor([law[text][0] for text in texts], dtype=torch.float64)
    accept, alpha, result = solve(toy, texts, length)
    start = result.visits_BLT[:, length, :, None] * survival(accept)[..., :length]
    inside = torch.tensor(
        [
            [[t + i < len(text) - 1 for i in range(length)] for t in range(BUDGET + 1)]
            for text in texts
        ]
    )
    judged = (chance[:, None, None] * start * inside).sum((0, 1))
    kept = (chance[:, None, None] * start * inside * alpha).sum((0, 1))
    truth = np.sum(list(law.values()), axis=0)
    assert kept.numpy() == pytest.approx(truth[2 : 2 + length], abs=1e-12)
    assert judged.numpy() == pytest.approx(truth[2 + length :], abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_a_uniform_average_over_starts_is_biased(rule: str) -> None:
    toy, length = Toy(3, rule), 3
    law = decode_law(toy, length)
    texts = [text for text, value in law.items() if value[0] > 0]
    chance = np.array([law[text][0] for text in texts])
    accept, _, result = solve(toy, texts, length)
    emitted = sum(law[text][0] * (len(text) - 2) for text in texts)
    true_tau = emitted / sum(value[1] for value in law.values())
    exact_tau = emitted / (chance @ result.rounds_BL[:, length].numpy())
    uniform = accept.cumprod(-1).sum(-1)[:, 1:].sum(1).numpy()
    uniform_tau = 1 + (chance @ uniform) / emitted
    assert exact_tau == pytest.approx(true_tau, abs=1e-12)
    assert abs(uniform_tau - true_tau) > 0.005


def test_visits_add_up_to_rounds_and_outcomes_to_one() -> None:
    generator = torch.Generator().manual_seed(0)
    accept = torch.rand(4, 12, 5, generator=generator, dtype=torch.float64)
    tokens = torch.tensor([12, 7, 2, 1])
    result = renewal(accept, tokens)
    assert torch.allclose(result.visits_BLT.sum(-1), result.rounds_BL)
    assert torch.allclose(outcome(accept).sum(-1), torch.ones(()).double())
    assert result.rounds_BL[2].tolist() == [1.0] * 6
    assert result.rounds_BL[3].tolist() == [0.0] * 6


def test_all_accepted_and_none_accepted() -> None:
    ones = renewal(torch.ones(1, 13, 3), torch.tensor([13]))
    assert ones.rounds_BL[0].tolist() == [12, 6, 4, 3]
    none = renewal(torch.zeros(1, 13, 3), torch.tensor([13]))
    assert none.rounds_BL[0].tolist() == [12, 12, 12, 12]
