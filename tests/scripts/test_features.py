"""`outrider features`, `outrider target`: size first, a budget, and a store that training finds."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.layout import layout_of
from outrider.data.rows import Reading, read_rows
from outrider.data.states import TargetStates
from outrider.data.store import FeatureStore
from outrider.data.target import Target
from outrider.scripts import features_command, target_command
from outrider.train.assembly import features, lay_ground
from outrider.train.kinds import EagleRun
from outrider.train.recipe import parse
from outrider.train.vocabulary import write_vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target on the disk and rows for it."""
    path = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(path / "model")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(path / "model")
    rows = [
        {"input_ids": [3 + i, 4, 5, 6, 7 + i, 1], "loss_mask": [0, 0, 0, 1, 1, 1]}
        for i in range(20)
    ]
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def arguments(folder, *more):
    target, data = str(folder / "model"), str(folder / "rows.jsonl")
    return ["--target", target, "--data", data, "--max-length", "16", *more]


def test_the_plan_prints_counts_and_size_and_writes_nothing(folder, tmp_path, capsys):
    features_command.main(arguments(folder, "--out", str(tmp_path / "out"), "--plan"))
    printed = capsys.readouterr().out
    assert "20 read, 20 kept" in printed
    assert "features of layers (2, 4, 5) and the last state: 0.000 GB" in printed
    assert not (tmp_path / "out").exists()


def test_training_finds_what_was_stored(folder, tmp_path, capsys, monkeypatch):
    features_command.main(arguments(folder, "--out", str(tmp_path)))
    assert "20 rows in" in capsys.readouterr().out
    target = Target.load(str(folder / "model"))
    rows, _ = read_rows(str(folder / "rows.jsonl"), target, Reading(max_length=16))

    def never(*_, **__):
        raise AssertionError("the target ran again")

    monkeypatch.setattr(Target, "run", never)
    stored = FeatureStore.build_or_open(
        target,
        rows,
        layout=layout_of(target, (2, 4, 5), "bfloat16"),
        root=tmp_path,
        progress=False,
    )
    assert stored.row(3).aux_TF.shape == (6, 96)


def test_eagle_1_needs_the_last_state_only(folder, tmp_path, capsys):
    features_command.main(arguments(folder, "--out", str(tmp_path), "--last-only"))
    assert "layers (none)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-gigabytes", "0.000001"], "max_bytes is 1,000"),
        (["--layers", "9"], r"layers holds \[9\]"),
    ],
)
def test_refusals(folder, tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        features_command.main(arguments(folder, "--out", str(tmp_path), *more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-gigabytes", "-1"], "give a positive number"),
        (["--layers", "2", "--last-only"], "leave one of them out"),
    ],
)
def test_settings_that_contradict_each_other_end_with_status_2(
    folder, tmp_path, more, message, capsys
):
    with pytest.raises(SystemExit) as caught:
        features_command.main(arguments(folder, "--out", str(tmp_path), *more))
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("\u2502", "").split())


def test_the_target_command_prints_the_folder(folder, capsys):
    target_command.main([str(folder / "model")])
    assert capsys.readouterr().out.strip() == str(folder / "model")


@pytest.mark.parametrize(("form", "most"), [("int8", 0.42), ("int4", 0.25)])
def test_packed_features_are_announced_by_size_and_found_by_training(
    folder, tmp_path, capsys, monkeypatch, form, most
):
    packed = ["--feature-dtype", form, "--draft-vocab", "20", "--top-k", "4"]
    features_command.main(arguments(folder, "--out", str(tmp_path), *packed))
    printed = capsys.readouterr().out
    assert "features of layers (2, 4, 5) and laws of 4 tokens: 0.000 GB" in printed
    assert "bytes a token" in printed

    def never(*_, **__):
        raise AssertionError("the target ran again")

    monkeypatch.setattr(TargetStates, "of", never)
    words = [*arguments(folder), "--store", str(tmp_path), "--output", str(tmp_path / "run")]
    ground = lay_ground(parse([*words, *packed], EagleRun), torch.device("cpu"))
    assert features(ground).row(3).law.ids.shape == (6, 4)


def test_laws_over_a_vocabulary_file_and_rows_are_found_by_training(
    folder, tmp_path, capsys, monkeypatch
):
    ids_W = torch.tensor([*range(12), *range(20, 26)])
    target = Target.load(str(folder / "model"))
    write_vocabulary(tmp_path / "ids.json", ids_W, target, {})
    packed = ["--feature-dtype", "int8", "--draft-vocab", str(tmp_path / "ids.json")]
    packed += ["--row-report", str(tmp_path / "report.jsonl")]
    features_command.main(arguments(folder, "--out", str(tmp_path / "store"), *packed))
    assert len((tmp_path / "report.jsonl").read_text().splitlines()) == 20
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "store" / "rows").iterdir()}
    assert kept
    monkeypatch.setattr(TargetStates, "of", lambda *_: pytest.fail("the target ran again"))
    words = [
        *arguments(folder),
        "--store",
        str(tmp_path / "store"),
        "--output",
        str(tmp_path / "r"),
    ]
    ground = lay_ground(parse([*words, *packed], EagleRun), torch.device("cpu"))
    assert set(features(ground).row(3).law.ids[2].tolist()) <= set(ids_W.tolist())
    rows = (tmp_path / "store" / "rows").iterdir()
    assert {path: path.stat().st_mtime_ns for path in rows} == kept


def test_a_store_in_a_cloud_keeps_its_rows_nowhere(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    features_command.main(arguments(folder, "--out", "memory://stored"))
    assert "20 rows in memory://stored/" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_draft_vocab_without_laws_is_refused(folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        features_command.main(arguments(folder, "--out", str(tmp_path), "--draft-vocab", "20"))
    err = " ".join(capsys.readouterr().err.replace("\u2502", "").split())
    assert "draft_vocab is 20 with feature_dtype bfloat16, which keeps no laws" in err


def test_c18_what_changes_the_numbers_rebuilds_the_store_and_nothing_else_does(
    folder, tmp_path, monkeypatch, capsys
):
    """C18, through the command, on files that change at the same path."""
    model, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(folder / "model", model)
    shutil.copy(folder / "rows.jsonl", rows)
    computed = []
    of = TargetStates.of

    def counted(self, chosen):
        computed.extend(chosen)
        return of(self, chosen)

    monkeypatch.setattr(TargetStates, "of", counted)

    def rebuilt(**changes):
        given = {"max-length": 16, "feature-dtype": "int8", "draft-vocab": 20, "top-k": 4}
        words = ["--target", str(model), "--data", str(rows), "--out", str(tmp_path / "out")]
        for name, value in (given | changes).items():
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
        computed.clear()
        features_command.main(words)
        return len(computed) == 20

    def edited(path, old, new):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    assert rebuilt()
    assert not rebuilt()
    assert rebuilt(**{"max-length": 5})
    assert rebuilt(**{"draft-vocab": 21})
    assert rebuilt(layers=(1, 4, 5))
    assert rebuilt(**{"feature-dtype": "int4"})
    assert rebuilt(**{"top-k": 5})
    assert rebuilt(**{"target-dtype": "bfloat16"})
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert rebuilt()
    edited(model / "tokenizer.json", '"w63": 63', '"v63": 63')
    assert rebuilt()
    weights = load_file(model / "model.safetensors")
    weights["model.layers.7.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert rebuilt()
    edited(rows, "[3, 4, 5", "[3, 4, 6")
    assert rebuilt()
    assert not rebuilt()
    assert not rebuilt(**{"max-gigabytes": 1, "device": "cpu"})  # as a log setting, no number's
    capsys.readouterr()
    shards = sorted(
        (tmp_path / "out").rglob("*.safetensors"), key=lambda path: path.stat().st_mtime
    )
    shards[-1].write_bytes(shards[-1].read_bytes()[:-3])  # half written
    assert rebuilt()
