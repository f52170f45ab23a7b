"""The paper's formula, its printed table, and the best draft lengths by exact arithmetic."""

from fractions import Fraction

import pytest

from outrider.eval.tune import formula


@pytest.mark.parametrize(
    ("alpha", "length", "printed"),
    [(0.6, 2, "1.96"), (0.7, 3, "2.53"), (0.8, 2, "2.44"), (0.8, 5, "3.69"), (0.9, 2, "2.71"),
     (0.9, 10, "6.86")],
)  # fmt: skip
def test_free_drafts_give_the_paper_s_printed_speeds(
    alpha: float, length: int, printed: str
) -> None:
    """Leviathan et al. 2023, table 1, column SPEED."""
    assert f"{formula.speedup(alpha, length, 0.0):.2f}" == printed


def exact(alpha: Fraction, length: int, c: Fraction) -> Fraction:
    return sum((alpha**i for i in range(length + 1)), Fraction(0)) / (length * c + 1)


# Best k and speed-up: the fractions above, searched up to 60, printed to two digits.
TABLE = {
    "0.05": {"0.5": (3, "1.63"), "0.6": (4, "1.92"), "0.7": (6, "2.35"), "0.8": (8, "3.09"),
             "0.9": (13, "4.67")},
    "0.2": {"0.5": (1, "1.25"), "0.6": (2, "1.40"), "0.7": (3, "1.58"), "0.8": (4, "1.87"),
            "0.9": (7, "2.37")},
}  # fmt: skip


@pytest.mark.parametrize("c", TABLE)
@pytest.mark.parametrize("alpha", ["0.5", "0.6", "0.7", "0.8", "0.9"])
def test_the_table_is_the_formula_s_own_maximum_in_exact_arithmetic(c: str, alpha: str) -> None:
    speeds = [exact(Fraction(alpha), k, Fraction(c)) for k in range(61)]
    best = speeds.index(max(speeds))
    found = formula.best_length(float(alpha), float(c))
    assert found.length == best
    assert found.speedup == pytest.approx(float(speeds[best]), rel=1e-12)
    assert (best, f"{float(speeds[best]):.2f}") == TABLE[c][alpha]
    row = next(line for line in formula.table().splitlines() if line.startswith(f"{alpha} "))
    assert f"{best}" in row.split()
    assert f"{float(speeds[best]):.2f}x" in row.split()


def test_no_draft_is_best_where_none_pays() -> None:
    assert formula.best_length(0.1, 0.5) == (0, 1.0)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"alpha is 1\.2; give a chance"):
        formula.tokens_per_call(1.2, 3)
    with pytest.raises(ValueError, match="length is -1"):
        formula.tokens_per_call(0.5, -1)
    with pytest.raises(ValueError, match=r"c is -0\.1"):
        formula.speedup(0.5, 3, -0.1)
    with pytest.raises(ValueError, match="without end"):
        formula.best_length(0.5, 0.0)
