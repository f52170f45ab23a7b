"""Prompts in every form that rows to train on may have; a row that cannot be asked is named."""

import json

import pytest

from outrider.data.answers import Request, prompt_ids
from outrider.data.prompts import read_requests
from outrider.data.rows import Reading, read_rows
from outrider.data.sampling import Sampling
from outrider.scripts.generate_command import main

ASK = {"role": "user", "content": "Why?"}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_are_read_from_messages_or_text(tmp_path):
    path = tmp_path / "prompts.jsonl"
    question = {"role": "user", "content": "Why?"}
    answer = {"role": "assistant", "content": "Because."}
    rows = [
        {"id": "a", "messages": [question, answer, question, answer], "kind": "qa", "finish": "x"},
        {"prompt": "Who?", "level": 3},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_requests(str(path), Sampling()) == [
        Request("a", [question, answer, question], Sampling(), {"kind": "qa"}),
        Request("row-000002", [{"role": "user", "content": "Who?"}], Sampling(), {"level": 3}),
    ]
    for bad, message in [
        (
            '{"messages": [{"role": "system", "content": "x"}]}',
            "row 1 has no question; give messages",
        ),
        ('{"text": "x"}', "row 1 has no question"),
        ("oops", "row 1 is not JSON"),
        ("", "has no rows; name a file of prompts"),
    ]:
        path.write_text(bad)
        with pytest.raises(ValueError, match=message):
            read_requests(str(path), Sampling())


def test_a_system_field_is_part_of_the_question(tmp_path):
    ask = {"role": "user", "content": "Name a river."}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "a", "messages": [ask], "system": "Be short."}) + "\n")
    (request,) = read_requests(str(path), Sampling())
    assert request.messages == [{"role": "system", "content": "Be short."}, ask]
    assert "system" not in request.extra
    both = [{"role": "system", "content": "Be long."}, ask]
    path.write_text(json.dumps({"id": "a", "messages": both, "system": "Be short."}) + "\n")
    with pytest.raises(ValueError, match="row 1 has a system field and a system message"):
        read_requests(str(path), Sampling())
    path.write_text(json.dumps({"id": "a", "messages": [ask], "system": ["Be short."]}) + "\n")
    with pytest.raises(ValueError, match=r"row 1 has a system field that is \['Be short.'\]"):
        read_requests(str(path), Sampling())


@pytest.mark.parametrize(
    "form",
    [
        {"messages": [ASK]},
        {"messages": None, "prompt": "Why?"},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "x"}]},
        {"conversation": [{"role": "human", "content": "Why?"}]},
        {"prompt": [ASK]},
        {"prompt": [ASK], "completion": [{"role": "assistant", "content": "x"}]},
        {"prompt": "Why?", "completion": "x", "id": None},
    ],
)
def test_forms_that_training_takes_are_the_same_question(tmp_path, form):
    source = write(tmp_path / "prompts.jsonl", [form | {"kind": "qa"}])
    assert read_requests(source, Sampling()) == [
        Request("row-000001", [ASK], Sampling(), {"kind": "qa"})
    ]


def test_sharegpt_with_calls_is_asked_as_messages_are(tmp_path, make_target):
    target = make_target("tools")
    call = {"name": "clock", "arguments": {"zone": "here"}}
    talk = [
        {"from": "human", "value": "What is the time?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "four"},
        {"from": "gpt", "value": "It is four."},
    ]
    messages = [
        {"role": "user", "content": "What is the time?"},
        {"role": "assistant", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "four"},
    ]
    more = {"system": "Write.", "tools": [{"name": "clock"}]}
    rows = [{"conversations": talk, **more}, {"messages": messages, **more}]
    asked = read_requests(write(tmp_path / "prompts.jsonl", rows), Sampling())
    ours, theirs = prompt_ids(target, asked)
    assert ours == theirs
    (function,) = [one["function"] for one in asked[0].messages[2]["tool_calls"]]
    assert function == {"name": "clock", "arguments": '{"zone": "here"}'}


def test_answers_to_sharegpt_prompts_train(tmp_path, make_model, make_tokenizer):
    from outrider.data.target import Target

    folder, out = tmp_path / "target", tmp_path / "rows.jsonl"
    make_model(vocab_size=500).save_pretrained(folder)
    make_tokenizer("chatml").save_pretrained(folder)
    rows = [{"conversations": [{"from": "human", "value": f"Hello {n}"}]} for n in range(3)]
    prompts = write(tmp_path / "prompts.jsonl", rows)
    given = ["--target", str(folder), "--prompts", prompts, "--out", str(out)]
    main([*given, "--max-new-tokens", "9", "--temperature", "1"])
    kept, counts = read_rows(str(out), Target.load(str(folder)), Reading())
    assert (len(kept), counts.refused) == (3, 0)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"messages": ["hi"]}, "cannot be asked: messages is not a list of objects"),
        ({"messages": 5, "prompt": "x"}, "cannot be asked: messages is not a list of objects"),
        ({"messages": "hi"}, "cannot be asked: messages is not a list of objects"),
        ({"prompt": " "}, "has no question"),
        ({"prompt": [1]}, "cannot be asked: messages is not a list of objects"),
        ({"messages": [{"role": "user"}]}, r"cannot be asked: message 0 \(user\) has no content"),
        ({"messages": [{"content": "x"}]}, "cannot be asked: message 0 has no role"),
        ({"conversations": [{"from": "bot", "value": "x"}]}, "message 0 is from 'bot'"),
        ({"messages": [ASK], "tools": "{"}, "cannot be asked: tools is not JSON"),
        ({"messages": [ASK, ASK | {"role": "assistant"}] * 2 + [ASK | {"role": "system"}]},
            "has no question; give messages"),
        ({"id": "\ud800", "prompt": "x"}, r"has the id '\\ud800', which is not valid Unicode"),
        ({"id": "7", "prompt": "x"}, "has the id '7' of row 1; give each its own id"),
        ([1], "is not a JSON object"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_asked_is_named_with_the_remedy(tmp_path, bad, reason):
    source = write(tmp_path / "prompts.jsonl", [{"id": 7, "prompt": "x"}, bad])
    with pytest.raises(ValueError, match=rf"prompts.jsonl row 2 .*{reason}.*; mend or remove it"):
        read_requests(source, Sampling())
