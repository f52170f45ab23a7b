"""The toy's published figures, and that enumeration, closed form and simulation agree."""

from fractions import Fraction

import numpy as np
import pytest

from outrider.eval.certificate import toy
from outrider.eval.certificate.law import certify
from outrider.scripts.toy_command import main


@pytest.fixture(scope="module")
def made():
    return toy.make_toy()


def test_acceptance_per_context(made):
    assert toy.alpha(made).round(3).tolist() == [0.672, 0.692, 0.856, 0.863]
    assert toy.agreement(made).round(3).tolist() == [0.245, 0.270, 0.321, 0.316]


def test_tokens_per_call(made):
    found = [round(toy.tokens_per_call(made, length), 3) for length in (1, 2, 3, 4, 6, 8)]
    assert found == [1.783, 2.397, 2.877, 3.251, 3.768, 4.079]


def test_tokens_of_a_call_equal_the_enumerated_rule(made):
    run = toy.rejection_round(made, 2)
    for context in range(4):
        accept = np.minimum(made.target_SV, made.draft_SV)
        expected = 1 + (accept + accept @ accept)[context].sum()
        emitted = certify(made.language(), run, 1, start=(context,), order=1).emitted
        assert float(emitted) == pytest.approx(expected, abs=1e-12)


def test_the_rule_is_exact_and_the_planted_fault_is_not(made):
    assert toy.exact_distance(made, toy.rejection_round(made, 3)) == Fraction(0)
    planted = toy.exact_distance(made, toy.faulty_round(made, 3))
    assert round(float(planted), 6) == 0.105809


def test_simulation_comes_close_and_sees_the_fault(made):
    exact = toy.simulated_distance(made, toy.rejection_round(made, 3), num_texts=400_000)
    assert 0 < exact <= 0.01
    faulty = toy.simulated_distance(made, toy.faulty_round(made, 3), num_texts=20_000)
    assert faulty == pytest.approx(0.105809, abs=0.03)


def test_the_command_prints_the_figures(capsys):
    main(["--texts", "1000"])
    shown = capsys.readouterr().out
    assert "0.672  0.692  0.856  0.863" in shown
    assert "1.783  2.397  2.877  3.251  3.768  4.079" in shown
    assert "0, exactly" in shown
    assert "0.105809" in shown


def test_texts_must_be_positive(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--texts", "0"])
    assert "texts is 0; simulate at least 1" in capsys.readouterr().err
