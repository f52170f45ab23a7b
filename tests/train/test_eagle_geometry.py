"""EAGLE-3 of every geometry from the command line: plan, run, export, embeddings, warm starts."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.data.target import Target
from outrider.eval.link import judged_head, tables
from outrider.heads import EagleHead, load_head
from outrider.train.optim import OptimSettings, build

Train = Callable[..., Path]
DEEP = ("--head-layers", "2", "--sliding-window", "8", "--draft-vocab", "40")
FUSED = ("--aux-layers", "0", "1", "3", "5", "7", "--fc-norm", "--norm-output")
NARROW = ("--head-hidden", "24", "--head-heads", "2", "--head-kv-heads", "1", "--head-dim", "8")


@pytest.fixture
def target(target_folder: Path) -> Target:
    return Target.load(str(target_folder))


def read(folder: Path, target: Target) -> EagleHead:
    head = judged_head(folder, target)
    assert isinstance(head, EagleHead)
    return head


def layer_numbers(width: int, reads: int, inner: int, queries: int, keys: int) -> int:
    """Weights of one decoder layer: four projections and three of the MLP, and the norm between."""
    return queries * reads + 2 * keys * reads + queries * width + 3 * width * inner + width


@pytest.mark.parametrize(
    ("flags", "trainable", "frozen"),
    [
        # Two norms before the first layer, one before the second, the last norm, and fc's.
        (
            (*DEEP, *FUSED),
            layer_numbers(32, 64, 48, 32, 16)
            + layer_numbers(32, 32, 48, 32, 16)
            + (4 + 5) * 32
            + 5 * 32 * 32
            + 40 * 32,
            0,
        ),
        (
            (*NARROW, "--draft-vocab", "40"),
            layer_numbers(24, 48, 48, 16, 8) + 3 * 24 + 3 * 32 * 24 + 40 * 24 + 128 * 24,
            0,
        ),
        (
            ("--embedding", "frozen", "--freeze-output"),
            layer_numbers(32, 64, 48, 32, 16) + 3 * 32 + 3 * 32 * 32,
            2 * 128 * 32,
        ),
    ],
)
def test_the_plan_counts_the_weights(
    flags: tuple[str, ...],
    trainable: int,
    frozen: int,
    train: Train,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(*flags, "--plan")
    plan = capsys.readouterr().out
    found = re.search(r"([\d.]+) M trainable parameters, ([\d.]+) M frozen", plan)
    assert found is not None
    assert found.groups() == (f"{trainable / 1e6:.2f}", f"{frozen / 1e6:.2f}")


@pytest.mark.parametrize("flags", [(*DEEP, *FUSED), NARROW], ids=["deep", "narrow"])
def test_a_run_learns_stops_goes_on_and_is_judged_by_its_export(
    flags: tuple[str, ...], train: Train, heldout_file: Path, target: Target
) -> None:
    flags = (*flags, "--epochs", "3", "--heldout", str(heldout_file))
    whole = train(*flags, output="whole")
    lines = (whole / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0]
    config = read(whole / "best", target).config
    if "--head-layers" in flags:
        assert (config.num_layers, config.sliding_window) == (2, 8)
        assert config.aux_layers == (0, 1, 3, 5, 7)
        assert config.fc_norm
        assert config.norm_output
    else:
        assert (config.hidden_size, config.num_heads, config.num_kv_heads) == (24, 2, 1)
        assert config.head_dim == 8
    assert json.loads((whole / "best" / "heldout.json").read_text(encoding="utf-8"))["tau"] >= 1
    with pytest.raises(SystemExit):
        train(*flags, "--stop-after-steps", "5", output="parts")
    parts = train(*flags, output="parts")
    ours = load_file(parts / "last" / "model.safetensors")
    for name, value in load_file(whole / "last" / "model.safetensors").items():
        assert torch.equal(ours[name], value), name


# Embeddings


@pytest.mark.parametrize("embedding", ["target", "frozen", "trained"])
def test_an_embedding_is_lent_copied_or_trained(
    embedding: str, train: Train, target: Target
) -> None:
    out = train("--embedding", embedding) / "last"
    table = load_file(out / "model.safetensors").get("embed_tokens.weight")
    if embedding == "target":
        assert table is None
        return
    assert table is not None
    is_same = torch.equal(table, target.embedding_VH)
    assert is_same == (embedding == "frozen")
    assert torch.equal(table[97:], target.embedding_VH[97:])  # rows that no text has
    head = read(out, target)
    hidden = head.embed(torch.tensor([5, 9]), torch.float32)
    assert torch.equal(hidden, table[[5, 9]])


def test_muon_leaves_tables_to_adamw(train: Train, target: Target) -> None:
    out = train("--embedding", "trained", "--optimizer", "muon", "--head-layers", "2") / "last"
    head = read(out, target).train().requires_grad_(True)
    first, second = build(head, OptimSettings(optimizer="muon"))
    ours = {id(value) for group in first.param_groups for value in group["params"]}
    assert id(head.embed_tokens.weight) in ours
    assert id(head.lm_head.weight) in ours
    inner = {id(value) for group in second.param_groups for value in group["params"]}
    assert id(head.get_parameter("layers.1.mlp.up_proj.weight")) in inner
    assert not ours & inner


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--embedding", "target", *NARROW), "engines then need own_embedding=True"),
        (("--full-attention-layers", "0"), "full_attention_layers is (0,)"),
        (("--aux-layers", "3", "9"), "aux_layers is (3, 9); give rising ids in 0..8"),
        (("--head-heads", "3"), "num_heads is 3; it must be a multiple of num_kv_heads (2)"),
        (("--sliding-window", "0"), "sliding_window is 0"),
        (("--norm-before-fc", "--fc-norm"), "norm_before_fc and fc_norm are both set"),
        (
            ("--head", "eagle1", "--unroll-steps", "1", "--sliding-window", "4"),
            "sliding_window is 4 with head eagle1",
        ),
        (
            ("--head", "eagle1", "--unroll-steps", "1", "--embedding", "frozen"),
            "embedding is frozen with head eagle1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    flags: tuple[str, ...], message: str, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        train(*flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


# Warm starts


def published(folder: Path, target: Target) -> Path:
    """A head rewritten as speculators 0.9.0 publishes it: own embedding, windows by layer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(folder / "model.safetensors")
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    top = {key: config.pop(key) for key in (*flags, "draft_vocab_size")}
    ids = config.pop("eagle_aux_hidden_state_layer_ids")
    for key in ("outrider", "eagle_config", "architectures"):
        del config[key]
    whole = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": config,
        "eagle_aux_hidden_state_layer_ids": ids,
        **top,
    }
    named = {key.replace("midlayer.", "layers.0."): value for key, value in tensors.items()}
    del named["layers.1.hidden_norm.weight"]
    named["embed_tokens.weight"] = target.embedding_VH.clone()
    out = folder.with_name("published")
    out.mkdir()
    (out / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    save_file(named, out / "model.safetensors")
    return out


def test_c10_a_published_deep_head_is_started_from_with_its_vocabulary(
    train: Train, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    old = published(train(*DEEP, *FUSED, output="old") / "last", target)
    new = train("--init", str(old), "--lr", "1e-12", output="new") / "last"
    before, after = load_head(old, tables(target)), load_head(new, tables(target))
    assert before.config.aux_layers == (0, 1, 3, 5, 7)
    assert after.config == before.config
    assert torch.equal(after.draft_ids_W, before.draft_ids_W)
    ids = torch.randint(2, 60, (2, 30), generator=torch.Generator().manual_seed(3))
    captured = target.run(ids, layers=before.config.aux_layers)
    place = torch.arange(29).expand(2, -1)
    proposals = []
    for head in (before, after):
        feature = head.project(captured.aux_BTF[:, :-1], captured.last_BTH[:, :-1])
        hidden = head.step(feature, ids[:, 1:], place)
        proposals.append(head.to_target(head.draft_logits(hidden).argmax(-1)))
    assert torch.equal(*proposals)
    assert torch.equal(after.embed_tokens.weight, target.embedding_VH)
    assert not torch.equal(
        load_file(
            train("--init", str(old), "--embedding", "trained", output="trained")
            / "last"
            / "model.safetensors"
        )["embed_tokens.weight"],
        target.embedding_VH,
    )
    for flags, message in (
        (("--head-layers", "1"), "head_layers is 1 but the head in init"),
        (("--sliding-window", "9"), "sliding_window is 9 but the head in init"),
        (("--embedding", "target"), "embedding is target but the head in init"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            train("--init", str(old), *flags, output="refused")
        assert message in capsys.readouterr().err
