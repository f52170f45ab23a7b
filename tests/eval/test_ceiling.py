"""Ceilings of draft vocabularies: brute force on a tiny target, and the exact rules themselves."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.data.batches import StoredRow
from outrider.data.layout import Raw
from outrider.data.rows import Row
from outrider.data.states import OnlineFeatures
from outrider.data.store import FeatureStore
from outrider.data.target import Target
from outrider.eval import ceiling
from outrider.eval.certificate.node_law import node_law
from outrider.eval.rules import RULES, Siblings

VOCAB = 40
CHOICES = [torch.tensor([0, 1, 5, 9, 30]), torch.arange(0, VOCAB, 2), torch.arange(VOCAB)]


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        eos_token_id=1,
    )
    return Target.from_model(LlamaForCausalLM(config).double())


def make_rows() -> list[Row]:
    made = torch.Generator().manual_seed(1)
    rows = []
    for number, length in enumerate([9, 3, 14, 6, 20]):
        ids = torch.randint(0, VOCAB, (length,), generator=made)
        mask = torch.rand(length, generator=made) < 0.6
        mask[2] = True
        rows.append(Row(ids, mask, f"r{number}", "even" if number % 2 == 0 else "odd", 0))
    return rows


def laws(target: Target, row: Row, temperature: float) -> list[tuple[int, list[float]]]:
    """(token, the law it was judged by) of every supervised position, in plain Python."""
    with torch.no_grad():
        logits_TV = target.model(input_ids=row.ids[None]).logits[0]
    found = []
    for place in range(2, len(row)):
        if row.mask[place]:
            scores = logits_TV[place - 1].tolist()
            if temperature == 0:
                law = [float(score == max(scores)) for score in scores]
            else:
                exps = [math.exp((score - max(scores)) / temperature) for score in scores]
                law = [value / sum(exps) for value in exps]
            found.append((int(row.ids[place]), law))
    return found


def brute_force(target: Target, rows: list[Row]) -> dict[str, list[list[float]]]:
    """Sums by row and vocabulary."""
    out: dict[str, list[list[float]]] = {"covered": [], "mass": [], "best": []}
    for row in rows:
        sampled, greedy = laws(target, row, 1.0), laws(target, row, 0.0)
        inside = [set(ids.tolist()) for ids in CHOICES]
        out["covered"].append([sum(token in ids for token, _ in sampled) for ids in inside])
        out["mass"].append([sum(sum(law[i] for i in ids) for _, law in sampled) for ids in inside])
        out["best"].append([sum(sum(law[i] for i in ids) for _, law in greedy) for ids in inside])
    return out


def off_by(found: ceiling.Tally, wanted: dict[str, list[list[float]]]) -> float:
    return max(np.abs(getattr(found, f"{name}_RS") - wanted[name]).max() for name in wanted)


def test_sums_equal_brute_force(target):
    rows = make_rows()
    found = ceiling.tally(target, OnlineFeatures(target, rows, layers=()), CHOICES)
    assert found.count_R.tolist() == [len(laws(target, row, 1.0)) for row in rows]
    assert off_by(found, brute_force(target, rows)) < 1e-9
    assert np.allclose(found.mass_RS[:, 2], found.count_R)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_laws_add_up_as_brute_force_says(target, temperature):
    rows = make_rows()
    sums_V = ceiling.law_sums(target, OnlineFeatures(target, rows, layers=()), temperature)
    wanted = [law for row in rows for _, law in laws(target, row, temperature)]
    assert np.abs(sums_V.numpy() - np.sum(wanted, axis=0)).max() < 1e-9


def test_chunks_and_passes_change_nothing(target, monkeypatch):
    source = OnlineFeatures(target, make_rows(), layers=())
    whole = ceiling.tally(target, source, CHOICES)
    monkeypatch.setattr(ceiling, "CHUNK_ELEMENTS", 3 * VOCAB)
    monkeypatch.setattr(ceiling, "PASS_TOKENS", 20)
    for ours, theirs in zip(ceiling.tally(target, source, CHOICES), whole, strict=True):
        assert np.abs(ours - theirs).max() < 1e-12


def test_no_chunk_holds_more_than_it_may(target, monkeypatch):
    monkeypatch.setattr(ceiling, "CHUNK_ELEMENTS", 4 * VOCAB)
    sizes: list[int] = []
    real = Target.logits

    def watched(self, hidden_NH):
        sizes.append(len(hidden_NH))
        return real(self, hidden_NH)

    monkeypatch.setattr(Target, "logits", watched)
    ceiling.law_sums(target, OnlineFeatures(target, make_rows(), layers=()), 1.0)
    assert max(sizes) == 4


def test_stored_features_give_the_same(target, tmp_path):
    rows, layout = make_rows(), Raw(layers=(), width=target.hidden_size, dtype=torch.float64)
    stored = FeatureStore.build_or_open(target, rows, layout=layout, root=tmp_path, progress=False)
    assert off_by(ceiling.tally(target, stored, CHOICES), brute_force(target, rows)) < 1e-9


class Shifted:
    """A planted fault: the states of the next or the last position."""

    def __init__(self, source: OnlineFeatures, shift: int) -> None:
        self.source, self.shift = source, shift
        self.lengths, self.row_ids = source.lengths, source.row_ids

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, indices) -> list[StoredRow]:
        return [
            row._replace(last_TH=row.last_TH.roll(self.shift, 0))
            for row in self.source.rows(indices)
        ]


@pytest.mark.parametrize("shift", [-1, 1])
def test_states_of_another_position_are_seen(target, shift):
    rows = make_rows()
    source = Shifted(OnlineFeatures(target, rows, layers=()), shift)
    assert off_by(ceiling.tally(target, source, CHOICES), brute_force(target, rows)) > 0.1


def test_first_tokens_do_not_count(target):
    """No draft can be of a row's first two tokens, whatever the mask says."""
    rows = make_rows()
    more = [dataclasses.replace(row, mask=row.mask.clone()) for row in rows]
    for row in more:
        row.mask[:2] = True
    ours, theirs = (
        ceiling.tally(target, OnlineFeatures(target, some, layers=()), CHOICES)
        for some in (rows, more)
    )
    assert np.array_equal(ours.count_R, theirs.count_R)
    assert np.array_equal(ours.mass_RS, theirs.mass_RS)


def accepted(p: np.ndarray, q: np.ndarray) -> float:
    """Chance that the exact rejection rule accepts a draft, by enumeration of its coins."""
    return float(node_law(RULES["rejection"].verify, Siblings.SINGLE, p, q, 1).accepted_V.sum())


@pytest.mark.parametrize("ids", CHOICES[:2], ids=["5", "half"])
def test_mass_is_what_a_perfect_draft_reaches_and_none_passes(target, ids):
    rng = np.random.default_rng(0)
    rows = make_rows()
    total, reached, count = 0.0, 0.0, 0
    for row in rows:
        for _, law in laws(target, row, 1.0):
            p = np.asarray(law)
            q = np.zeros_like(p)
            q[ids] = p[ids]
            q /= q.sum()
            count += 1
            total += p[ids].sum()
            reached += accepted(p, q)
            other = np.zeros_like(p)
            other[ids] = rng.dirichlet(np.full(len(ids), 0.3))
            assert accepted(p, other) <= p[ids].sum() + 1e-12
    found = ceiling.tally(target, OnlineFeatures(target, rows, layers=()), [ids])
    assert found.mass_RS.sum() == pytest.approx(reached, abs=1e-9)
    assert total == pytest.approx(reached, abs=1e-9)
    outside = torch.tensor([token for token in range(VOCAB) if token not in ids.tolist()])
    assert ceiling.tally(
        target, OnlineFeatures(target, rows, layers=()), [outside]
    ).mass_RS.sum() == pytest.approx(count - reached, abs=1e-9)


@pytest.mark.parametrize("ids", CHOICES[:2], ids=["5", "half"])
def test_best_is_what_a_perfect_greedy_draft_reaches(target, ids):
    rows = make_rows()
    reached = 0.0
    for row in rows:
        for (_, law), (_, point) in zip(
            laws(target, row, 1.0), laws(target, row, 0.0), strict=True
        ):
            inside = np.zeros(VOCAB)
            inside[ids] = np.asarray(law)[ids]
            q = np.zeros(VOCAB)
            q[inside.argmax()] = 1.0
            found = node_law(RULES["greedy"].verify, Siblings.SINGLE, np.asarray(point), q, 1)
            reached += float(found.accepted_V.sum())
    found = ceiling.tally(target, OnlineFeatures(target, rows, layers=()), [ids])
    assert found.best_RS.sum() == pytest.approx(reached, abs=1e-9)


def test_costs_pool_positions_by_kind(target):
    rows = make_rows()
    sums = ceiling.tally(target, OnlineFeatures(target, rows, layers=()), CHOICES)
    kinds = [row.kind for row in rows]
    made = {cost.kind: cost for cost in ceiling.costs(sums, kinds, 1)}
    assert list(made) == ["all", "even", "odd"]
    even = [0, 2, 4]
    assert made["even"].positions == sums.count_R[even].sum()
    share = sums.mass_RS[even, 1].sum() / sums.count_R[even].sum()
    assert made["even"].mass.value == pytest.approx(share)
    for cost in made.values():
        assert cost.mass.low <= cost.mass.value <= cost.mass.high
    assert [cost.kind for cost in ceiling.costs(sums, ["x"] * 5, 0)] == ["all"]
    assert made["all"].rows == 5


def test_refusals(target):
    source = OnlineFeatures(target, make_rows(), layers=())
    with pytest.raises(ValueError, match="temperature is -1"):
        ceiling.law_sums(target, source, -1)
    with pytest.raises(ValueError, match="no draft vocabulary is given"):
        ceiling.tally(target, source, [])
    sums = ceiling.tally(target, source, CHOICES)
    with pytest.raises(ValueError, match="2 kinds are given for 5 rows"):
        ceiling.costs(sums, ["a", "b"], 0)
