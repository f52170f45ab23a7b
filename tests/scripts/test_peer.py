"""The peer reads our features as its own: same rows, masks and teacher; its log is read back."""

import importlib
import json
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.batches import StoredRow
from outrider.data.rows import Row
from outrider.data.target import Target
from outrider.scripts.peer_format import Offline, peer_states, read_offline, write_offline
from outrider.scripts.peer_speculators import origin
from outrider.scripts.peer_trainer import PeerRun, arguments, read_log, run_peer

LAYERS = (2, 3, 4)
HIDDEN = 32


def tiny_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # all ones would hide a forgotten division
        model.model.norm.weight.uniform_(0.5, 2.0)
        model.model.embed_tokens.weight.mul_(50)  # states of ordinary size: the norm's eps is small
    return model


@pytest.fixture(scope="module")
def target():
    return Target.from_model(tiny_model())


@pytest.fixture(scope="module")
def rows(target):
    made = []
    for index, length in enumerate((9, 5, 14, 7)):
        ids_T = (torch.arange(length) * 7 + index) % 64
        captured = target.run(ids_T[None], layers=LAYERS)
        mask_T = torch.arange(length) >= length // 2
        made.append(StoredRow(ids_T, mask_T, captured.aux_BTF[0], captured.last_BTH[0]))
    return made


def norm_weight(target):
    return target.model.model.norm.weight.detach()


def peer_final_norm(hidden_TH, weight_H, eps):
    scale_T1 = (hidden_TH.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return hidden_TH * scale_T1 * weight_H


def test_rows_keep_order_tokens_and_masks(rows, target, tmp_path):
    offline = write_offline(rows[:3], rows[3:], norm_weight(target), tmp_path, torch.float32)
    table = load_from_disk(str(tmp_path))
    assert [row["input_ids"].tolist() for row in table] == [row.ids_T.tolist() for row in rows]
    assert [row["loss_mask"].tolist() for row in table] == [
        row.mask_T.int().tolist() for row in rows
    ]
    assert table["seq_len"][:].tolist() == [9, 5, 14, 7]
    for index, row in enumerate(rows):
        stored = load_file(tmp_path / "hidden_states" / f"hs_{index}.safetensors")
        assert torch.equal(stored["token_ids"], row.ids_T)
        assert stored["hidden_states"].shape == (len(row.ids_T), 4, HIDDEN)
    assert offline == read_offline(tmp_path)
    assert (offline.num_train, offline.num_validation, offline.num_tokens) == (3, 1, 28)


def test_vocabulary_counts_come_from_supervised_training_tokens_only(rows, target, tmp_path):
    offline = write_offline(rows[:3], rows[3:], norm_weight(target), tmp_path, torch.float32)
    counts = torch.load(tmp_path / "token_freq.pt")
    kept = torch.cat([row.ids_T[row.mask_T] for row in rows[:3]])
    assert counts == {int(i): int((kept == i).sum()) for i in kept.unique()}
    assert (offline.num_supervised, offline.num_drawn) == (len(kept), len(counts))


def test_fused_states_are_the_captured_layers_in_order(rows, target):
    for row in rows:
        states_TSH = peer_states(row.aux_TF, row.last_TH, norm_weight(target))
        hidden = target.model(row.ids_T[None], output_hidden_states=True).hidden_states
        for slot, layer in enumerate(LAYERS):
            assert torch.equal(states_TSH[:, slot], hidden[layer][0])


def test_the_peers_own_norm_gives_the_stored_state_back(rows, target):
    weight_H, eps = norm_weight(target), target.config.rms_norm_eps
    for row in rows:
        true_TH = target.run(row.ids_T[None], layers=(target.num_layers,)).aux_BTF[0]
        from_truth_TH = peer_final_norm(true_TH, weight_H, eps)
        recovered_TH = peer_states(row.aux_TF, row.last_TH, weight_H)[:, 3]
        again_TH = peer_final_norm(recovered_TH, weight_H, eps)
        assert torch.allclose(from_truth_TH, row.last_TH, atol=1e-6)
        assert torch.allclose(again_TH, row.last_TH, rtol=1e-5, atol=1e-5)
        # The fault this guards against: storing the normed state, which the peer norms once more.
        wrong_TH = peer_final_norm(row.last_TH, weight_H, eps)
        assert (wrong_TH - row.last_TH).abs().max() > 0.1


def test_states_are_stored_in_the_precision_asked_for(rows, target, tmp_path):
    write_offline(rows[:1], rows[1:2], norm_weight(target), tmp_path, torch.bfloat16)
    stored = load_file(tmp_path / "hidden_states" / "hs_0.safetensors")["hidden_states"]
    assert stored.dtype == torch.bfloat16
    assert read_offline(tmp_path).dtype == "bfloat16"


def test_an_unfinished_folder_is_redone_and_a_finished_one_refused(rows, target, tmp_path):
    (tmp_path / "hidden_states").mkdir()
    assert read_offline(tmp_path) is None
    write_offline(rows[:3], rows[3:], norm_weight(target), tmp_path, torch.float32)
    with pytest.raises(ValueError, match="already holds features for the peer; remove it"):
        write_offline(rows[:3], rows[3:], norm_weight(target), tmp_path, torch.float32)


def test_refusals_name_the_value_and_the_remedy(rows, target, tmp_path):
    weight_H = norm_weight(target).clone()
    weight_H[3] = 0
    with pytest.raises(ValueError, match=r"final norm has a weight of 0; .*another target"):
        peer_states(rows[0].aux_TF, rows[0].last_TH, weight_H)
    with pytest.raises(ValueError, match=r"shape \(9, 64\); .*\(9, 96\): store three layers"):
        peer_states(rows[0].aux_TF[:, :64], rows[0].last_TH, norm_weight(target))
    with pytest.raises(ValueError, match="no rows to train the peer on"):
        write_offline([], rows, norm_weight(target), tmp_path, torch.float32)


def described(num_train, num_validation):
    return Offline(
        num_train=num_train,
        num_validation=num_validation,
        num_tokens=0,
        num_supervised=0,
        num_drawn=0,
        dtype="float32",
    )


def make_run(folder, **changes):
    given = {
        "python": Path(sys.executable),
        "target": "t",
        "layers": LAYERS,
        "offline": folder,
        "output": folder / "o",
    }
    return PeerRun(**(given | changes))


def test_the_peer_cuts_exactly_behind_the_training_rows(tmp_path):
    for num_train in (1, 2, 3, 10, 999, 1571, 54321):
        for num_validation in (1, 2, 48):
            words = arguments(make_run(tmp_path), described(num_train, num_validation))
            ratio = float(words[words.index("--train-data-ratio") + 1])
            assert 0 < ratio < 1
            assert int((num_train + num_validation) * ratio) == num_train


def test_the_peer_is_told_the_published_layout_and_our_numbers(tmp_path):
    words = arguments(make_run(tmp_path, max_steps=9, lr=2e-3), described(5, 1))
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    assert pairs["--total-seq-len"] == "512"
    assert pairs["--draft-vocab-size"] == "8192"
    assert pairs["--ttt-steps"] == "3"
    assert pairs["--max-steps"] == "9"
    assert pairs["--lr"] == "0.002"
    assert {"--no-norm-before-residual", "--no-norm-before-fc", "--no-norm-output"} < set(words)


def test_missing_pieces_are_named(rows, target, tmp_path):
    with pytest.raises(ValueError, match="holds no finished features for the peer"):
        run_peer(make_run(tmp_path))
    write_offline(rows[:3], rows[3:], norm_weight(target), tmp_path, torch.float32)
    with pytest.raises(ValueError, match=r"peer-python is .*nowhere.*scripts/peer_venv\.sh"):
        run_peer(make_run(tmp_path, python=tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"ended with status 1; .*printed\.txt"):
        run_peer(make_run(tmp_path))  # this interpreter has no speculators


def logged(global_step, epoch, step_ms, tokens, accuracy):
    return {
        "profile": {
            "step_ms": step_ms,
            "tokens_per_s": tokens / step_ms * 1e3,
            "fetch_ms": 0.0,
            "fwd_ms": step_ms / 2,
            "bwd_ms": step_ms / 4,
            "opt_ms": step_ms / 4,
        },
        "train": {f"full_acc_{step}": accuracy for step in range(3)},
        "epoch": epoch,
        "global_step": global_step,
    }


def test_throughput_leaves_out_warm_up_and_padding(tmp_path):
    steps = [(9000, 512), (9000, 512), (1000, 400), (1000, 500), (1000, 480)]
    lines = [logged(i, i // 3, ms, tokens, i / 10) for i, (ms, tokens) in enumerate(steps)]
    lines.insert(3, {"val": {"loss_epoch": 1.0}, "epoch": 0})
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = read_log(log, make_run(tmp_path))
    assert result.tokens_per_s == pytest.approx(480)
    assert result.positions_per_s == pytest.approx(512)
    assert (result.num_steps, result.num_tokens) == (5, 2404)
    assert result.step_seconds == pytest.approx(21)
    assert result.step_share == pytest.approx({"fetch": 0, "fwd": 0.5, "bwd": 0.25, "opt": 0.25})
    assert result.accuracy == [pytest.approx([0.1] * 3), pytest.approx([0.35] * 3)]
    assert result.heads == [tmp_path / "o" / "heads" / "0", tmp_path / "o" / "heads" / "1"]
    log.write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(ValueError, match="trained 1 steps; more than 2 are needed"):
        read_log(log, make_run(tmp_path))


def test_the_launcher_keeps_every_record_of_metrics(tmp_path):
    launch = importlib.import_module("outrider.scripts.peer_launch")
    keep = launch.keep_lines(tmp_path / "log.jsonl")
    for message in ({"train": {"loss": 1.5}}, "words", {"val": {"loss": torch.tensor(2.0)}}):
        assert keep(logging.LogRecord("m", logging.INFO, "", 0, message, None, None))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [sorted(line) for line in lines] == [["time", "train"], ["time", "val"]]


@pytest.mark.slow
def test_the_real_trainer_learns_from_our_folder(rows, target, tmp_path):
    python = os.environ.get("OUTRIDER_PEER_PYTHON")
    if python is None:
        pytest.skip("set OUTRIDER_PEER_PYTHON to the interpreter of scripts/peer_venv.sh")
    model = tmp_path / "target"
    target.model.save_pretrained(model)
    words = {"<unk>": 0} | {f"w{index}": index for index in range(1, 64)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(model)
    write_offline(rows * 4, rows[:1], norm_weight(target), tmp_path / "offline", torch.float32)
    result = run_peer(
        make_run(
            tmp_path / "offline",
            python=Path(python),
            target=str(model),
            output=tmp_path / "run",
            pack_size=32,
            draft_vocab=48,
            epochs=2,
        )
    )
    assert result.num_tokens == 2 * 4 * (9 + 5 + 14 + 7 - 4)
    assert all((head / "model.safetensors").exists() for head in result.heads)
    assert len(result.heads) == 2


def test_the_peers_copy_is_named_after_all_it_depends_on(target):
    def ground(rows, precision):
        data = SimpleNamespace(feature_dtype="bfloat16")
        settings = SimpleNamespace(data=data, run=SimpleNamespace(precision=precision))
        return SimpleNamespace(target=target, rows=rows, layers=LAYERS, settings=settings)

    def row(ids, mask):
        ids, mask = torch.tensor(ids), torch.tensor(mask)
        return Row(ids=ids, mask=mask, row_id="r", kind="k", prompt_length=1)

    one, other, masked = (
        [row([1, 2, 3], [False, True, True])],
        [row([1, 2, 4], [False, True, True])],
        [row([1, 2, 3], [False, False, True])],
    )
    names = {origin(ground(rows, "fp32")) for rows in (one, other, masked)}
    assert len(names | {origin(ground(one, "bf16"))}) == 4
    assert origin(ground(one, "fp32")) in names
