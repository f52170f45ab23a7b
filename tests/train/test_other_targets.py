"""`--init` with a head of another target: told by name, or refused where it cannot work."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from outrider.data.rows import Reading, read_rows
from outrider.data.target import Target
from outrider.eval.link import tables
from outrider.heads.formats import load_head, read_notes
from outrider.train.kinds import EagleRun
from outrider.train.recipe import parse
from outrider.train.start import make_head
from outrider.train.vocabulary import tokens_hash

Train = Callable[..., Path]
Check = Callable[..., Any]
Spoil = Callable[[Path, Callable[[dict[str, torch.Tensor]], None]], None]
FLAGS = ("--draft-vocab", "60", "--head-intermediate", "16")


@pytest.fixture
def old(train: Train) -> str:
    """A head of the usual target."""
    return str(train(*FLAGS, output="old") / "last")


@pytest.fixture
def tuned(tmp_path: Path, target_folder: Path) -> Path:
    """A copy of the target, to be changed."""
    return Path(shutil.copytree(target_folder, tmp_path / "tuned"))


@pytest.fixture
def told(train: Train, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What training says and how it ends; nothing is computed."""

    def run(*flags: str) -> str:
        capsys.readouterr()
        with suppress(SystemExit):
            train(*flags, "--plan", output="new")
        said = capsys.readouterr()
        return said.out + said.err

    return run


def test_a_fine_tune_is_told_by_name_and_trains(
    train: Train, check: Check, told: Callable[..., str], spoil: Spoil, old: str, tuned: Path
) -> None:
    same = check("--init", old)
    assert same.code == 0
    assert same.found["start from"].verdict == "ok"
    assert "was trained for this very target" in same.found["start from"].seen
    assert "was trained for" not in told("--init", old)

    spoil(tuned, lambda x: x["model.layers.1.mlp.up_proj.weight"].mul_(1.01))
    first = read_notes(old)
    seen = (
        f"the head in init '{old}' was trained for {first['target']} (hash "
        f"{first['target_fingerprint'][:12]}), and this target is {tuned} (hash "
        f"{Target.load(str(tuned)).fingerprint()[:12]})"
    )
    result = check("--init", old, target=tuned)
    assert result.code == 0
    assert result.found["start from"].verdict == "warn"
    assert result.found["start from"].seen == seen
    said = told("--init", old, "--target", str(tuned))
    assert f"note: start from: {seen}; a fine-tune of the same base is a fair start" in said
    with pytest.raises(SystemExit, match="0"):
        train("--init", old, "--target", str(tuned), "--stop-after-steps", "1", output="going")


def test_weights_that_changed_under_the_same_name_are_told(
    told: Callable[..., str], train: Train, spoil: Spoil, tuned: Path
) -> None:
    old = str(train(*FLAGS, "--target", str(tuned), output="old") / "last")
    spoil(tuned, lambda x: x["model.layers.1.mlp.up_proj.weight"].mul_(1.01))
    said = told("--init", old, "--target", str(tuned))
    assert f"was trained for {tuned} (hash" in said
    assert f"and this target is {tuned} (hash" in said


def test_a_head_that_names_no_target_is_taken(
    check: Check, told: Callable[..., str], old: str
) -> None:
    path = Path(old) / "config.json"
    config = json.loads(path.read_text())
    config["outrider"] = {"head": config["outrider"]["head"]}
    path.write_text(json.dumps(config))
    result = check("--init", old)
    assert result.code == 0
    assert "does not say what target it was trained for" in result.found["start from"].seen
    assert "start from" not in told("--init", old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 9}, "the head's num_target_layers is 8 and the target's is 9"),
        ({"vocab_size": 136}, "output head is 136 x 32 but this head was made for 128 x 32"),
        ({"hidden_size": 48}, "output head is 128 x 48 but this head was made for 128 x 32"),
    ],
)
@pytest.mark.parametrize("rebuild", [(), ("--rebuild-vocab", "--draft-vocab", "60")])
def test_other_sizes_are_refused(
    change: dict[str, int],
    message: str,
    rebuild: tuple[str, ...],
    check: Check,
    told: Callable[..., str],
    old: str,
    tuned: Path,
) -> None:
    config = LlamaConfig.from_pretrained(tuned)
    config.update(change | {"head_dim": 8})
    LlamaForCausalLM(config).save_pretrained(tuned)
    said = told("--init", old, "--target", str(tuned), *rebuild)
    assert "error:" in said
    if not rebuild:
        assert message in said
    result = check("--init", old, *rebuild, target=tuned)
    assert result.code == 1
    assert "head" in result.wrong


def change_words(folder: Path, change: Callable[[dict[str, int]], dict[str, int]]) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = change(content["model"]["vocab"])
    path.write_text(json.dumps(content))


def test_a_draft_vocabulary_of_other_tokens_is_refused(
    check: Check, told: Callable[..., str], old: str, tuned: Path
) -> None:
    change_words(tuned, lambda x: x | {"w7": x["w8"], "w8": x["w7"]})
    message = f"the draft vocabulary of the head in init '{old}' was chosen with another tokenizer"
    said = told("--init", old, "--target", str(tuned))
    assert message in said
    assert "add --rebuild-vocab" in said
    result = check("--init", old, target=tuned)
    assert result.code == 1
    assert message in result.found["head"].seen
    rebuilt = told("--init", old, "--target", str(tuned), "--rebuild-vocab", *FLAGS)
    assert "error:" not in rebuilt
    assert "note: start from: the head in init" in rebuilt


def test_a_whole_vocabulary_of_other_tokens_is_refused(
    check: Check, train: Callable[..., Path], tuned: Path
) -> None:
    """Its output rows are of other tokens, too."""
    whole = str(train(output="whole") / "last")
    change_words(tuned, lambda x: x | {"w7": x["w8"], "w8": x["w7"]})
    result = check("--init", whole, target=tuned)
    assert result.code == 1
    assert "its ids are other tokens here" in result.found["head"].seen


@pytest.mark.parametrize("is_other", [False, True])
def test_a_rebuilt_vocabulary_takes_no_rows_of_other_tokens(
    is_other: bool, old: str, tuned: Path, rows_file: Path
) -> None:
    if is_other:
        change_words(tuned, lambda x: x | {"w7": x["w8"], "w8": x["w7"]})
    words = ["--target", str(tuned), "--data", str(rows_file), "--output", "o", *FLAGS]
    settings = parse([*words, "--init", old, "--rebuild-vocab", "--lr", "1e-3"], EagleRun)
    target = Target.load(str(tuned))
    rows, _ = read_rows(str(rows_file), target, Reading(max_length=64))
    _, head = make_head(settings, target, rows)
    before = load_head(old, tables(target))
    assert torch.equal(head.fc.weight, before.fc.weight)
    inside_W = torch.isin(head.draft_ids_W, before.draft_ids_W)
    rows_W = torch.isin(before.draft_ids_W, head.draft_ids_W)
    assert inside_W.sum() > 20
    kept = torch.equal(head.lm_head.weight[inside_W], before.lm_head.weight[rows_W])
    assert kept is not is_other


def test_ids_past_the_targets_tokenizer_are_refused(
    told: Callable[..., str], old: str, tuned: Path, tmp_path: Path
) -> None:
    change_words(tuned, lambda x: {word: token for word, token in x.items() if token < 40})
    path = Path(old) / "config.json"
    config = json.loads(path.read_text())
    del config["outrider"]["draft_tokens"]  # as a head of an earlier version
    path.write_text(json.dumps(config))
    rows = tmp_path / "low.jsonl"
    row = {"input_ids": [*range(2, 40)], "loss_mask": [0] * 8 + [1] * 30}
    rows.write_text(json.dumps(row) + "\n")
    said = told("--init", old, "--target", str(tuned), "--data", str(rows))
    assert "error:" in said
    assert "the draft vocabulary holds id" in said


def test_added_and_renamed_special_tokens_change_no_ordinary_ones(
    check: Check, old: str, tuned: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tuned)
    before = tokens_hash(Target.load(str(tuned)), torch.arange(97))
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.add_tokens([AddedToken("<tool>", special=True)])
    tokenizer.save_pretrained(tuned)
    assert tokens_hash(Target.load(str(tuned)), torch.arange(97)) == before
    result = check("--init", old, target=tuned)
    assert result.code == 0
    assert result.found["start from"].verdict == "warn"
