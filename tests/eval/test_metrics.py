"""The figures of metrics, against hand-counted rounds."""

import pytest

from outrider.eval.metrics import Round, count


def test_c16_fixed_trace_gives_the_hand_counted_figures() -> None:
    # Four drafts a step. A: 4, 0, 2 accepted, then all four match but the third is EOS.
    # B: one accepted, then three match with two tokens of budget left.
    a = [Round(4, 4, 5), Round(4, 0, 1), Round(4, 2, 3), Round(4, 4, 3)]
    b = [Round(4, 1, 2), Round(4, 3, 2)]
    counts = count([a, b])
    assert (counts.rounds, counts.drafted, counts.emitted, counts.kept) == (6, 24, 16, 12)
    assert counts.tau == pytest.approx(16 / 6)
    assert round(counts.tau, 3) == 2.667
    assert counts.drafted_rate == 0.5
    assert counts.survival == pytest.approx((5 / 6, 4 / 6, 2 / 6, 1 / 6))
    assert counts.conditional == pytest.approx((5 / 6, 4 / 5, 2 / 4, 1 / 2))
    assert counts.tau_macro == 2.5
    assert counts.cut == 2


def test_c16_a_naive_count_differs() -> None:
    rounds = [Round(4, 4, 5), Round(4, 0, 1), Round(4, 2, 3), Round(4, 4, 3)]
    rounds += [Round(4, 1, 2), Round(4, 3, 2)]
    counts = count([rounds])
    assert round(counts.accepted_plus_one, 3) == 3.333
    assert round(counts.accepted / counts.drafted, 3) == 0.583
    assert counts.tau < counts.accepted_plus_one


def test_judged_counts_accepted_and_first_rejected() -> None:
    # 0 of 3: judged 1. 2 of 3: judged 3. 3 of 3: judged 3. Cut after 2 of 3: judged 2.
    counts = count([[Round(3, 0, 1), Round(3, 2, 3), Round(3, 3, 4), Round(3, 3, 2)]])
    assert counts.judged == 9
    assert counts.judged_alpha == pytest.approx(7 / 9)


def test_plain_decoding_has_tau_one_and_no_positions() -> None:
    counts = count([[Round(0, 0, 1)] * 5])
    assert counts.tau == 1
    assert counts.survival == ()
    assert counts.conditional == ()
    assert counts.drafted_rate == 0


def test_tree_rounds_use_the_given_depth() -> None:
    counts = count([[Round(12, 2, 3), Round(12, 0, 1)]], depth=3)
    assert counts.survival == (0.5, 0.5, 0.0)
    assert counts.judged == 4


def test_an_empty_request_is_no_request() -> None:
    assert count([[], [Round(1, 1, 2)]]).tau_macro == 2


@pytest.mark.parametrize("bad", [Round(2, 3, 1), Round(2, 1, 3), Round(2, 1, 0)])
def test_impossible_rounds_are_refused(bad: Round) -> None:
    with pytest.raises(ValueError, match="accepts at most what it drafted"):
        count([[bad]])


def test_a_path_that_ends_at_a_leaf_refuses_nothing() -> None:
    counts = count([[Round(4, 1, 2, is_used_up=True), Round(4, 3, 4, is_used_up=True)]], depth=3)
    assert counts.judged == 4
    assert counts.judged_alpha == 1
    chain = [Round(3, 3, 4, is_used_up=True), Round(3, 3, 2, is_used_up=True), Round(3, 0, 1)]
    assert count([chain]).judged == 3 + 2 + 1
