"""One thread, no hub, and GPU tests skipped with a printed count."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import signal

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
