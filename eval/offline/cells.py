"""Where in the text figures come from: sums by place in the answer, context length and entropy.

B rows, T places in the answer, P buckets of a dimension, Q quantities.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.eval.offline.traces import TraceRow

QUANTITIES = ("tokens", "starts", "judged", "kept", "best", "wide", "inside")
"""What is summed: text tokens, round starts, and at judged contexts what `Score` names alike."""

EDGES: dict[str, tuple[float, ...]] = {
    "place": (1, 17, 33, 65, 129, 257, 513, 1025, 2049, 4097, 8193),
    "context": (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    "entropy": (0, 0.01, 0.1, 0.3, 1, 2, 4),
}
"""Lower edges of the buckets: the token's place in the answer (the prefill's is 0), the tokens
before it, and the entropy in nats of the target's law there (of greedy text, at temperature 1)."""


def cells(rows: Sequence[TraceRow], tables: Mapping[str, Tensor]) -> dict[str, NDArray[np.float64]]:
    """Sums of each quantity's [B, T] table by bucket, [B, P, Q] for every dimension.

    Place 0 is left out: the prefill's token is no decoding.
    """
    value_BTQ = torch.stack([tables[name].double() for name in QUANTITIES], -1)
    num_places = value_BTQ.shape[1]
    found: dict[str, NDArray[np.float64]] = {}
    for name, edges in EDGES.items():
        index_BT = torch.zeros(len(rows), num_places, dtype=torch.long)
        for b, row in enumerate(rows):
            index_BT[b, : row.num_tokens] = _bucket(_measure(row, name), edges)
        sums_BPQ = torch.zeros(len(rows), len(edges), len(QUANTITIES), dtype=torch.float64)
        index_BTQ = index_BT[:, 1:, None].expand(-1, -1, len(QUANTITIES))
        found[name] = sums_BPQ.scatter_add_(1, index_BTQ, value_BTQ[:, 1:]).numpy()
    return found


def bucket_name(edges: Sequence[float], index: int) -> str:
    """How a bucket is written: its bounds, the upper one not included."""
    if index + 1 == len(edges):
        return f"{edges[index]:g} up"
    return f"{edges[index]:g} to {edges[index + 1]:g}"


def _measure(row: TraceRow, dimension: str) -> Tensor:
    """What each place of a row has of a dimension."""
    place_N = torch.arange(row.num_tokens)
    if dimension == "place":
        return place_N
    return place_N + row.prompt_length if dimension == "context" else row.entropy_N


def _bucket(value_N: Tensor, edges: Sequence[float]) -> Tensor:
    edges_P = torch.tensor(edges, dtype=torch.float64)
    return (torch.bucketize(value_N.double(), edges_P, right=True) - 1).clamp(min=0)
