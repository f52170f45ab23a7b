"""The ablation script: its runs are real command lines, its table says what was measured."""

import json
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from outrider.data.target import Target
from outrider.scripts import ablate
from outrider.scripts.ablate import RUNS, Settings, command_of, main, markdown
from outrider.train.kinds import EagleRun
from outrider.train.recipe import parse


@pytest.fixture
def answers(tmp_path: Path, target_folder: Path) -> Path:
    """Prompts that the tiny target answered greedily, and by drawing at temperature 1."""
    target = Target.load(str(target_folder))
    made = torch.Generator().manual_seed(5)
    lines: list[str] = []
    for number in range(12):
        ids = torch.randint(2, 60, (1, 8), generator=made)
        for _ in range(10):
            logits = target.logits(target.run(ids).last_BTH[:, -1])[0, : target.tokenizer_size]
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=made)
            token = logits.argmax().view(1) if number % 2 else drawn
            ids = torch.cat([ids, token[None]], dim=1)
        row = {"id": f"h{number}", "kind": "random", "temperature": float(1 - number % 2)}
        whole = ids[0].tolist()
        lines.append(json.dumps(row | {"prompt_ids": whole[:8], "answer_ids": whole[8:]}))
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def flags(tmp_path: Path, target_folder: Path, rows_file: Path, answers: Path) -> list[str]:
    """An ablation of the tiny target."""
    recipe = tmp_path / "tiny.yaml"
    shared = {"head": "eagle3", "draft_vocab": 40, "unroll_steps": 2, "max_length": 64}
    shared |= {"optimizer": "muon", "lr": 0.01, "muon_lr": 0.01}
    recipe.write_text(yaml.safe_dump(shared | {"device": "cpu"}), encoding="utf-8")
    given = {
        "output": tmp_path / "ablate",
        "recipe": recipe,
        "target": target_folder,
        "data": rows_file,
        "heldout": answers,
        "max-tokens": 200,
        "epochs": 1,
        "threads": 1,
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def test_every_run_is_a_command_line_that_differs_from_the_first() -> None:
    seen = [parse(command_of(Settings(), name), EagleRun).flat() for name in RUNS]
    first = next(iter(seen))
    for name, settings in zip(RUNS, seen, strict=True):
        changed = {key for key, value in settings.items() if value != first[key]} - {"output"}
        words = [word[2:] for word in shlex.split(RUNS[name]) if word.startswith("--")]
        assert changed == {word.removeprefix("no-").replace("-", "_") for word in words}, name
        assert settings["output"] == f"runs/ablate/{name}"
    assert Settings().runs == tuple(RUNS)[: ablate.MOST_RUNS]


def test_runs_can_be_listed_without_training(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(["--list", "--output", str(tmp_path / "none")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(RUNS)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (("base", "nothing"), "choose of base, plain_start"),
        (("base", "base"), "each once"),
        ((), "choose of base, plain_start"),
    ],
)
def test_runs_that_do_not_exist_are_refused(runs: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings(runs=runs)


def test_more_runs_than_an_ablation_may_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablate, "MOST_RUNS", 2)
    with pytest.raises(ValueError, match="names 3 runs; choose at most 2"):
        Settings(runs=("base", "tv", "adamw"))


def test_the_table_marks_differences_that_leave_out_zero_and_runs_that_take_too_long() -> None:
    def result(head: str, trace: str, value: float) -> dict[str, object]:
        sampling = {"T=0": "greedy", "T=1": "T=1"}[trace]
        tau = {"value": value, "low": value - 1, "high": value + 1}
        return {
            "head": head, "trace": trace, "sampling": sampling, "draft": "chain:3", "tau": tau,
        }  # fmt: skip

    def apart(trace: str, value: float, low: float, high: float) -> dict[str, object]:
        tau = {"value": value, "low": low, "high": high}
        return {"head": "tv", "trace": trace, "draft": "chain:3", "against": "base", "tau": tau}

    text = markdown(
        {
            "results": [
                result("base", "T=0", 2.0),
                result("base", "T=1", 1.5),
                result("tv", "T=0", 2.25),
                result("tv", "T=1", 1.45),
            ],
            "differences": [apart("T=0", 0.25, 0.1, 0.4), apart("T=1", -0.05, -0.2, 0.1)],
        },
        {"base": 5.04, "tv": 12.5},
    )
    lines = text.splitlines()
    assert lines[0] == "| run | flags | minutes | greedy, chain:3 | T=1, chain:3 |"
    assert lines[2] == "| base | the recipe | 5.0 | 2.000 | 1.500 |"
    assert lines[3] == (
        "| tv | `--loss tv` | 12.5 (too long) | 2.250, **+0.250** [+0.100, +0.400] | "
        "1.450, -0.050 [-0.200, +0.100] |"
    )


@pytest.mark.slow
def test_runs_are_trained_once_judged_together_and_written_down(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ablate"
    main([*flags, "--runs", "base", "adamw"])
    record = json.loads((folder / "ablation.json").read_text())
    assert list(record["runs"]) == list(record["heads"]) == ["base", "adamw"]
    run = record["runs"]["base"]
    assert run["training_seconds"] > 0
    assert run["last"]["step"] == run["heldout"][-1]["step"]
    assert yaml.safe_load(run["settings"])["unroll_steps"] == 2
    results = record["evaluation"]["results"]
    assert {(one["sampling"], one["draft"]) for one in results} == {
        (law, f"chain:{length}") for law in ("greedy", "T=1") for length in (1, 3, 5)
    }
    assert {one["prompts"] for one in results} == {6}
    assert "| adamw | `--optimizer adamw` |" in (folder / "table.md").read_text()
    capfd.readouterr()
    stamps = {name: (folder / name / "done.json").stat().st_mtime_ns for name in ("base", "adamw")}
    main([*flags, "--runs", "base", "adamw", "tv"])
    said = capfd.readouterr().out
    assert "base: done already" in said
    assert {name: (folder / name / "done.json").stat().st_mtime_ns for name in stamps} == stamps
    record = json.loads((folder / "ablation.json").read_text())
    assert {one["head"] for one in record["evaluation"]["differences"]} == {"adamw", "tv"}
