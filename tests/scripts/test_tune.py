"""`outrider tune` as a person runs it: every source of costs, every refusal."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.heads import EagleConfig, EagleHead, save_head
from outrider.scripts import cli, tune_command

DESCRIBED = ["--parameters", "8e9", "--kv-per-token", "65536", "--draft-parameters", "4e8"]


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(
        tmp_path / "target"
    )
    return tmp_path / "target"


def run(*argv: object) -> None:
    tune_command.main([str(one) for one in argv])


def test_the_table_needs_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    run("--table")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split() == ["0.9", "13", "4.67x", "7", "2.37x"]


def test_an_alpha_on_a_data_sheet_gives_table_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tune.json"
    run(
        "--alpha", 0.7, "--gpu", "h100", *DESCRIBED, "--context", 1024, 8192, "--new-tokens", 64,
        "--batch", 1, 8, 64, "--out", out,
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert "NVIDIA H100 SXM, bfloat16, roofline" in shown
    assert "context 8192: speed-up over plain decoding" in shown
    assert "throughput of one GPU at most" in shown
    assert "requests of 64 tokens that start together" in shown
    report = json.loads(out.read_text())
    assert report["schema_version"] == 2
    assert report["provenance"]["settings"]["alpha"] == "0.7"
    tune = report["tune"]
    assert [one["context"] for one in tune["contexts"]] == [1024, 8192]
    for one in tune["contexts"]:
        assert len(one["predictions"]) == 3 * 8
        assert one["schedule"][-1]["last"] == 256
        assert all(row["speedup"]["value"] >= 1 for row in one["best"])
        assert one["requests"][2]["best"]["mean_rows"] < 64
        gain = one["throughput"]["drafted"]["batch"] / one["throughput"]["plain"]["batch"]
        assert gain < 1
    page = out.with_suffix(".html").read_text()
    assert "What it buys" in page
    assert page.count("<svg") == 2


def test_long_contexts_keep_drafts_worth_while(capsys: pytest.CaptureFixture[str]) -> None:
    def ends(context: int) -> int | None:
        run(
            "--alpha", 0.6, "--gpu", "h200", *DESCRIBED, "--context", context, "--batch", 1,
            "--max-batch", 512,
        )  # fmt: skip
        shown = capsys.readouterr().out
        if "break-even: from batch" not in shown:
            return None
        return int(shown.split("break-even: from batch ")[1].split()[0])

    short = ends(512)
    assert short is not None
    assert ends(32_768) is None


def test_measured_costs_are_kept_and_used_again(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = make_head(target_folder, tmp_path / "head")
    costs = tmp_path / "costs.json"
    run(
        "--alpha", 0.6, "--draft", "chain:1", "chain:3", "--target", target_folder, "--head", head,
        "--measure", costs, "--batch", 1, 2, "--context", 24, "--repeats", 1, "--dtype", "float32",
        "--max-batch", 4,
    )  # fmt: skip
    first = capsys.readouterr().out
    assert not costs.with_suffix(".partial.jsonl").exists()
    run("--alpha", 0.6, "--draft", "chain:1", "chain:2", "chain:3", "--costs", costs, "--batch", 1,
        2, "--context", 24, "--max-batch", 4)  # fmt: skip
    second = capsys.readouterr().out
    assert "float32, measured" in second
    rows = [
        next(line.split() for line in text.splitlines() if line.startswith("    1"))
        for text in (first, second)
    ]
    assert rows[0][1] == rows[1][1]
    assert rows[0][2] == rows[1][3]
    with pytest.raises(ValueError, match="draft 'chain:5' was not measured"):
        run("--alpha", 0.6, "--draft", "chain:5", "--costs", costs)


def test_a_target_by_its_config_and_a_head_by_its_folder(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (target_folder / "model.safetensors").unlink()
    head = make_head(target_folder, tmp_path / "head")
    run("--alpha", 0.9, "--gpu", "l4", "--target", target_folder, "--head", head, "--batch", 1,
        "--context", 100, "--step-overhead", 0.01, "--draft-overhead", 0.0001)  # fmt: skip
    shown = capsys.readouterr().out
    config = json.loads(shown.split("--speculative-config '")[1].split("'")[0])
    assert config["method"] == "eagle3"
    assert config["model"] == str(head)
    assert "--speculative-algorithm EAGLE3" in shown
    run("--alpha", 0.9, "--gpu", "l4", "--target", target_folder, "--batch", 1, "--context", 100)
    assert "speculative-config" not in capsys.readouterr().out


def make_head(target_folder: Path, folder: Path) -> Path:
    torch.manual_seed(0)
    config = EagleConfig.from_target(
        LlamaConfig.from_pretrained(target_folder), draft_vocab_size=48, tokenizer_size=61
    )
    return save_head(EagleHead(config, torch.arange(3, 51)), folder)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "acceptance is None and alpha is None"),
        (["--alpha", 0.5, "--acceptance", "x.json", "--gpu", "h100"], "give one of them"),
        (["--alpha", 0.5], "0 of them are given"),
        (["--alpha", 0.5, "--gpu", "h100", "--costs", "x"], "2 of them are given"),
        (["--alpha", 0.5, "--gpu", "h100"], "name the target with --target, or give both"),
        (["--alpha", 0.5, "--gpu", "h9"], "gpu is 'h9'"),
        (["--alpha", 0.5, "--bandwidth", 1e12, *DESCRIBED], "flops, memory is not given"),
        (["--alpha", 1.5, "--gpu", "h100", *DESCRIBED], r"alpha is 1\.5"),
        (["--alpha", 0.5, "--gpu", "h100", *DESCRIBED[:4]], "draft_parameters is not given"),
        (
            ["--alpha", 0.5, "--gpu", "h100", *DESCRIBED, "--draft", "tree:2,2,4"],
            "nothing of trees",
        ),
        (["--alpha", 0.5, "--gpu", "h100", *DESCRIBED, "--batch", 0], r"batch is \(0,\)"),
        (["--alpha", 0.5, "--gpu", "h100", *DESCRIBED, "--max-batch", 0], "max_batch is 0"),
        (["--alpha", 0.5, "--gpu", "h100", *DESCRIBED, "--out", "x.txt"], "ends in .json"),
        (["--alpha", 0.5, "--measure", "x.json"], "measuring runs both"),
        (["--alpha", 0.5, "--costs", "absent.json"], "is not a file of measured costs"),
        (["--acceptance", "absent.json", "--gpu", "h100"], "is not a report of outrider eval"),
    ],
)
def test_bad_input_is_refused(
    argv: list[Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, SystemExit)) as caught:
        run(*argv)
    # Settings are refused by the parser, which puts the message in a box.
    boxed = " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
    assert re.search(message, f"{caught.value} {boxed}")


def test_it_is_a_sub_command() -> None:
    assert "tune" in cli.COMMANDS
