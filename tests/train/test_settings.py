"""Flags, recipes and their errors."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from outrider.data.choices import PACKED
from outrider.data.quantise import CODECS
from outrider.heads.losses import OBJECTIVES
from outrider.train import recipe
from outrider.train.kinds import EagleRun, HydraRun, MedusaRun, MtpRun
from outrider.train.mixture import LOSSES, parse_terms
from outrider.train.recipe import ENTRIES, recipe_argv, shipped_recipes, to_yaml
from outrider.train.settings import FREE_FIELDS, Settings, field_names, identity

NEEDED = ["--target", "t", "--data", "d", "--output", "o"]


def parse(argv: list[str]) -> EagleRun:
    return recipe.parse(argv, EagleRun)


def refused(
    argv: list[str], capsys: pytest.CaptureFixture[str], run: type[Settings] = EagleRun
) -> str:
    """The message of a refused command line, as one line; the exit code is checked."""
    with pytest.raises(SystemExit) as caught:
        recipe.parse(argv, run)
    assert caught.value.code == 2
    text = capsys.readouterr().err
    return " ".join(word for word in text.split() if not set(word) <= set("─│╭╮╰╯"))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_every_flag_has_its_own_name_and_its_own_help() -> None:
    names = field_names(EagleRun)
    assert len(names) == len(set(names)) > 50
    assert set(names) == set(parse(NEEDED).flat())
    assert set(names) >= FREE_FIELDS


def test_every_group_is_listed() -> None:
    assert [item.name for item in fields(EagleRun)] == [
        "target", "data", "head", "objective", "optim", "schedule", "run",
    ]  # fmt: skip


def test_help_is_readable_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in field_names(EagleRun):
        assert "--" + name.replace("_", "-") in text
    assert "Share of all steps in which the rate rises" in " ".join(text.split())


def test_yaml_exponents_arrive_as_numbers(tmp_path: Path) -> None:
    assert yaml.safe_load("lr: 1e-4")["lr"] == "1e-4"  # the trap
    path = write(tmp_path / "r.yaml", "lr: 1e-4\nwarmup: 0.1\nepochs: 3\n")
    settings = parse([*NEEDED, "--recipe", str(path)])
    assert settings.optim.lr == 1e-4
    assert settings.run.epochs == 3


def test_flags_win_over_the_recipe_wherever_they_stand(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "lr: 1e-4\nonline: true\naux-layers: [1, 3, 5]\ninit: null\n")
    first = parse(["--lr", "3e-4", *NEEDED, f"--recipe={path}"])
    last = parse([*NEEDED, "--recipe", str(path), "--no-online", "--aux-layers", "2", "4"])
    assert (first.optim.lr, first.data.online, first.head.init) == (3e-4, True, None)
    assert first.head.aux_layers == (1, 3, 5)
    assert (last.data.online, last.head.aux_layers) == (False, (2, 4))


def test_settings_survive_being_saved_as_a_recipe(tmp_path: Path) -> None:
    before = parse([*NEEDED, "--lr", "3e-4", "--aux-layers", "1", "3", "--fc-norm", "--seed", "5"])
    path = write(tmp_path / "settings.yaml", to_yaml(before))
    after = parse(["--recipe", str(path)])
    assert after.flat() | {"recipe": None} == before.flat()


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_parse(name: str) -> None:
    kind = yaml.safe_load(shipped_recipes()[name].read_text(encoding="utf-8"))["head"]
    (run,) = (run for run in ENTRIES if kind in recipe.kinds_of(run))
    settings = recipe.parse(["--recipe", name], run)
    assert settings.head.head == kind
    assert settings.target.target
    assert settings.data.heldout != settings.data.data


def test_shipped_recipes_are_found() -> None:
    names = {"demo", "demo-quick", "eagle1", "medusa-demo", "hydra-demo", "mtp-demo"}
    assert names <= set(shipped_recipes())


def test_a_recipe_of_another_kind_names_its_entry_point() -> None:
    with pytest.raises(ValueError, match=r"is for head 'medusa', which train/medusa\.py trains"):
        parse(["--recipe", "medusa-demo"])
    with pytest.raises(ValueError, match=r"is for head 'eagle3', which train/eagle\.py trains"):
        recipe.parse(["--recipe", "demo"], MtpRun)


@pytest.mark.parametrize("run", list(ENTRIES))
def test_every_entry_has_its_own_help_and_survives_being_saved(
    run: type[Settings], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        recipe.parse(["--help"], run)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    names = field_names(run)
    assert len(names) == len(set(names)) > 40
    assert ENTRIES[run] in text
    for name in names:
        assert "--" + name.replace("_", "-") in text
    settings = recipe.parse([*NEEDED, "--draft-vocab", "9"], run)
    path = write(tmp_path / "settings.yaml", to_yaml(settings))
    assert recipe.parse(["--recipe", str(path)], run).flat() | {"recipe": None} == settings.flat()
    assert set(settings.head.geometry()) >= {*settings.head.GEOMETRY.values()}


@pytest.mark.parametrize(
    ("run", "flags", "message"),
    [
        (MedusaRun, ["--num-draft-heads", "0"], "num_draft_heads is 0; allowed: at least 1"),
        (HydraRun, ["--num-draft-layers", "0"], "num_draft_layers is 0; allowed: at least 1"),
        (MtpRun, ["--unroll-steps", "0"], "unroll_steps is 0; allowed: at least 1"),
        (MtpRun, ["--head-intermediate", "0"], "head_intermediate is 0; allowed: at least 1"),
        (MedusaRun, ["--unroll-steps", "2"], "Unrecognized options"),
        (HydraRun, ["--head", "medusa"], "invalid choice"),
        (MedusaRun, ["--joint", "lora", "--normalise", "document"], "token by token"),
        (MedusaRun, ["--joint", "full", "--hidden-states", "x"], "hidden_states is set with joint"),
        (MedusaRun, ["--step-weights", "1"], "step_weights has 1 numbers for"),
        (
            MedusaRun,
            ["--feature-dtype", "fp8", "--top-k", "9", "--teacher-top-k", "10"],
            "teacher_top_k is 10 and feature_dtype fp8 keeps top_k 9 tokens",
        ),
    ],
)
def test_wrong_values_of_other_kinds_are_refused(
    run: type[Settings], flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused([*NEEDED, *flags], capsys, run)


def test_an_unknown_recipe_key_names_key_and_suggestion(tmp_path: Path) -> None:
    path = write(tmp_path / "r.yaml", "warm_up: 0.1\n")
    with pytest.raises(ValueError, match=r"r\.yaml has the unknown key 'warm_up'.*warmup"):
        recipe_argv(path, EagleRun)
    path = write(tmp_path / "r.yaml", "zzz: 0.1\n")
    with pytest.raises(ValueError, match="unknown key 'zzz'; see --help"):
        recipe_argv(path, EagleRun)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: [1", "not valid YAML"),
        ("- lr\n", "no `key: value` lines"),
        ("lr: {peak: 1}\n", "lr holds nested keys"),
        ("recipe: other.yaml\n", "unknown key 'recipe'"),
    ],
)
def test_broken_recipes_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_argv(write(tmp_path / "r.yaml", text), EagleRun)


def test_a_missing_recipe_lists_the_shipped_ones() -> None:
    with pytest.raises(ValueError, match=r"recipe is 'nope', which is no file; shipped.*demo"):
        recipe.find("nope")


def test_files_for_accelerate_are_not_recipes(tmp_path: Path) -> None:
    assert not recipe.is_recipe(write(tmp_path / "a.yaml", "compute_environment: LOCAL_MACHINE\n"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr", "-1"], "lr is -1.0; allowed: above 0"),
        (["--lr", "nan"], "lr is nan; allowed: above 0"),
        (["--beta2", "1"], "beta2 is 1.0; allowed: at least 0 and below 1"),
        (["--muon-lr", "0"], "muon_lr is 0.0"),
        (["--weight-decay", "-1"], "weight_decay is -1.0"),
        (["--clip", "-1"], "clip is -1.0; allowed: at least 0"),
        (["--warmup", "1"], "warmup is 1.0; allowed: at least 0 and below 1"),
        (["--final-lr", "2"], "final_lr is 2.0; allowed: at least 0 and at most 1"),
        (["--schedule", "wsd", "--warmup", "0.9"], "warmup 0.9 and cooldown 0.2 together exceed"),
        (["--unroll-steps", "0"], "unroll_steps is 0; allowed: at least 1 and at most 32"),
        (["--unroll-decay", "0"], "unroll_decay is 0.0; allowed: above 0 and at most 1"),
        (["--feature-weight", "-1"], "feature_weight is -1.0"),
        (["--max-unsupervised", "2"], "max_unsupervised is 2.0"),
        (["--draft-vocab", "0"], "draft_vocab is 0; allowed: at least 1"),
        (["--head-hidden", "0"], "head_hidden is 0"),
        (["--rebuild-vocab"], "rebuild_vocab is set without init"),
        (["--head", "eagle1", "--unroll-steps", "3"], "unroll_steps is 3 with head eagle1"),
        (["--head", "eagle1", "--draft-vocab", "9"], "draft_vocab is 9 with head eagle1"),
        (["--head", "eagle1", "--freeze-output"], "freeze_output is True with head eagle1"),
        (["--head", "eagle1", "--aux-layers", "1"], "aux_layers is (1,) with head eagle1"),
        (["--max-length", "1"], "max_length is 1; allowed: at least 4"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--epochs", "0"], "epochs is 0; allowed: at least 1"),
        (["--batch-size", "0"], "batch_size is 0"),
        (["--accumulation", "0"], "accumulation is 0"),
        (["--keep-last", "0"], "keep_last is 0"),
        (["--seed", "-1"], "seed is -1; allowed: at least 0"),
        (["--stop-after-steps", "0"], "stop_after_steps is 0"),
        (["--waive", "head"], "waive is 'head'; allowed: optimizer, schedule"),
        (["--feature-dtype", "int8", "--teacher-top-k", "45"], "teacher_top_k is 45"),
        (
            ["--feature-dtype", "int8", "--teacher-top-k", "9", "--teacher-over", "target"],
            "with teacher_over target",
        ),
        (
            ["--feature-dtype", "int8", "--teacher-top-k", "9", "--loss-temperature", "0.5"],
            "loss_temperature 0.5",
        ),
        (["--on-long", "split"], "invalid choice"),
        (["--precision", "fp16"], "invalid choice"),
    ],
)
def test_wrong_values_exit_with_2_and_say_what_is_allowed(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused([*NEEDED, *flags], capsys)


def test_unknown_and_shortened_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--lr FLOAT" in refused([*NEEDED, "--lrr", "1"], capsys)
    assert "Unrecognized options" in refused([*NEEDED, "--epoch", "1"], capsys)


def test_required_flags_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = refused([], capsys)
    assert "--target" in text
    assert "--data" in text
    assert "--output" in text


def test_a_continuation_may_change_only_what_changes_no_weight() -> None:
    before = identity(parse(NEEDED))
    free = identity(parse([*NEEDED, "--log-every", "3", "--threads", "1", "--keep-last", "9"]))
    bound = identity(parse([*NEEDED, "--lr", "3e-3"]))
    assert before == free
    assert before != bound
    assert before["unroll_steps"] == 7


def test_settings_do_not_load_torch_models() -> None:
    code = (
        "import sys; from outrider.train.recipe import parse;"
        "from outrider.train.kinds import EagleRun;"
        "parse(['--recipe', 'demo'], EagleRun); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["feature-noise-std", "feature-dropout", "layer-dropout"])
def test_what_disturbs_eagle3_is_refused_for_eagle1(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse([*NEEDED, f"--{name}", "0.1"]).flat()[name.replace("-", "_")] == 0.1
    said = refused([*NEEDED, "--head", "eagle1", f"--{name}", "0.1"], capsys)
    assert (
        f"{name.replace('-', '_')} is 0.1 with head eagle1, which is disturbed by --feature-noise"
        in said
    )


def test_an_average_that_never_moves_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ema is 1.0; allowed: at least 0 and below 1" in refused([*NEEDED, "--ema", "1"], capsys)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--loss", "ce"], "loss is 'ce', where 'ce' is unknown; choose of soft_ce, kl"),
        (["--loss", "tv:x"], "loss is 'tv:x', where 'x' is no weight; write NAME:WEIGHT"),
        (["--loss", "tv:,kl"], "where '' is no weight"),
        (["--loss", "tv:-1"], "where '-1' is no weight"),
        (["--loss", "tv:nan"], "where 'nan' is no weight"),
        (["--loss", "tv,tv:2"], "loss is 'tv,tv:2'; name tv once"),
        (["--lk-decay", "-1"], "lk_decay is -1.0; allowed: at least 0"),
        (["--teacher-top-k", "0"], "teacher_top_k is 0; allowed: at least 1"),
        (["--loss-temperature", "0"], "loss_temperature is 0.0; allowed: above 0"),
        (["--step-weights", "1", "0"], "step_weights is 0.0; allowed: above 0"),
        (["--step-weights", "1e-60", "1e-60"], "step_weights is 1e-60; allowed: at least 1e-06"),
        (["--step-weights", "1e60", "1e60"], "step_weights is 1e+60; allowed: at least 1e-06"),
        (["--step-weights", "1", "0.5"], "step_weights has 2 numbers for 7 draft steps"),
    ],
)
def test_objectives_that_make_no_sense_are_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused([*NEEDED, *flags], capsys)


def test_every_divergence_can_be_named() -> None:
    assert set(LOSSES) == set(OBJECTIVES)
    assert parse_terms(" kl , tv:2 ") == (("kl", 1.0), ("tv", 2.0))


def test_every_part_of_the_objective_has_a_flag(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.yaml",
        "unroll_steps: 3\nstep_weights: [0.51, 0.31, 0.18]\nloss: tv:0.9,lk_lambda:0.1\n"
        "lk_decay: 2.0\nteacher_top_k: 64\nloss_temperature: 0.8\nnormalise: document\n",
    )
    settings = parse([*NEEDED, "--recipe", str(path)])
    found = settings.objective.divergence()
    assert found.terms == (("tv", 0.9), ("lk_lambda", 0.1))
    assert (found.lk_decay, found.top_k, found.temperature) == (2.0, 64, 0.8)
    assert settings.objective.weights(3) == (0.51, 0.31, 0.18)
    assert settings.objective.normalise == "document"
    text = to_yaml(settings)
    again = parse(["--recipe", str(write(tmp_path / "again.yaml", text))])
    assert again.objective == settings.objective


@pytest.mark.parametrize(
    "flags",
    [
        ["--feature-dtype", "int8", "--teacher-top-k", "44"],
        ["--feature-dtype", "int8", "--online", "--teacher-top-k", "45"],
        ["--teacher-top-k", "45"],
    ],
)
def test_laws_may_be_cut_to_what_is_known_of_them(flags: list[str]) -> None:
    assert recipe.parse([*NEEDED, *flags], EagleRun).objective.divergence().top_k in (44, 45)


def test_packed_forms_are_those_that_there_are() -> None:
    assert set(PACKED) == set(CODECS)
