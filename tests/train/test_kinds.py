"""Every kind of head through its own entry point: plan, run, stop, go on, export, start from it."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.data.target import Target
from outrider.eval.link import judged_head
from outrider.heads import HEADS

Run = Callable[..., Path]
KINDS: dict[str, dict[str, Any]] = {
    "medusa": {"draft-vocab": 40, "num-draft-heads": 3},
    "hydra": {"num-draft-heads": 2, "prefix-layer": None, "freeze-output": None},
    "mtp": {"draft-vocab": 40, "unroll-steps": 2},
}


@pytest.fixture
def run(tmp_path: Path, target_folder: Path, rows_file: Path, heldout_file: Path) -> Run:
    """Runs a kind's main with the tiny target; returns the output folder."""

    def main(kind: str, *flags: str, output: str = "run") -> Path:
        given = {
            "target": target_folder,
            "data": rows_file,
            "heldout": heldout_file,
            "output": tmp_path / output,
            "device": "cpu",
            "max-length": 64,
            "lr": 1e-2,
            "log-every": 2,
            **KINDS[kind],
        }
        words = [
            word
            for name, value in given.items()
            for word in ([f"--{name}"] if value is None else [f"--{name}", str(value)])
        ]
        module = importlib.import_module(f"outrider.train.{kind}")
        module.main([*words, *flags])
        return tmp_path / output

    return main


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_learns_and_its_export_is_the_head(
    kind: str, run: Run, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(kind, "--plan")
    plan = capsys.readouterr().out
    assert f"head: {kind}" in plan
    assert "M trainable parameters" in plan
    out = run(kind, "--epochs", "6")
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0]
    by_step = json.loads(lines[-1])["loss_by_step"]
    head = judged_head(out / "best", Target.load(str(target_folder)))
    assert isinstance(head, HEADS[kind])
    assert len(by_step) == min(3, KINDS[kind].get("num-draft-heads", 2))
    assert json.loads((out / "best" / "heldout.json").read_text(encoding="utf-8"))["tau"] >= 1


@pytest.mark.parametrize("kind", list(KINDS))
def test_going_on_equals_never_having_stopped(kind: str, run: Run) -> None:
    whole = run(kind, "--epochs", "2", output="whole")
    flags = ("--epochs", "2")
    with pytest.raises(SystemExit) as caught:
        run(kind, *flags, "--stop-after-steps", "5", output="parts")
    assert caught.value.code == 0
    parts = run(kind, *flags, output="parts")
    ours = load_file(parts / "last" / "model.safetensors")
    for name, value in load_file(whole / "last" / "model.safetensors").items():
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_head_is_started_from_and_another_geometry_refused(
    kind: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    old = run(kind, output="old") / "last"
    run(kind, "--init", str(old), "--plan")
    wrong = {"medusa": "--num-draft-heads=5", "hydra": "--num-draft-layers=3"}
    wrong |= {"mtp": "--head-intermediate=40"}
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run(kind, "--init", str(old), wrong[kind], output="new")
    assert caught.value.code == 2
    name = wrong[kind].removeprefix("--").split("=")[0].replace("-", "_")
    assert f"{name} is" in capsys.readouterr().err


def test_a_rebuilt_vocabulary_keeps_what_is_known(run: Run, target_folder: Path) -> None:
    old = run("medusa", output="old") / "last"
    flags = ("--init", str(old), "--rebuild-vocab", "--draft-vocab", "30", "--lr", "1e-9")
    new = run("medusa", *flags, output="new") / "last"
    target = Target.load(str(target_folder))
    ours, theirs = judged_head(new, target), judged_head(old, target)
    state = torch.randn(4, target.hidden_size)
    for depth in range(3):
        have = ours.scatter(ours.draft_probs(state, 1.0, depth))
        known = ours.draft_ids_W[torch.isin(ours.draft_ids_W, theirs.draft_ids_W)]
        want = theirs.scatter(theirs.draft_probs(state, 1.0, depth))[:, known]
        assert len(known) > 20
        torch.testing.assert_close(
            have[:, known] / have[:, known].sum(-1, keepdim=True),
            want / want.sum(-1, keepdim=True),
            rtol=1e-4,
            atol=1e-6,
        )


def test_another_kinds_head_is_refused(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    old = run("medusa", output="old") / "last"
    with pytest.raises(SystemExit):
        run("mtp", "--init", str(old), output="new")
    assert "has medusa; train/medusa.py goes on with it" in capsys.readouterr().err


def test_a_default_other_than_the_head_in_init_is_to_be_given(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody can leave out what nobody gave."""
    old = run("hydra", "--num-draft-layers", "1", output="old") / "last"
    run("hydra", "--init", str(old), "--num-draft-layers", "1", "--plan")
    with pytest.raises(SystemExit):
        run("hydra", "--init", str(old), "--plan")
    said = capsys.readouterr().err
    assert "num_draft_layers is 2 but" in said
    assert "has 1; give --num-draft-layers 1" in said


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("mtp", [], "kind is mtp but the head in init"),
        ("medusa", ["--num-draft-heads", "2"], "num_draft_heads is 2 but the head in init"),
        ("medusa", ["--freeze-output"], "shared_output is True but the head in init"),
    ],
)
def test_a_rebuilt_vocabulary_changes_nothing_else(
    kind: str, flags: list[str], message: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    old = run("medusa", output="old") / "last"
    with pytest.raises(SystemExit) as caught:
        run(kind, "--init", str(old), "--rebuild-vocab", *flags, output="new")
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
