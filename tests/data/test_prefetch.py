"""Batches read ahead are the same batches."""

import threading

import pytest
import torch

from outrider.data.batches import Batches, StoredRow
from outrider.data.prefetch import Prefetched


class Memory:
    """Rows in memory that remember who read them."""

    def __init__(self, count=20):
        self.lengths = [6 + index % 5 for index in range(count)]
        self.row_ids = [f"row{index}" for index in range(count)]
        self.readers = set()
        self.broken = None

    def __len__(self):
        return len(self.lengths)

    def rows(self, indices):
        self.readers.add(threading.current_thread().name)
        if self.broken in indices:
            raise ValueError(f"row {self.broken} is broken")
        return [
            StoredRow(
                torch.full((self.lengths[i],), i),
                torch.ones(self.lengths[i]).bool(),
                torch.full((self.lengths[i], 4), float(i)),
                torch.full((self.lengths[i], 2), float(i)),
            )
            for i in indices
        ]


@pytest.fixture
def batches():
    return Batches(Memory(), size=16, batch_size=2, seed=3)


def same(one, other):
    assert one.row_ids == other.row_ids
    for name in ("ids_BT", "mask_BT", "document_BT", "aux_BTF", "last_BTH"):
        assert torch.equal(getattr(one, name), getattr(other, name))


def test_in_order_out_of_order_and_over_the_epochs_end(batches):
    ahead = Prefetched(batches)
    length = ahead.epoch_length()
    order = [(0, index) for index in range(length)] + [(1, 0), (1, 3), (0, 1), (1, 4)]
    for place in order:
        same(ahead.batch(*place), batches.batch(*place))
    same(ahead.batch(1, 2, 1, 2), batches.batch(1, 2, 1, 2))


def test_what_follows_is_read_before_it_is_asked_for(batches):
    ahead = Prefetched(batches, depth=2)
    ahead.batch(0, 0)
    futures = list(ahead._ahead.items())
    assert [place for place, _ in futures] == [(0, 1, 0, 1), (0, 2, 0, 1)]
    same(futures[1][1].result(timeout=30), batches.batch(0, 2))
    same(ahead.batch(0, 1), batches.batch(0, 1))
    assert any(name.startswith("prefetch") for name in batches.source.readers)


def read_all(ahead):
    for index in range(ahead.epoch_length()):
        ahead.batch(0, index)


def test_a_broken_row_stops_the_step_that_needs_it(batches):
    ahead = Prefetched(batches)
    batches.source.broken = batches.packs[0][0]
    with pytest.raises(ValueError, match="is broken"):
        read_all(ahead)


def test_nothing_ahead_is_refused(batches):
    with pytest.raises(ValueError, match="depth is 0; read at least 1 batch ahead"):
        Prefetched(batches, depth=0)
