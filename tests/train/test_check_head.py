"""`outrider check` on heads and a step: each check has a fault that it must tell."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.train import refusals
from outrider.train.check.head import shallow_layers

Train = Callable[..., Path]
Check = Callable[..., Any]
Spoil = Callable[[Path, Callable[[dict[str, torch.Tensor]], None]], None]


def test_a_head_of_another_target_to_start_from_fails(
    check: Check, train: Train, wide_folder: Path
) -> None:
    old = train("--target", str(wide_folder), output="old") / "last"
    result = check("--init", str(old))
    assert result.code == 1
    assert "128 x 32 but this head was made for 128 x 128" in result.found["head"].seen
    assert result.found["step"].verdict == "skipped"
    assert result.found["layer capture"].verdict == "ok"


def test_a_draft_vocabulary_that_covers_little_is_told_with_a_size(
    check: Check, tmp_path: Path
) -> None:
    low = check("--draft-vocab", "3")
    assert low.code == 1
    assert "tokens cover" in low.found["draft vocabulary"].seen
    some = check("--draft-vocab", "30")
    told = some.found["draft vocabulary"]
    assert (some.code, told.verdict) == (0, "warn")
    size = told.fix["draft_vocab"]
    assert f"--draft-vocab {size} covers 95%" in told.remedy
    at = check("--draft-vocab", str(size)).found["draft vocabulary"].seen
    below = check("--draft-vocab", str(size - 1)).found["draft vocabulary"].seen
    covered = [float(seen.split("cover ")[1].split("%")[0]) for seen in (below, at)]
    assert covered[0] < 95 <= covered[1]


def test_too_large_a_draft_vocabulary_fails_and_is_mended(check: Check, tmp_path: Path) -> None:
    result = check("--draft-vocab", "110", "--fix", str(tmp_path / "fixed"))
    assert "the target's tokenizer has 97 tokens" in " ".join(result.said.split())
    assert result.code == 0
    assert result.record["settings"]["draft_vocab"] is None


def test_engine_limits_and_positions_are_told(check: Check, tmp_path: Path) -> None:
    result = check("--norm-before-residual", "--max-length", "256")
    assert result.code == 0
    assert "SGLang ignores norm_before_residual" in result.found["engines"].seen
    told = result.found["position limits"]
    assert told.verdict == "warn"
    assert told.fix == {"max_length": 128}


def test_a_tensor_that_changes_on_its_way_through_files_fails(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = refusals.load_head

    def spoiled(*args: Any) -> Any:
        head = right(*args)
        head.fc.weight.data[0, 0] += 1
        return head

    monkeypatch.setattr(refusals, "load_head", spoiled)
    result = check()
    assert result.code == 1
    assert "tensor fc.weight changed on its way" in result.found["step"].seen


def test_a_setting_that_is_lost_on_its_way_through_files_fails(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = refusals.load_head

    def spoiled(*args: Any) -> Any:
        head = right(*args)
        head.config = replace(head.config, rms_norm_eps=0.5)
        return head

    monkeypatch.setattr(refusals, "load_head", spoiled)
    result = check()
    assert result.code == 1
    assert result.found["save and reload"].verdict == "fail"
    assert "gives other outputs" in result.found["save and reload"].seen


def test_a_step_that_is_not_finite_names_its_rows(spoil: Spoil, check: Check, train: Train) -> None:
    old = train(output="old") / "last"
    spoil(old, lambda x: x["lm_head.weight"].fill_(3e38))
    result = check("--init", str(old))
    assert result.code == 1
    told = result.found["one step"]
    assert told.verdict == "fail"
    assert "not finite; rows that alone do it: r" in told.seen
    assert "start from another head" in told.remedy


def test_a_step_that_teaches_nothing_fails(spoil: Spoil, check: Check, train: Train) -> None:
    old = train(output="old") / "last"
    spoil(old, lambda x: x["midlayer.mlp.down_proj.weight"].fill_(3e38))  # the norm gives zeros
    told = check("--init", str(old)).found["one step"]
    assert told.verdict == "fail"
    assert "gradient norm 0 " in told.seen


def test_a_head_with_nan_to_start_from_fails(spoil: Spoil, check: Check, train: Train) -> None:
    old = train(output="old") / "last"
    spoil(old, lambda x: x["midlayer.mlp.down_proj.weight"][3].fill_(torch.nan))
    result = check("--init", str(old))
    assert result.code == 1
    assert "midlayer.mlp.down_proj.weight holds NaN" in result.found["head"].seen


def test_layers_of_shallow_targets_are_rising_ids() -> None:
    for depth in range(1, 12):
        layers = shallow_layers(depth)
        assert list(layers) == sorted(set(layers))
        assert layers[0] >= 1
        assert layers[-1] <= depth
