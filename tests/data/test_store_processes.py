"""Real processes that write a store: killed at any moment, several at once, on a full disk."""

import json
import os
import random
import re
import signal
import time

import pytest

NUM_ROWS = 81
FORMS = ("bfloat16", "int4")
# Jobs: the command on the files in {root}, or the store by itself, which counts the rows it runs.
PREAMBLE = """
import resource
import torch
from outrider.data import states, store
from outrider.data.rows import Reading, read_rows
from outrider.data.layout import layout_of
from outrider.data.target import Target
from outrider.scripts import cli, features_command

torch.set_num_threads(1)
store.SHARD_TOKENS, store.PASS_TOKENS = 200, 100
passes = 0

class Counted(states.TargetStates):
    def of(self, rows):
        global passes
        passes += len(rows)
        return super().of(rows)

store.TargetStates = Counted

def job(out, form, limit, check):
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    if check == "unchecked":  # as when another program takes the room after the check
        store.check_disk = lambda *_: None
    sys.stdout = sys.stderr = open(f"{out}.said", "w")
    words = ["--target", "{root}/target", "--data", "{root}/rows.jsonl", "--out", out]
    words += ["--layers", "2", "3", "4", "--feature-dtype", form]
    words += [] if form == "bfloat16" else ["--top-k", "8"]
    cli.main(["features", *words])
    open(f"{out}.{os.getpid()}.passes", "w").write(str(passes))
"""


@pytest.fixture(scope="module")
def forks(make_forks, make_model, make_tokenizer, tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    make_model().save_pretrained(root / "target")
    make_tokenizer().save_pretrained(root / "target")
    made = random.Random(0)
    lengths = [10, 14, 22, 18, 31] * 16 + [120]
    with (root / "rows.jsonl").open("w") as file:
        for length in lengths:
            ids = [made.randrange(3, 300) for _ in range(length)]
            row = {"input_ids": ids, "loss_mask": [int(place >= 3) for place in range(length)]}
            file.write(json.dumps(row) + "\n")
    return make_forks(PREAMBLE.replace("{root}", str(root)))


def run(forks, root, form, limit=0, check="checked"):
    return forks.run(root, form, limit, check)


@pytest.fixture(scope="module", params=FORMS)
def whole(request, forks, tmp_path_factory):
    """Form, files and duration of an uninterrupted build: raw, and packed."""
    root = tmp_path_factory.mktemp("whole") / "store"
    begun = time.perf_counter()
    assert run(forks, root, request.param) == 0, said(root)
    return request.param, files(root), time.perf_counter() - begun


def files(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.suffix in (".safetensors", ".json", ".tmp")
    }


def said(root):
    return root.with_name(f"{root.name}.said").read_text()


def killed_and_completed(forks, whole, tmp_path, kills):
    form, expected, seconds = whole
    assert len(expected) > 8
    chance, partial, num_killed = random.Random(os.getpid()), 0, 0
    for number in range(kills):
        root = tmp_path / f"store-{number}"
        for _ in range(2):  # the continuation is killed too
            child = forks.start(root, form, 0, "checked")
            time.sleep(chance.random() * seconds)
            os.kill(child, signal.SIGKILL)
            code = forks.end(child)
            assert code in (0, -signal.SIGKILL), said(root)
            num_killed += code != 0
        partial += files(root) != expected
        assert run(forks, root, form) == 0, said(root)
        assert files(root) == expected
    print(f"{form}: {num_killed} of {2 * kills} runs killed, {partial} stores left unfinished")
    return partial


def test_killed_at_any_moment_a_build_completes_to_the_same_bytes(forks, whole, tmp_path):
    killed_and_completed(forks, whole, tmp_path, 3)


@pytest.mark.slow
def test_killed_twenty_times_a_build_completes_to_the_same_bytes(forks, whole, tmp_path):
    assert killed_and_completed(forks, whole, tmp_path, 20) > 3


def test_processes_that_build_one_store_share_its_shards(forks, whole, tmp_path):
    form, expected, _ = whole
    root = tmp_path / "store"
    children = [forks.start(root, form, 0, "checked") for _ in range(3)]
    assert [forks.end(child) for child in children] == [0, 0, 0]
    assert files(root) == expected
    passes = [int((tmp_path / f"store.{child}.passes").read_text()) for child in children]
    assert sum(passes) == NUM_ROWS  # no row was computed twice
    assert sum(count > 0 for count in passes) > 1


def test_a_file_that_may_not_grow_leaves_a_usable_store(forks, whole, tmp_path):
    form, expected, _ = whole
    root = tmp_path / "store"
    sizes = sorted(len(content) for content in expected.values())
    # Only the largest shard does not fit.
    assert run(forks, root, form, limit=sizes[-1] - 100) == 2
    assert "cannot be written: [Errno 27] File too large" in said(root)
    complete(forks, whole, root)


def complete(forks, whole, root):
    """What a failed build left is whole, and the same command makes the rest."""
    form, expected, _ = whole
    assert "free some space and run the same command again" in said(root)
    left = files(root)
    assert 0 < len(left) < len(expected)
    assert all(expected[name] == content for name, content in left.items())
    assert run(forks, root, form) == 0, said(root)
    assert files(root) == expected


def test_a_disk_that_fills_up_leaves_a_usable_store(forks, whole, tmp_path, make_disk):
    form, expected, _ = whole
    size = sum(len(content) for content in expected.values())
    disk = make_disk(size // 2)
    root = disk.path / "store"
    root.with_name("store.said").symlink_to(tmp_path / "said")  # it must not take of the room
    assert run(forks, root, form) == 2
    wanted = r"the features need [\d,]+ bytes, \S+ has [\d,]+ free; free some space, read fewer"
    assert re.search(wanted, said(root))
    assert run(forks, root, form, check="unchecked") == 2
    assert "cannot be written: [Errno 28] No space left on device" in said(root)
    disk.grow(2 * size)
    complete(forks, whole, root)
