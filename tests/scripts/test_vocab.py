"""`outrider vocab`: files that training takes, safe tokens in them, and refusals."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.rows import Reading, read_rows
from outrider.data.target import Target
from outrider.eval.link import judged_head
from outrider.scripts import features_command, vocab_command
from outrider.train import vocabulary
from outrider.train.medusa import main as train
from outrider.train.vocabulary import read_vocabulary

SAFE = {1, 40, 41}
"""The end token and two tokens of one byte."""


def make_target(path: Path, words: dict[str, int]) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny target whose tokenizer ends at 60, rows of two kinds, and held-out rows."""
    path = tmp_path_factory.mktemp("vocab")
    words = {f"w{index}": index for index in range(60) if index not in (40, 41)}
    make_target(path / "model", words | {"a": 40, "b": 41})
    made = torch.Generator().manual_seed(0)
    for name, number in (("rows", 24), ("heldout", 8)):
        rows = []
        for index in range(number):
            ids = torch.randint(2, 40, (12,), generator=made).tolist()
            kind = "code" if index % 2 else "chat"
            rows.append({"input_ids": ids, "loss_mask": [0] * 4 + [1] * 8, "kind": kind})
        (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def arguments(folder: Path, out: Path, *more: str) -> list[str]:
    given = {"target": folder / "model", "data": folder / "rows.jsonl", "out": out}
    words = [word for name in given for word in (f"--{name}", str(given[name]))]
    return [*words, *(more if "--sizes" in more else ("--sizes", "16", "24", *more))]


def train_words(folder: Path, out: Path, vocab: Path | int, *more: str) -> list[str]:
    given = {
        "target": folder / "model",
        "data": folder / "rows.jsonl",
        "output": out,
        "device": "cpu",
        "max-length": 24,
        "num-draft-heads": 2,
        "draft-vocab": vocab,
    }
    return [*(word for name in given for word in (f"--{name}", str(given[name]))), *more]


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory) -> Path:
    """Both ways of choosing, two sizes, measured on held-out rows too."""
    out = tmp_path_factory.mktemp("made") / "out"
    flags = ("--by", "frequency", "mass", "--heldout", str(folder / "heldout.jsonl"))
    vocab_command.main(arguments(folder, out, *flags))
    return out


def test_files_hold_safe_tokens_and_the_report_every_figure(made, folder):
    target = Target.load(str(folder / "model"))
    names = sorted(path.name for path in made.iterdir())
    wanted = [f"{by}-{size}.json" for by in ("frequency", "mass") for size in (16, 24)]
    assert names == sorted([*wanted, "report.json"])
    for name in wanted:
        ids = read_vocabulary(made / name, target)
        assert set(ids.tolist()) >= SAFE
        assert len(ids) == int(name.split("-")[1].removesuffix(".json"))
    report = json.loads((made / "report.json").read_text())["results"]
    assert len(report) == 2 * 4 * 3  # sets of rows, vocabularies, kinds with `all`
    for one in report:
        for name in ("covered", "mass", "best"):
            assert 0 <= one[name]["low"] <= one[name]["value"] <= one[name]["high"] <= 1


def test_each_way_of_choosing_is_best_at_what_it_chooses_by(made):
    """On the rows it was chosen from: no other vocabulary of the size holds more."""
    report = json.loads((made / "report.json").read_text())["results"]
    found = {
        (one["by"], one["size"]): one
        for one in report
        if one["rows_of"] == "chosen from" and one["kind"] == "all"
    }
    for size in (16, 24):
        frequency, mass = found["frequency", size], found["mass", size]
        assert frequency["covered"]["value"] > mass["covered"]["value"]
        assert mass["mass"]["value"] > frequency["mass"]["value"]


def test_the_table_is_printed(folder, tmp_path, capsys):
    vocab_command.main(arguments(folder, tmp_path / "out"))
    printed = capsys.readouterr().out
    assert "rows         chosen by  kind  size  tokens inside" in printed
    assert "chosen from  frequency  code  24" in printed
    assert "report.json, frequency-16.json, frequency-24.json" in printed


def test_training_takes_a_file_and_by_frequency_it_is_the_number(made, folder, tmp_path):
    target = Target.load(str(folder / "model"))
    heads = {}
    for name in ("frequency-16", "mass-16", 16):
        vocab = name if isinstance(name, int) else made / f"{name}.json"
        train(train_words(folder, tmp_path / str(name), vocab))
        heads[name] = judged_head(tmp_path / str(name) / "last", target).draft_ids_W
    assert torch.equal(heads["frequency-16"], heads[16])
    assert torch.equal(heads["mass-16"], read_vocabulary(made / "mass-16.json", target))
    assert not torch.equal(heads["mass-16"], heads[16])


def test_training_chooses_by_mass_itself_and_keeps_what_it_chose(
    made, folder, tmp_path, monkeypatch
):
    target, words = Target.load(str(folder / "model")), ("--draft-vocab-by", "mass")
    train(train_words(folder, tmp_path / "one", 16, *words))
    heads = [judged_head(tmp_path / "one" / "last", target).draft_ids_W]
    assert torch.equal(heads[0], read_vocabulary(made / "mass-16.json", target))
    monkeypatch.setattr(vocabulary, "law_sums", None)  # the second run reads what the first kept
    train(train_words(folder, tmp_path / "two", 16, *words))
    assert torch.equal(judged_head(tmp_path / "two" / "last", target).draft_ids_W, heads[0])
    monkeypatch.undo()
    (kept,) = (tmp_path / "features" / "vocabularies").iterdir()
    kept.write_text(kept.read_text()[:40])  # a damaged one is made again
    train(train_words(folder, tmp_path / "three", 16, *words))
    assert torch.equal(judged_head(tmp_path / "three" / "last", target).draft_ids_W, heads[0])


def test_a_plan_says_that_the_target_is_still_to_choose(folder, tmp_path, capsys):
    train(train_words(folder, tmp_path / "one", 16, "--draft-vocab-by", "mass", "--plan"))
    printed = capsys.readouterr().out
    assert "draft vocabulary: 16 tokens, which the target chooses when training starts" in printed
    assert "cover" not in printed
    words = train_words(folder, tmp_path / "one", 16, "--draft-vocab-by", "mass")
    sizeless = [word for word in words if word not in ("--draft-vocab", "16")]
    with pytest.raises(SystemExit):
        train(sizeless)
    assert "draft_vocab_by is 'mass' without draft_vocab" in capsys.readouterr().err


def test_the_mass_is_of_rows_evenly_spaced(folder, tmp_path, monkeypatch):
    """Against the plain sum of transformers' own laws over every third row, in float64."""
    monkeypatch.setattr(vocabulary, "MOST_MASS_TOKENS", 100)  # of 24 rows of 12
    target = Target.load(str(folder / "model"))
    rows, _ = read_rows(str(folder / "rows.jsonl"), target, Reading(max_length=24))
    model = LlamaForCausalLM.from_pretrained(folder / "model").double()
    mass_V = torch.zeros(64, dtype=torch.float64)
    for row in rows[::3]:
        laws_TV = model(row.ids[None]).logits[0].detach().softmax(-1)
        mass_V += sum(laws_TV[place - 1] for place in range(2, 12) if row.mask[place])
    best = [token for token in mass_V.argsort(descending=True).tolist() if token < 60]
    wanted = sorted(SAFE | set([token for token in best if token not in SAFE][: 16 - len(SAFE)]))
    found = vocabulary.likely_vocabulary(target, rows, 16, tmp_path)
    assert found.draft_ids_W.tolist() == wanted
    assert len(list(tmp_path.iterdir())) == 1
    vocabulary.likely_vocabulary(target, rows[1:], 16, tmp_path)
    vocabulary.likely_vocabulary(target, rows, 17, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3  # other rows, another size: other files


def test_stored_laws_are_over_the_vocabulary_that_training_chooses(folder, tmp_path):
    more = ("--feature-dtype", "int8", "--draft-vocab-by", "mass")
    given = {"target": folder / "model", "data": folder / "rows.jsonl", "out": tmp_path / "store"}
    words = [word for name in given for word in (f"--{name}", str(given[name]))]
    features_command.main(
        [*words, "--max-length", "24", "--last-only", "--draft-vocab", "16", *more]
    )
    stores = {path.name for path in (tmp_path / "store").glob("*/*.safetensors")}
    before = sorted(path for path in (tmp_path / "store").iterdir() if path.is_dir())
    train(train_words(folder, tmp_path / "run", 16, *more, "--store", str(tmp_path / "store")))
    after = sorted(path for path in (tmp_path / "store").iterdir() if path.is_dir())
    assert stores
    assert after == before


def test_a_size_that_the_tokenizer_cannot_fill_is_refused(folder):
    target = Target.load(str(folder / "model"))
    with pytest.raises(ValueError, match="draft_vocab is 61; the target's tokenizer has 60"):
        vocabulary.likely_vocabulary(target, [], 61)


def test_a_run_does_not_go_on_with_another_vocabulary(made, folder, tmp_path, capsys):
    file = tmp_path / "vocab.json"
    file.write_text((made / "frequency-16.json").read_text())
    words = train_words(folder, tmp_path / "run", file, "--epochs", "2")
    with pytest.raises(SystemExit):
        train([*words, "--stop-after-steps", "3"])
    file.write_text((made / "mass-16.json").read_text())
    with pytest.raises(SystemExit) as caught:
        train(words)
    assert caught.value.code == 2
    assert "draft_vocab" in capsys.readouterr().err


def test_a_head_to_start_from_keeps_its_vocabulary(made, folder, tmp_path, capsys):
    file = made / "frequency-16.json"
    train(train_words(folder, tmp_path / "old", file))
    flags = ("--init", str(tmp_path / "old" / "last"))
    train(train_words(folder, tmp_path / "same", file, *flags))
    with pytest.raises(SystemExit) as caught:
        train(train_words(folder, tmp_path / "other", made / "mass-16.json", *flags))
    assert caught.value.code == 2
    assert "names 16 tokens other than those of the head in init" in capsys.readouterr().err
    flags = (*flags, "--rebuild-vocab")
    train(train_words(folder, tmp_path / "rebuilt", made / "mass-16.json", *flags))
    target = Target.load(str(folder / "model"))
    ids = judged_head(tmp_path / "rebuilt" / "last", target).draft_ids_W
    assert torch.equal(ids, read_vocabulary(made / "mass-16.json", target))


def edit(**changes):
    def change(content):
        return {**content, **changes}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: "{" + json.dumps(content), "neither a number nor a readable file"),
        (lambda _: [1, 2], "is no draft vocabulary of version 1"),
        (edit(tokenizer="x"), "whose tokenizer is not that of"),
        (edit(draft_ids=[3, 2]), "are not 16 rising ids"),
        (edit(draft_ids="all"), "are not 16 rising ids"),
        (edit(draft_ids=[*range(15), 60]), "draft_ids run from 0 to 60; they must be in 0..59"),
        (edit(draft_ids=list(range(16))), "lacks 2 of the end, special and byte tokens"),
    ],
)
def test_files_that_are_wrong_are_refused(change, message, made, folder, tmp_path, capsys):
    file = tmp_path / "wrong.json"
    changed = change(json.loads((made / "frequency-16.json").read_text()))
    file.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(SystemExit) as caught:
        train(train_words(folder, tmp_path / "run", file))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        train(train_words(folder, tmp_path / "run", tmp_path / "none.json"))
    assert caught.value.code == 2
    assert "neither a number nor a readable file" in capsys.readouterr().err


def test_a_file_for_another_tokenizer_is_refused(made, folder, tmp_path):
    make_target(tmp_path / "model", {f"x{index}": index for index in range(60)} | {"w2": 60})
    target = Target.load(str(tmp_path / "model"))
    with pytest.raises(ValueError, match="whose tokenizer is not that of"):
        read_vocabulary(made / "frequency-16.json", target)


def test_stored_features_serve_again(folder, tmp_path, monkeypatch):
    flags = ("--by", "mass", "--store", str(tmp_path / "store"), "--last-only")
    flags = (*flags, "--feature-dtype", "float32")
    vocab_command.main(arguments(folder, tmp_path / "a", *flags))
    monkeypatch.setattr("outrider.data.states.TargetStates.of", lambda *_: pytest.fail("ran again"))
    vocab_command.main(arguments(folder, tmp_path / "b", *flags))
    ours, theirs = (json.loads((tmp_path / x / "mass-16.json").read_text()) for x in "ab")
    assert ours == theirs


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sizes", "2"], "it must hold the 3 ids that are always in"),
        (["--sizes", "61"], "be at most 60"),
    ],
)
def test_sizes_that_cannot_be_are_refused(more, message, folder, tmp_path):
    with pytest.raises(ValueError, match=message):
        vocab_command.main(arguments(folder, tmp_path / "out", *more))


def test_heldout_rows_among_the_data_are_refused(folder, tmp_path):
    flags = ("--heldout", str(folder / "rows.jsonl"))
    with pytest.raises(ValueError, match="is also row"):
        vocab_command.main(arguments(folder, tmp_path / "out", *flags))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--sizes", "8", "8"], "name one or more, each once"),
        (["--temperature", "-1"], "temperature is -1.0; give a number from 0 up"),
        (["--layers", "1", "--last-only"], "leave one of them out"),
    ],
)
def test_settings_that_are_wrong_end_with_status_2(more, message, folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        vocab_command.main(arguments(folder, tmp_path / "out", *more))
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("\u2502", "").split())
