"""One thread, no hub, and GPU tests skipped with a printed count."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import signal
import subprocess

import pytest
import torch

torch.set_num_threads(1)


def pytest_configure():
    # A shell that runs this in the background has children ignore Ctrl-C, which tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    num_gpu = sum("no CUDA device" in str(report.longrepr) for report in skipped)
    if num_gpu:
        terminalreporter.write_line(f"GPU tests skipped for want of a CUDA device: {num_gpu}")


class Disk:
    """A real file system of its own size, in memory."""

    def __init__(self, path):
        self.path = path

    def mount(self, size, *options):
        words = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs"]
        done = subprocess.run([*words, str(self.path)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no disk to fill, since mount is not allowed here: {done.stderr.strip()}")

    def grow(self, size):
        self.mount(size, "remount")


@pytest.fixture
def make_disk(tmp_path):
    disk = Disk(tmp_path / "disk")
    disk.path.mkdir()

    def make(size):
        disk.mount(size)
        return disk

    yield make
    # Lazily: a stopped run in this process may not have let go of its files yet.
    subprocess.run(["umount", "--lazy", str(disk.path)], capture_output=True)
