"""Rows from every kind of source, the length policy, refusals by number, and counts that add up."""

import gzip
import json
import lzma
from pathlib import Path

import datasets
import pytest
import torch

from outrider.data.rows import Counts, Reading, read_rows
from outrider.data.sources import records

END = 2


def chat(*contents):
    return [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]


def write(path, rows):
    lines = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(lines + "\n")
    return str(path)


def adds_up(counts: Counts) -> bool:
    outcomes = counts.kept + counts.cut + counts.dropped + counts.refused
    return counts.read + counts.extra_turns == outcomes


def answers(rows, target):
    return [target.tokenizer.decode(row.ids[row.mask].tolist()) for row in rows]


def test_c01_pre_rendered_rows_of_another_template_refuse_and_show_one(tmp_path, target):
    right = [
        {"text": f"<|turn|>user\nHi<|end|>\n<|turn|>assistant\nline {i}<|end|>\n"} for i in "abcd"
    ]
    rows, _ = read_rows(write(tmp_path / "right.jsonl", right), target, Reading())
    assert answers(rows, target) == [f"line {i}<|end|>" for i in "abcd"]
    wrong = [{"text": f"### User: Hi\n### Bot: line {i}\n"} for i in "abcd"]
    with pytest.raises(ValueError, match="no supervised token") as caught:
        read_rows(write(tmp_path / "wrong.jsonl", wrong), target, Reading())
    assert "4 of 4 rows" in str(caught.value)
    assert "### Bot: line a" in str(caught.value)
    assert "give the rows as messages" in str(caught.value)


def test_a_few_rows_without_supervision_are_listed_and_the_rest_trains(tmp_path, target):
    good = {"messages": chat("Hello", "Paris")}
    empty = {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}
    source = write(tmp_path / "rows.jsonl", [good] * 12 + [empty])
    rows, counts = read_rows(source, target, Reading())
    assert len(rows) == 12
    assert counts.unsupervised == [13]
    assert "row 13 refused: no supervised token" in str(counts)
    with pytest.raises(ValueError, match="1 of 13 rows have no supervised token"):
        read_rows(source, target, Reading(max_unsupervised=0.05))


def test_c02_every_odd_row_is_refused_by_number_and_the_others_train(tmp_path, make_target):
    target = make_target("strict")
    source = write(
        tmp_path / "rows.jsonl",
        [
            {"messages": chat("Hello", "Paris")},
            {"messages": [{"role": "system", "content": "x"}, *chat("a", "b")]},
            {"messages": [{"role": "assistant", "content": "hi"}, *chat("a", "b")]},
            {"messages": [*chat("a"), *chat("a", "b")]},
            {"messages": chat("a", "")},
            {"messages": chat("a")},
            "{broken",
            {"messages": "text"},
            {"other": 1},
            {"messages": chat("why", "yes, no.")},
        ],
    )
    rows, counts = read_rows(source, target, Reading())
    assert answers(rows, target) == ["Paris<|end|>", "yes, no.<|end|>"]
    assert [row.row_id for row in rows] == ["1", "10"]
    assert [refusal.number for refusal in counts.refusals] == [2, 3, 4, 5, 6, 7, 8, 9]
    reasons = dict(counts.refusals)
    assert "no system role" in reasons[2]
    assert "alternate" in reasons[4]
    assert "empty answer" in reasons[5]
    assert "not JSON" in reasons[7]
    assert "has fields ['other']" in reasons[9]
    assert adds_up(counts)
    assert "10 read, 2 kept, 0 cut, 0 dropped, 8 refused" in str(counts)
    assert "and 3 more" in str(counts)


def test_c02_a_file_with_nothing_left_is_refused(tmp_path, target):
    source = write(tmp_path / "rows.jsonl", [{"messages": chat("a")}])
    with pytest.raises(ValueError, match="no row is left to train on"):
        read_rows(source, target, Reading())


def test_c03_turns_of_one_conversation_are_counted_and_named(tmp_path, make_target):
    target = make_target("strips_earlier_thinking")
    talk = chat("Hello", "<think>first</think>yes", "why", "<think>then</think>no.")
    source = write(tmp_path / "rows.jsonl", [{"id": "talk", "kind": "chat", "messages": talk}])
    rows, counts = read_rows(source, target, Reading())
    assert [row.row_id for row in rows] == ["talk#1", "talk#3"]
    assert {row.kind for row in rows} == {"chat"}
    assert (counts.read, counts.extra_turns, counts.kept) == (1, 1, 2)
    assert adds_up(counts)
    for row, answer in zip(rows, (talk[1], talk[3]), strict=True):
        assert target.tokenizer.decode(row.ids[row.mask].tolist()) == answer["content"] + "<|end|>"


def test_c13_ids_that_the_tokenizer_cannot_make_are_refused(tmp_path, make_model, make_tokenizer):
    from outrider.data.target import Target

    target = Target.from_model(make_model(vocab_size=500), make_tokenizer())
    size = target.tokenizer_size
    assert size < target.vocab_size
    good = {"input_ids": [5, 6, size - 1], "loss_mask": [0, 0, 1]}
    rows = [good, good | {"input_ids": [5, 6, size]}, good | {"input_ids": [5, -1, 6]}]
    kept, counts = read_rows(write(tmp_path / "rows.jsonl", rows), target, Reading())
    assert len(kept) == 1
    reasons = dict(counts.refusals)
    assert f"token id {size} at position 2 is outside" in reasons[2]
    assert "token id -1 at position 1" in reasons[3]


def lengths_file(tmp_path, most):
    """Rows at most - 1, most, most + 1 tokens, and one whose answer begins after the cut."""
    rows = []
    for length, start in ((most - 1, 3), (most, 3), (most + 1, 3), (most + 6, most)):
        mask = [0] * start + [1] * (length - start)
        ids = [10 + i for i in range(length - 1)] + [END]
        rows.append({"input_ids": ids, "loss_mask": mask})
    return write(tmp_path / "rows.jsonl", rows)


def test_c19_cut_counts_and_never_an_empty_mask(tmp_path, target):
    source = lengths_file(tmp_path, 12)
    rows, counts = read_rows(source, target, Reading(max_length=12))
    assert [len(row) for row in rows] == [11, 12, 12]
    assert (counts.kept, counts.cut, counts.dropped, counts.refused) == (2, 1, 1, 0)
    assert adds_up(counts)
    assert all(row.mask[2:].any() for row in rows)
    assert counts.tokens == 35
    assert counts.supervised == 26
    assert counts.ends == {END: 2}  # the cut row lost its end
    assert "turn ends trained: <|end|> 2 times" in str(counts)
    assert "2 kept, 1 cut, 1 dropped" in str(counts)


def test_c19_drop_counts(tmp_path, target):
    rows, counts = read_rows(
        lengths_file(tmp_path, 12), target, Reading(max_length=12, policy="drop")
    )
    assert [len(row) for row in rows] == [11, 12]
    assert (counts.kept, counts.cut, counts.dropped) == (2, 0, 2)
    assert adds_up(counts)


def test_c19_a_shorter_length_than_before_is_obeyed(tmp_path, target):
    rows, counts = read_rows(lengths_file(tmp_path, 12), target, Reading(max_length=8))
    assert [len(row) for row in rows] == [8, 8, 8]
    assert counts.cut == 3
    assert counts.dropped == 1


def test_reading_stops_at_the_token_limit(tmp_path, target):
    row = {"input_ids": list(range(10, 20)), "loss_mask": [0] * 5 + [1] * 5}
    source = write(tmp_path / "rows.jsonl", [row] * 9)
    rows, counts = read_rows(source, target, Reading(limit_tokens=25))
    assert len(rows) == counts.read == 3
    assert counts.limit_reached
    assert adds_up(counts)
    assert "stopped at the token limit" in str(counts)


def test_forms_give_the_same_row(tmp_path, target):
    talk = chat("Hello", "Paris", "why", "yes.")
    speakers = {"user": "human", "assistant": "gpt"}
    (reference,), _ = read_rows(
        write(tmp_path / "a.jsonl", [{"messages": talk}]), target, Reading()
    )
    forms = {
        "sharegpt": {
            "conversations": [{"from": speakers[m["role"]], "value": m["content"]} for m in talk]
        },
        "ids": {"input_ids": reference.ids.tolist(), "loss_mask": reference.mask.int().tolist()},
        "text": {"text": target.tokenizer.decode(reference.ids.tolist())},
        "tools": {"messages": talk, "tools": "[]"},
    }
    for name, record in forms.items():
        (row,), _ = read_rows(write(tmp_path / f"{name}.jsonl", [record]), target, Reading())
        assert torch.equal(row.ids, reference.ids), name
        assert torch.equal(row.mask, reference.mask), name
        assert row.prompt_length == int(reference.mask.int().argmax())


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"input_ids": [5, 6, 7]}, "without loss_mask"),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1]}, "2 entries for 3 input_ids"),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 2]}, "one 0 or 1 per token"),
        ({"input_ids": "5", "loss_mask": [1]}, "not a list of integers"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "from 'bot'; known are human"),
        ({"prompt_ids": [5, 6], "answer_ids": []}, "answer_ids is empty"),
        ([1, 2], "not a JSON object"),
    ],
)
def test_malformed_rows_are_refused_with_the_remedy(tmp_path, target, record, reason):
    good = {"messages": chat("Hello", "Paris")}
    source = write(tmp_path / "rows.jsonl", [good, record])
    _, counts = read_rows(source, target, Reading())
    assert counts.refusals[0].number == 2
    assert reason in counts.refusals[0].reason


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.jsonl.xz"])
def test_json_lines_plain_and_packed(tmp_path, name):
    rows = [{"messages": chat("Hello", "\u00e9")}, {"messages": chat("why", "no.")}]
    assert list(records(write(tmp_path / name, rows))) == rows


def test_sources_of_the_datasets_library(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"messages": chat("Hello", "Paris")}, {"messages": chat("why", "no.")}]
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(tmp_path / "saved")
    assert list(records(str(tmp_path / "saved"))) == rows
    datasets.DatasetDict({"test": made}).save_to_disk(tmp_path / "parts")
    assert list(records(f"{tmp_path / 'parts'}:test")) == rows
    made.to_parquet(tmp_path / "rows.parquet")
    assert list(records(str(tmp_path / "rows.parquet"))) == rows
    Path(tmp_path / "rows.json").write_text(json.dumps(rows))
    assert list(records(str(tmp_path / "rows.json"))) == rows


def test_sources_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="neither 'demo'"):
        list(records("nosuch"))
    for name in ("nosuch.jsonl", "no/such.jsonl.gz", "no/such.parquet"):
        with pytest.raises(ValueError, match="there is no such file"):
            list(records(name))


@pytest.mark.parametrize(
    "bad",
    [
        {"messages": chat("Hello", "Paris"), "tools": "not json"},
        {"messages": [*chat("Hello"), {"role": "assistant", "tool_calls": ["x"]}]},
        {"conversations": ["a", "b"]},
        {"conversations": None},
        {"conversations": [{"from": ["human"], "value": "w3"}]},
        {"messages": [], "prompt_ids": [4, 5, 6], "answer_ids": [7, 8]},
        {"messages": "hi", "prompt_ids": [4, 5, 6], "answer_ids": [7, 8]},
        {"text": "\ud800 w3"},
        {"input_ids": [True, False, True, True], "loss_mask": [0, 0, 1, 1]},
    ],
)
def test_one_malformed_row_is_refused_by_number_and_the_rest_trains(tmp_path, target, bad):
    good = {"messages": chat("Hello", "Paris")}
    source = write(tmp_path / "rows.jsonl", [bad, good, good, good])
    rows, counts = read_rows(source, target, Reading(max_unsupervised=1.0))
    assert len(rows) == 3
    assert [refusal.number for refusal in counts.refusals] == [1]
    assert adds_up(counts)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_length": 2}, "max_length is 2"),
        ({"policy": "split"}, "choose 'cut' or 'drop'"),
        ({"limit_tokens": 0}, "limit_tokens is 0"),
        ({"max_unsupervised": 2.0}, "it is a share"),
    ],
)
def test_settings_are_checked(setting, message):
    with pytest.raises(ValueError, match=message):
        Reading(**setting)


def test_targets_without_tokenizer_take_token_rows_only(tmp_path, make_target):
    target = make_target(None)
    row = {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}
    rows, _ = read_rows(write(tmp_path / "a.jsonl", [row]), target, Reading())
    assert len(rows) == 1
    with pytest.raises(ValueError, match="the target has no tokenizer"):
        read_rows(write(tmp_path / "b.jsonl", [{"messages": chat("a", "b")}]), target, Reading())


def test_damaged_files_are_named(tmp_path):
    rows = [{"messages": chat("Hello", "Paris " * 400)}] * 50
    for name in ("rows.jsonl.gz", "rows.jsonl.xz"):
        path = tmp_path / name
        write(path, rows)
        path.write_bytes(path.read_bytes()[:-30])
        with pytest.raises(ValueError, match=f"{name}' cannot be read to its end"):
            list(records(str(path)))
    for name in ("rows.json", "rows.parquet"):
        path = tmp_path / name
        path.write_bytes(b"[{ this is neither")
        with pytest.raises(ValueError, match=f"{name}' cannot be read to its end"):
            list(records(str(path)))


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_message_without_content_is_refused(tmp_path, target, role):
    good = {"messages": chat("Hello", "Paris")}
    bad = {"messages": [{"role": role, "content": None}, *chat("Hello", "Paris")]}
    source = write(tmp_path / "rows.jsonl", [good, bad, good])
    _, counts = read_rows(source, target, Reading(max_unsupervised=1.0))
    (refusal,) = counts.refusals
    assert refusal.number == 2
    assert f"message 0 ({role}) has no content" in refusal.reason
