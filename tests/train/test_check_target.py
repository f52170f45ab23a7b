"""`outrider check` on targets: each check has a fault that it must tell."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data import capture
from outrider.data import target as target_module
from outrider.data.target import Captured, Target
from outrider.heads import EagleConfig, EagleHead
from outrider.train.check.target import check_rotary, check_tables, check_vocabulary

Train = Callable[..., Path]
Check = Callable[..., Any]
Spoil = Callable[[Path, Callable[[dict[str, torch.Tensor]], None]], None]


@pytest.fixture
def other_target(tmp_path: Path, target_folder: Path) -> Path:
    """A copy of the target to plant faults in."""
    return Path(shutil.copytree(target_folder, tmp_path / "other"))


def edit(path: Path, **values: object) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), encoding="utf-8")


def embed_as(spoil: Spoil, folder: Path, token: int, value: float) -> None:
    """Change a token's embedding alone: the output head becomes a table of its own first."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.embed_tokens.weight"][token].fill_(value)

    spoil(folder, change)
    edit(folder / "config.json", tie_word_embeddings=False)


def rows_with(folder: Path, *tokens: int) -> Path:
    """Rows r0, r1, ... that differ in one token."""
    path = folder / "few.jsonl"
    rows = [
        {"id": f"r{n}", "input_ids": [5, 6, 7, token, 9], "loss_mask": [0, 0, 1, 1, 1]}
        for n, token in enumerate(tokens)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# The target


def test_nan_weights_that_rows_reach_are_told_with_those_rows(
    spoil: Spoil, check: Check, other_target: Path, tmp_path: Path
) -> None:
    embed_as(spoil, other_target, 70, torch.nan)
    result = check(target=other_target, data=rows_with(tmp_path, 8, 70, 9))
    assert result.code == 1
    assert result.wrong[:1] == ["target weights"]
    assert "weights hold NaN or infinity: model.embed_tokens.weight" in (
        result.found["target weights"].seen
    )
    assert "row r1 has non-finite features" in result.found["features"].seen
    assert "remove the row" in result.found["features"].remedy
    assert result.found["layer capture"].verdict == "ok"


def test_nan_weights_that_every_text_reaches_are_named(
    spoil: Spoil, check: Check, other_target: Path
) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    spoil(other_target, lambda x: x[name][0, 0].fill_(torch.inf))
    result = check(target=other_target)
    assert result.code == 1
    assert f"(weights with NaN or infinity: {name})" in result.found["target"].seen
    assert "fetch its files again" in result.found["target"].remedy
    assert {one.verdict for one in result.found.values()} == {"fail", "skipped"}


def test_weights_that_files_lack_are_not_left_random(
    spoil: Spoil, check: Check, other_target: Path
) -> None:
    def lose(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.3.self_attn.q_proj.weight"]

    spoil(other_target, lose)
    result = check(target=other_target)
    assert result.code == 1
    assert "lack 1 weights (model.layers.3.self_attn.q_proj.weight" in result.found["target"].seen


def test_layers_captured_one_off_fail_here_and_in_training(
    check: Check, train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = capture.hook

    def shifted(blocks: Any, layer: int, slot: int, keep: Any) -> Any:
        return right(blocks, min(layer + 1, len(blocks)), slot, keep)

    monkeypatch.setattr(capture, "hook", shifted)
    result = check()
    assert result.code == 1
    told = result.found["layer capture"]
    assert told.verdict == "fail"
    assert "layers [0, 1, 2, 3, 4, 5, 6, 7] are not those that enter" in told.seen
    with pytest.raises(SystemExit) as caught:
        train()
    assert caught.value.code == 2
    assert "states captured for layers [0, 1" in capsys.readouterr().err


def test_a_last_state_from_before_the_final_norm_fails(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Target.run

    def before(self: Target, ids_BT: torch.Tensor, **settings: Any) -> Captured:
        unnormed_BTH = right(self, ids_BT, layers=(self.num_layers,)).aux_BTF
        return Captured(right(self, ids_BT, **settings).aux_BTF, unnormed_BTH)

    monkeypatch.setattr(target_module, "_check_tables", lambda _: None)
    monkeypatch.setattr(Target, "run", before)
    result = check()
    assert result.code == 1
    assert "wrong side of a norm" in result.found["layer capture"].seen


def test_rotary_positions_of_another_target_fail_here_and_in_training(
    check: Check,
    train: Train,
    other_target: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old = train("--head-intermediate", "16", output="old") / "last"
    config = json.loads((other_target / "config.json").read_text("utf-8"))
    rope = config["rope_parameters"] | {"rope_theta": 5e5}
    edit(other_target / "config.json", rope_parameters=rope)
    result = check("--init", str(old), target=other_target)
    assert result.code == 1
    told = result.found["rotary positions"]
    assert told.verdict == "fail"
    assert "(default, base 10000) are none of the target's (rotary_emb.inv_freq of 4)" in told.seen
    assert result.found["head"].verdict == "ok"  # sizes alone do not tell
    capsys.readouterr()
    with pytest.raises(SystemExit):
        train("--init", str(old), "--target", str(other_target), output="new")
    assert "are none of the target's" in capsys.readouterr().err


def test_ends_of_text_past_the_tokenizer_fail(check: Check, other_target: Path) -> None:
    edit(other_target / "generation_config.json", eos_token_id=[1, 120])
    result = check(target=other_target)
    assert result.code == 1
    assert "end tokens [1, 120] of a tokenizer with 97 tokens" in result.found["ends of text"].seen
    assert "generation_config.json" in result.found["ends of text"].remedy


def test_tables_and_sizes_that_contradict_the_config_fail(target_folder: Path) -> None:
    target = Target.load(str(target_folder))
    assert [one.verdict for one in check_tables(target)] == ["ok"]
    apart = replace(target, output_VH=target.output_VH * 1.5)
    (told,) = check_tables(apart)
    assert told.verdict == "fail"
    assert "tie_word_embeddings to false" in told.remedy
    longer = replace(target, output_VH=torch.cat([target.output_VH, target.output_VH[:2]]))
    told = next(iter(check_vocabulary(longer)))
    assert told.verdict == "fail"
    assert "config.json says 128 tokens, the output head has 130 rows" in told.seen


def test_a_target_that_is_not_there_leaves_the_rest_skipped(check: Check, tmp_path: Path) -> None:
    result = check(target=tmp_path / "nope")
    assert result.code == 1
    assert result.wrong == ["target"]
    assert result.found["rows"].seen == "needs the target, which a check above did not get"


def test_a_target_whose_positions_cannot_be_read_is_told(target_folder: Path) -> None:
    target = Target.load(str(target_folder))
    head = EagleHead(EagleConfig.from_target(target.config))
    (told,) = check_rotary(head, replace(target, decoder=torch.nn.Identity()))
    assert told.verdict == "warn"
    assert "no rotary positions" in told.seen


def test_only_the_row_that_breaks_the_step_is_named(
    spoil: Spoil, check: Check, train: Train, other_target: Path, tmp_path: Path
) -> None:
    embed_as(spoil, other_target, 70, 1e35)
    old = train("--head", "eagle1", "--unroll-steps", "1", output="old") / "last"
    spoil(old, lambda x: x["fc.weight"].mul_(1e6))  # too large for that one embedding only
    flags = ("--head", "eagle1", "--init", str(old))
    result = check(*flags, target=other_target, data=rows_with(tmp_path, 8, 9, 70, 10))
    assert result.code == 1
    assert result.found["features"].verdict == "ok"
    assert result.found["one step"].seen.endswith("rows that alone do it: r2")
