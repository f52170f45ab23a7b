"""Mixtures, cut teachers and their errors, number by number."""

import math

import pytest
import torch
from torch import Tensor

from outrider.heads import slopes
from outrider.heads.losses import OBJECTIVES, coarsen
from outrider.heads.objective import Objective, saved_calls
from outrider.heads.slopes import slope

ROWS, STEPS, WIDTH = 5, 3, 9


def laws(spread: float = 2.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits [P, K, W] and a teacher [P, 1, W]."""
    torch.manual_seed(0)
    logits = torch.randn(ROWS, STEPS, WIDTH, dtype=dtype) * spread
    return logits, (torch.randn(ROWS, 1, WIDTH, dtype=dtype) * spread).softmax(-1)


def outcomes(
    logits: list[float], p: list[float], top_k: int, temperature: float
) -> list[tuple[float, float]]:
    """(p, q) of the top tokens, then of all others together."""
    powers = [math.exp(z / temperature) for z in logits]
    q = [x / sum(powers) for x in powers]
    order = sorted(range(len(p)), key=lambda token: -p[token])
    pairs = [(p[token], q[token]) for token in order[:top_k]]
    rest = order[top_k:]
    return [*pairs, (sum(p[token] for token in rest), sum(q[token] for token in rest))]


def plain(name: str, pairs: list[tuple[float, float]], decay: float) -> float:
    """One divergence over outcomes of which the last one is no token."""
    kl = sum(a * math.log(a / b) for a, b in pairs)
    accept = sum(min(a, b) for a, b in pairs)
    weight = math.exp(-decay * accept)
    found = {
        "soft_ce": -sum(a * math.log(b) for a, b in pairs),
        "kl": kl,
        "reverse_kl": sum(b * math.log(b / a) for a, b in pairs),
        "jsd": sum(a * math.log(2 * a / (a + b)) + b * math.log(2 * b / (a + b)) for a, b in pairs)
        / 2,
        "hard_ce": -math.log(pairs[0][1]),
        "tv": 1 - accept,
        "lk_alpha": -math.log(accept),
        "lk_lambda": weight * kl + (1 - weight) * (1 - accept),
    }
    return found[name]


def expected(objective: Objective, logits: Tensor, teacher: Tensor) -> list[float]:
    assert objective.top_k is not None
    found: list[float] = []
    for row in range(ROWS):
        for step in range(STEPS):
            z, p = logits[row, step].tolist(), teacher[row, 0].tolist()
            pairs = outcomes(z, p, objective.top_k, objective.temperature)
            terms = [(plain(name, pairs, objective.lk_decay), w) for name, w in objective.terms]
            found.append(sum(value * weight for value, weight in terms))
    return found


def given(objective: Objective, logits: Tensor, teacher: Tensor) -> list[float]:
    each = slope(logits, teacher, objective).each_PKM
    return (each @ each.new_tensor(objective.weights)).flatten().tolist()


CUT = Objective(
    terms=tuple((name, 0.3 + place) for place, name in enumerate(OBJECTIVES)),
    lk_decay=1.5,
    top_k=3,
    temperature=1.3,
)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@pytest.mark.parametrize("top_k", [1, 3, WIDTH - 1])
def test_a_cut_teacher_keeps_probabilities_and_the_mass_of_its_tail(name: str, top_k: int) -> None:
    logits, teacher = laws()
    objective = Objective(terms=((name, 1.0),), top_k=top_k)
    wanted = expected(objective, logits, teacher)
    assert given(objective, logits, teacher) == pytest.approx(wanted, rel=1e-11, abs=1e-13)


def test_a_mixture_at_a_temperature_equals_the_sum_of_its_terms() -> None:
    logits, teacher = laws()
    wanted = expected(CUT, logits, teacher)
    assert given(CUT, logits, teacher) == pytest.approx(wanted, rel=1e-11)
    reference = CUT.loss(logits, teacher.expand_as(logits)).flatten().tolist()
    assert reference == pytest.approx(wanted, rel=1e-11)


def test_a_tail_that_is_dropped_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted faults: the tail forgotten, and the top tokens made to sum to one."""
    logits, teacher = laws()
    wanted = expected(CUT, logits, teacher)
    whole = slopes._cut

    def forgotten(log_q: Tensor, q: Tensor, teacher: Tensor, top_k: int) -> slopes._Laws:
        laws = whole(log_q, q, teacher, top_k)
        top = teacher * (teacher >= teacher.topk(top_k, dim=-1).values[..., -1:])
        return laws._replace(p=top, cross=-(top * log_q).sum(-1))

    def renormalised(log_q: Tensor, q: Tensor, teacher: Tensor, top_k: int) -> slopes._Laws:
        top = teacher * (teacher >= teacher.topk(top_k, dim=-1).values[..., -1:])
        return whole(log_q, q, top / top.sum(-1, keepdim=True), top_k)

    for fault in (forgotten, renormalised):
        monkeypatch.setattr(slopes, "_cut", fault)
        found = given(CUT, logits, teacher)
        assert all(abs(a - b) > 1e-3 for a, b in zip(found, wanted, strict=True))


# Soft and hard cross-entropy are no divergences; lk_lambda's weight moves with acceptance.
DIVERGENCES = [name for name in OBJECTIVES if name not in ("soft_ce", "hard_ce", "lk_lambda")]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_coarse_laws_are_no_further_apart_than_whole_ones(name: str) -> None:
    logits, teacher = laws()
    whole = Objective(terms=((name, 1.0),)).loss(logits, teacher.expand_as(logits))
    cut = Objective(terms=((name, 1.0),), top_k=3).loss(logits, teacher.expand_as(logits))
    assert bool((cut <= whole + 1e-12).all())
    assert bool((cut < whole - 1e-6).any())


def test_coarse_laws_sum_to_one_and_a_large_cut_changes_nothing() -> None:
    logits, teacher = laws()
    log_q, p = coarsen(logits, teacher.expand_as(logits), 4)
    assert log_q.shape == p.shape == (ROWS, STEPS, 5)
    torch.testing.assert_close(log_q.exp().sum(-1), torch.ones(ROWS, STEPS).double())
    torch.testing.assert_close(p.sum(-1), torch.ones(ROWS, STEPS).double())
    assert coarsen(logits, teacher, WIDTH) == (logits, teacher)


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_far_apart_laws_in_fp32_have_finite_values_and_gradients(
    name: str, top_k: int | None
) -> None:
    logits, teacher = laws(spread=300.0, dtype=torch.float32)
    found = slope(logits, teacher, Objective(terms=((name, 1.0),), top_k=top_k))
    for value in found:
        assert bool(torch.isfinite(value).all())


def test_arguments_are_not_changed() -> None:
    logits, teacher = laws()
    for objective in (Objective(), CUT):
        before = logits.clone(), teacher.clone()
        slope(logits, teacher, objective)
        assert torch.equal(logits, before[0])
        assert torch.equal(teacher, before[1])


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ((("ce", 1.0),), r"loss is 'ce'; choose of hard_ce, jsd, kl"),
        ((("tv", -1.0),), r"loss tv has the weight -1; give a number above 0"),
        ((("tv", float("nan")),), r"loss tv has the weight nan"),
        ((("tv", 1.0), ("tv", 2.0)), r"loss is tv, tv; name each divergence once"),
        ((), r"no divergence"),
    ],
)
def test_terms_that_make_no_sense_are_refused(
    terms: tuple[tuple[str, float], ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Objective(terms=terms)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("lk_decay", -1.0, "lk_decay is -1.0; give at least 0"),
        ("temperature", 0.0, "temperature is 0.0; give a number above 0"),
        ("top_k", 0, "top_k is 0; keep at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(field: str, value: float, said: str) -> None:
    settings: dict[str, float] = {field: value}
    with pytest.raises(ValueError, match=said):
        Objective(**settings)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(("steps", "length"), [(3, 5), (1, 4), (3, 3), (5, 2), (2, 8)])
def test_saved_calls_are_the_slope_of_calls_per_token(steps: int, length: int):
    """Steps after the last accept like it, as constants; steps past the chain save nothing."""
    torch.manual_seed(0)
    accept = torch.rand(9, steps, dtype=torch.float64)
    valid = (torch.rand(9, steps) > 0.2).double()
    alive = (accept * valid).requires_grad_()
    after = alive[:, -1:].detach().expand(-1, max(0, length - steps))
    tau = 1 + torch.cat([alive, after], 1)[:, :length].cumprod(1).sum(1)
    (1 / tau).sum().backward()
    assert alive.grad is not None
    found = saved_calls(accept, valid, length)
    torch.testing.assert_close(found, -alive.grad, rtol=1e-12, atol=1e-14)


def test_hard_places_count_most_at_their_first_step():
    hard, easy = saved_calls(torch.tensor([[0.1] * 3, [0.9] * 3]), torch.ones(2, 3), 5)
    assert hard[0] > 3 * easy[0]
    assert hard[2] < easy[2]


def test_an_aim_below_one_is_refused():
    with pytest.raises(ValueError, match="aim is 0; give the length of a chain"):
        Objective(aim=0)
