"""Real processes that write a store: killed at any moment, several at once, on a full disk."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

SERVER = """
import os, resource, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from outrider.data import states, store
from outrider.data.layout import layout_of
from outrider.data.rows import Row
from outrider.data.target import Target

torch.set_num_threads(1)
torch.manual_seed(3)
store.SHARD_TOKENS, store.PASS_TOKENS = 200, 100
config = LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=7,
                     num_attention_heads=4, num_key_value_heads=2)
target = Target.from_model(LlamaForCausalLM(config))
made = torch.Generator().manual_seed(0)
lengths = [10, 14, 22, 18, 31] * 16 + [120]
rows = [Row(torch.randint(3, 300, (n,), generator=made), torch.arange(n) >= 3, str(i), "", 3)
        for i, n in enumerate(lengths)]
layout = layout_of(target, (2, 3, 4), "int4", top_k=8)
passes = 0

class Counted(states.TargetStates):
    def of(self, rows):
        global passes
        passes += len(rows)
        return super().of(rows)

def build(root, limit):
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        store.FeatureStore.build_or_open(
            target, rows, layout=layout, root=root, states=Counted(target, layout.layers),
            progress=False)
    except ValueError as error:
        open(root + ".error", "w").write(str(error))
        os._exit(2)
    open(f"{root}.{os.getpid()}.passes", "w").write(str(passes))
    os._exit(0)

print(len(rows), flush=True)
for line in sys.stdin:
    word, *rest = line.split()
    if word == "start":
        child = os.fork()
        if child == 0:
            build(rest[0], int(rest[1]))
        print(child, flush=True)
    else:
        print(os.waitstatus_to_exitcode(os.waitpid(int(rest[0]), 0)[1]), flush=True)
"""


class Server:
    """Starts builds in processes of their own; importing torch once is enough for all of them."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.num_rows = int(self.process.stdout.readline())

    def ask(self, words):
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, root, limit=0):
        return self.ask(f"start {root} {limit}")

    def end(self, child):
        return self.ask(f"wait {child}")

    def run(self, root, limit=0):
        return self.end(self.start(root, limit))


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    made.process.stdin.close()
    made.process.wait(timeout=30)
    made.process.stdout.close()


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """An uninterrupted build: its files, and how long it took."""
    root = tmp_path_factory.mktemp("whole") / "store"
    begun = time.perf_counter()
    assert server.run(root) == 0
    return files(root), time.perf_counter() - begun


def files(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.suffix in (".safetensors", ".json", ".tmp")
    }


def killed_and_completed(server, whole, tmp_path, kills):
    expected, seconds = whole
    assert len(expected) > 8
    chance, partial = random.Random(os.getpid()), 0
    for number in range(kills):
        root = tmp_path / f"store-{number}"
        for _ in range(2):  # the continuation is killed too
            child = server.start(root)
            time.sleep(chance.random() * seconds)
            os.kill(child, signal.SIGKILL)
            assert server.end(child) in (0, -signal.SIGKILL)
        partial += files(root) != expected
        assert server.run(root) == 0
        assert files(root) == expected
    return partial


def test_killed_at_any_moment_a_build_completes_to_the_same_bytes(server, whole, tmp_path):
    killed_and_completed(server, whole, tmp_path, 4)


@pytest.mark.slow
def test_killed_twenty_times_a_build_completes_to_the_same_bytes(server, whole, tmp_path):
    assert killed_and_completed(server, whole, tmp_path, 20) > 3


def test_processes_that_build_one_store_share_its_shards(server, whole, tmp_path):
    root = tmp_path / "store"
    children = [server.start(root) for _ in range(3)]
    assert [server.end(child) for child in children] == [0, 0, 0]
    assert files(root) == whole[0]
    passes = [int((tmp_path / f"store.{child}.passes").read_text()) for child in children]
    assert sum(passes) == server.num_rows  # no row was computed twice
    assert sum(count > 0 for count in passes) > 1


def test_a_disk_that_fills_up_leaves_a_usable_store(server, whole, tmp_path):
    root, expected = tmp_path / "store", whole[0]
    sizes = sorted(len(content) for content in expected.values())
    assert server.run(root, limit=sizes[-1] - 100) == 2  # only the largest shard does not fit
    message = (tmp_path / "store.error").read_text()
    assert "cannot be written: [Errno 27] File too large" in message
    assert "free some space and run the same command again" in message
    left = files(root)
    assert 0 < len(left) < len(expected)
    assert all(expected[name] == content for name, content in left.items())
    assert server.run(root) == 0
    assert files(root) == expected
