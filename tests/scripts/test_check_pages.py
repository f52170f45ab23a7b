"""Pages of `outrider check` for a good and for broken inputs, on the demo target; `-s` shows them.

Each broken input ends with exit status 1 and its remedy.
"""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.data.demo_target import smollm2_demo

pytestmark = pytest.mark.slow

TALK = [
    {"role": "user", "content": "Name three rivers."},
    {"role": "assistant", "content": "The Rhine, the Elbe and the Oder."},
    {"role": "user", "content": "And a lake?"},
    {"role": "assistant", "content": "Lake Constance."},
]
GOOD = [{"id": f"talk-{number}", "messages": TALK} for number in range(4)]
THOUGHT = [*TALK[:3], {"role": "assistant", "content": "<think>lakes</think>Lake Constance."}]
STRIPS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
    " + message['content'].split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def demo_copy(tmp_path):
    """The demo target's files, linked one by one so that some can be replaced."""

    def copy(**config):
        folder = tmp_path / "target"
        folder.mkdir()
        for path in smollm2_demo().iterdir():
            (folder / path.name).symlink_to(path)
        if config:
            values = json.loads((folder / "config.json").read_text()) | config
            (folder / "config.json").unlink()
            (folder / "config.json").write_text(json.dumps(values))
        return folder

    return copy


@pytest.fixture
def page(tmp_path):
    """The page and exit status of the command, in a process of its own on one thread."""

    def run(rows, *flags, target="smollm2-demo"):
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["--target", str(target), "--data", str(data), "--max-length", "512", *flags]
        words += ["--unroll-steps", "3", "--draft-vocab", "8192"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "outrider.scripts.cli", "check", *words],
            capture_output=True,
            text=True,
            env=environment,
        )
        print(f"\n$ outrider check {' '.join(words)}\n{done.stdout}")
        print(f"exit status {done.returncode}, {time.perf_counter() - start:.0f} s")
        return done.returncode, " ".join(done.stdout.split())

    return run


def test_a_good_input(page):
    code, said = page(GOOD)
    assert code == 0
    assert "turn ends trained: <|im_end|> 8 times (of 8 answers)" in said
    assert "ids 0..30 equal independent hooks bit for bit" in said


def test_masks_that_match_nothing(page):
    code, said = page([{"text": f"### User: Hi\n### Bot: line {letter}\n"} for letter in "abcd"])
    assert code == 1
    assert "4 of 4 rows have no supervised token" in said
    assert "give the rows as messages" in said


def test_a_template_that_strips_thinking(page, demo_copy):
    folder = demo_copy()
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        if (folder / name).exists():
            text = (folder / name).read_text()
            (folder / name).unlink()
            (folder / name).write_text(text)
    (folder / "chat_template.jinja").write_text(STRIPS)
    code, said = page([{"messages": THOUGHT}], target=folder)
    assert code == 1
    assert "the template strips answers: row 1 message 3 loses" in said
    assert "reasoning_content" in said


def test_a_target_too_shallow_for_the_default_layers(page, demo_copy, tmp_path):
    folder = demo_copy(num_hidden_layers=4)
    fixed = tmp_path / "fixed"
    code, said = page(GOOD, "--fix", str(fixed), target=folder)
    assert "give aux_layers explicitly" in said
    assert "aux_layers: None -> (1, 2, 3)" in said
    assert code == 0
    assert "aux_layers:\n- 1\n- 2\n- 3\n" in (fixed / "recipe.yaml").read_text()


def test_weights_that_are_not_numbers(page, demo_copy):
    folder = demo_copy()
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.7.mlp.up_proj.weight"][0, 0] = torch.nan
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})
    code, said = page(GOOD, target=folder)
    assert code == 1
    assert "model.layers.7.mlp.up_proj.weight" in said
    assert "fetch its files again" in said


def test_rows_that_are_all_too_long(page):
    code, said = page(GOOD, "--max-length", "16")
    assert code == 1
    assert "100% of the rows are lost" in said
    assert "--max-length 128 keeps 100% of the rows whole" in said


def test_ids_of_another_vocabulary(page):
    rows = [{"input_ids": [1, 7, 50000 + n, 2], "loss_mask": [0, 0, 1, 1]} for n in range(3)]
    code, said = page(rows)
    assert code == 1
    assert "token id 50000 at position 2 is outside the target's vocabulary (0 to 49151)" in said


def test_the_demo_recipe_is_checked_within_a_minute(page):
    before = os.times().children_user  # of processor time: the machine may be busy
    code, _ = page(GOOD, "--data", "demo", "--heldout", "demo:heldout")
    assert code == 0
    assert 1 < os.times().children_user - before < 60
