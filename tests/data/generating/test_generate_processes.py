"""Real processes that answer prompts: killed at any moment, and on a full disk."""

import json
import os
import random
import signal
import time

import pytest

from outrider.data.manifest import manifest_path

NUM_ROWS = 30
PREAMBLE = """
import torch
from outrider.scripts import cli, generate_command

torch.set_num_threads(1)

def job(out, *more):
    sys.stdout = sys.stderr = open(f"{out}.said", "w")
    words = ["--target", "{root}/target", "--prompts", "{root}/prompts.jsonl", "--out", out]
    cli.main(["generate", *words, "--batch-size", "3", "--max-new-tokens", "40", *more])
"""


@pytest.fixture(scope="module")
def forks(make_forks, root):
    return make_forks(PREAMBLE.replace("{root}", str(root)))


@pytest.fixture(scope="module", params=["process", "server"])
def by(request, place):
    """Words that say who answers: the target in the process that is killed, or a server."""
    served = ["--server", place.server.url, "--concurrency", "3"]
    return served if request.param == "server" else []


@pytest.fixture(scope="module")
def whole(forks, by, tmp_path_factory):
    """An uninterrupted run: its rows and its manifest, and how long it took."""
    out = tmp_path_factory.mktemp("whole") / "rows.jsonl"
    begun = time.perf_counter()
    assert forks.run(out, *by) == 0, said(out)
    return content(out), time.perf_counter() - begun


def content(out):
    return out.read_bytes(), manifest_path(out).read_bytes()


def said(out):
    return out.with_name(f"{out.name}.said").read_text()


def rows_in(partial):
    return [json.loads(line)["id"] for line in partial.read_bytes().splitlines()[2:]]


def num_done(out):
    """Rows in the partial file, after its lines of settings and of the run."""
    partial = out.with_name(f"{out.name}.partial.jsonl")
    try:
        return max(0, partial.read_bytes().count(b"\n") - 2)
    except FileNotFoundError:  # not begun, or finished
        return 0


def wait_for_rows(out, num_more, most_s):
    least, end = num_done(out) + num_more, time.monotonic() + most_s
    while num_done(out) < least and not out.exists() and time.monotonic() < end:
        time.sleep(0.002)


def killed_and_completed(forks, by, whole, tmp_path, kills):
    """Kill runs and their continuations; how many were stopped with rows done, but not all."""
    expected, seconds = whole
    chance, num_killed, num_begun = random.Random(os.getpid()), 0, 0
    for number in range(kills):
        out = tmp_path / f"{number}.jsonl"
        for _ in range(2):  # the continuation is killed too
            child = forks.start(out, *by)
            # Half of the moments lie anywhere, starting included; half after some rows more.
            scale = 1.0
            if chance.random() < 0.5:
                scale = 0.05
                wait_for_rows(out, chance.randrange(1, NUM_ROWS // 2), most_s=20 * seconds)
            time.sleep(chance.random() * seconds * scale)
            os.kill(child, signal.SIGKILL)
            code = forks.end(child)
            assert code in (0, -signal.SIGKILL), said(out)
            num_killed += code != 0
            num_begun += num_done(out) > 0
        assert forks.run(out, *by) == 0, said(out)
        assert content(out) == tuple(part.replace(b"rows.jsonl", out.name.encode())
                                     for part in expected)  # fmt: skip
        assert sorted(path.name for path in tmp_path.glob(f"{number}.jsonl*")) == [
            out.name, manifest_path(out).name, f"{out.name}.said",
        ]  # fmt: skip
    print(f"{num_killed} of {2 * kills} runs killed, {num_begun} of them with rows done")
    return num_begun


def test_killed_at_any_moment_a_run_completes_to_the_same_bytes(forks, by, whole, tmp_path):
    killed_and_completed(forks, by, whole, tmp_path, 3)


@pytest.mark.slow
def test_killed_twenty_times_a_run_completes_to_the_same_bytes(forks, by, whole, tmp_path):
    assert killed_and_completed(forks, by, whole, tmp_path, 20) > 3


def test_a_disk_that_fills_up_keeps_the_rows_that_were_answered(
    forks, by, whole, tmp_path, make_disk
):
    expected, _ = whole
    disk = make_disk(len(expected[0]) // 2)
    out = disk.path / "rows.jsonl"
    out.with_name("rows.jsonl.said").symlink_to(tmp_path / "said")  # must not take of the room
    assert forks.run(out, *by) == 2
    assert "rows.jsonl.partial.jsonl cannot be written: [Errno 28] No space left" in said(out)
    assert "free some space and run the same command again" in said(out)
    kept = rows_in(disk.path / "rows.jsonl.partial.jsonl")
    assert 3 < len(kept) < NUM_ROWS
    assert len(set(kept)) == len(kept)
    disk.grow(int(len(expected[0]) * 1.5))  # room for the partial file, but not for the whole one
    assert forks.run(out, *by) == 2
    assert f"{out} cannot be written: [Errno 28] No space left" in said(out)
    assert not out.exists()
    disk.grow(4 * len(expected[0]))
    assert forks.run(out, *by) == 0, said(out)
    assert f"{NUM_ROWS} rows taken over from a stopped run" in said(out)
    assert content(out) == expected
