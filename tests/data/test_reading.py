"""Mixes, folders, workers, the cache and the report: the same rows whichever way they are read."""

import json
import subprocess
import sys
from dataclasses import replace

import datasets
import pytest
import torch

from outrider.data import rowcache, rows, sources
from outrider.data.mixture import Mixture, parts_of
from outrider.data.rows import Reading, read_rows
from outrider.data.sources import records


def talk(number):
    return [
        {"role": "user", "content": f"Hello {number}"},
        {"role": "assistant", "content": f"Paris {number}"},
    ]


def write(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


def numbered(path, count, **extra):
    return write(path, [{"messages": talk(number), **extra} for number in range(count)])


def same(ours, theirs):
    assert len(ours.rows) == len(theirs.rows)
    for one, other in zip(ours.rows, theirs.rows, strict=True):
        assert (one.row_id, one.kind, one.prompt_length) == (
            other.row_id,
            other.kind,
            other.prompt_length,
        )
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.mask, other.mask)
    assert ours.counts == theirs.counts


def test_a_mix_keeps_its_shares_at_every_moment(tmp_path):
    names = [numbered(tmp_path / f"{name}.jsonl", 60) for name in "abc"]
    mixture = Mixture(f"{names[0]}=5,{names[1]}=3,{names[2]}=2")
    taken = dict.fromkeys(names, 0)
    for total, one in enumerate(mixture, start=1):
        taken[one.source] += 1
        assert one.number == taken[one.source]
        for name, share in zip(names, (0.5, 0.3, 0.2), strict=True):
            assert abs(taken[name] - share * total) <= 1
    assert mixture.ran_out == names[0]
    assert taken == {names[0]: 60, names[1]: 36, names[2]: 24}


def test_a_mix_is_the_same_again_and_a_limit_takes_its_beginning(tmp_path, target):
    a, b = numbered(tmp_path / "a.jsonl", 20), numbered(tmp_path / "b.jsonl", 20)
    whole = read_rows(f"{a}=0.7,{b}=0.3", target, Reading())
    same(whole, read_rows(f"{a}=0.7,{b}=0.3", target, Reading()))
    part = read_rows(f"{a}=0.7,{b}=0.3", target, Reading(limit_tokens=120))
    assert [row.row_id for row in part.rows] == [row.row_id for row in whole.rows][: len(part.rows)]
    assert part.counts.limit_reached
    assert "stopped at the token limit" in str(part.counts)
    told = str(whole.counts)
    assert f"{a} ran out and ended the mix" in told
    assert f"rows by source: {a} 20, {b} 9" in told


def test_refusals_in_a_mix_name_their_source(tmp_path, target):
    a = numbered(tmp_path / "a.jsonl", 3)
    b = write(tmp_path / "b.jsonl", [{"messages": talk(1)}, {"messages": []}, {"x": 1}])
    told = str(read_rows(f"{a}=1,{b}=1", target, Reading()).counts)
    assert f"row 2 of {b} refused: no assistant message" in told
    assert f"row 3 of {b} refused: has fields" in told


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a=1,b=0", r"the weight of 'b' is 0\.0; give a finite number above 0, or leave that"),
        ("a=-1,b=1", "the weight of 'a' is -1.0"),
        ("a=1,b=nan", "the weight of 'b' is nan"),
        (f"a={'9' * 400},b=1", "the weight of 'a' is inf"),
        ("a=1,a=2", r"names a source twice \(a, a\)"),
        ("a=1,b", "'b' has no weight; give every source of a mix its weight"),
        ("a=1,b=much", "'b=much' has no weight"),
        ("a=1,", "'' has no weight"),
    ],
)
def test_mixes_that_make_no_sense_are_refused(source, message):
    with pytest.raises(ValueError, match=message):
        parts_of(source)


def test_what_is_no_mix_is_one_source():
    for name in ("demo:heldout", "owner/name:config:split", "a, b.jsonl", "a=b.jsonl"):
        assert [part.name for part in parts_of(name)] == [name]


def test_weights_are_numbers_of_any_spelling():
    assert parts_of("a=1e-3, b=b.jsonl=.5") == [("a", 1e-3), ("b=b.jsonl", 0.5)]


def test_files_of_a_mix_without_weights_and_one_under_two_paths_are_refused(tmp_path):
    a, b = numbered(tmp_path / "a.jsonl", 3), numbered(tmp_path / "b.jsonl", 3)
    with pytest.raises(ValueError, match=r"a.jsonl' has no weight"):
        parts_of(f"{a},{b}")
    other = f"{tmp_path}/../{tmp_path.name}/./a.jsonl"
    with pytest.raises(ValueError, match="names a source twice") as caught:
        parts_of(f"{a}=1,{other}=1")
    assert f"({a}, {other})" in str(caught.value)
    (tmp_path / "link.jsonl").symlink_to(a)
    with pytest.raises(ValueError, match="names a source twice"):
        parts_of(f"{a}=1,{tmp_path / 'link.jsonl'}=1")


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_source_without_a_row_is_refused_by_name(tmp_path, target, text):
    """It would have ended the mix after one row of the other."""
    full, empty = numbered(tmp_path / "full.jsonl", 9), tmp_path / "empty.jsonl"
    empty.write_text(text)
    for source in (f"{full}=1,{empty}=1", f"{empty}=0.001,{full}=1", str(empty)):
        with pytest.raises(ValueError, match=r"empty.jsonl' has no row"):
            read_rows(source, target, Reading())


def test_what_ended_a_mix_is_told_where_one_source_alone_gave_rows(tmp_path, target):
    short, long = numbered(tmp_path / "short.jsonl", 2), numbered(tmp_path / "long.jsonl", 9)
    counts = read_rows(f"{short}=1000,{long}=1", target, Reading()).counts
    assert counts.sources == {short: 2}
    assert f"{short} ran out and ended the mix" in str(counts)


def test_folders_of_files_and_json_of_either_kind(tmp_path):
    items = [{"messages": talk(number)} for number in range(4)]
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "a.jsonl", items[:1])
    (folder / "b.json").write_text(json.dumps(items[1:2]))
    write(folder / "c.json", items[2:3])  # one object a line
    datasets.Dataset.from_list(items[3:]).to_parquet(folder / "d.parquet")
    (folder / "notes.txt").write_text("not rows")
    assert list(records(str(folder))) == items
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is a folder with none of"):
        list(records(str(tmp_path / "empty")))
    (tmp_path / "mixed.json").write_text('[{"a": 1}, 5, {"a": "x"}]')
    assert list(records(str(tmp_path / "mixed.json"))) == [
        {"a": 1},
        "not a JSON object",
        {"a": "x"},
    ]


BOM = "\ufeff"


@pytest.mark.parametrize("mark", ["", BOM])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_of_any_layout_has_its_rows(tmp_path, mark, indent):
    path = tmp_path / "rows.json"
    rows = [{"messages": talk(number)} for number in range(3)]
    for content in (
        rows,
        {"data": rows},
        {"version": "1", "tags": ["a"], "none": [], "data": rows},
    ):
        path.write_text(mark + json.dumps(content, indent=indent), encoding="utf-8")
        assert list(records(str(path))) == rows
    for row in (rows[0], {"prompt_ids": [5], "answer_ids": [6]}):
        path.write_text(mark + json.dumps(row, indent=indent), encoding="utf-8")
        assert list(records(str(path))) == [row]
    path.write_text(mark + "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert list(records(str(path))) == rows
    path.rename(tmp_path / "rows.jsonl")
    assert list(records(str(tmp_path / "rows.jsonl"))) == rows


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ({"train": [{"a": 1}], "test": [{"a": 2}]}, 2),
        ({"data": [{"a": 1}, 5]}, 0),
        ({"rows": "none"}, 0),
    ],
)
def test_an_object_without_one_list_of_rows_is_refused_with_a_hint(tmp_path, content, count):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(content, indent=1))
    message = rf"is one object with fields \[.*\], of which {count} hold a list.*or one row a line"
    with pytest.raises(ValueError, match=message):
        list(records(str(path)))


def test_what_arrow_fills_in_does_not_reach_the_template(tmp_path, make_target):
    """Columns of structs give every message every field, and every call every argument."""
    call = {"function": {"name": "clock", "arguments": {"zone": "here"}}}
    other = {"function": {"name": "clock", "arguments": {"hour": 4}}}
    items = [
        {"messages": [talk(1)[0], {"role": "assistant", "content": "x", "tool_calls": [one]}]}
        for one in (call, other)
    ]
    items.append({"messages": talk(3)})
    datasets.Dataset.from_list(items).to_parquet(tmp_path / "rows.parquet")
    target = make_target("tools")
    ours = read_rows(str(tmp_path / "rows.parquet"), target, Reading())
    theirs = read_rows(write(tmp_path / "rows.jsonl", items), target, Reading())
    assert [row.ids.tolist() for row in ours.rows] == [row.ids.tolist() for row in theirs.rows]
    assert "null" not in "".join(target.tokenizer.decode(row.ids.tolist()) for row in ours.rows)


def test_a_split_that_is_not_there_is_named(tmp_path):
    made = datasets.Dataset.from_list([{"messages": talk(1)}])
    datasets.DatasetDict({"test": made}).save_to_disk(tmp_path / "parts")
    with pytest.raises(ValueError, match="has no split 'train'; it has test"):
        list(records(str(tmp_path / "parts")))


def test_the_hub_is_streamed_and_its_faults_are_named(monkeypatch):
    asked = []

    def load(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        if name == "no/such":
            raise FileNotFoundError("no/such")
        return iter([{"messages": talk(1), "extra": None}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(records("org/set:part:test")) == [{"messages": talk(1)}]
    assert list(records("org/set:test")) == list(records("org/set")) == [{"messages": talk(1)}]
    assert asked == [
        ("org/set", "part", "test", True),
        ("org/set", None, "test", True),
        ("org/set", None, "train", True),
    ]
    with pytest.raises(ValueError, match="does not load from the Hub"):
        list(records("no/such"))


def test_workers_give_the_rows_of_one_process(tmp_path, target):
    items = [{"id": str(number % 150), "messages": talk(number)} for number in range(200)]
    items[7] = {"messages": []}
    items[70] = {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1], "kind": "ids"}
    source = write(tmp_path / "rows.jsonl", items)
    for limit in (None, 900):
        alone = read_rows(source, target, Reading(limit_tokens=limit))
        same(read_rows(source, target, Reading(limit_tokens=limit, workers=2)), alone)


def test_faults_of_the_whole_data_leave_the_workers(tmp_path, target):
    source = numbered(tmp_path / "rows.jsonl", 3)
    bare = replace(target, tokenizer=None)
    with pytest.raises(ValueError, match="the target has no tokenizer"):
        read_rows(source, bare, Reading(workers=2))


def test_the_cache_gives_the_same_rows_and_misses_when_anything_changes(
    tmp_path, target, make_target, monkeypatch
):
    source = numbered(tmp_path / "rows.jsonl", 5, kind="qa")
    reading = Reading(cache=tmp_path / "cache")
    read = 0
    real = rows._read

    def counted(*args):
        nonlocal read
        read += 1
        return real(*args)

    monkeypatch.setattr(rows, "_read", counted)
    first = read_rows(source, target, reading)
    same(read_rows(source, target, reading), first)
    same(read_rows(source, target, replace(reading, workers=2)), first)
    assert read == 1
    changes = [
        (target, replace(reading, max_length=400)),
        (target, replace(reading, policy="drop")),
        (target, replace(reading, limit_tokens=20)),
        (target, replace(reading, template_options={"mode": 1})),
        (make_target("strict"), reading),
        (replace(target, eos_ids=(2, 5)), reading),
    ]
    for number, (other, changed) in enumerate(changes, start=2):
        read_rows(source, other, changed)
        assert read == number
    numbered(tmp_path / "rows.jsonl", 5, kind="qb")
    assert {row.kind for row in read_rows(source, target, reading).rows} == {"qb"}
    assert read == 8
    monkeypatch.setattr(rowcache, "_source", lambda name: b"other code")
    read_rows(source, target, reading)
    assert read == 9


@pytest.mark.parametrize("content", [b"", b"\0" * 900, (2).to_bytes(8, "little") + b"{}"])
def test_a_damaged_cache_file_is_read_again(content, tmp_path, target):
    source, reading = numbered(tmp_path / "rows.jsonl", 5), Reading(cache=tmp_path / "cache")
    first = read_rows(source, target, reading)
    (path,) = (tmp_path / "cache").glob("*.safetensors")
    good = path.read_bytes()
    path.write_bytes(content)
    same(read_rows(source, target, reading), first)
    assert path.read_bytes() == good


def test_a_cache_without_room_is_told_and_leaves_nothing(tmp_path, target, make_disk):
    source, disk = numbered(tmp_path / "rows.jsonl", 500), make_disk("8k")
    with pytest.raises(ValueError, match=r"cannot be written: .*No space left on device"):
        read_rows(source, target, Reading(cache=disk.path / "cache"))
    assert not list((disk.path / "cache").iterdir())


def test_half_a_cache_file_is_read_again(tmp_path, target):
    source, reading = numbered(tmp_path / "rows.jsonl", 5), Reading(cache=tmp_path / "cache")
    first = read_rows(source, target, reading)
    (path,) = (tmp_path / "cache").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-7])
    same(read_rows(source, target, reading), first)
    same(rowcache.load_read(path), first)


def test_what_cannot_be_hashed_is_not_cached(tmp_path, target, monkeypatch):
    assert sources.source_digest("org/set") is None
    assert sources.source_digest("demo") != sources.source_digest("demo:heldout")
    folder = tmp_path / "folder"
    folder.mkdir()
    numbered(folder / "a.jsonl", 2)
    before = sources.source_digest(str(folder))
    numbered(folder / "a.jsonl", 3)
    assert sources.source_digest(str(folder)) not in (before, None)


def test_the_report_lists_every_row(tmp_path, target):
    source = write(tmp_path / "rows.jsonl", [{"messages": talk(1)}, {"messages": []}])
    read_rows(source, target, Reading()).counts.write(tmp_path / "report.jsonl")
    first, second = map(json.loads, (tmp_path / "report.jsonl").read_text().splitlines())
    assert (first["number"], first["outcome"], first["supervised"] > 0) == (1, "kept", True)
    assert second == {
        "source": source,
        "number": 2,
        "row_id": "2",
        "outcome": "refused",
        "reason": "no assistant message answers a user message",
        "tokens": 0,
        "supervised": 0,
    }


@pytest.mark.slow
def test_the_benchmark_of_reading_runs(tmp_path):
    command = [sys.executable, "-m", "outrider.scripts.rows_bench", "--rows", "200"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "rows a minute" in done.stdout
