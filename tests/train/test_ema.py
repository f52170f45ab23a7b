"""The weights' average against a plain recurrence, through checkpoints, export and resume."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.train.assembly import lay_ground
from outrider.train.checkpoint import latest
from outrider.train.ema import WeightAverage, decay_at
from outrider.train.kinds import EagleRun
from outrider.train.recipe import parse

Train = Callable[..., Path]
FLAGS = ("--epochs", "2", "--draft-vocab", "40", "--ema", "0.7")


def newest(folder: Path) -> Path:
    found = latest(folder)
    assert found is not None
    return found


def weights_after_every_step(folder: Path) -> list[dict[str, Tensor]]:
    """Weights before the first step and after each, from settings and checkpoints."""
    settings = parse(["--recipe", str(folder / "settings.yaml")], EagleRun)
    first = lay_ground(settings, torch.device("cpu")).head.state_dict()
    kept = sorted((folder / "checkpoints").glob("step-*"))
    return [first, *(load_file(path / "head.safetensors") for path in kept)]


def plain_average(values: list[float], decay: float) -> float:
    """One number's average, step by step."""
    average = values[0]
    for step, value in enumerate(values[1:]):
        keep = min(decay, (1 + step) / (10 + step))
        average = keep * average + (1 - keep) * value
    return average


@pytest.mark.parametrize("frozen", [False, True])
def test_checkpoints_and_exports_hold_the_plain_average(train: Train, frozen: bool) -> None:
    flags = ("--freeze-output",) if frozen else ()
    folder = train(*FLAGS, *flags, "--save-every", "1", "--keep-last", "99")
    course = weights_after_every_step(folder)
    assert len(course) == 15
    average = load_file(newest(folder) / "ema.safetensors")
    exported = load_file(folder / "last" / "model.safetensors")
    assert ("lm_head.weight" in average) != frozen
    for name, value in average.items():
        flat = [weights[name].flatten().double().tolist() for weights in course]
        for place in range(0, value.numel(), 97):
            wanted = plain_average([one[place] for one in flat], 0.7)
            assert float(value.flatten()[place]) == pytest.approx(wanted, rel=1e-5, abs=1e-7)
        assert not torch.equal(value, course[-1][name]), name
        assert torch.equal(exported[name], value), name
    if frozen:
        assert torch.equal(exported["lm_head.weight"], course[0]["lm_head.weight"])


def test_the_average_is_what_is_judged(
    train: Train, heldout_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a decay of 0 the average is the weights, with a high one nearly the first ones."""
    flags = ("--heldout", str(heldout_file), "--lr", "1e-1", "--epochs", "2")
    taus = []
    for number, more in enumerate([(), ("--ema", "0"), ("--ema", "0.9")]):
        folder = train(*flags, *more, output=f"run{number}")
        text = (folder / "best" / "heldout.json").read_text()
        taus.append(re.sub(r'"step": \d+,', "", text))
    assert taus[0] == taus[1]
    assert taus[2] != taus[0]


@pytest.mark.parametrize("step", [3, 7])
def test_resume_equals_never_having_stopped(train: Train, step: int) -> None:
    whole = train(*FLAGS, output="whole")
    with pytest.raises(SystemExit):
        train(*FLAGS, "--stop-after-steps", str(step), output="stopped")
    resumed = train(*FLAGS, output="stopped")
    for file in ("head.safetensors", "ema.safetensors"):
        ours, theirs = load_file(newest(whole) / file), load_file(newest(resumed) / file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), file


def test_a_continuation_without_the_average_is_refused(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train(*FLAGS, "--stop-after-steps", "3")
    for flags, said in [
        (FLAGS[:-2], "ema is None, but the run"),
        ((*FLAGS, "--ema", "0.9"), "ema is 0.9, but the run"),
    ]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            train(*flags)
        assert caught.value.code == 2
        assert said in capsys.readouterr().err
    (newest(tmp_path / "run") / "ema.safetensors").unlink()
    with pytest.raises(SystemExit) as caught:
        train(*FLAGS)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "lacks ema.safetensors (the average); put it back or delete the folder" in message
    assert "waive" not in message


def test_weights_come_back_even_after_an_error_inside() -> None:
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    average = WeightAverage(module, 0.5)
    average.average["weight"].fill_(7)

    def fail() -> None:
        with average.applied():
            assert bool((module.weight == 7).all())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert torch.equal(module.weight, before)


def test_an_average_of_another_module_is_refused() -> None:
    average = WeightAverage(nn.Linear(2, 2), 0.5)
    with pytest.raises(ValueError, match="tensor bias is missing from the stored average"):
        average.load({"weight": torch.zeros(2, 2)})


def test_the_decay_warms_up_to_its_value() -> None:
    assert [decay_at(step, 0.999) for step in (0, 8)] == [0.1, 0.5]
    assert decay_at(10**6, 0.999) == 0.999


def test_the_plan_counts_the_average(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for flags in ((), ("--ema", "0.999")):
        train("--plan", "--head-hidden", "2048", *flags)
        text = capsys.readouterr().out
        found = re.search(r"moments( and average)? ([\d.]+) GiB", text)
        assert found is not None
        assert (found[1] is not None) == bool(flags)
        sizes.append(float(found[2]))
    assert sizes[1] == pytest.approx(sizes[0] * 5 / 4, abs=0.01)
