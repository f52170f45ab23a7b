"""A store behind a URL: uploaded whole, read through a local copy, completed from anywhere."""

import re
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
import torch

from outrider.data import store as store_module
from outrider.data.files import sweep, temporary_for
from outrider.data.folders import LocalFolder, folder_at
from outrider.data.layout import layout_of
from outrider.data.rows import Row
from outrider.data.states import TargetStates
from outrider.data.store import FeatureStore

LAYERS = (1, 3, 5)


def make_rows(count=9):
    made = torch.Generator().manual_seed(1)
    return [
        Row(torch.randint(3, 300, (9,), generator=made), torch.arange(9) >= 3, f"r{i}", "", 3)
        for i in range(count)
    ]


@pytest.fixture(params=["memory://stores", "file"])
def root(request, tmp_path, monkeypatch):
    """A place that every machine sees; each machine has a cache of its own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "one"))
    monkeypatch.setattr(store_module, "SHARD_TOKENS", 27)
    if request.param == "file":
        return f"file://{tmp_path / 'shared'}"
    memory = fsspec.filesystem("memory")
    if memory.exists("/stores"):
        memory.rm("/stores", recursive=True)
    return request.param


def build(target, root, states=None):
    layout = layout_of(target, LAYERS, "int8", top_k=5)
    return FeatureStore.build_or_open(
        target, make_rows(), layout=layout, root=root, states=states, progress=False
    )


class Never(TargetStates):
    def of(self, rows):
        raise AssertionError("the target ran again")


def test_another_machine_reads_what_one_has_stored(target, root, tmp_path, monkeypatch):
    first = build(target, root)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "two"))
    second = build(target, root, states=Never(target, LAYERS))
    assert first.folder.local != second.folder.local
    for index in range(9):
        ours, theirs = first.row(index), second.row(index)
        assert torch.equal(ours.aux_TF, theirs.aux_TF)
        assert torch.equal(ours.law.log_probs, theirs.law.log_probs)


def test_a_shard_that_is_cut_short_there_is_built_again(target, root, tmp_path, monkeypatch):
    first = build(target, root)
    files, place = fsspec.core.url_to_fs(f"{first.folder.name}/features-000001.safetensors")
    content = files.cat_file(place)
    files.pipe_file(place, content[:-7])
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "two"))
    build(target, root)
    assert files.cat_file(place) == content


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 400,
        (2).to_bytes(8, "little") + b"[]" + b"\0" * 40,
        (12).to_bytes(8, "little") + b'{"scale":[]}' + b"\0" * 40,
    ],
)
def test_damaged_shards_are_built_again(content, target, root, tmp_path, monkeypatch):
    first = build(target, root)
    files, place = fsspec.core.url_to_fs(f"{first.folder.name}/features-000001.safetensors")
    good = files.cat_file(place)
    files.pipe_file(place, content)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "two"))
    build(target, root)
    assert files.cat_file(place) == good


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\0\0"])
def test_a_damaged_key_is_written_again(content, target, root, tmp_path, monkeypatch):
    for place in (root, str(tmp_path / "here")):
        first = build(target, place)
        name = f"{first.folder.name}/key.json"
        files, at = fsspec.core.url_to_fs(name)
        good = files.cat_file(at)
        files.pipe_file(at, content)
        build(target, place, states=Never(target, LAYERS))
        assert files.cat_file(at) == good


def test_a_full_disk_behind_an_address_is_told(target, tmp_path, monkeypatch, make_disk):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "one"))
    monkeypatch.setattr(store_module, "SHARD_TOKENS", 27)
    whole = build(target, f"file://{tmp_path / 'roomy'}").folder.local
    size = sum(path.stat().st_size for path in whole.iterdir())
    disk = make_disk(size // 2)
    with pytest.raises(ValueError, match=r"cannot be written: .*No space.*run the same command ag"):
        build(target, f"file://{disk.path}/store")
    disk.grow(10 * size)
    store = build(target, f"file://{disk.path}/store")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "two"))
    again = build(target, store.folder.name.rpartition("/")[0], states=Never(target, LAYERS))
    assert torch.equal(again.row(8).aux_TF, store.row(8).aux_TF)


def test_an_address_that_nothing_opens_is_refused():
    with pytest.raises(ValueError, match="store 'nowhere://x/y' cannot be opened"):
        folder_at("nowhere://x", "y")


def test_a_claim_outlives_the_end_of_another_of_the_same_process(tmp_path):
    """Closing the lock file would give up every number of it; another process tells."""
    folder = LocalFolder(tmp_path / "store")
    code = (
        "import sys, pathlib; from outrider.data.folders import LocalFolder\n"
        "with LocalFolder(pathlib.Path(sys.argv[1])).claim(int(sys.argv[2]), wait=False) as mine:\n"
        "    print(mine)"
    )

    def another_gets(number):
        words = [sys.executable, "-c", code, str(tmp_path / "store"), str(number)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

    with folder.claim(0, wait=False) as first:
        with folder.claim(1, wait=False) as second:
            assert first
            assert second
        assert another_gets(0) == "False"
        assert another_gets(1) == "True"
    assert another_gets(0) == "True"


WRITERS = """
import os, pathlib, sys
from outrider.data.folders import write_whole

def write(letter):
    for _ in range(150):
        write_whole(pathlib.Path(sys.argv[1]), letter * 5000)
    os._exit(0)

children = []
for letter in (b"a", b"b", b"c"):
    child = os.fork()
    if child == 0:
        write(letter)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""


def run(code, path):
    words = [sys.executable, "-c", code, str(path)]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_processes_that_write_one_file_leave_a_whole_one(tmp_path):
    path = tmp_path / "key.json"
    assert run(WRITERS, path) == "[0, 0, 0]"
    assert path.read_bytes() in [letter * 5000 for letter in (b"a", b"b", b"c")]
    assert [one.name for one in tmp_path.iterdir()] == ["key.json"]


def test_only_what_killed_processes_of_this_machine_left_is_swept(tmp_path):
    code = (
        "import sys, pathlib; from outrider.data.files import temporary_for\n"
        "path = temporary_for(pathlib.Path(sys.argv[1])); path.touch(); print(path)"
    )
    left = Path(run(code, tmp_path / "b.json"))
    ours = temporary_for(tmp_path / "a.json")
    foreign = left.with_name(re.sub(r"\.[^.]+-(\d+\.tmp)$", r".elsewhere-\1", left.name))
    others = (ours, foreign, tmp_path / "mine.tmp")
    for path in others:
        path.touch()
    assert left.exists()
    sweep(tmp_path)
    assert set(tmp_path.iterdir()) == set(others)
