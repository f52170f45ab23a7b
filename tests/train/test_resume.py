"""C14: a resumed run equals an uninterrupted one, or is refused."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import outrider.train.eagle
from outrider.data.batches import Batch
from outrider.train import checkpoint
from outrider.train.checkpoint import Claims, Position, Stateful, latest, step_of
from outrider.train.journal import forget_after
from outrider.train.objectives import DraftTask, DraftWork

Train = Callable[..., Path]
# 28 rows in 7 packs, one pack a step: 7 steps an epoch, 21 in all.
FLAGS = ("--epochs", "3", "--draft-vocab", "40")


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    """Weights, vocabulary map and optimiser state of the newest checkpoint."""
    state = load_file(newest(folder) / "head.safetensors")
    for values in torch.load(newest(folder) / "optimizer.pt", weights_only=True):
        for number, moments in values["state"].items():
            state |= {f"optimizer.{number}.{name}": value for name, value in moments.items()}
    return state


def assert_same_run(one: Path, other: Path) -> None:
    ours, theirs = final_state(one), final_state(other)
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("optimizer.") for name in ours)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (one, other)]
    rates = [{json.loads(x)["step"]: json.loads(x)["lr"] for x in found} for found in lines]
    assert rates[0].items() <= rates[1].items()  # a stop adds a line of its own


def newest(folder: Path) -> Path:
    found = latest(folder)
    assert found is not None
    return found


def refused(train: Train, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The message of a refused continuation."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        train(*FLAGS, *flags, output="stopped")
    assert caught.value.code == 2
    return capsys.readouterr().err


def stopped_at(train: Train, step: int, output: str = "stopped") -> None:
    with pytest.raises(SystemExit) as caught:
        train(*FLAGS, "--stop-after-steps", str(step), output=output)
    assert caught.value.code == 0


@pytest.mark.parametrize("step", [7, 14, 10, 1], ids=["step 7", "epoch end", "epoch 2", "first"])
def test_c14_resume_equals_never_having_stopped(train: Train, step: int) -> None:
    whole = train(*FLAGS, output="whole")
    stopped_at(train, step)
    resumed = train(*FLAGS, output="stopped")
    assert step_of(newest(resumed)) == 21
    assert_same_run(whole, resumed)


def test_c14_resume_draws_the_same_noise(train: Train) -> None:
    noisy = ("--feature-noise-std", "0.2", "--feature-dropout", "0.1", "--layer-dropout", "0.1")
    whole = train(*FLAGS, *noisy, output="whole")
    with pytest.raises(SystemExit):
        train(*FLAGS, *noisy, "--stop-after-steps", "10", output="stopped")
    assert_same_run(whole, train(*FLAGS, *noisy, output="stopped"))
    quiet = train(*FLAGS, output="quiet")
    assert not torch.equal(final_state(whole)["fc.weight"], final_state(quiet)["fc.weight"])


def test_c14_rows_come_in_the_same_order(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[list[str]]] = []
    prepare = DraftTask.prepare

    def spy(self: DraftTask, batch: Batch) -> DraftWork:
        seen.append(batch.row_ids)
        return prepare(self, batch)

    monkeypatch.setattr(DraftTask, "prepare", spy)
    train(*FLAGS, output="whole")
    whole = list(seen)
    seen.clear()
    stopped_at(train, 10)
    train(*FLAGS, output="stopped")
    assert seen == whole
    assert len(whole) == 21


PIECES = [("schedule", "schedule.json"), ("optimizer", "optimizer.pt")]


@pytest.mark.parametrize(("piece", "name"), PIECES)
def test_c14_a_missing_piece_is_refused_unless_waived(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], piece: str, name: str
) -> None:
    stopped_at(train, 10)
    (newest(tmp_path / "stopped") / name).unlink()
    message = refused(train, capsys)
    assert f"lacks {name} (the {piece})" in message
    assert f"--waive {piece}" in message
    train(*FLAGS, "--waive", piece, output="stopped")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optimizer.pt", "optimizer.pt (the optimizer) is damaged"),
        ("head.safetensors", "head.safetensors (the head) is damaged"),
        ("schedule.json", "schedule.json (the schedule) is damaged"),
        ("state.json", "state.json is damaged"),
    ],
)
def test_c14_damage_that_keeps_the_size_is_named(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    stopped_at(train, 10)
    path = newest(tmp_path / "stopped") / name
    path.write_bytes(b"\x01" * path.stat().st_size)
    message = refused(train, capsys)
    assert said in message
    assert "delete the folder to go back" in message


def test_c14_missing_or_cut_weights_cannot_be_waived(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_at(train, 10)
    path = newest(tmp_path / "stopped") / "head.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    message = refused(train, capsys)
    assert "holds a cut head.safetensors (the head); put it back or delete the folder" in message
    assert "waive" not in message
    shutil.rmtree(path.parent)  # the remedy: the checkpoint before, of step 7
    train(*FLAGS, output="stopped")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lr", "1e-3"), "lr is 0.001, but the run in .*stopped was started with 0.003"),
        (("--epochs", "4"), "epochs is 4, but .* with 3; give the old value .* another --output"),
        (("--unroll-decay", "0.5"), "unroll_decay is 0.5"),
        (("--seed", "1"), "seed is 1"),
        (("--precision", "bf16"), "precision is 'bf16'"),
    ],
)
def test_other_settings_are_refused_by_name(
    train: Train, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    stopped_at(train, 7)
    assert re.search(message, refused(train, capsys, *flags))


def test_other_rows_are_refused(
    train: Train, tmp_path: Path, rows_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_at(train, 7)
    text = rows_file.read_text(encoding="utf-8")
    rows_file.write_text(text.replace('"r0", "input_ids": [', '"r0", "input_ids": [5, '), "utf-8")
    refused(train, capsys)  # the mask no longer fits: the row is refused
    rows_file.write_text("".join(text.splitlines(keepends=True)[::-1]), encoding="utf-8")
    assert "rows is" in refused(train, capsys)


def test_more_processes_are_refused(train: Train, tmp_path: Path) -> None:
    stopped_at(train, 7)
    folder = newest(tmp_path / "stopped")
    live = Stateful(head=torch.nn.Linear(1, 1), optimizers=[], world=2)
    state = checkpoint.read_state(folder)
    claims = Claims(settings=state["settings"], schedule=state["schedule"], data=state["data"])
    with pytest.raises(ValueError, match="written by 1 processes and this run has 2"):
        checkpoint.restore(folder, live, claims)


def test_another_schedule_is_refused(train: Train, tmp_path: Path) -> None:
    stopped_at(train, 7)
    folder = newest(tmp_path / "stopped")
    state = checkpoint.read_state(folder)
    schedule = state["schedule"] | {"num_steps": 99}
    claims = Claims(settings=state["settings"], schedule=schedule, data=state["data"])
    position = Position(**state["position"])
    with pytest.raises(ValueError, match="schedule num_steps is 99 now and 21 in"):
        checkpoint.check_schedule(folder, position, claims)


def test_another_head_is_refused_by_tensor(train: Train, tmp_path: Path) -> None:
    stopped_at(train, 7)
    with pytest.raises(ValueError, match="tensor bias is missing from the checkpoint"):
        checkpoint.load_weights(newest(tmp_path / "stopped"), torch.nn.Linear(1, 1))


def test_a_checkpoint_without_its_state_is_refused(train: Train, tmp_path: Path) -> None:
    stopped_at(train, 7)
    (newest(tmp_path / "stopped") / "state.json").unlink()
    with pytest.raises(ValueError, match=r"lacks state.json; delete the folder"):
        checkpoint.read_state(newest(tmp_path / "stopped"))


def test_only_the_last_checkpoints_stay(train: Train) -> None:
    out = train(*FLAGS, "--save-every", "2", "--keep-last", "3")
    steps = sorted(step_of(path) for path in (out / "checkpoints").iterdir())
    assert steps == [18, 20, 21]


def test_a_finished_run_says_so_and_stays(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    out = train(*FLAGS)
    before = final_state(out)
    capsys.readouterr()
    train(*FLAGS)
    assert "already trained: 21 of 21 steps" in capsys.readouterr().out
    assert all(torch.equal(value, before[name]) for name, value in final_state(out).items())


def test_a_half_moved_folder_comes_back(tmp_path: Path) -> None:
    final = tmp_path / "best"
    final.mkdir()
    (final / "old").touch()
    final.rename(tmp_path / ".old-best")  # killed between the two moves
    checkpoint.recover_folder(final)
    assert (final / "old").exists()


def test_lines_written_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3}\n{"step": 6}\n{"step": 9}\n{"st', encoding="utf-8")
    forget_after(path, 6)
    assert path.read_text(encoding="utf-8") == '{"step": 3}\n{"step": 6}\n'


def command(tmp_path: Path, target: Path, rows: Path, *flags: str) -> list[str]:
    return [
        *(sys.executable, str(Path(outrider.train.eagle.__file__)), "--target", str(target)),
        *("--data", str(rows), "--output", str(tmp_path / "stopped"), "--device", "cpu"),
        *("--max-length", "64", "--unroll-steps", "2", "--lr", "3e-3", "--log-every", "3"),
        *(*FLAGS, *flags),
    ]


def started(argv: list[str]) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        argv, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def test_an_interrupt_saves_and_the_same_command_continues(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(*FLAGS, output="whole")
    calls: list[int] = []
    prepare = DraftTask.prepare

    def interrupted(self: DraftTask, batch: Batch) -> DraftWork:
        calls.append(1)
        if len(calls) == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return prepare(self, batch)

    monkeypatch.setattr(DraftTask, "prepare", interrupted)
    with pytest.raises(SystemExit) as caught:
        train(*FLAGS, output="stopped")
    assert caught.value.code == 130
    assert "stopped after step 11 of 21; the same command continues" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same_run(whole, train(*FLAGS, output="stopped"))


@pytest.mark.multi
@pytest.mark.slow
def test_sigint_saves_and_the_same_command_continues(
    train: Train, tmp_path: Path, target_folder: Path, rows_file: Path
) -> None:
    whole = train(*FLAGS, output="whole")
    argv = command(tmp_path, target_folder, rows_file, "--log-every", "1")
    process = started(argv)
    wait_for(tmp_path / "stopped" / "metrics.jsonl", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if process.returncode:  # it may have come to its end first
        assert process.returncode == 130, err
        assert "the same command continues from there" in out
    resumed = train(*FLAGS, output="stopped")
    assert_same_run(whole, resumed)


@pytest.mark.multi
@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_a_state_that_continues(
    train: Train, tmp_path: Path, target_folder: Path, rows_file: Path
) -> None:
    whole = train(*FLAGS, "--save-every", "1", output="whole")
    argv = command(tmp_path, target_folder, rows_file, "--save-every", "1")
    kills = 0
    for delay in (0.0, 0.01, 0.02, 0.04, 0.08, 0.15):
        process = started(argv)
        first = tmp_path / ("features" if kills == 0 else "stopped/metrics.jsonl")
        wait_for(first, process)
        time.sleep(delay)
        process.kill()
        process.communicate(timeout=60)
        kills += process.returncode == -signal.SIGKILL
    assert kills >= 3
    done = started(argv)
    _, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    assert_same_run(whole, tmp_path / "stopped")
