"""`outrider plan`: the trainers' own figures, without weights, and what a run then takes."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.outline import outline
from outrider.scripts import plan_bench
from outrider.scripts.cli import main as outrider
from outrider.scripts.plan_command import PlanSettings, invented, main
from outrider.train import eagle
from outrider.train.calibrate import random_target
from outrider.train.duration import clock


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with weights, and rows for it."""
    place = tmp_path_factory.mktemp("plan")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(place / "target")
    words = {"<s>": 0, "</s>": 1} | {f"w{index}": index for index in range(2, 96)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(place / "target")
    made = torch.Generator().manual_seed(1)
    with (place / "rows.jsonl").open("w", encoding="utf-8") as file:
        for length in [16, 12, 20, 9] * 7:
            ids = torch.randint(2, 60, (length,), generator=made).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [0] * 4 + [1] * (length - 4)}))
            file.write("\n")
    return place


@pytest.fixture
def bare(folder: Path, tmp_path: Path) -> Path:
    """The target's config.json and nothing else."""
    place = tmp_path / "bare"
    place.mkdir()
    shutil.copy(folder / "target" / "config.json", place)
    return place


FLAGS = ("--max-length", "64", "--draft-vocab", "40", "--unroll-steps", "2", "--device", "cpu")
BOX: dict[str, Any] = {
    "name": "box", "source": "by hand", "is_measured": True, "device": "cpu",
    "forward": {"float32": 1e9}, "step": {"fp32": 2e9}, "optimiser": {"adamw": 1e9, "muon": 1e9},
    "write": 1e8, "read": 1e9, "start": 3.0, "rows": 100.0,
}  # fmt: skip


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def box(tmp_path: Path) -> str:
    path = tmp_path / "box.json"
    path.write_text(json.dumps(BOX), encoding="utf-8")
    return str(path)


def test_a_config_alone_is_enough(bare: Path, box: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eagle", "--target", str(bare), "--rows", "100", "--mean-length", "20", *FLAGS]
    found = planned(capsys, *words, "--machine", box)
    assert found["tokens"] == 2000
    width, layers = 32, 3
    assert found["disk_bytes"]["features"] == pytest.approx(
        2000 * 2 * (layers + 1) * width, rel=0.05
    )
    assert found["seconds"]["start"] == 3.0
    assert found["seconds"]["rows"] == 1.0
    assert found["machine"] == {"name": "box", "source": "by hand", "is_measured": True}
    more = planned(capsys, *words, "--machine", box, "--epochs", "3")
    assert more["seconds"]["steps"] == pytest.approx(3 * found["seconds"]["steps"])
    assert more["seconds"]["features"] == found["seconds"]["features"]
    packed = planned(capsys, *words, "--machine", box, "--feature-dtype", "int8", "--top-k", "8")
    assert packed["disk_bytes"]["features"] < found["disk_bytes"]["features"]
    online = planned(capsys, *words, "--machine", box, "--online")
    assert online["disk_bytes"]["features"] == online["seconds"]["features"] == 0
    assert online["seconds"]["steps"] > found["seconds"]["steps"]


def test_a_vocabulary_by_mass_takes_the_targets_passes(
    bare: Path, box: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eagle", "--target", str(bare), "--rows", "100", "--mean-length", "20", *FLAGS]
    plain = planned(capsys, *words, "--machine", box)["seconds"]["features"]
    mass = planned(capsys, *words, "--machine", box, "--draft-vocab-by", "mass")
    online = planned(capsys, *words, "--machine", box, "--draft-vocab-by", "mass", "--online")
    passes = plain - 2 * 2000 * (3 + 1) * 32 / BOX["write"]  # less three layers and the last state
    laws = 2 * 1000 * 32 * 96 / 1e9  # half of the tokens are supervised
    assert mass["seconds"]["features"] == pytest.approx(plain + passes + laws)
    assert online["seconds"]["features"] == pytest.approx(passes + laws)


def test_many_rows_are_planned_by_few(
    bare: Path, box: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eagle", "--target", str(bare), "--mean-length", "20", *FLAGS, "--machine", box]
    few, many = (planned(capsys, *words, "--rows", rows) for rows in ("4000", "400000"))
    for part, name in (("disk_bytes", "features"), ("seconds", "features"), ("seconds", "steps")):
        assert many[part][name] == pytest.approx(100 * few[part][name], rel=0.01)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "hydra", "mtp"])
def test_every_trainer_has_a_plan(
    kind: str, bare: Path, box: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        kind,
        "--target",
        str(bare),
        "--rows",
        "9",
        "--mean-length",
        "20",
        "--max-length",
        "64",
    ]
    outrider(["plan", *words, "--machine", box])
    said = capsys.readouterr().out
    assert re.search(r"time on box \(measured rates; by hand\): [\d.]+ s", said)
    assert "memory (estimate): peak 0." in said
    assert "head eagle3" in said or f"head {kind}" in said


def test_the_trainers_plan_says_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--target", str(folder / "target"), "--data", str(folder / "rows.jsonl"), *FLAGS]
    flags += ["--output", str(tmp_path / "run")]
    eagle.main([*flags, "--plan"])
    theirs = capsys.readouterr().out
    found = planned(capsys, "eagle", *flags)
    steps = found["steps"]
    assert f"{steps['per_epoch']} optimiser steps an epoch, {steps['total']} in all" in theirs
    assert f"{found['parameters']['trained'] / 1e6:.2f} M trainable parameters" in theirs
    assert f"disk: {found['disk_bytes']['total'] / 2**30:.2f} GiB" in theirs
    assert f"peak {found['memory_bytes']['peak'] / 2**30:.2f} GiB" in theirs
    assert "time on this machine (an estimate; from a matrix product timed now" in theirs
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("form", ["bfloat16", "int4"])
def test_disk_is_what_a_run_then_takes(
    form: str, folder: Path, box: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--target", str(folder / "target"), "--data", str(folder / "rows.jsonl"), *FLAGS]
    flags += ["--output", str(tmp_path / "run"), "--feature-dtype", form, "--threads", "1"]
    found = planned(capsys, "eagle", *flags, "--machine", box)
    eagle.main(flags)
    written = plan_bench.size_of(tmp_path / "features", "*/features-*.safetensors")
    assert found["disk_bytes"]["features"] == pytest.approx(written, rel=0.05)
    kept = plan_bench.size_of(tmp_path / "run", "checkpoints/*/*")
    one = found["disk_bytes"]["checkpoints"] / 3
    assert one == pytest.approx(kept, rel=0.25)  # a tiny head's file headers weigh
    exports = plan_bench.size_of(tmp_path / "run", "last/*.safetensors")
    with safe_open(tmp_path / "run" / "last" / "model.safetensors", "pt") as file:
        assert file.keys()
    assert found["disk_bytes"]["exports"] == pytest.approx(exports, rel=0.1)


@pytest.mark.slow
def test_a_machine_is_measured_by_real_steps(
    bare: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.train.calibrate.STEP_SECONDS", 0.3)
    monkeypatch.setattr("outrider.train.calibrate.FORWARD_SECONDS", 0.3)
    words = ["eagle", "--target", str(bare), "--rows", "200", "--mean-length", "20", *FLAGS]
    words += ["--output", str(tmp_path / "run"), "--optimizer", "muon"]
    kept = tmp_path / "machine.json"
    first = planned(capsys, *words, "--measure", "--save-machine", str(kept))
    assert first["machine"]["is_measured"]
    again = planned(capsys, *words, "--machine", str(kept))
    assert again["seconds"] == pytest.approx(first["seconds"])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".measure")]
    rates = json.loads(kept.read_text())
    assert set(rates["optimiser"]) == {"adamw", "muon"}
    with pytest.raises(ValueError, match="has no rate of forward for bfloat16"):
        main([*words, "--machine", str(kept), "--target-dtype", "bfloat16"])


def test_a_large_target_is_measured_by_its_first_layers(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.data.outline import outline

    target = outline(str(bare), dtype=torch.float32, reads_rows=False)
    assert {value.device.type for value in target.model.parameters()} == {"meta"}
    assert random_target(target, "cpu").num_layers == 8
    monkeypatch.setattr("outrider.train.calibrate.MOST_WEIGHTS", 1.0)
    small = random_target(target, "cpu")
    assert small.num_layers == 2
    assert small.hidden_size == target.hidden_size


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "5"], "rows and mean_length go together"),
        (["--rows", "0", "--mean-length", "20"], "rows is 0; give at least 1"),
        (["--rows", "5", "--mean-length", "2"], "rows have at least 4 tokens"),
        (["--rows", "5", "--mean-length", "20", "--supervised", "0"], "supervised is 0.0"),
        (["--measure", "--machine", "h100"], "leave one of them out"),
        (["--save-machine", "x.json"], "nothing to save"),
        (["--efficiency", "2", "--machine", "h100"], "efficiency is 2.0"),
        (["--efficiency", "0.5", "--rows", "5", "--mean-length", "20"], "without machine"),
        (["--rows", "5", "--mean-length", "inf"], "mean_length is inf"),
        (["--rows", "5", "--mean-length", "nan"], "mean_length is nan"),
        (["--rows", "5", "--mean-length", "900", "--on-long", "drop"], "leaves no row of at most"),
        (["--rows", "5", "--mean-length", "20", "--data", "x.jsonl"], "rows is given and --data"),
        (["--rows", "5", "--mean-length", "20", "--machine", "abacus"], "machine is 'abacus'"),
        (["--rows", "5", "--mean-length", "20", "--init", "somewhere"], "init is 'somewhere'"),
        (["--rows", "5", "--mean-length", "20", "--draft-vocab", "400"], "draft_vocab is 400"),
        (["--data", "rows.jsonl"], "has no config.json and a tokenizer"),
    ],
)
def test_refusals_exit_with_2_and_say_what_to_do(
    words: list[str], said: str, bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        outrider(["plan", "eagle", *words, "--target", str(bare), "--max-length", "64"])
    assert ended.value.code == 2
    shown = re.sub(r"[^\w(),.:;\'/-]+", " ", capsys.readouterr().err)  # without boxes
    assert said in shown


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"memory": "16G"}, "memory is '16G'; allowed: a number"),
        ({"memory": -1}, "memory is -1; allowed: above 0"),
        ({"start": -5}, "start is -5; allowed: at least 0"),
        ({"start": True}, "start is True; allowed: a number"),
        ({"write": float("nan")}, "write is nan; allowed: above 0"),
        ({"forward": {"float32": "fast"}}, "forward[float32] is 'fast'; allowed: a number"),
        ({"step": [2e9]}, "step is [2000000000.0]; allowed: rates by name"),
        ({"name": 3}, "name is 3; allowed: text"),
        ({"forward": {}}, "has no rate of forward for float32 (it has none)"),
    ],
)
def test_a_machine_file_with_wrong_values_is_refused_by_name(
    wrong: dict[str, Any], said: str, bare: Path, box: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(box).write_text(json.dumps(BOX | wrong), encoding="utf-8")
    words = ["plan", "eagle", "--target", str(bare), "--rows", "9", "--mean-length", "20", *FLAGS]
    with pytest.raises(SystemExit) as ended:
        outrider([*words, "--machine", box])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_measured_machine_takes_no_efficiency(bare: Path, box: str) -> None:
    words = ["eagle", "--target", str(bare), "--rows", "9", "--mean-length", "20", *FLAGS]
    with pytest.raises(ValueError, match=r"efficiency is 0\.5 and machine is the file"):
        main([*words, "--machine", box, "--efficiency", "0.5"])


def test_limits_of_the_run_hold_for_invented_rows(
    bare: Path, box: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eagle", "--target", str(bare), "--mean-length", "60", *FLAGS, "--machine", box]
    whole = planned(capsys, *words, "--rows", "1000")
    assert 45_000 < whole["tokens"] < 60_000  # half of the rows are cut to 64
    few = planned(capsys, *words, "--rows", "1000", "--max-tokens", "5000")
    assert few["tokens"] == 5000
    share = 5000 / whole["tokens"]
    for part, name in (("disk_bytes", "features"), ("seconds", "steps")):
        assert few[part][name] == pytest.approx(share * whole[part][name], rel=0.03)
    many = planned(capsys, *words, "--rows", "400000", "--max-tokens", "5000")
    assert many["tokens"] == 5000
    kept = planned(capsys, *words, "--rows", "1000", "--on-long", "drop")
    lengths = [round(30.03 + 0.06 * place) for place in range(1000)]
    assert kept["tokens"] == pytest.approx(sum(x for x in lengths if x <= 64), rel=0.01)


def test_a_folder_without_a_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        outrider(["plan", "eagle", "--target", str(tmp_path), "--rows", "5", "--mean-length", "9"])
    assert "has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", {"hidden_size": "32"}, {"num_attention_heads": 5}, {"vocab_size": None},
        {"vocab_size": -5}, {"model_type": "nonsense"}, {"model_type": "t5"},
        {"rope_parameters": {"rope_type": "none of them"}},
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_read_is_refused_in_a_line(
    content: str | dict[str, Any], bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bare / "config.json"
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text("utf-8")) | content)
    path.write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        outrider(["plan", "eagle", "--target", str(bare), "--rows", "5", "--mean-length", "9"])
    assert ended.value.code == 2
    (said,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("error"))
    assert "has no config.json of a causal language model" in said
    assert len(said) < 700


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3_text"])
def test_a_target_that_scales_its_embedding_is_planned(
    kind: str, tmp_path: Path, box: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its scale is a buffer, which holds nothing in a model without weights."""
    config = CONFIG_MAPPING[kind](
        vocab_size=96, hidden_size=36, intermediate_size=48, num_hidden_layers=8, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert outline(str(tmp_path), dtype=torch.float32, reads_rows=False).embed_scale == 6
    words = ["eagle", "--target", str(tmp_path), "--rows", "9", "--mean-length", "20", *FLAGS]
    assert planned(capsys, *words, "--machine", box)["seconds"]["features"] > 0


def test_a_machine_that_is_too_small_is_told(
    bare: Path, box: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(box).write_text(json.dumps(BOX | {"memory": 1e6}), encoding="utf-8")
    words = ["eagle", "--target", str(bare), "--rows", "9", "--mean-length", "20", *FLAGS]
    main([*words, "--machine", box])
    assert "exceeds this machine's 0.0 GiB" in capsys.readouterr().out


def test_invented_rows_have_the_mean_and_share_that_were_asked(bare: Path) -> None:
    from outrider.scripts.plan_command import trainer_settings

    asked = PlanSettings(kind="eagle", rows=1000, mean_length=40, supervised=0.25)
    settings = trainer_settings(asked, ["--target", str(bare), "--max-length", "64"])
    rows = invented(asked, settings)
    assert len(rows) == 1000
    assert sum(map(len, rows)) / 1000 == pytest.approx(40, rel=0.01)
    marked = sum(int(row.mask.sum()) for row in rows) / sum(map(len, rows))
    assert marked == pytest.approx(0.25, abs=0.01)
    assert max(map(len, rows)) <= 64


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(9.04, "9.0 s"), (101, "1 min 41 s"), (7200, "2 h 00 min"), (3.6e6, "1,000 h 00 min")],
)
def test_times_are_told_in_usual_units(seconds: float, said: str) -> None:
    assert clock(seconds) == said


def test_the_bench_tells_plan_run_and_ratio() -> None:
    text = plan_bench.table([{"disk": [110, 100]}, {"disk": [90, 100]}, {"disk": [100, 100]}])
    assert "| disk | 100 | 100 | 1.000 |" in text
