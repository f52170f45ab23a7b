"""Packing and batches: nothing split or lost, a pure function of the seed, equal over any world."""

import pytest
import torch
import torch.nn.functional as F

from outrider.data.batches import Batches, StoredRow
from outrider.data.chat import Template, encode
from outrider.data.packing import pack, shuffled_packs
from outrider.data.rows import Row
from outrider.data.states import OnlineFeatures

END = 2


class Plain:
    """Rows whose features tell where they come from."""

    def __init__(self, rows):
        self.stored = [
            StoredRow(
                ids, mask, torch.stack([ids, 2 * ids], -1).double(), 3.0 * ids.double()[:, None]
            )
            for ids, mask in rows
        ]
        self.lengths = [len(ids) for ids, _ in rows]
        self.row_ids = [f"row-{i}" for i in range(len(rows))]

    def __len__(self):
        return len(self.stored)

    def rows(self, indices):
        return [self.stored[index] for index in indices]


def random_rows(count, longest=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest + 1, (count,), generator=generator).tolist()
    return [
        (torch.randint(1, 90, (n,), generator=generator), torch.rand(n, generator=generator) < 0.5)
        for n in lengths
    ]


def documents(batch):
    """Every document of a batch as (ids, mask, positions, aux, last)."""
    found = []
    for row in range(len(batch.ids_BT)):
        for number in range(1, int(batch.document_BT[row].max()) + 1):
            at = batch.document_BT[row] == number
            found.append(
                (
                    batch.ids_BT[row, at].tolist(),
                    batch.mask_BT[row, at].tolist(),
                    batch.position_BT[row, at].tolist(),
                    batch.aux_BTF[row, at],
                    batch.last_BTH[row, at],
                )
            )
    return found


def epoch(batches, number, world=1):
    return [
        document
        for index in range(batches.epoch_length())
        for rank in range(world)
        for document in documents(batches.batch(number, index, rank, world))
    ]


def slow_first_fit(lengths, size):
    packs = []
    for row in range(len(lengths)):
        for places in packs:
            if sum(lengths[other] for other in places) + lengths[row] <= size:
                places.append(row)
                break
        else:
            packs.append([row])
    return packs


def test_pack_is_first_fit_and_loses_nothing():
    for seed in range(20):
        lengths = [len(ids) for ids, _ in random_rows(1 + 3 * seed, seed=seed)]
        packs = pack(lengths, 16)
        assert packs == slow_first_fit(lengths, 16)
        assert sorted(row for places in packs for row in places) == list(range(len(lengths)))
        assert all(sum(lengths[row] for row in places) <= 16 for places in packs)
    assert pack([], 16) == []
    assert pack([16], 16) == [[0]]


def test_pack_fills_well():
    lengths = [len(ids) for ids, _ in random_rows(400, longest=200, seed=1)]
    assert sum(lengths) / (512 * len(pack(lengths, 512))) > 0.94


def test_packs_mix_rows_of_all_lengths():
    # Two kinds, one of short and one of long rows, given one after the other.
    lengths = [20] * 300 + [90] * 300
    packs = shuffled_packs(lengths, 512, seed=3)
    assert sorted(row for places in packs for row in places) == list(range(600))
    assert shuffled_packs(lengths, 512, seed=4) != packs
    mixed = sum(len({lengths[row] for row in places}) == 2 for places in packs)
    assert mixed > 0.8 * len(packs)
    assert sum(len({lengths[row] for row in places}) == 2 for places in pack(lengths, 512)) <= 1


@pytest.mark.parametrize("length", [0, 17])
def test_pack_never_splits_a_row(length):
    with pytest.raises(ValueError, match=rf"row 1 has {length} tokens, a pack holds 1 to 16"):
        pack([5, length], 16)


def test_an_epoch_holds_every_row_once_with_its_features():
    rows = random_rows(37)
    batches = Batches(Plain(rows), size=16, batch_size=3, seed=5)
    found = epoch(batches, 0)
    assert sorted(ids for ids, *_ in found) == sorted(ids.tolist() for ids, _ in rows)
    masks = {tuple(ids.tolist()): mask.tolist() for ids, mask in rows}
    for ids, mask, positions, aux, last in found:
        assert mask == masks[tuple(ids)]
        assert positions == list(range(len(ids)))
        assert torch.equal(aux, torch.tensor([[i, 2 * i] for i in ids]).double())
        assert torch.equal(last[:, 0], 3.0 * torch.tensor(ids).double())


def test_padding_is_document_zero_and_holds_nothing():
    batch = Batches(Plain(random_rows(5)), size=16, batch_size=4, seed=0).batch(0, 0)
    padding = batch.document_BT == 0
    assert padding.any()
    for tensor in (batch.ids_BT, batch.mask_BT, batch.position_BT, batch.aux_BTF, batch.last_BTH):
        assert not tensor[padding].any()
    assert batch.num_tokens == int((~padding).sum())
    starts = batch.position_BT == 0
    assert (starts & ~padding).sum() == sum(len(names) for names in batch.row_ids)


def test_batches_are_a_pure_function_of_seed_epoch_and_index():
    rows = random_rows(37)
    one, two = (Batches(Plain(rows), size=16, batch_size=3, seed=5) for _ in range(2))
    assert [x[0] for x in documents(one.batch(3, 2))] == [x[0] for x in documents(two.batch(3, 2))]
    order = [[x[0] for x in epoch(one, number)] for number in range(3)]
    assert order[0] != order[1] != order[2]
    assert sorted(order[0]) == sorted(order[1])
    other = Batches(Plain(rows), size=16, batch_size=3, seed=6)
    assert [x[0] for x in epoch(other, 0)] != order[0]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_union_over_ranks_is_the_same_for_any_world(world):
    batches = Batches(Plain(random_rows(37)), size=16, batch_size=3, seed=5)
    for index in range(batches.epoch_length()):
        whole = sorted(x[0] for x in documents(batches.batch(1, index)))
        parts = [batches.batch(1, index, rank, world) for rank in range(world)]
        assert sorted(x[0] for part in parts for x in documents(part)) == whole
        assert len({part.ids_BT.shape for part in parts}) == 1
        assert all(len(part.row_ids) == len(part.ids_BT) for part in parts)


def test_the_last_batch_may_be_smaller_and_is_kept():
    batches = Batches(Plain(random_rows(37)), size=16, batch_size=4, seed=5)
    sizes = [len(batches.batch(0, index).ids_BT) for index in range(batches.epoch_length())]
    assert sum(sizes) == len(batches.packs)
    assert sizes[:-1] == [4] * (len(sizes) - 1)
    assert sizes[-1] == len(batches.packs) % 4 or sizes[-1] == 4
    assert 0.8 < batches.fill() <= 1


def test_a_batch_moves_as_a_whole():
    batch = Batches(Plain(random_rows(5)), size=16, batch_size=4, seed=0).batch(0, 0)
    moved = batch.to("meta")
    assert moved.ids_BT.device.type == moved.last_BTH.device.type == "meta"
    assert moved.row_ids == batch.row_ids


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.batch(0, 99), "index is 99; an epoch has batches 0 to"),
        (lambda b: b.batch(0, 0, rank=2, world=2), "rank is 2 of world 2"),
        (lambda b: Batches(b.source, size=16, batch_size=0, seed=0), "batch_size is 0"),
        (lambda b: Batches(b.source, size=8, batch_size=1, seed=0), "a pack holds 1 to 8"),
        (lambda b: Batches(Plain([]), size=8, batch_size=1, seed=0), "no rows"),
    ],
)
def test_wrong_calls_are_refused(call, message):
    batches = Batches(Plain(random_rows(9)), size=16, batch_size=3, seed=5)
    with pytest.raises(ValueError, match=message):
        call(batches)


def labels(mask, document, num_steps):
    """(row, step) pairs in the loss by the alignment rule, straight from its words."""
    return {
        (t, k)
        for k in range(num_steps)
        for t in range(len(mask) - k - 2)
        if mask[t + k + 2] and document[t] > 0
        if all(document[t + j] == document[t] for j in range(k + 3))
    }


def test_c05_packed_labels_are_those_of_each_row_alone():
    one = ([5, 6, 7, 8, END, 9], [0, 0, 0, 0, 1, 0])  # an answer of one token
    whole = ([5, 6, 7, 8, END], [1, 1, 1, 1, 1])  # an answer from position 0
    last = ([5, 6, 7, 8], [0, 0, 1, 1])  # an answer to the last position
    rows = [(torch.tensor(ids), torch.tensor(mask).bool()) for ids, mask in (one, whole, last)]
    batch = Batches(Plain(rows), size=24, batch_size=1, seed=0).batch(0, 0)
    mask, document = batch.mask_BT[0].tolist(), batch.document_BT[0].tolist()
    packed = labels(mask, document, 3)
    alone = 0
    for number, name in enumerate(batch.row_ids[0], start=1):
        ids, row_mask = rows[int(name.split("-")[1])]
        start = document.index(number)
        expected = labels(row_mask.tolist(), [1] * len(ids), 3)
        assert {(t - start, k) for t, k in packed if document[t] == number} == expected
        assert all(t + k + 2 < start + len(ids) for t, k in packed if document[t] == number)
        alone += len(expected)
    assert len(packed) == alone == 3 + (3 + 2 + 1) + (2 + 1)
    without_documents = labels(mask, [1] * len(mask), 3)
    assert without_documents != packed  # the planted leak over a document's end is seen


def test_c04_rows_of_one_and_three_answers_cost_the_same_alone_or_together(make_target):
    target = make_target(family="llama")
    target.model.double()
    using = Template(tokenizer=target.tokenizer, eos_ids=target.eos_ids)
    talk = [
        {"role": role, "content": text}
        for role, text in zip(
            ["user", "assistant"] * 3, ["Hi", "Paris", "a", "yes", "b", "no."], strict=True
        )
    ]
    encoded = [encode(talk[:2], using)[0], encode(talk, using)[0]]
    rows = [
        Row(torch.tensor(x.ids), torch.tensor(x.mask).bool(), str(i), "chat", x.mask.index(1))
        for i, x in enumerate(encoded)
    ]

    def losses(batch):
        """Summed next-token loss of each document over supervised tokens."""
        hidden = batch.last_BTH.reshape(-1, batch.last_BTH.shape[-1])
        logits = target.logits(hidden).reshape(*batch.ids_BT.shape, -1)
        found = {}
        for row, names in enumerate(batch.row_ids):
            for number, name in enumerate(names, start=1):
                at = (batch.document_BT[row] == number).nonzero()[:, 0]
                each = F.cross_entropy(
                    logits[row, at[:-1]], batch.ids_BT[row, at[1:]], reduction="none"
                )
                found[name] = float((each * batch.mask_BT[row, at[1:]]).sum())
        return found

    source = OnlineFeatures(target, rows, layers=())
    size = sum(source.lengths) + 4
    together = Batches(source, size=size, batch_size=1, seed=0).batch(0, 0)
    ends = (together.ids_BT == END) & together.mask_BT
    assert int(ends.sum()) == 4
    for row in rows:
        alone = Batches(OnlineFeatures(target, [row], layers=()), size=size, batch_size=1, seed=0)
        assert losses(alone.batch(0, 0))[row.row_id] == pytest.approx(
            losses(together)[row.row_id], abs=1e-9
        )
