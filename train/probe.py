"""A guess at this machine's rates from two matrix products, where nothing was measured."""

import time

import torch

from outrider.train.machine import DISK, Machine
from outrider.train.settings import Settings

FORWARD_SHARE, STEP_SHARE = 0.85, 0.5
"""Shares of a plain large product's speed that a target's pass and a head's step reached on CPUs
(scripts/throughput_bench.py: 0.42 to 0.79 for steps)."""
MEMORY = 8e9
"""Bytes a second that an optimiser moves on a CPU of which nothing is known."""


def probed(threads: int | None, settings: Settings) -> Machine:
    """The machine that this process runs on; takes half a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    device = "cuda" if settings.run.device != "cpu" and torch.cuda.is_available() else "cpu"
    try:
        peaks = {dtype: product_rate(dtype, device) for dtype in (torch.float32, torch.bfloat16)}
    finally:
        torch.set_num_threads(before)
    fp32, bf16 = peaks.values()
    bandwidth = MEMORY if device == "cpu" else 1e12
    return Machine(
        name="this machine",
        source="from a matrix product timed now; outrider plan --measure is nearer",
        is_measured=False,
        device=device,
        threads=threads or before,
        forward={"float32": FORWARD_SHARE * fp32, "bfloat16": FORWARD_SHARE * bf16},
        step={"fp32": STEP_SHARE * fp32, "bf16": STEP_SHARE * bf16},
        optimiser={"muon": STEP_SHARE * max(fp32, bf16), "adamw": bandwidth},
        write=DISK,
        read=DISK,
    )


def product_rate(dtype: torch.dtype, device: str) -> float:
    """Operations a second of a large product, the best of several."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        begun = time.perf_counter()
        product = a @ b
        if product.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best
