"""Records that stand for a large source: which ones, how many, and that none is favoured."""

import json
from collections import Counter

import pytest

from outrider.data.mixture import Mixture
from outrider.data.thinned import is_kept, thin, work


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def talk(size, turns=1):
    said = [{"role": role, "content": "x" * size} for role in ("user", "assistant")]
    return {"messages": said * turns}


def test_small_data_is_taken_whole_in_order(tmp_path):
    source = write(tmp_path / "a.jsonl", [talk(5) | {"id": n} for n in range(50)])
    thinned = thin(source)
    assert (thinned.stride, thinned.read) == (1, 50)
    assert thinned.found == list(Mixture(source))


def test_large_data_is_thinned_to_the_work_allowed_and_no_further(tmp_path):
    source = write(tmp_path / "a.jsonl", [talk(100) for _ in range(1000)])
    each = work(talk(100))
    thinned = thin(source, most_work=100 * each)
    assert (thinned.stride, thinned.read) == (16, 1000)
    numbers = [one.number for one in thinned.found]
    assert numbers == [number for number in range(1, 1001) if is_kept(number, 16)]
    assert numbers[0] == 1
    assert 50 < len(numbers) <= 100
    # Evenly spread: as many in each tenth of the file, and none far from the next.
    assert set(Counter((number - 1) // 100 for number in numbers).values()) <= {5, 6, 7, 8}
    assert max(b - a for a, b in zip(numbers, [*numbers[1:], 1001], strict=True)) < 2.7 * 16


@pytest.mark.parametrize("period", [2, 3, 4, 5, 8, 10, 16])
def test_no_kind_of_row_is_missed_that_comes_at_every_so_many(period):
    kept = [number for number in range(1, 4001) if is_kept(number, 16)]
    counts = Counter(number % period for number in kept)
    assert len(counts) == period
    assert max(counts.values()) < 2 * min(counts.values())


def test_every_source_of_a_mix_is_thinned_alike(tmp_path):
    a = write(tmp_path / "a.jsonl", [talk(100) for _ in range(400)])
    b = write(tmp_path / "b.jsonl", [talk(100) for _ in range(400)])
    thinned = thin(f"{a}=0.5,{b}=0.5", most_work=110 * work(talk(100)))
    counts = Counter(one.source for one in thinned.found)
    assert (thinned.stride, thinned.read) == (8, 800)
    assert counts[a] == counts[b] == sum(is_kept(number, 8) for number in range(1, 401))


def test_one_record_is_left_however_large(tmp_path):
    source = write(tmp_path / "a.jsonl", [talk(100) for _ in range(9)])
    assert [one.number for one in thin(source, most_work=1).found] == [1]


def test_a_limit_of_tokens_ends_the_reading(tmp_path):
    source = write(tmp_path / "a.jsonl", [talk(100) for _ in range(1000)])
    assert 100 * 16 < 16 * thin(source, limit_tokens=1000).read < 1000 * 16
    assert thin(source, limit_tokens=10**6).read == 1000


def test_a_conversation_is_as_much_work_as_its_beginnings_together():
    one, four = work(talk(1000)), work(talk(1000, turns=4))
    assert 0.9 < four / (one * 36 / 3) < 1.1  # 1 + 2 + ... + 8 messages over 1 + 2
    assert work("not a record") == 0
    ids = {"input_ids": [12345] * 1000, "loss_mask": [1] * 1000}
    assert 0 < work(ids) < work({"text": "x" * 5000})
