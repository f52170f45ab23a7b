"""Medusa-2 through its entry point: plan, run, stop, go on, export, reload, decode, drift."""

import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.by_plan import drafter_by
from outrider.eval.link import judged_head
from outrider.eval.offline.texts import Text, read_texts
from outrider.eval.trees.plans import plan_named
from outrider.heads.formats import read_notes
from outrider.train import joint_plan, medusa
from outrider.train.checkpoint import latest
from outrider.train.drift import measure_drift, text_of
from outrider.train.joint import JointSettings
from outrider.train.medusa import main
from outrider.train.tuning import FullTuning, tune

Run = Callable[..., Path]
LORA = ("--joint", "lora", "--target-lr", "1e-2", "--lora-rank", "4", "--lora-alpha", "8")
FULL = ("--joint", "full", "--target-lr", "1e-3")
MODES = pytest.mark.parametrize("mode", [LORA, FULL], ids=["lora", "full"])


@pytest.fixture
def run(tmp_path: Path, target_folder: Path, rows_file: Path) -> Run:
    """Trains three heads on the tiny target, 7 steps an epoch; returns the output folder."""

    def go(*flags: str, output: str = "run") -> Path:
        given = {
            "target": target_folder,
            "data": rows_file,
            "output": tmp_path / output,
            "device": "cpu",
            "max-length": 64,
            "draft-vocab": 40,
            "num-draft-heads": 3,
            "lr": 1e-2,
            "log-every": 2,
        }
        main([*(word for name in given for word in (f"--{name}", str(given[name]))), *flags])
        return tmp_path / output

    return go


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / name).read_text(encoding="utf-8").splitlines()]


def state(folder: Path) -> dict[str, Any]:
    """All tensors and counts of the newest checkpoint."""
    newest = latest(folder)
    assert newest is not None
    found: dict[str, Any] = dict(load_file(newest / "head.safetensors"))
    for place, values in enumerate(torch.load(newest / "optimizer.pt", weights_only=True)):
        for number, moments in values["state"].items():
            found |= {f"{place}.{number}.{name}": value for name, value in moments.items()}
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(other[k])) for k, v in one.items())


@MODES
@pytest.mark.parametrize("step", [2, 5, 9], ids=["heads alone", "joint", "epoch 2"])
def test_going_on_equals_never_having_stopped(run: Run, mode: tuple[str, ...], step: int) -> None:
    flags = (*mode, "--epochs", "2", "--heads-first", "0.25")
    whole = run(*flags, output="whole")
    with pytest.raises(SystemExit) as caught:
        run(*flags, "--stop-after-steps", str(step), output="parts")
    assert caught.value.code == 0
    parts = run(*flags, "--eval-every", "3", output="parts")
    ours = state(parts)
    assert any(name.startswith("target.") for name in ours)
    assert any(name.startswith("1.") for name in ours)
    assert_same(ours, state(whole))
    tuned = [load_file(x / "last" / "target" / "model.safetensors") for x in (parts, whole)]
    assert_same(*tuned)


@MODES
@pytest.mark.parametrize("first", ["0.5", "0"])
def test_a_target_that_stands_still_makes_medusa_1_step_for_step(
    run: Run, mode: tuple[str, ...], first: str, target_folder: Path
) -> None:
    flags = ("--epochs", "2", "--clip", "0", "--log-every", "1")
    alone = run("--online", *flags, output="alone")
    still = run(*mode, "--target-lr", "0", "--heads-first", first, *flags, output="still")
    ours, theirs = (load_file(x / "last" / "model.safetensors") for x in (still, alone))
    assert_same(ours, theirs)
    pairs = list(zip(lines(still), lines(alone), strict=True))
    assert len(pairs) == 14
    for one, other in pairs:
        assert one["loss_by_step"] == other["loss_by_step"]
        assert one.get("target_kl", 0) == 0
    before = load_file(target_folder / "model.safetensors")
    assert_same(load_file(still / "last" / "target" / "model.safetensors"), before)
    moving = run(*mode, "--heads-first", first, *flags, output="moving")
    moved = load_file(moving / "last" / "model.safetensors")
    assert any(not torch.equal(moved[name], value) for name, value in theirs.items())


@MODES
def test_only_what_should_learn_moves(
    run: Run, mode: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Target] = []
    load = Target.load

    def spy(*args: Any, **named: Any) -> Target:
        loaded.append(load(*args, **named))
        loaded[0].__dict__.setdefault("before", snapshot(loaded[0]))
        return loaded[-1]

    monkeypatch.setattr(Target, "load", spy)
    out = run(*mode, "--epochs", "2")
    after = snapshot(loaded[0])
    before: dict[str, Tensor] = loaded[0].__dict__["before"]
    kept = {
        name.replace(".base_layer", "").removeprefix("base_model.model."): value
        for name, value in after.items()
        if "lora_" not in name
    }
    assert_same(kept, before)
    tuned = load_file(out / "last" / "target" / "model.safetensors")
    moved = {name for name, value in tuned.items() if not torch.equal(value, before[name])}
    tables = {name for name in tuned if "embed_tokens" in name or "lm_head" in name}
    norms = {name for name in tuned if "norm" in name}
    wanted = set(tuned) - tables - (norms if mode is LORA else set())
    assert moved == wanted


def snapshot(target: Target) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in target.model.state_dict().items()}


@pytest.fixture
def pair(run: Run, heldout_file: Path) -> Path:
    """A run of both stages with held-out rows."""
    return run(*LORA, "--heldout", str(heldout_file), "--epochs", "3")


def test_what_is_exported_is_the_pair_that_was_trained(pair: Path, target_folder: Path) -> None:
    folder = pair / "best"
    base = AutoModelForCausalLM.from_pretrained(target_folder)
    ids_BT = torch.randint(2, 60, (2, 12))
    original = base(ids_BT).logits.detach()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        adapted = PeftModel.from_pretrained(base, str(folder / "adapter"))(ids_BT).logits
    merged = Target.load(str(folder / "target"))
    logits = merged.model(ids_BT).logits
    # Weights rounded to float32 after eight random layers; the next test is exact.
    torch.testing.assert_close(logits, adapted.detach(), rtol=0, atol=1e-4)
    assert float((logits - original).abs().max()) > 0.01
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(target_folder)
    assert config["r"] == 4
    assert merged.tokenizer is not None


def test_the_merged_target_is_the_adapted_one(target_folder: Path, tmp_path: Path) -> None:
    exact = Target.load(str(target_folder), dtype=torch.float64)
    exact.model.save_pretrained(tmp_path / "exact")
    AutoTokenizer.from_pretrained(target_folder).save_pretrained(tmp_path / "exact")
    target = Target.load(str(tmp_path / "exact"), dtype=torch.float64)
    tuning = tune(target, JointSettings(joint="lora", lora_rank=4), 0)
    with torch.no_grad():
        for value in tuning.parameters.values():
            value += 0.1
    ids_BT = torch.randint(2, 60, (2, 12))
    before = tuning.original_states(ids_BT)
    tuning.write(tmp_path)
    merged = Target.load(str(tmp_path / "target"), dtype=torch.float64)
    wanted = target.logits(tuning.states(ids_BT)).detach()
    found = merged.model(ids_BT).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert float((target.logits(before) - wanted).abs().max()) > 0.1
    assert torch.equal(tuning.original_states(ids_BT), before)


def test_the_notes_name_the_tuned_target_and_its_drift(
    pair: Path, target_folder: Path, heldout_file: Path
) -> None:
    folder = pair / "best"
    notes = read_notes(folder)
    merged, original = Target.load(str(folder / "target")), Target.load(str(target_folder))
    assert notes["target_fingerprint"] == merged.fingerprint()
    assert notes["original_fingerprint"] == original.fingerprint()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        judged_head(folder, merged)
    with pytest.warns(UserWarning, match=r"tuned with this head .*may seldom be accepted"):
        judged_head(folder, original)
    wanted = by_hand(original, merged, read_texts(str(heldout_file), Sampling(temperature=0.0)))
    found = notes["drift"]
    assert found == json.loads((folder / "heldout.json").read_text(encoding="utf-8"))["drift"]
    (best,) = [x for x in lines(pair, "heldout.jsonl") if x["drift"] == found]
    assert best["is_best"]
    assert found["tokens"] == wanted["tokens"] == 120
    for name in ("kl", "tv", "greedy_kept"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4), name
    assert found["kl"] > 1e-3
    assert lines(pair)[-1]["target_kl"] > 0


def by_hand(original: Target, tuned: Target, texts: list[Text]) -> dict[str, float]:
    """Drift by plain loops over tokens and vocabulary."""
    kl, tv, kept, tokens = 0.0, 0.0, 0, 0
    for text in texts:
        for place in range(len(text.answer_ids)):
            ids = torch.tensor([text.prompt_ids + text.answer_ids[:place]])
            with torch.no_grad():
                rows = [x.model(ids).logits[0, -1].double() for x in (original, tuned)]
            laws = [[math.exp(float(z - row.logsumexp(0))) for z in row] for row in rows]
            pairs = list(zip(*laws, strict=True))
            kl += sum(p * math.log(p / q) for p, q in pairs)
            tv += sum(max(0.0, p - q) for p, q in pairs)
            kept += laws[0].index(max(laws[0])) == laws[1].index(max(laws[1]))
            tokens += 1
    return {"kl": kl / tokens, "tv": tv / tokens, "greedy_kept": kept / tokens, "tokens": tokens}


@pytest.mark.parametrize("draft", ["chain:3", "tree:3,3,9"])
def test_decoding_with_the_head_is_the_tuned_targets_own_text(pair: Path, draft: str) -> None:
    folder = pair / "best"
    tuned = Target.load(str(folder / "target"))
    drafter = drafter_by(plan_named(draft), judged_head(folder, tuned))
    decoding = Decoding(max_new_tokens=20, sampling=Sampling(temperature=0.0))
    rounds = 0
    for seed in range(3):
        noise = torch.Generator().manual_seed(seed)
        prompt = torch.randint(2, 60, (7,), generator=noise).tolist()
        drafted = decode(tuned, prompt, drafter, decoding)
        assert drafted.ids == decode(tuned, prompt, None, decoding).ids
        rounds += len(drafted.rounds)
    assert rounds > 3


def test_an_untouched_target_has_no_drift_at_all(target_folder: Path) -> None:
    target = Target.load(str(target_folder))
    tuning = tune(target, JointSettings(joint="lora"), 0)
    texts = [Text("a", "k", [2, 3, 4], [5, 6, 7, 8])]
    drift = measure_drift(target, texts, tuning.original_states, tuning.states)
    assert (drift.kl, drift.tv, drift.greedy_kept, drift.tokens) == (0.0, 0.0, 1.0, 4)
    assert "100.00% of greedy tokens unchanged (4 tokens)" in text_of(drift.record())


def test_held_by_its_original_the_target_drifts_less(run: Run, heldout_file: Path) -> None:
    flags = (*LORA, "--heldout", str(heldout_file), "--epochs", "2", "--head-weight", "1")
    drifts = []
    for weight in ("10", "0.01"):
        out = run(*flags, "--kl-weight", weight, output=f"kl{weight}")
        drifts.append(read_notes(out / "last")["drift"]["kl"])
    assert drifts[0] < drifts[1] / 2


def test_heads_that_are_trained_already_are_taken_up_and_the_end_tells_the_drift(
    run: Run, heldout_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = run("--epochs", "3", output="medusa1")
    flags = ("--init", str(old / "last"), "--heads-first", "0", "--heldout", str(heldout_file))
    out = run(*LORA, *flags, output="medusa2")
    said = capsys.readouterr().out
    assert "held-out after step 7: tau by length of chain 1: " in said
    assert "; drift from the original: KL 0." in said
    first, fresh = lines(out)[0], lines(old)[0]
    assert first["loss"] < fresh["loss"]
    assert "target_kl" in first


@pytest.mark.multi
@pytest.mark.slow
def test_two_processes_train_a_pair_as_one_does(run: Run, tmp_path: Path) -> None:
    flags = (*LORA, "--epochs", "2", "--batch-size", "3", "--accumulation", "2")
    alone = run(*flags, output="alone")
    argv = ["--recipe", str(alone / "settings.yaml"), "--output", str(tmp_path / "two")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launch, str(Path(medusa.__file__)), *argv],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        text=True,
        capture_output=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    ours, theirs = state(alone), state(tmp_path / "two")
    names = [name for name in ours if name.startswith(("head.", "target."))]
    assert any(name.startswith("target.") for name in names)
    for name in names:
        torch.testing.assert_close(theirs[name], ours[name], rtol=0, atol=1e-4, msg=name)


# What is refused, and what is planned


def refused(run: Run, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run(*flags, output="refused")
    assert caught.value.code == 2
    said = capsys.readouterr()
    return " ".join((said.out + said.err).replace("│", " ").split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora-rank", "8"), "lora_rank is 8 with joint none, which does not use it"),
        ((*FULL, "--lora-alpha", "4"), "lora_alpha is 4 with joint full"),
        ((*LORA, "--kl-weight", "0"), "kl_weight and lm_weight are both 0"),
        ((*LORA, "--heads-first", "1"), "heads_first is 1.0; allowed: at least 0 and below 1"),
        ((*FULL, "--target-dtype", "bfloat16"), "joint is 'full' with target_dtype bfloat16"),
    ],
)
def test_wrong_settings_are_refused(
    run: Run, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert message in refused(run, capsys, *flags)


def test_without_peft_adapters_are_refused_by_the_name_of_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("outrider.train.joint.metadata.version", absent)
    with pytest.raises(ValueError, match=r"needs the package peft: pip install 'outrider\[lora\]'"):
        JointSettings(joint="lora")
    assert JointSettings(joint="full").joint == "full"


@MODES
def test_plan_tells_what_the_target_costs(
    run: Run, mode: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(*mode, "--epochs", "2", "--heads-first", "0.5", "--plan", output="planned")
    text = capsys.readouterr().out
    assert f"joint {mode[1]}: 0." in text
    assert "M parameters of the target learn, in steps 8 to 14; heads alone before" in text
    assert "features 0.00 GiB" in text
    assert not (tmp_path / "planned").exists()


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_planned_activations_are_what_autograd_keeps(target_folder: Path, mode: Any) -> None:
    target = Target.load(str(target_folder))
    tuning = tune(target, JointSettings(joint=mode), 0)
    short, long = (joint_plan.saved_bytes(tuning, size) for size in (32, 64))
    # Near linear: attention here is a fused kernel, which keeps no T x T.
    assert long == pytest.approx(2 * short, rel=0.05)
    config = target.config
    # At the least the input and the output of both halves of each layer, and of its MLP.
    floor = 64 * config.num_hidden_layers * 4 * (4 * config.hidden_size)
    assert floor < long < 20 * floor


def test_a_full_tuning_shares_the_tables(target_folder: Path) -> None:
    target = Target.load(str(target_folder))
    tuning = FullTuning(target)
    assert tuning.copy.embedding_VH.data_ptr() == target.embedding_VH.data_ptr()
    assert not any("embed" in name or "lm_head" in name for name in tuning.parameters)
    layers = sum(x.numel() for x in target.decoder.parameters()) - target.embedding_VH.numel()
    assert sum(x.numel() for x in tuning.parameters.values()) == layers
