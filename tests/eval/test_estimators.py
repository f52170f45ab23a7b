"""Offline scores against enumerated laws of small languages: equal text by text; shortcuts err."""

from fractions import Fraction

import numpy as np
import pytest

from outrider.eval.certificate.languages import cases
from outrider.eval.certificate.law import speculative_round, target_law
from outrider.eval.certificate.lazy_tree import propose_chain
from outrider.eval.offline import estimators
from outrider.eval.offline.estimators import compare, known_texts
from outrider.eval.offline.longrun import long_run
from outrider.eval.rules import rejection
from outrider.eval.trees.plans import ChainPlan, TreePlan
from outrider.scripts.cli import main as outrider

LANGUAGES = {case.name: case.language for case in cases(3)}
DRAFTS = [
    (ChainPlan(1), "rejection"),
    (ChainPlan(3), "rejection"),
    (ChainPlan(2), "block"),
    (ChainPlan(3), "block"),
    (ChainPlan(3), "match"),
    (ChainPlan(2), "point_mass"),
    (TreePlan(2, 2, 3), "match"),
    (TreePlan(3, 2, 5), "point_mass"),
]


@pytest.mark.parametrize(("plan", "rule"), DRAFTS)
@pytest.mark.parametrize("name", ["random", "zeros", "holes in q", "ties", "penalty"])
def test_every_text_takes_the_calls_that_the_recursion_says(
    name: str, plan: ChainPlan | TreePlan, rule: str
) -> None:
    found = compare(name, LANGUAGES[name], plan, rule, limit=4)
    assert found.texts >= 3
    assert found.worst_text < 1e-9
    assert found.estimates["recursion"] == pytest.approx(found.exact, abs=1e-9)


def test_the_texts_are_the_targets_own() -> None:
    language = LANGUAGES["random"]
    run = speculative_round(language, propose_chain(language, 2), rejection)
    known = known_texts(run, (1,), 0, 4)
    wanted = target_law(language, 4, (1,), 0)
    assert {text[1:]: one.chance for text, one in known.items()} == {
        text: chance for text, chance in wanted.items() if chance
    }
    assert sum(one.chance for one in known.values()) == Fraction(1)


def test_shortcuts_miss_where_the_recursion_does_not() -> None:
    found = compare("random", LANGUAGES["random"], ChainPlan(3), "rejection")
    assert abs(found.estimates["recursion"] - found.exact) < 1e-9
    for name in ("uniform", "marginals", "one alpha"):
        assert abs(found.estimates[name] - found.exact) > 0.005


def test_a_planted_fault_in_the_recursion_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = estimators.block_credit
    monkeypatch.setattr(estimators, "block_credit", lambda ratio: 0 * real(ratio) + 1)
    found = compare("random", LANGUAGES["random"], ChainPlan(3), "block")
    assert found.worst_text > 1e-3


def test_drawn_rules_of_trees_are_refused() -> None:
    with pytest.raises(ValueError, match="judges drawn chains"):
        compare("random", LANGUAGES["random"], TreePlan(2, 2, 3), "rejection")


def test_only_the_recursion_is_unbiased_in_the_long_run() -> None:
    runs = [long_run(seed, tokens=16_000) for seed in (0, 3, 4)]
    errors = {
        name: np.abs([run.estimates[name] - run.exact for run in runs])
        for name in runs[0].estimates
    }
    # Sampled text: its figure's standard deviation is about 0.016.
    assert errors["recursion"].max() < 0.08
    for name, least in (("uniform", 0.06), ("1 - TV", 0.06), ("one alpha", 0.01)):
        assert errors[name].min() > least, name
    with pytest.raises(ValueError, match="vocab is 1; give 2 or more"):
        long_run(0, vocab=1)


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    outrider(["toy", "--estimators"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in lines if line[:1] == ["random"]]
    assert len(rows) == 8
    assert all(float(row[5]) < 1e-9 for row in rows)
    assert max(abs(float(row[7])) for row in rows if row[1] == "chain:3") > 0.005
