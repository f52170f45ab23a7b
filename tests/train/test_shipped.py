"""`--init target`: a run that starts from the MTP module of the target's own checkpoint."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

from outrider.data.target import Target
from outrider.eval.link import judged_head
from outrider.heads import MtpHead
from outrider.train.medusa import main as train_medusa
from outrider.train.mtp import main as train_mtp

PREFIX = "model.layers.8."
Run = Callable[..., Path]


def module_tensors() -> dict[str, torch.Tensor]:
    """A DeepSeek-named module with a dense Llama block of the tiny target's size."""
    torch.manual_seed(4)
    shapes = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
        "eh_proj": (32, 64),
    }
    found = {f"{PREFIX}{name}.weight": 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
    return found | {f"{PREFIX}{name}.weight": 1 + 0.1 * torch.randn(32) for name in norms}


@pytest.fixture
def shipping(target_folder: Path, tmp_path: Path) -> Path:
    """The tiny target with a module in its checkpoint; transformers leaves it out."""
    folder = tmp_path / "shipping"
    shutil.copytree(target_folder, folder)
    found = load_file(folder / "model.safetensors")
    table = found["model.embed_tokens.weight"]
    copies = {f"{PREFIX}{name}.weight": table for name in ("embed_tokens", "shared_head.head")}
    save_file(
        {key: value.clone() for key, value in (found | copies | module_tensors()).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


@pytest.fixture
def run(tmp_path: Path, shipping: Path, rows_file: Path, heldout_file: Path) -> Run:
    """Runs train/mtp.py from the shipped module; returns the output folder."""

    def main(*flags: str, output: str = "run", target: Path = shipping) -> Path:
        given = {
            "target": target,
            "data": rows_file,
            "output": tmp_path / output,
            "device": "cpu",
            "max-length": 64,
            "unroll-steps": 2,
            "log-every": 1,
            "init": "target",
        }
        if target == shipping:  # these rows are that target's own
            given["heldout"] = heldout_file
        train_mtp([*(word for name in given for word in (f"--{name}", str(given[name]))), *flags])
        return tmp_path / output

    return main


@pytest.mark.parametrize("flags", [[], ["--draft-vocab", "40"]])
def test_the_run_starts_from_the_module_and_exports_its_names(flags: list[str], run: Run) -> None:
    out = run("--lr", "1e-12", *flags)
    found = load_file(out / "last" / "model.safetensors")
    wanted = module_tensors()
    assert found.keys() - {"d2t", "t2d"} == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, atol=1e-8), name


def test_it_learns_from_there_and_goes_on_from_its_export(
    run: Run, shipping: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--plan")
    assert f"starting from {PREFIX}* of the target, module 1 of 1" in capsys.readouterr().out
    out = run("--lr", "1e-2", "--epochs", "4")
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0]
    target = Target.load(str(shipping))
    assert judged_head(out / "best", target).config.kind == "mtp"
    assert json.loads((out / "best" / "heldout.json").read_text(encoding="utf-8"))["tau"] >= 1
    again = run("--init", str(out / "last"), "--lr", "1e-12", output="again")
    ours, theirs = (load_file(x / "last" / "model.safetensors") for x in (again, out))
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-8) for name in theirs)


def test_stopping_changes_nothing(run: Run) -> None:
    whole = run("--epochs", "2", "--lr", "1e-2", output="whole")
    with pytest.raises(SystemExit):
        run("--epochs", "2", "--lr", "1e-2", "--stop-after-steps", "3", output="parts")
    parts = run("--epochs", "2", "--lr", "1e-2", output="parts")
    ours = load_file(parts / "last" / "model.safetensors")
    for name, value in load_file(whole / "last" / "model.safetensors").items():
        assert torch.equal(ours[name], value), name


def test_a_family_with_norms_less_one_is_known_by_its_target(
    run: Run, target_folder: Path, tmp_path: Path
) -> None:
    """Qwen3.5's names, gates and norms: the offset is asked of the target's own final norm."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["full_attention"] * 2,
        max_position_embeddings=128,
        eos_token_id=1,
    )
    folder = tmp_path / "qwen"
    shutil.copytree(target_folder, folder)
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    layer = Qwen3_5DecoderLayer(config, 0)
    found = {f"mtp.layers.0.{key}": torch.randn_like(x) for key, x in layer.state_dict().items()}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        found[f"mtp.{name}.weight"] = torch.randn(32)
    found["mtp.fc.weight"] = torch.randn(32, 64)
    whole = load_file(folder / "model.safetensors") | found
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    out = run("--lr", "1e-12", output="qwen-run", target=folder)
    exported = load_file(out / "last" / "model.safetensors")
    assert exported.keys() == found.keys()
    assert all(torch.allclose(exported[name], found[name], atol=1e-8) for name in found)
    head = judged_head(out / "last", Target.load(str(folder)))
    assert isinstance(head, MtpHead)
    config = head.config
    assert (config.names, config.norm_offset) == ("qwen", 1.0)
    assert config.qk_norm
    assert config.output_gate
    assert config.norm_output
    assert not config.attention_bias


def ends_with(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in " ".join(capsys.readouterr().err.replace("\u2502", "").split())


def test_a_target_without_a_module_is_refused(
    run: Run, target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(target=target_folder)
    assert caught.value.code == 2
    ends_with("ships no MTP module", capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rebuild-vocab"], "whose module has no draft vocabulary"),
        (["--head-intermediate", "24"], "head_intermediate is 24 but the target's MTP module has"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    flags: list[str], message: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*flags)
    assert caught.value.code == 2
    ends_with(message, capsys)


def test_other_kinds_do_not_start_from_a_module(
    shipping: Path, rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--target", str(shipping), "--data", str(rows_file), "--output", str(tmp_path / "x")]
    with pytest.raises(SystemExit) as caught:
        train_medusa([*words, "--init", "target"])
    assert caught.value.code == 2
    ends_with("only MTP modules are shipped", capsys)
