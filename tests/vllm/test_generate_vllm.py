"""The demo target served by vLLM on CPU: the in-process answers, whoever is killed on the way.

Run by `scripts/test.sh --vllm`, which installs vLLM into an environment of its own.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time

import httpx2
import pytest
import torch

from outrider.data.anatomy import find_folder
from outrider.data.demo.prompts import prompts
from outrider.data.manifest import manifest_path
from outrider.data.target import Target

PYTHON = os.environ.get("OUTRIDER_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not PYTHON, reason="no vLLM here: run scripts/test.sh --vllm"),
]
NUM_ROWS = 24
COMMON = ["--target", "smollm2-demo", "--max-new-tokens", "64"]
# Logits closer than this may change places between two ways to multiply in float32.
NEAR_TIE = 1e-3


class Vllm:
    """A vLLM server of the demo target, to be killed and started again at one address."""

    def __init__(self, log):
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def start(self):
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
        own |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        words = ["--model", str(find_folder("smollm2-demo")), "--dtype", "float32"]
        words += ["--enforce-eager", "--max-model-len", "2048", "--host", "127.0.0.1"]
        module = "vllm.entrypoints.openai.api_server"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [PYTHON, "-m", module, *words, "--port", str(self.port)],
                env={**os.environ, **own},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self):
        """Until it answers."""
        for _ in range(1200):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                return httpx2.get(f"{self.url}/models").raise_for_status()
            except httpx2.HTTPError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-4000:])

    def kill(self):
        """With the processes that it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    made = Vllm(tmp_path_factory.mktemp("vllm") / "log")
    made.start()
    made.wait()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"id": one.id, "messages": one.messages} for one in prompts("heldout", NUM_ROWS // 6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def local(asked, tmp_path_factory):
    """The answers of the target in process."""
    out = tmp_path_factory.mktemp("local") / "rows.jsonl"
    done = run(asked, out)
    print(done.stdout)
    return rows(out)


@pytest.fixture(scope="module")
def whole(asked, vllm, tmp_path_factory):
    """The file of an uninterrupted run through the server."""
    out = tmp_path_factory.mktemp("served") / "rows.jsonl"
    done = run(asked, out, "--server", vllm.url)
    print(done.stdout)
    return out


def start(asked, out, *more):
    command = [sys.executable, "-m", "outrider.scripts.cli", "generate"]
    words = [*command, *COMMON, "--prompts", str(asked), "--out", str(out), *more]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process):
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run(asked, out, *more):
    begun = time.perf_counter()
    done = end(start(asked, out, *more))
    assert done.returncode == 0, done.stderr
    print(f"{time.perf_counter() - begun:.1f} s")
    return done


def rows(out):
    return [json.loads(line) for line in out.read_bytes().splitlines()]


def rows_in(out):
    partial = out.with_name(f"{out.name}.partial.jsonl")
    try:
        return max(0, partial.read_bytes().count(b"\n") - 2)
    except FileNotFoundError:  # not begun, or finished
        return 0


def gap_at(target, ids, first, second):
    """How far apart the logits of two tokens are after `ids`."""
    with torch.no_grad():
        logits_V = target.model(input_ids=torch.tensor([ids])).logits[0, -1]
    return float((logits_V[first] - logits_V[second]).abs())


def test_greedy_ids_are_those_of_the_target_in_process(local, whole):
    served = rows(whole)
    assert [row["id"] for row in served] == [row["id"] for row in local]
    assert len({row["id"] for row in served}) == NUM_ROWS
    target, num_ties = Target.load("smollm2-demo"), 0
    for ours, theirs in zip(local, served, strict=True):
        assert theirs["prompt_ids"] == ours["prompt_ids"]
        if ours == theirs:
            continue
        pairs = list(zip(ours["answer_ids"], theirs["answer_ids"], strict=False))
        place = next(place for place, pair in enumerate(pairs) if pair[0] != pair[1])
        before = ours["prompt_ids"] + ours["answer_ids"][:place]
        assert gap_at(target, before, *pairs[place]) < NEAR_TIE, ours["id"]
        num_ties += 1
    print(f"{NUM_ROWS - num_ties} of {NUM_ROWS} rows equal, {num_ties} part at a near tie")
    assert num_ties <= 2


def test_the_manifest_names_server_and_form(whole, vllm):
    found = json.loads(manifest_path(whole).read_text())
    assert found["settings"]["server_form"] == "ids"
    assert found["settings"]["server_model"] == str(find_folder("smollm2-demo"))
    (noted,) = found["runs"]
    assert noted["server_version"] == "0.32.0"
    assert noted["fields_not_sent"] == []
    assert found["counts"]["retokenised"] == 0


@pytest.mark.parametrize("form", ["text", "chat"])
def test_text_gives_the_same_ids_but_where_the_text_is_written_otherwise(
    asked, whole, vllm, tmp_path, form
):
    out = tmp_path / "rows.jsonl"
    run(asked, out, "--server", vllm.url, "--server-form", form)
    for row, wanted in zip(rows(out), rows(whole), strict=True):
        assert row["finish"] == wanted["finish"]
        is_same = len(row["answer_ids"]) == len(wanted["answer_ids"])
        assert row["retokenised"] == ("same count" if is_same else "other")
        assert row["answer_ids"] == wanted["answer_ids"] or "text_gives_other_ids" in wanted


def test_sampled_rows_are_a_function_of_seed_and_id(asked, vllm, tmp_path):
    words = ["--server", vllm.url, "--temperatures", "0,0.7,1", "--top-p", "0.95"]
    found = []
    for name, more in [("one", ()), ("two", ("--concurrency", "5")), ("other", ("--seed", "1"))]:
        run(asked, tmp_path / name, *words, *more)
        found.append(rows(tmp_path / name))
    one, two, other = found
    assert {row["temperature"] for row in one} == {0.0, 0.7, 1.0}
    same = sum(a["answer_ids"] == b["answer_ids"] for a, b in zip(one, two, strict=True))
    assert same >= NUM_ROWS - 2  # a draw may fall otherwise where rounding does
    assert sum(a["answer_ids"] == b["answer_ids"] for a, b in zip(one, other, strict=True)) < 16


def test_a_client_killed_at_any_moment_completes_to_the_same_file(asked, whole, vllm, tmp_path):
    """Killed with rows done: the moments are counted in rows, since starting takes longest."""
    chance = random.Random(os.getpid())
    for number in range(3):
        out = tmp_path / f"{number}.jsonl"
        for _ in range(2):
            client = start(asked, out, "--server", vllm.url, "--concurrency", "4")
            least = rows_in(out) + chance.randrange(1, 6)
            while client.poll() is None and rows_in(out) < least:
                time.sleep(0.01)
            time.sleep(chance.random())
            client.kill()
            end(client)
        print(f"{rows_in(out)} of {NUM_ROWS} rows were done when it was killed twice")
        run(asked, out, "--server", vllm.url, "--concurrency", "4")
        assert out.read_bytes() == whole.read_bytes()


def test_a_server_killed_and_started_again_costs_no_row(asked, whole, vllm, tmp_path):
    out = tmp_path / "rows.jsonl"
    client = start(asked, out, "--server", vllm.url, "--concurrency", "4")
    while rows_in(out) < 5:
        assert client.poll() is None, client.stderr.read()
        time.sleep(0.01)
    vllm.kill()
    print(f"server killed after {rows_in(out)} rows")
    assert rows_in(out) < NUM_ROWS
    time.sleep(3)
    vllm.start()
    done = end(client)
    assert done.returncode == 0, done.stderr
    assert "trying again for up to 600 s" in done.stderr
    assert out.read_bytes() == whole.read_bytes()
