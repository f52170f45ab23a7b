"""The eval command's report: valid by its schema, with parts that add up, and marked texts."""

import json
from collections.abc import Callable
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from outrider.data.sampling import Sampling
from outrider.eval.offline.losses import ENDS, LOSSES
from outrider.eval.offline.texts import Text
from outrider.eval.report import tables
from outrider.scripts.cli import main as outrider

Run = Callable[..., dict[str, Any]]
SCHEMA = json.loads(
    package_files("outrider.eval.report").joinpath("report.schema.json").read_text("utf-8")
)
DRAFTS = ("chain:1-3", "tree:3,2,4", "lookup:2", "suffix:1-2,4", "drawn:2,1,2")


@pytest.fixture(scope="module")
def folder(
    write_files: Callable[[Path], None],
    make_texts: Callable[..., list[Text]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A target, two heads, and traces at two temperatures, one of them of foreign text."""
    root = tmp_path_factory.mktemp("report")
    write_files(root)
    for temperature in (0.0, 1.0):
        with (root / f"t{temperature:g}.jsonl").open("w") as file:
            for text in make_texts(Sampling(temperature=temperature), 10):
                row = {"id": text.row_id, "kind": text.kind, "prompt_ids": text.prompt_ids}
                file.write(json.dumps({**row, "answer_ids": text.answer_ids}) + "\n")
    trace = ["trace", "--target", str(root / "target"), "--layers", "1", "3", "5"]
    for name in ("t0", "t1"):
        text = ["--text", str(root / f"{name}.jsonl"), "--temperature", name[1:]]
        outrider([*trace, *text, "--out", str(root / name)])
    foreign = [*trace, "--text", str(root / "t1.jsonl"), "--out", str(root / "foreign")]
    with pytest.raises(SystemExit):
        outrider(foreign)
    outrider([*foreign, "--off-policy"])
    return root


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Run:
    """Scores in the folder and reads the report, checked by its schema."""

    def score(*arguments: str, traces: tuple[str, ...] = ("t0", "t1")) -> dict[str, Any]:
        out = tmp_path / "report.json"
        command = ["eval", "--target", str(folder / "target"), "--out", str(out)]
        for name in traces:
            command += ["--trace", str(folder / name)]
        outrider([*command, "--markdown", str(tmp_path / "report.md"), *arguments])
        report = json.loads(out.read_text())
        jsonschema.validate(report, SCHEMA)
        return report

    return score


def test_reports_are_valid_and_their_parts_add_up(run: Run, folder: Path, tmp_path: Path) -> None:
    heads = [word for name in ("good", "fresh") for word in ("--head", str(folder / "run" / name))]
    report = run(*heads, "--model", "layers:2", "--draft", *DRAFTS)
    assert report["provenance"]["command"][1:] or report["provenance"]["command"]
    evaluation = report["evaluation"]
    results = evaluation["results"]
    drafts = {(one["head"], one["draft"]) for one in results}
    chains = {"chain:1", "chain:2", "chain:3", "drawn:2,1,2"}
    assert {draft for head, draft in drafts if head == "layers:2"} == chains
    assert {draft for head, draft in drafts if head == "run/good"} == chains | {"tree:3,2,4"}
    assert {draft for head, draft in drafts if head == "text alone"} == {
        "lookup:2",
        "suffix:1,4",
        "suffix:2,4",
    }
    for one in results:
        parts = [one, *one["by_kind"].values()]
        for part in parts:
            lost = sum(part["loss"][name]["value"] for name in LOSSES)
            if part["alpha"]["value"] is not None:
                assert part["alpha"]["value"] + lost == pytest.approx(1)
            assert sum(part["ends"][name]["value"] for name in ENDS) == pytest.approx(1)
        for key in ("by_place", "by_context", "by_entropy"):
            assert sum(part["tokens"] for part in one[key]) == one["tokens"]
            judged = sum(part["judged"] for part in one[key])
            assert judged == pytest.approx(one["judged"])
            kept = sum(
                part["judged"] * part["alpha"]["value"] for part in one[key] if part["judged"]
            )
            if judged:
                assert kept / judged == pytest.approx(one["alpha"]["value"])
    same = {one["draft"]: one["tau"]["value"] for one in results if one["head"] == "run/good"}
    assert same["drawn:2,1,2"] == same["chain:2"]
    compared = [one for one in evaluation["differences"] if one["head"] == "run/fresh"]
    assert {tuple(sorted(one["by_kind"])) for one in compared} == {("chat", "code")}
    page = (tmp_path / "report.html").read_text()
    assert "What is lost, and to what" in page
    assert "acceptance and losses by entropy of the target" in page
    text = (tmp_path / "report.md").read_text()
    assert "| run/good | greedy | chain:3 | greedy |" in text
    assert "By entropy of the target, nats." in text
    assert "Differences, paired by prompt." in text
    assert tables.OFF_POLICY not in page + text


def test_a_change_that_breaks_the_schema_is_found(run: Run, folder: Path) -> None:
    report = run("--draft", "lookup:2", traces=("t0",))
    for spoil in (
        lambda one: one["results"][0].pop("loss"),
        lambda one: one["results"][0].update(tau=1.5),
        lambda one: one["results"][0].update(more=1),
        lambda one: one["traces"]["t0"].pop("off_policy"),
    ):
        found = json.loads(json.dumps(report))
        spoil(found["evaluation"])
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(found, SCHEMA)


def test_trees_on_a_stated_subset_of_whole_texts(run: Run, folder: Path) -> None:
    head = ["--head", str(folder / "run" / "good")]
    report = run(*head, "--draft", "tree:3,2,4", "chain:1", "--tree-texts", "4", "--seed", "3")
    tree, chain = report["evaluation"]["results"][:2]
    assert (tree["prompts"], tree["subset"]) == (4, {"texts": 4, "of": 10, "seed": 3})
    assert (chain["prompts"], chain["subset"]) == (10, None)
    again = run(*head, "--draft", "tree:3,2,4", "--tree-texts", "4", "--seed", "3")
    assert again["evaluation"]["results"][0]["tau"] == tree["tau"]
    whole = run(*head, "--draft", "tree:3,2,4")["evaluation"]["results"][0]
    assert (whole["prompts"], whole["subset"]) == (10, None)


def test_foreign_text_needs_leave_and_is_marked_everywhere(
    run: Run, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("--draft", "lookup:2", traces=("foreign",))
    assert stopped.value.code == 2
    assert "not this target's own" in capsys.readouterr().err
    report = run("--draft", "lookup:2", "--off-policy", traces=("foreign",))
    assert report["evaluation"]["results"][0]["off_policy"] is True
    assert report["evaluation"]["traces"]["foreign"]["off_policy"] is True
    printed = capsys.readouterr().out
    assert tables.OFF_POLICY in printed
    assert "greedy, off-policy" in printed
    assert tables.OFF_POLICY in (tmp_path / "report.md").read_text()
    page = (tmp_path / "report.html").read_text().replace("&#39;", "'")
    assert tables.OFF_POLICY in page
    assert "greedy, off-policy" in page


def test_what_cannot_be_scored_is_refused_with_the_reason(
    run: Run, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = ["--head", str(folder / "run" / "good")]
    cases = (
        ([*head, "--draft", "drawn:2,2,4"], "depends on tokens drawn elsewhere"),
        (["--draft", "chain:3"], "or a draft of the text alone"),
        ([*head, "--draft", "chain:3-1"], "write a range of lengths as chain:1-8"),
        ([*head, "--tree-texts", "0"], "tree_texts is 0"),
        (["--model", "layers:6"], "draft with 1 to 5 of the target's layers"),
    )
    for arguments, message in cases:
        with pytest.raises(SystemExit) as stopped:
            run(*arguments)
        assert stopped.value.code == 2
        said = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert message in said
