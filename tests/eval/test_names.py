"""One run in the words of every tool: case C16 to the printed digits, counted by hand."""

import pytest

from outrider.eval.metrics import Round
from outrider.eval.names import C16, Name, Run, names_table, reconcile
from outrider.scripts.cli import main as outrider
from outrider.scripts.names_command import read_request

# Accepted, nothing cut: 4 0 2 4 and 1 3. Emitted: 5 1 3 3 and 2 2. 24 drafted in 6 rounds.
BY_HAND = {
    ("Outrider", "tau"): (16 / 6,),
    ("Outrider", "tau_macro"): (2.5,),
    ("Outrider", "survival"): (5 / 6, 4 / 6, 2 / 6, 1 / 6),
    ("Outrider", "conditional"): (5 / 6, 4 / 5, 2 / 4, 1 / 2),
    ("Outrider", "drafted_rate"): (0.5,),
    # vLLM counts what was accepted past the end token and the limit.
    ("vLLM", "Mean acceptance length"): (1 + 14 / 6,),
    ("vLLM", "Per-position acceptance rate"): (5 / 6, 4 / 6, 3 / 6, 2 / 6),
    ("vLLM", "Avg Draft acceptance rate"): (14 / 24,),
    # SGLang keeps the prefill's token of each prompt, and takes one off every round for its own.
    ("SGLang", "spec_accept_length (request)"): (18 / 6,),
    ("SGLang", "spec_accept_rate (request)"): (10 / 24,),
    ("SGLang", "accept len (log, gauge)"): (16 / 6,),
    ("SGLang", "accept rate (log, gauge)"): (16 / 30, 10 / 24),
    ("EAGLE", "average acceptance length (tau)"): (20 / 6,),
    ("EAGLE", "n-alpha"): (5 / 6, 4 / 5, 3 / 4, 2 / 3),
    ("Spec-Bench", "#Mean accepted tokens"): (20 / 6,),
    ("Medusa", "acceleration rate"): (20 / 6,),
    ("SpecForge", "accept_length (benchmark)"): (3.0,),
    ("SpecForge", "simulated_acc_len"): (),
    ("gpt-fast", "Mean Accepted"): (14 / 6,),
    ("gpt-fast", "Acceptance probs"): (1 / 6, 1 / 6, 1 / 6, 1 / 6, 2 / 6),
    # DeepSpec: 5 1 3, then 3 with the end token and no bonus; 2, then 4, the limit notwithstanding.
    ("DeepSpec", "accept_len"): (18 / 6,),
    ("DeepSpec", "accept_rate@i"): (5 / 6, 4 / 6, 3 / 6, 1 / 5),
    ("DeepSpec", "verify_rate"): (18 / (23 + 6),),
}


def test_c16_in_everybodys_terms() -> None:
    found = {(one.tool, one.name): one.values for one in reconcile(C16)}
    assert found.pop(("Outrider", "judged_alpha")) == pytest.approx((12 / 15,))
    assert found.keys() == BY_HAND.keys()
    for key, values in BY_HAND.items():
        assert found[key] == pytest.approx(values), key


def test_vllms_figures_for_c16_are_the_naive_ones(capsys: pytest.CaptureFixture[str]) -> None:
    outrider(["names"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (mean,) = (line for line in lines if line[:4] == ["vLLM", "Mean", "acceptance", "length"])
    (rate,) = (line for line in lines if line[:3] == ["vLLM", "Avg", "Draft"])
    (tau,) = (line for line in lines if line[:2] == ["Outrider", "tau"])
    assert (mean[4], rate[5], tau[2]) == ("3.333", "0.583", "2.667")


def values(names: list[Name], tool: str, name: str) -> tuple[float, ...]:
    (found,) = (one.values for one in names if (one.tool, one.name) == (tool, name))
    return found


def test_where_nothing_is_cut_the_means_agree() -> None:
    names = reconcile([Run([Round(3, 2, 3), Round(3, 0, 1), Round(3, 3, 4)], "stop")])
    for tool, name in (
        ("vLLM", "Mean acceptance length"),
        ("SGLang", "accept len (log, gauge)"),
        ("Medusa", "acceleration rate"),
        ("DeepSpec", "accept_len"),
    ):
        assert values(names, tool, name) == pytest.approx((8 / 3,))
    assert values(names, "vLLM", "Avg Draft acceptance rate") == pytest.approx((5 / 9,))
    assert values(names, "SGLang", "spec_accept_rate (request)") == pytest.approx((5 / 9,))


def test_vllm_does_not_count_rounds_that_drafted_nothing() -> None:
    names = reconcile([Run([Round(0, 0, 1), Round(2, 1, 2)], "length")])
    assert values(names, "vLLM", "Mean acceptance length") == (2.0,)
    assert values(names, "gpt-fast", "Mean Accepted") == (0.5,)


def test_requests_read_as_written() -> None:
    assert read_request("4/4/5,4/0/1,4/2/3,4/4/3,stop") == Run(list(C16[0].rounds), "stop")
    for text in ("4/4,stop", "4/4/5", "a/b/c,stop"):
        with pytest.raises(ValueError, match="then stop or length"):
            read_request(text)
    with pytest.raises(ValueError, match="at least one prompt"):
        reconcile([Run([], "stop")])


def test_the_table_says_what_a_run_cannot_tell() -> None:
    table = names_table(reconcile(C16))
    assert "not from a run" in table
    assert "R rounds (target calls after the prefill)" in table
