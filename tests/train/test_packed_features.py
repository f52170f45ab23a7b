"""Training from packed features: the first step's loss and gradients, and whole runs."""

import json

import pytest
import torch

from outrider.data import layout as layout_module
from outrider.data.batches import Batches
from outrider.data.quantise import Rotated
from outrider.train.assembly import features, lay_ground
from outrider.train.kinds import EagleRun, MedusaRun
from outrider.train.objectives import task_of
from outrider.train.recipe import parse

# How far a first step may be from one on the target's own states: loss, and gradients by norm.
TOLERANCE = {
    "float32": (1e-5, 1e-4),
    "bfloat16": (3e-4, 6e-3),
    "int8": (3e-4, 2e-2),
    "fp8": (1e-3, 8e-2),
    "int4": (1e-2, 3e-1),
}


@pytest.fixture
def first_step(tmp_path, target_folder, rows_file):
    """Loss per prediction and gradients of the first batch."""

    def run(*flags, kind=EagleRun):
        words = ["--target", str(target_folder), "--data", str(rows_file), "--max-length", "64"]
        words += ["--output", str(tmp_path / "run"), "--device", "cpu", *flags]
        ground = lay_ground(parse(words, kind), torch.device("cpu"))
        source = features(ground)
        batch = Batches(source, size=64, batch_size=7, seed=0).batch(0, 0)
        settings = ground.settings
        task = task_of(ground.head, settings.objective, num_steps=settings.num_steps)
        task.eval()  # no feature noise
        work = task.prepare(batch)
        loss = task(work).loss / work.weight
        loss.backward()
        named = task.head.named_parameters()
        return float(loss.detach()), {k: v.grad for k, v in named if v.grad is not None}

    return run


def distance(ours, theirs):
    """Relative difference of losses, and the largest one of gradients by norm."""
    assert ours[1].keys() == theirs[1].keys()
    gaps = [float((ours[1][k] - v).norm() / v.norm()) for k, v in theirs[1].items()]
    return abs(ours[0] / theirs[0] - 1), max(gaps)


KINDS = {
    "eagle3": ((), EagleRun),
    "reduced": (("--draft-vocab", "40"), EagleRun),
    "eagle1": (("--head", "eagle1"), EagleRun),
    "medusa": (("--num-draft-heads", "2"), MedusaRun),
}


@pytest.mark.parametrize("form", TOLERANCE)
@pytest.mark.parametrize("name", KINDS)
def test_first_steps_agree_with_the_targets_own_states(first_step, name, form):
    flags, kind = KINDS[name]
    online = first_step(*flags, "--online", kind=kind)
    stored = first_step(*flags, "--feature-dtype", form, "--top-k", "97", kind=kind)
    loss, gradients = distance(stored, online)
    assert loss < TOLERANCE[form][0]
    assert gradients < TOLERANCE[form][1]


def test_laws_over_all_ids_serve_a_reduced_draft_vocabulary(first_step):
    reduced = ("--draft-vocab", "40")
    online = first_step(*reduced, "--online")
    packed = (*reduced, "--feature-dtype", "int8", "--teacher-over", "target", "--top-k", "97")
    loss, gradients = distance(first_step(*packed), online)
    assert loss < TOLERANCE["int8"][0]
    assert gradients < TOLERANCE["int8"][1]


def test_a_short_list_of_ids_moves_the_first_step_less_the_longer_it_is(first_step):
    online = first_step("--online")
    gaps = [
        distance(first_step("--feature-dtype", "int8", "--top-k", str(k)), online)[1]
        for k in (2, 10, 60)
    ]
    assert gaps[0] > 2 * gaps[2]
    assert gaps[0] > gaps[1] > gaps[2]


def wrong_scale(monkeypatch):
    encode = Rotated.encode

    def planted(self, state_NLH):
        found = encode(self, state_NLH)
        return found | {"scale": found["scale"].roll(1, 0)}

    monkeypatch.setattr(Rotated, "encode", planted)


def law_of_the_next_position(monkeypatch):
    encode = layout_module.Packed.encode

    def planted(self, row, aux_TF, last_TH):
        return encode(self, row, aux_TF, last_TH.roll(-1, 0))

    monkeypatch.setattr(layout_module.Packed, "encode", planted)


def rows_shifted(monkeypatch):
    decode = layout_module.Packed.decode

    def planted(self, rows, found):
        made = decode(self, rows, found)
        return [one._replace(aux_TF=one.aux_TF.roll(1, 0)) for one in made]

    monkeypatch.setattr(layout_module.Packed, "decode", planted)


@pytest.mark.parametrize("plant", [wrong_scale, law_of_the_next_position, rows_shifted])
def test_planted_faults_break_the_first_step(first_step, monkeypatch, plant):
    online = first_step("--online")
    plant(monkeypatch)
    packed = first_step("--feature-dtype", "int8", "--top-k", "97")
    loss, gradients = distance(packed, online)
    assert loss > TOLERANCE["int8"][0] or gradients > TOLERANCE["int8"][1]


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_whole_run_from_int4_learns_like_one_from_raw_features(train):
    raw = lines(train("--epochs", "4", output="raw"))
    packed = lines(
        train("--epochs", "4", "--feature-dtype", "int4", "--top-k", "30", output="packed")
    )
    for ours, theirs in zip(packed, raw, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)
    assert packed[-1]["loss"] < packed[0]["loss"]


def test_settings_that_contradict_each_other_are_refused(train, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train("--online", "--hidden-states", str(tmp_path))
    assert "online is set and hidden_states too" in capsys.readouterr().err
