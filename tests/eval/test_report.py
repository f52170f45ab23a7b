"""The report: a documented schema, a page that needs nothing else, every part optional."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from outrider.eval.metrics import DEFINITIONS, Round
from outrider.eval.report import plots, tables
from outrider.eval.report.page import build_report, read_training
from outrider.eval.report.passage import marks, passage

KINDS = ("chat", "code_edit", "math")


def interval(value: float, low: float | None = None) -> dict[str, float | None]:
    return {"value": value, "low": value - 0.1 if low is None else low, "high": value + 0.1}


def result(head: str, sampling: str, draft: str) -> dict[str, Any]:
    depth = int(draft.split(":")[1][0])
    return {
        "head": head,
        "trace": "demo",
        "sampling": sampling,
        "draft": draft,
        "rule": "greedy",
        "tau": interval(1.5),
        "alpha": interval(0.5),
        "alpha_star": interval(0.6),
        "survival": [interval(0.5**i) for i in range(1, depth + 1)],
        "conditional": [0.5, float("nan"), *[0.5] * depth][:depth],
        "ceiling": 0.97,
        "prompts": 12,
        "tokens": 700,
        "by_kind": {kind: {"tau": interval(1.4)} for kind in KINDS},
    }


PARTS: dict[str, Any] = {
    "evaluation": {
        "traces": {
            "demo": {
                "target": "tiny",
                "fingerprint": "0123456789abcdef",
                "text": "fedcba",
                "dtype": "float32",
                "on_policy": "700 tokens, 0 near ties, 0 not the argmax",
            }
        },
        "results": [
            result(head, sampling, draft)
            for head in ("ours", "theirs & co")
            for sampling in ("greedy", "T=1")
            for draft in ("chain:1", "chain:3", "tree:4,4,16")
        ],
        "differences": [
            {
                "trace": "demo",
                "draft": "chain:3",
                "head": "theirs & co",
                "against": "ours",
                "tau": interval(-0.2),
                "alpha": interval(-0.1),
                "by_kind": {"chat": {"tau": interval(-0.3), "alpha": interval(0.1)}},
            }
        ],
    },
    "bench": {
        "settings": {"dtype": "bfloat16", "threads": 2, "repeats": 3},
        "rows": [
            {
                "draft": draft,
                "kind": kind,
                "speedup": interval(speed),
                "tau": 1.6,
                "tokens_per_s": 30.0,
                "plain_tokens_per_s": 25.0,
            }
            for draft, speed in (("chain:1", 0.9), ("chain:3", 1.2))
            for kind in ("all", *KINDS)
        ],
        "cost": {"c": 0.08, "verify": [{"tokens": 1, "ms": 40.0, "ratio": 1.0}]},
    },
    "training": [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "tau": 1.3}],
    "passage": {
        "title": "chat",
        "prompt": "a <b> c",
        "pieces": [{"text": "x <script>", "mark": "plain"}, {"text": "y", "mark": "accepted"}],
        "tokens": 2,
        "calls": 2,
    },
}


class Page(HTMLParser):
    """Well-formedness, ids and links of a page."""

    VOID = ("meta", "link", "br", "img", "path", "use", "line", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._note(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                self.links.append(value or "")


def read(path: Path) -> tuple[str, Page]:
    text, page = path.read_text(encoding="utf-8"), Page()
    page.feed(text)
    assert page.open == []
    return text, page


def test_a_full_report_is_one_self_contained_page(tmp_path: Path) -> None:
    paths = build_report(tmp_path, **PARTS, notes={"seeds": {"train": 0}}, title="A & B")
    text, page = read(paths.html)
    assert len(page.ids) == len(set(page.ids))
    assert page.links
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert not {"script", "link", "img", "iframe"} & page.tags
    outside = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert all(url.startswith("http://www.w3.org/") for url in outside)
    assert text.count("<svg") == 6
    assert "prefers-color-scheme: dark" in text
    # Plots take every colour from the page, so that both themes work.
    drawn = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert not re.findall(r"#[0-9a-f]{6}\b", "".join(drawn))


def test_words_of_others_are_escaped(tmp_path: Path) -> None:
    text, _ = read(build_report(tmp_path, **PARTS).html)
    assert "x &lt;script&gt;" in text
    assert "a &lt;b&gt; c" in text
    assert "theirs &amp; co" in text


def test_definitions_and_slower_settings_are_printed(tmp_path: Path) -> None:
    text, _ = read(build_report(tmp_path, **PARTS).html)
    for name in DEFINITIONS:
        assert name.replace("_", " ") in text
    assert "0.90x" in text
    assert "-0.300 to -0.100" in text


def test_json_holds_schema_and_provenance_and_is_strict(tmp_path: Path) -> None:
    paths = build_report(tmp_path, **PARTS, notes={"dtype": "float32"})
    report = json.loads(paths.json.read_text(), parse_constant=pytest.fail)
    assert report["schema_version"] == 2
    assert set(report) == {
        "schema_version",
        "title",
        "provenance",
        "definitions",
        "evaluation",
        "bench",
        "tune",
        "training",
        "passage",
    }
    origin = report["provenance"]
    assert {"created", "versions", "machine", "commit", "dtype"} <= set(origin)
    assert origin["machine"]["threads"] >= 1
    assert report["evaluation"]["results"][1]["conditional"][1] is None


@pytest.mark.parametrize("missing", [(), *[(name,) for name in PARTS], tuple(PARTS)])
def test_any_part_may_be_missing(missing: tuple[str, ...], tmp_path: Path) -> None:
    parts = {name: part for name, part in PARTS.items() if name not in missing}
    paths = build_report(tmp_path, **parts)
    read(paths.html)
    report = json.loads(paths.json.read_text())
    assert all(report[name] is None for name in missing)


def test_a_lone_prompt_has_no_interval(tmp_path: Path) -> None:
    parts = json.loads(json.dumps(PARTS["evaluation"]))
    for one in parts["results"]:
        one["tau"] = {"value": 1.5, "low": float("nan"), "high": float("nan")}
    read(build_report(tmp_path, evaluation=parts).html)


def test_a_kind_without_a_target_call_is_a_gap(tmp_path: Path) -> None:
    """Answers of one token have no round: their tau, and what follows, is null."""
    nothing = dict.fromkeys(("value", "low", "high"))
    parts = json.loads(json.dumps(PARTS["evaluation"]))
    for one in parts["results"]:
        one["by_kind"]["math"]["tau"] = nothing
    page, _ = read(build_report(tmp_path, evaluation=parts).html)
    assert "1.40" in page
    for one in parts["results"]:
        one["tau"] = one["alpha"] = one["alpha_star"] = nothing
        one["survival"] = [nothing for _ in one["survival"]]
    read(build_report(tmp_path, evaluation=parts).html)


def test_kinds_are_words_in_plots_and_cells(tmp_path: Path) -> None:
    """Dollar signs are not mathematics, a line break is no new row, and tags are no tags."""
    kinds = ("$\\frac$", "costs $5 and $10", "a\n| b", "<b>c</b>")
    parts = json.loads(json.dumps(PARTS["evaluation"]))
    nothing = {name: interval(0.1) for name in tables.LOSSES}
    for one in parts["results"]:
        part = {"tau": interval(1.4), "alpha": interval(0.4), "prompts": 1, "tokens": 9}
        one["by_kind"] = {kind: {**part, "loss": nothing} for kind in kinds}
        one["loss"] = nothing
    text = tables.markdown(parts)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} <= {8, 9, 10, 11, 13}
    assert "| a \\| b |" in text
    assert "&lt;b&gt;c&lt;/b&gt;" in text
    page, _ = read(build_report(tmp_path, evaluation=parts).html)
    assert "costs $5 and $10" in page
    assert "<b>c" not in page


def test_texts_of_one_sampling_are_named() -> None:
    one = result("ours", "greedy", "chain:1")
    assert tables.text_of(one) == "greedy"
    assert tables.text_of(one | {"text": None}) == "greedy"
    assert tables.text_of(one | {"text": "monday"}) == "monday, greedy"


def test_training_log_is_read_back(tmp_path: Path) -> None:
    assert read_training(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 1.5}\n{"step": 4, "loss": 1.0}\n')
    (tmp_path / "heldout.jsonl").write_text('{"step": 4, "tau": {"1": 1.2, "3": 1.4}}\n')
    assert read_training(tmp_path) == [
        {"step": 2, "loss": 1.5},
        {"step": 4, "loss": 1.0},
        {"step": 4, "tau": 1.4},
    ]


class Letters:
    """Every id is a byte, as in byte-level tokenizers."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_a_passage_keeps_text_and_marks_whole() -> None:
    ids = list("ab\u00e9cd".encode())
    rounds = [Round(2, 2, 3), Round(2, 0, 1), Round(2, 2, 1)]
    shown = passage("t", "p", ids, rounds, Letters(), depth=2)
    assert "".join(piece["text"] for piece in shown["pieces"]) == "ab\u00e9cd"
    found = [piece["mark"] for piece in shown["pieces"]]
    assert found == ["plain", "accepted", "accepted", "plain", "corrected", "accepted"]
    # The first byte of the accent shows nothing, the second the whole letter.
    assert [piece["text"] for piece in shown["pieces"]][2:4] == ["", "\u00e9"]
    assert shown["calls"] == 4
    with pytest.raises(ValueError, match="rounds of this very text"):
        passage("t", "p", ids[:-1], rounds, Letters(), depth=2)


def test_a_trees_deepest_path_decides_what_was_rejected() -> None:
    assert marks([Round(12, 2, 3)], depth=4)[-1] == "corrected"
    assert marks([Round(12, 4, 5)], depth=4)[-1] == "plain"
    assert marks([Round(0, 0, 1)], depth=4)[-1] == "plain"


def test_a_plot_alone_is_a_whole_file_with_colours_for_light_and_dark() -> None:
    point = {"value": 1.5, "low": 1.4, "high": 1.7}
    text = plots.alone(plots.kind_plot({"greedy": {"chat": point, "qa": point}}, "tau"))
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    style = root[0].text or ""
    light, dark = style.split("@media (prefers-color-scheme:dark)")
    for name in set(re.findall(r"var\((--[\w-]+)\)", text)):
        assert f"{name}:#" in light
        assert f"{name}:#" in dark
