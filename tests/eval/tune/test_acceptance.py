"""Acceptance from a report of outrider eval or from one alpha; other things are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.offline.evaluate import TEXT, evaluate
from outrider.eval.offline.texts import Text
from outrider.eval.offline.traces import build_trace
from outrider.eval.report.page import write_report
from outrider.eval.tune.acceptance import Acceptance, from_alpha, read_acceptances
from outrider.heads import EagleHead

DRAFTS = ("chain:1", "chain:3", "tree:2,2,4", "lookup:3,2")


@pytest.fixture(scope="module")
def report(
    tiny_target: Target,
    tiny_head: EagleHead,
    greedy_texts: list[Text],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("acceptance")
    layers = tiny_head.config.aux_layers
    trace = build_trace(tiny_target, greedy_texts, folder / "t", sampling=Sampling(), layers=layers)
    heads = {"a": tiny_head, "b": tiny_head}
    found = evaluate(tiny_target, heads, {"demo": trace, "more": trace}, DRAFTS)
    write_report(folder / "eval.json", {"evaluation": found}, notes=None, title="")
    return folder / "eval.json"


def test_a_report_gives_every_draft_of_one_head_on_one_trace(report: Path) -> None:
    found = read_acceptances(report, head="b", trace="demo")
    assert [one.draft for one in found] == list(DRAFTS)
    results = json.loads(report.read_text())["evaluation"]["results"]
    chosen = [r for r in results if r["head"] in ("b", TEXT) and r["trace"] == "demo"]
    for one, result in zip(found, chosen, strict=True):
        assert one.tau == result["tau"]["value"]
        assert one.tau_low < one.tau < one.tau_high
        assert one.survival == tuple(depth["value"] for depth in result["survival"])
        assert sum(one.emitted) == pytest.approx(1)
    assert [one.tokens for one in found[:3]] == [2, 4, 5]
    assert 2 <= found[3].tokens <= 4


def test_figures_of_one_kind_of_prompt(report: Path) -> None:
    every = read_acceptances(report, head="a", trace="demo")[1]
    parts = [read_acceptances(report, head="a", trace="demo", kind=k)[1] for k in ("chat", "code")]
    assert min(p.tau for p in parts) < every.tau < max(p.tau for p in parts)


def test_an_open_choice_and_unknown_names_are_refused(report: Path) -> None:
    with pytest.raises(ValueError, match=r"head is None and .* has 'a', 'b'; choose one"):
        read_acceptances(report)
    with pytest.raises(ValueError, match="head is 'c'"):
        read_acceptances(report, head="c", trace="demo")
    with pytest.raises(ValueError, match="trace is None"):
        read_acceptances(report, head="a")
    with pytest.raises(ValueError, match=r"kind is .poem. and .* has chat, code"):
        read_acceptances(report, head="a", trace="demo", kind="poem")


def test_other_files_are_refused(tmp_path: Path, report: Path) -> None:
    path = tmp_path / "x.json"
    for text in ("", "[]", '{"evaluation": null}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a report of outrider eval"):
            read_acceptances(path)
    whole: dict[str, Any] = json.loads(report.read_text())
    whole["evaluation"]["results"][0]["exact"] = False
    path.write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="lossy result"):
        read_acceptances(path, head="a", trace="demo")


def test_one_alpha_makes_geometric_chains() -> None:
    one, three = from_alpha(0.6, [1, 3])
    assert (one.draft, one.tokens, one.tau) == ("chain:1", 2, 1.6)
    assert three.survival == pytest.approx((0.6, 0.36, 0.216))
    assert three.emitted == pytest.approx((0.4, 0.24, 0.144, 0.216))
    assert three.tau == pytest.approx(sum(i * p for i, p in enumerate(three.emitted, start=1)))
    with pytest.raises(ValueError, match=r"alpha is -0\.1"):
        from_alpha(-0.1, [1])
    with pytest.raises(ValueError, match="lengths is empty"):
        from_alpha(0.5, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"survival": (0.5, 0.6)}, "survival of chain:2 at depth 2 is 0.6"),
        ({"survival": (1.2, 0.6)}, "at depth 1 is 1.2"),
        ({"tau": 0.9}, "tau of chain:2 is 0.9; a round of 2 drafts in a row emits 1 to 3"),
        ({"tau": 3.1}, "tau of chain:2 is 3.1"),
        ({"tokens": 0}, "tokens of chain:2 is 0"),
    ],
)
def test_impossible_acceptance_is_refused(changes: dict[str, Any], message: str) -> None:
    right: dict[str, Any] = {
        "draft": "chain:2", "tokens": 3, "survival": (0.6, 0.3), "tau": 1.9, "tau_low": 1.8,
        "tau_high": 2.0, "source": "",
    }  # fmt: skip
    Acceptance(**right)
    with pytest.raises(ValueError, match=message):
        Acceptance(**{**right, **changes})
