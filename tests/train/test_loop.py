"""The loop on real parts: token weight, rates, learning, refusal to go on with broken numbers."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor

from outrider.data.target import Target
from outrider.heads import EagleHead
from outrider.train import eagle, optim
from outrider.train.assembly import build, lay_ground
from outrider.train.eagle import main
from outrider.train.kinds import EagleRun
from outrider.train.loop import Loop
from outrider.train.objectives import DraftTask
from outrider.train.optim import OptimSettings
from outrider.train.parts import TrainingStopped
from outrider.train.recipe import parse

Train = Callable[..., Path]
Make = Callable[..., Loop]


@pytest.fixture
def make(tmp_path: Path, target_folder: Path, unlike_rows: Path) -> Make:
    """A loop over 18 packs of one row each with unlike masks, in float64, ready to fit."""

    def loop(*flags: str, output: str = "run") -> Loop:
        given = {
            "target": target_folder,
            "data": unlike_rows,
            "output": tmp_path / output,
            "device": "cpu",
            "lr": 1e-2,
            "max-length": 40,
            "unroll-steps": 2,
            "draft-vocab": 40,
            "feature-dtype": "float32",
            "clip": 0,
        }
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        settings = parse([*words, *flags], EagleRun)
        torch.manual_seed(0)
        (tmp_path / output).mkdir(exist_ok=True)
        parts = build(settings, Accelerator(cpu=True))
        parts.task.head.double()
        return Loop(parts=parts, settings=settings, accelerator=Accelerator(cpu=True))

    return loop


def weights(loop: Loop) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in loop.head.named_parameters()}


def test_c15_18_micro_batches_by_4_make_5_steps_and_the_rate_ends_at_the_last(make: Make) -> None:
    loop = make("--accumulation", "4", "--log-every", "1", "--final-lr", "0.25")
    assert loop.parts.batches.epoch_length() == 18
    loop.fit()
    lines = (loop.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    rates = [json.loads(line)["lr"] for line in lines]
    assert rates[-1] == 0.25 * 1e-2
    assert rates[0] == pytest.approx(1e-2 / 2)
    assert rates == sorted(rates[:2]) + sorted(rates[2:], reverse=True)


@pytest.mark.parametrize("normalise", ["token", "document"])
@pytest.mark.parametrize(("accumulation", "batch_size"), [(4, 4), (18, 18), (8, 8)])
def test_c15_the_update_equals_that_of_one_batch(
    make: Make, accumulation: int, batch_size: int, normalise: str
) -> None:
    weighed = ("--normalise", normalise)
    split = make("--accumulation", str(accumulation), *weighed, output="split")
    start = weights(split)
    split.fit()
    whole = make("--batch-size", str(batch_size), *weighed, output="whole")
    whole.fit()
    assert split.num_steps == whole.num_steps == math.ceil(18 / accumulation)
    moved = 0.0
    for name, value in weights(split).items():
        moved = max(moved, float((value - start[name]).abs().max()))
        torch.testing.assert_close(value, weights(whole)[name], rtol=0, atol=1e-6, msg=name)
    assert moved > 1e-3


def test_c15_averaging_micro_batches_would_be_seen(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: each micro-batch divided by its own weight."""
    right = make("--accumulation", "18", output="right")
    right.fit()
    wrong = make("--accumulation", "18", output="wrong")
    forward = DraftTask.forward

    def averaged(self: DraftTask, work: Any) -> Any:
        out = forward(self, work)
        return out._replace(loss=out.loss / max(work.weight, 1e-9))

    monkeypatch.setattr(DraftTask, "forward", averaged)
    wrong.fit()
    assert any(
        float((value - weights(right)[name]).abs().max()) > 1e-4
        for name, value in weights(wrong).items()
    )


def test_c15_only_the_head_has_optimiser_state_and_the_target_stays(
    make: Make, target_folder: Path
) -> None:
    loop = make("--accumulation", "18", "--epochs", "2")
    loop.fit()
    own = {id(value) for value in loop.head.parameters()}
    with_state = {id(value) for item in loop.optimizers for value in item.optimizer.state}
    assert with_state == own
    assert isinstance(loop.head, EagleHead)
    tables = loop.head.lent()
    fresh = Target.load(str(target_folder))
    assert torch.equal(tables.embedding_VH, fresh.embedding_VH)
    assert torch.equal(tables.output_VH, fresh.output_VH)
    assert not tables.embedding_VH.requires_grad


def test_the_frozen_target_does_not_change(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Target] = []
    load = Target.load

    def spy(*args: Any, **named: Any) -> Target:
        loaded.append(load(*args, **named))
        return loaded[-1]

    monkeypatch.setattr(Target, "load", spy)
    loop = make("--online", "--accumulation", "9")
    (target,) = loaded
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    loop.fit()
    assert all(torch.equal(value, before[k]) for k, value in target.model.state_dict().items())
    assert all(value.grad is None for value in target.model.parameters())


def test_one_batch_can_be_learned(train: Train, one_row: Path) -> None:
    rare = ("--save-every", "1000", "--eval-every", "1000")
    out = train("--epochs", "150", "--lr", "1e-2", "--schedule", "constant", *rare, data=one_row)
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    accept = json.loads(lines[-1])["accept"]
    assert min(accept) > 0.9, accept


def test_online_and_stored_features_train_alike(train: Train) -> None:
    flags = ("--feature-dtype", "float32", "--epochs", "1")
    stored = (train(*flags, output="stored") / "metrics.jsonl").read_text(encoding="utf-8")
    online = (train(*flags, "--online", output="online") / "metrics.jsonl").read_text("utf-8")
    ours, theirs = ([json.loads(x)["loss"] for x in text.splitlines()] for text in (stored, online))
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_non_finite_numbers_stop_the_run_and_name_the_rows(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make("--accumulation", "2", "--save-every", "1")
    batch = loop.parts.batches.batch
    calls: list[list[str]] = []

    def broken(epoch: int, index: int, rank: int = 0, world: int = 1) -> Any:
        made = batch(epoch, index, rank, world)
        calls.append(made.row_ids[0])
        if len(calls) == 6:
            made.aux_BTF.fill_(math.inf)
        return made

    monkeypatch.setattr(loop.parts.batches, "batch", broken)
    with pytest.raises(TrainingStopped) as caught:
        loop.fit()
    (name,) = calls[5]
    assert re.search(rf"the loss is not finite in a step over the rows {name};", str(caught.value))
    kept = sorted((loop.output / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["step-00000001", "step-00000002"]


def test_training_that_breaks_exits_with_1(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> Tensor:
        return torch.tensor(math.nan)

    monkeypatch.setattr(optim, "clip", broken)
    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 1
    assert "error: the gradient is not finite" in capsys.readouterr().err


def test_steps_do_not_depend_on_logging_or_evaluation(train: Train) -> None:
    one = train("--log-every", "1", "--eval-every", "2", "--save-every", "3", output="one")
    other = train("--log-every", "5", output="other")
    ours, theirs = ((x / "last" / "model.safetensors").read_bytes() for x in (one, other))
    assert ours == theirs


def test_muon_moves_inner_matrices_and_adamw_the_rest(make: Make) -> None:
    loop = make("--optimizer", "muon", "--accumulation", "9")
    adamw, muon = (item.optimizer for item in loop.optimizers)
    names = {id(value): name for name, value in loop.head.named_parameters()}
    orthogonal = {names[id(value)] for group in muon.param_groups for value in group["params"]}
    rest = {names[id(value)] for group in adamw.param_groups for value in group["params"]}
    assert "midlayer.mlp.up_proj.weight" in orthogonal
    assert {"lm_head.weight", "norm.weight"} <= rest
    assert orthogonal | rest == set(names.values())
    before = weights(loop)
    loop.fit()
    assert all(not torch.equal(value, before[name]) for name, value in weights(loop).items())


def test_only_matrices_decay() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    (adamw,) = optim.build(module, OptimSettings(weight_decay=0.1))
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.1, 0.0]
    assert [len(group["params"]) for group in adamw.param_groups] == [1, 3]


def test_clipping_scales_down_and_zero_leaves_gradients() -> None:
    value = torch.nn.Parameter(torch.zeros(2))
    for limit, kept in ((1.0, 1.0), (0.0, 5.0)):
        value.grad = torch.tensor([3.0, 4.0])
        assert float(optim.clip([value], limit)) == 5
        assert float(value.grad.norm()) == pytest.approx(kept, rel=1e-5)


def test_plan_prints_and_spends_nothing(
    train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    train("--epochs", "3", "--draft-vocab", "40", "--plan", output="planned")
    text = capsys.readouterr().out
    assert not (tmp_path / "planned").exists()
    assert not (tmp_path / "features").exists()
    assert "28 kept, 0 cut, 0 dropped, 0 refused" in text
    assert "7 optimiser steps an epoch, 21 in all, 1197 tokens" in text
    assert "layers [2, 4, 5], 2 unrolled steps" in text
    for word in ("unroll_decay: 0.8", "trainable parameters", "memory (estimate)", "features 0.00"):
        assert word in text


def test_an_unused_setting_of_ground_is_none(
    target_folder: Path, rows_file: Path, tmp_path: Path
) -> None:
    output = str(tmp_path / "unused")
    argv = ["--target", str(target_folder), "--data", str(rows_file), "--output", output]
    ground = lay_ground(parse(argv, EagleRun), torch.device("cpu"))
    assert ground.vocabulary is None
    assert not ground.head.config.is_reduced


def test_a_frozen_output_head_keeps_the_rows_of_the_target(
    train: Train, target_folder: Path
) -> None:
    argv = ("--epochs", "2", "--lr", "0.01", "--weight-decay", "0.1", "--optimizer", "muon")
    kept = load_file(train("--freeze-output", *argv, output="kept") / "last" / "model.safetensors")
    free = load_file(train(*argv, output="free") / "last" / "model.safetensors")
    target = load_file(target_folder / "model.safetensors")
    rows_VH = target["model.embed_tokens.weight"]
    assert torch.equal(kept["lm_head.weight"], rows_VH)
    assert not torch.equal(free["lm_head.weight"], rows_VH)
    moved = [name for name in kept if not torch.equal(kept[name], free[name])]
    assert "fc.weight" in moved


def test_settings_and_provenance_lie_beside_the_weights(train: Train, tmp_path: Path) -> None:
    out = train("--epochs", "1")
    again = parse(["--recipe", str(out / "settings.yaml")], EagleRun)
    assert again.run.output == str(out)
    assert again.objective.unroll_steps == 2
    facts = json.loads((out / "provenance.json").read_text(encoding="utf-8"))
    assert facts["versions"]["torch"]
    assert facts["command"]


def test_help_exits_cleanly(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "Train an EAGLE draft head" in capsys.readouterr().out


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "num_processes"),
    [
        ("accelerate.commands.launch --cpu --mixed_precision no --dynamo_backend no", 1),
        ("torch.distributed.run --standalone", 2),
    ],
)
@pytest.mark.parametrize("normalise", ["token", "document"])
def test_launched_processes_train_as_one_does(
    train: Train,
    tmp_path: Path,
    target_folder: Path,
    rows_file: Path,
    launcher: str,
    num_processes: int,
    normalise: str,
) -> None:
    flags = ("--epochs", "2", "--batch-size", "3", "--accumulation", "2", "--draft-vocab", "40")
    flags = (*flags, "--normalise", normalise)
    alone = train(*flags, "--feature-dtype", "float32", output="alone")
    given = {
        "target": target_folder,
        "data": rows_file,
        "output": tmp_path / "launched",
        "device": "cpu",
        "max-length": 64,
        "unroll-steps": 2,
        "lr": 3e-3,
        "log-every": 3,
        "feature-dtype": "float32",
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    count = "--nproc_per_node" if num_processes > 1 else "--num_processes"
    launch = [sys.executable, "-m", *launcher.split(), count, str(num_processes)]
    script = str(Path(eagle.__file__))
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*launch, script, *words, *flags], env=env, text=True, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    ours = load_file(alone / "last" / "model.safetensors")
    theirs = load_file(tmp_path / "launched" / "last" / "model.safetensors")
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=2e-5, msg=name)
    lines = (tmp_path / "launched" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    state = json.loads(
        (tmp_path / "launched" / "checkpoints" / "step-00000004" / "state.json").read_text(
            encoding="utf-8"
        )
    )
    assert state["world"] == num_processes
    assert json.loads(lines[-1])["tokens"] == 2 * 399


def test_only_the_ratios_of_step_weights_matter(train: Train) -> None:
    tiny = train("--step-weights", "3.814697265625e-06", "1.9073486328125e-06", output="tiny")
    usual = train("--step-weights", "1", "0.5", output="usual")
    theirs = load_file(usual / "last" / "model.safetensors")
    for name, value in load_file(tiny / "last" / "model.safetensors").items():
        assert torch.equal(value, theirs[name]), name
