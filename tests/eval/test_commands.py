"""The trace, eval and bench commands from files to report, and what they refuse."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.offline.texts import Text, read_texts
from outrider.heads import EagleHead, save_head
from outrider.scripts import bench_command, eval_command, trace_command
from outrider.scripts.cli import main as outrider


@pytest.fixture(scope="module")
def files(
    write_files: Callable[[Path], None],
    make_texts: Callable[..., list[Text]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with target, two heads and answered rows at two temperatures."""
    root = tmp_path_factory.mktemp("files")
    write_files(root)
    with (root / "rows.jsonl").open("w") as file:
        for temperature in (0.0, 1.0):
            for text in make_texts(Sampling(temperature=temperature), 8):
                row = {"id": f"{text.row_id}-t{temperature:g}", "temperature": temperature}
                row |= {"kind": text.kind, "prompt_ids": text.prompt_ids}
                file.write(json.dumps({**row, "answer_ids": text.answer_ids}) + "\n")
    return root


def trace(files: Path, *more: str) -> None:
    trace_command.main(
        ["--target", str(files / "target"), "--text", str(files / "rows.jsonl"), *more]
    )


def test_trace_then_eval_compares_heads_and_writes_a_report(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = ["--layers", "1", "3", "5"]
    trace(files, "--out", str(tmp_path / "cold"), *layers)
    trace(files, "--out", str(tmp_path / "warm"), *layers, "--temperature", "1")
    assert "8 rows, greedy" in capsys.readouterr().out
    arguments = ["--target", str(files / "target")]
    for head in ("good", "fresh"):
        arguments += ["--head", str(files / "run" / head)]
    for folder in ("cold", "warm"):
        arguments += ["--trace", str(tmp_path / folder)]
    out = tmp_path / "deep" / "figures.json"
    eval_command.main([*arguments, "--draft", "chain:2", "tree:2,2,4", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "run/fresh less run/good, cold, chain:2: tau -" in printed
    assert "tau: emitted tokens / rounds" in printed
    report = json.loads(out.read_text())
    results = report["evaluation"]["results"]
    assert [(one["head"], one["trace"], one["draft"]) for one in results] == [
        (head, text, draft)
        for text in ("cold", "warm")
        for head in ("run/good", "run/fresh")
        for draft in ("chain:2", "tree:2,2,4")
    ]
    assert results[0]["tau"]["value"] > results[2]["tau"]["value"]
    assert out.with_suffix(".html").exists()
    assert all(found["model.safetensors"] for found in report["provenance"]["heads"].values())


def test_bench_prints_every_setting(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--target", str(files / "target"), "--head", str(files / "run" / "good")]
    arguments += ["--text", str(files / "rows.jsonl"), "--per-kind", "1", "--dtype", "float32"]
    arguments += ["--drafts", "chain:1", "tree:2,2,4", "--repeats", "1", "--max-new-tokens", "5"]
    bench_command.main([*arguments, "--out", str(tmp_path / "bench.json")])
    printed = capsys.readouterr().out
    assert [line.split()[:2] for line in printed.splitlines()[1:7]] == [
        [draft, kind] for draft in ("chain:1", "tree:2,2,4") for kind in ("all", "chat", "code")
    ]
    assert "a draft step over a plain step" in printed
    assert json.loads((tmp_path / "bench.json").read_text())["bench"]["cost"]["c"] > 0


def test_read_texts_takes_rows_of_the_asked_sampling(files: Path) -> None:
    source = str(files / "rows.jsonl")
    cold = read_texts(source, Sampling())
    assert [text.row_id for text in cold] == [f"row-{i}-t0" for i in range(8)]
    few = read_texts(source, Sampling(temperature=1.0), per_kind=1)
    assert [(text.row_id, text.kind) for text in few] == [
        ("row-0-t1", "chat"),
        ("row-1-t1", "code"),
    ]
    with pytest.raises(ValueError, match="16 rows but none drawn with"):
        read_texts(source, Sampling(temperature=0.5))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt_ids": [1]}', "row 1 has no prompt_ids or no answer_ids"),
        ("[", "row 1 is not JSON"),
        ('{"prompt_ids": [1, 2], "answer_ids": "abc"}', "row 1 has .* not lists of whole numbers"),
        ('{"prompt_ids": [1, 2], "answer_ids": [1.5]}', "row 1 has .* not lists of whole numbers"),
        ('{"prompt_ids": [1], "answer_ids": [true]}', "row 1 has .* not lists of whole numbers"),
        ('{"choices": ["a"]}', "row 1 has no prompt_ids"),
        ('{"choices": {"a": 1}}', "row 1 has no prompt_ids"),
        ('{"sampling": {"strange": 1}}', "row 1: its sampling cannot be read .*strange"),
        ('{"sampling": {"temperature": "hot"}}', "row 1: its sampling cannot be read"),
        ('{"sampling": {"temperature": -1}}', "row 1: temperature is -1"),
        ('{"request": {"top_k": "many"}}', "row 1: its sampling cannot be read"),
    ],
)
def test_read_texts_names_a_bad_row(row: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    with pytest.raises(ValueError, match=message):
        read_texts(str(tmp_path / "rows.jsonl"), Sampling())


def test_refusals_exit_with_two(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--target", str(files / "target")]
    cases = [
        (["trace", *target, "--out", str(tmp_path)], "give one of them"),
        (["eval", *target, "--head", "h", "--draft", "chain"], "write chain:LENGTH"),
        (["eval", *target, "--head", "h", "--out", "x.txt"], "ends in .json"),
        (["bench", *target, "--head", "h", "--per-kind", "0"], "per_kind is 0"),
    ]
    for arguments, message in cases:
        with pytest.raises(SystemExit) as stopped:
            outrider(arguments)
        assert stopped.value.code == 2
        # tyro wraps what it prints.
        assert message in " ".join(capsys.readouterr().err.split())


def test_traces_of_one_name_in_two_folders_are_both_scored(files: Path, tmp_path: Path) -> None:
    for place, temperature in (("a", "0"), ("b", "1")):
        out = tmp_path / place / "t"
        trace(files, "--out", str(out), "--layers", "1", "3", "5", "--temperature", temperature)
    arguments = ["--target", str(files / "target"), "--head", str(files / "run" / "good")]
    for place in "ab":
        arguments += ["--trace", str(tmp_path / place / "t")]
    eval_command.main([*arguments, "--draft", "chain:1", "--out", str(tmp_path / "o.json")])
    results = json.loads((tmp_path / "o.json").read_text())["evaluation"]["results"]
    assert len({one["trace"] for one in results}) == 2


def test_answers_to_other_prompts_or_settings_are_not_taken_for_these(
    files: Path, tmp_path: Path
) -> None:
    asked = [{"id": "a", "messages": [{"role": "user", "content": "w4 w5"}]}]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps(asked[0]) + "\n")
    template = "{% for m in messages %}w9 {{ m['content'] }} {% endfor %}w8 "
    folder = tmp_path / "target"
    shutil.copytree(files / "target", folder)
    (folder / "chat_template.jinja").write_text(template)
    command = ["--target", str(folder), "--prompts", str(prompts), "--layers", "1", "3", "5"]
    command += ["--out", str(tmp_path / "out")]
    trace_command.main([*command, "--max-new-tokens", "4"])
    trace_command.main([*command, "--max-new-tokens", "4"])
    with pytest.raises(ValueError, match="was answered from other prompts, settings"):
        trace_command.main([*command, "--max-new-tokens", "5"])
    prompts.write_text(json.dumps({**asked[0], "id": "b"}) + "\n")
    with pytest.raises(ValueError, match="was answered from other prompts, settings"):
        trace_command.main([*command, "--max-new-tokens", "4"])


def engine_said(path: Path, rounds: int, accepted: list[int]) -> str:
    """vLLM's counters after so many rounds of chains."""
    label, name = 'engine="0",model_name="m"', "vllm:spec_decode_num"
    lines = [
        f"{name}_drafts_total{{{label}}} {rounds}",
        f"{name}_draft_tokens_total{{{label}}} {rounds * len(accepted)}",
        f"{name}_accepted_tokens_total{{{label}}} {sum(accepted)}",
    ]
    for place, count in enumerate(accepted):
        lines.append(f'{name}_accepted_tokens_per_pos_total{{{label},position="{place}"}} {count}')
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_an_engines_counts_are_held_against_the_figures_of_the_same_run(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace(files, "--out", str(tmp_path / "t"), "--layers", "1", "3", "5")
    arguments = ["--target", str(files / "target"), "--trace", str(tmp_path / "t")]
    arguments += ["--head", str(files / "run" / "good"), "--draft", "chain:2"]
    out = tmp_path / "figures.json"
    eval_command.main([*arguments, "--out", str(out)])
    (result,) = json.loads(out.read_text())["evaluation"]["results"]
    counts = [round(1000 * one["value"]) for one in result["survival"]]
    same = engine_said(tmp_path / "same.txt", 1000, counts)
    eval_command.main([*arguments, "--engine-log", same])
    assert "no drift at level 0.05" in capsys.readouterr().out
    other = engine_said(tmp_path / "other.txt", 1000, [1000, 1000])
    with pytest.raises(SystemExit) as caught:
        eval_command.main([*arguments, "--engine-log", other])
    assert caught.value.code == 1
    assert "drift: engine=0,model_name=m" in capsys.readouterr().out


def test_damaged_heads_and_traces_are_named(files: Path, tmp_path: Path) -> None:
    trace(files, "--out", str(tmp_path / "t"), "--layers", "1", "3", "5")
    head = tmp_path / "head"
    shutil.copytree(files / "run" / "good", head)
    arguments = ["--target", str(files / "target"), "--trace", str(tmp_path / "t")]
    arguments += ["--draft", "chain:1", "--head", str(head)]
    eval_command.main(arguments)
    for path in (tmp_path / "t" / "shard-00000.safetensors", head / "model.safetensors"):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=f"{path.name} is damaged"):
            eval_command.main(arguments)
        path.write_bytes(whole)


def test_a_head_of_another_target_is_noted(
    files: Path, tiny_head: EagleHead, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace(files, "--out", str(tmp_path / "t"), "--layers", "1", "3", "5")
    here = Target.load(str(files / "target"))
    arguments = ["--target", str(files / "target"), "--trace", str(tmp_path / "t")]
    for number, (name, fingerprint, is_noted) in enumerate(
        [
            ("elsewhere", "0123456789abcdef", True),
            ("moved", here.fingerprint(), False),
            (here.name, "0123456789abcdef", False),  # the same name is taken at its word
        ]
    ):
        notes = {"target": name, "target_fingerprint": fingerprint}
        head = save_head(tiny_head, tmp_path / f"head{number}", provenance=notes)
        outrider(["eval", *arguments, "--draft", "chain:1", "--head", str(head)])
        said = capsys.readouterr().err
        assert ("was trained for elsewhere (hash 0123456789ab)" in said) is is_noted
        assert ("note: " in said) is is_noted


def test_a_reader_that_closes_early_sees_no_traceback(files: Path) -> None:
    command = [sys.executable, "-m", "outrider.scripts.cli", "toy", "--texts", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        said = run.stderr.read()
    assert said == b""
    assert run.returncode == 141


@pytest.mark.parametrize("method", ["hits", "rank"])
def test_a_fitted_tree_scores_what_its_fit_said(
    method: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace(files, "--out", str(tmp_path / "t"), "--layers", "1", "3", "5")
    head = str(files / "run" / "good")
    command = ["--target", str(files / "target"), "--head", head, "--trace", str(tmp_path / "t")]
    tree = tmp_path / "tree.json"
    fit = ["--out", str(tree), "--nodes", "6", "--depth", "3", "--width", "3", "--method", method]
    outrider(["tree", *command, *fit])
    said = capsys.readouterr().out
    notes = json.loads(tree.read_text())
    assert len(notes["paths"]) == 6
    assert notes["notes"]["method"] == method
    assert f"use it with --draft static:{tree}" in said
    assert f"{notes['notes']['accepted']:.3f} accepted a round" in said

    out = tmp_path / "eval.json"
    drafts = ["--draft", f"static:{tree}", "chain:1", "tree:3,3,6"]
    outrider(["eval", *command, *drafts, "--out", str(out)])
    results = {one["draft"]: one for one in json.loads(out.read_text())["evaluation"]["results"]}
    # The tree was fitted to this very text: it accepts at least what one likeliest token does.
    assert results[f"static:{tree}"]["tau"]["value"] >= results["chain:1"]["tau"]["value"]
    if method == "hits":  # counted over every start of the text, not over a round's starts alone
        assert notes["notes"]["accepted"] + 1 == pytest.approx(
            results[f"static:{tree}"]["tau"]["value"], rel=0.25
        )


def test_lossy_rules_are_marked_and_measured(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["lossy", "--target", str(files / "target"), "--head", str(files / "run" / "good")]
    command += ["--text", str(files / "rows.jsonl"), "--per-kind", "1", "--max-new-tokens", "8"]
    outrider([*command, "--out", str(tmp_path / "lossy.json")])
    said = capsys.readouterr().out
    assert said.startswith("INEXACT: these texts are not the target's. chain:3, 2 prompts")
    rows = {row["rule"]: row for row in json.loads((tmp_path / "lossy.json").read_text())}
    assert set(rows) == {"typical", "nucleus", "threshold", "ensemble"}
    assert all(row["exact"] is False for row in rows.values())
    exact = ["--rule", "threshold", "ensemble", "--accept", "1", "--weight", "1"]
    outrider([*command, *exact, "--out", str(tmp_path / "exact.json")])
    for row in json.loads((tmp_path / "exact.json").read_text()):
        assert row["tv_per_step"] == pytest.approx(0, abs=1e-6), row["rule"]
    assert rows["typical"]["tv_per_step"] > 0.01
    capsys.readouterr()
    for more, message in (
        (["--temperature", "0"], "lossy rules are measured above 0"),
        (["--draft", "tree:2,2,4"], "judges drawn chains"),
        (["--out", "x.txt"], "name a file that ends in .json"),
    ):
        with pytest.raises(SystemExit) as stopped:
            outrider([*command, *more])
        assert stopped.value.code == 2
        said = " ".join(re.findall(r"[^\s│|]+", capsys.readouterr().err))  # tyro draws a box
        assert message in said
