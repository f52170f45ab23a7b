"""Messages of every form come out as one; what cannot be read is refused by number and reason."""

import json

import pytest
import torch

from outrider.data.chat import RowError, Template, encode
from outrider.data.messages import read_conversation, read_tools
from outrider.data.rows import Reading, read_rows
from outrider.data.template import Dialect

PLAIN = Dialect("object", None, "reasoning_content")
ASK = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Paris"}


def rows_of(tmp_path, target, *records, **reading):
    path = tmp_path / "rows.jsonl"
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_rows(str(path), target, Reading(**{"max_unsupervised": 1.0} | reading))


@pytest.mark.parametrize(
    "found",
    [
        [ASK, ANSWER],
        [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Paris"}],
        [{"role": "human", "content": "Hello"}, {"role": "model", "content": "Paris"}],
        [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"text": "lo"}]}, ANSWER],
        [{"role": "user", "content": ["Hel", "lo"]}, ANSWER],
        [{**ASK, "tool_calls": None, "name": None}, {**ANSWER, "reasoning_content": None}],
        [ASK, {**ANSWER, "tool_calls": [], "thinking": ""}],
        [ASK, {**ANSWER, "tool_calls": ""}],
    ],
)
def test_forms_of_messages_come_out_as_one(found):
    assert read_conversation(found, PLAIN) == [ASK, ANSWER]


@pytest.mark.parametrize(
    ("dialect", "arguments"),
    [(PLAIN, {"a": 1}), (PLAIN._replace(arguments="text"), '{"a": 1}')],
)
@pytest.mark.parametrize("given", [{"a": 1}, '{"a": 1}'])
def test_tool_calls_come_out_as_the_template_wants_them(dialect, arguments, given):
    function = {"name": "f", "arguments": given}
    wanted = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    forms = [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "assistant", "tool_calls": [function]},
        {"role": "assistant", "tool_calls": json.dumps([function])},
        {"role": "assistant", "function_call": function},
        {"from": "function_call", "value": json.dumps(function)},
    ]
    for form in forms:
        (found,) = read_conversation([form], dialect)
        assert found == {"role": "assistant", "content": None, "tool_calls": [wanted]}, form


def test_a_call_without_arguments_has_an_empty_object():
    (found,) = read_conversation([{"role": "assistant", "tool_calls": [{"name": "f"}]}], PLAIN)
    assert found["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_has_one_name(name):
    (found,) = read_conversation([{**ANSWER, name: "so"}], PLAIN)
    assert found == {**ANSWER, "reasoning_content": "so"}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "x"}, "message 0 has no role"),
        ({"role": 5, "content": "x"}, "message 0 has no role"),
        ({"role": "user", "content": 5}, "content of type int"),
        ({"role": "user", "content": {"a": None}}, "content of type dict"),
        ({"role": "user", "content": [{"type": "image", "url": "x"}]}, "part of type 'image'"),
        ({"role": "user", "content": [None]}, "part of type 'NoneType'"),
        ({"role": "user"}, "has no content"),
        ({"from": "bot", "value": "x"}, "from 'bot'; known are human"),
        ({"role": "assistant", "tool_calls": "no json"}, "tool_calls is not JSON"),
        ({"role": "assistant", "tool_calls": {"name": "f"}}, "tool_calls of type dict"),
        ({"role": "assistant", "tool_calls": [None]}, "tool call without a name"),
        ({"role": "assistant", "tool_calls": [{"name": 5}]}, "tool call without a name"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, "not JSON"),
        ({"from": "function_call", "value": "f(x)"}, "function call is not JSON"),
    ],
)
def test_a_message_that_cannot_be_read_is_named(message, reason):
    with pytest.raises(RowError, match=reason):
        read_conversation([message], PLAIN)


def test_tools_are_read_from_a_list_or_its_text():
    tool = {"type": "function", "function": {"name": "f"}}
    for found in ([tool], json.dumps([tool]), [json.dumps(tool)]):
        assert read_tools(found) == [tool]
    assert read_tools(None) is read_tools([]) is read_tools("") is None
    for wrong in ("{", {"name": "f"}, 5):
        with pytest.raises(RowError, match="tools"):
            read_tools(wrong)


def test_sharegpt_with_a_system_field_and_tools_is_the_same_row(tmp_path, make_target):
    target = make_target("tools")
    tools = [{"name": "clock"}]
    call = {"name": "clock", "arguments": {"zone": "here"}}
    sharegpt = {
        "system": "Write.",
        "tools": json.dumps(tools),
        "conversations": [
            {"from": "human", "value": "What is the time?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "four"},
            {"from": "gpt", "value": "It is four."},
        ],
    }
    messages = {
        "tools": tools,
        "messages": [
            {"role": "system", "content": "Write."},
            {"role": "user", "content": "What is the time?"},
            {"role": "assistant", "tool_calls": [{"function": call}]},
            {"role": "tool", "content": "four"},
            {"role": "assistant", "content": "It is four."},
        ],
    }
    (ours, theirs), counts = rows_of(tmp_path, target, sharegpt, messages)
    assert torch.equal(ours.ids, theirs.ids)
    assert torch.equal(ours.mask, theirs.mask)
    assert counts.with_tools == 2
    assert set(counts.roles) == {"system", "user", "assistant", "tool"}
    shares = {role: part / whole for role, (whole, part) in counts.roles.items()}
    assert shares["system"] == shares["user"] == shares["tool"] == 0 < shares["assistant"]


def test_prompt_and_completion_as_texts_and_as_messages(tmp_path, target):
    records = [
        {"messages": [ASK, ANSWER]},
        {"prompt": "Hello", "completion": "Paris"},
        {"prompt": [ASK], "completion": [ANSWER]},
    ]
    rows, _ = rows_of(tmp_path, target, *records)
    assert all(torch.equal(row.ids, rows[0].ids) for row in rows)
    assert all(torch.equal(row.mask, rows[0].mask) for row in rows)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("loss_mask", [0, 0, 0, 1, 1]),
        ("loss_mask", [False, False, False, True, True]),
        ("assistant_masks", [0, 0, 0, 1, 1]),
        ("completion_mask", [0, 0, 0, 1, 1]),
        ("labels", [-100, -100, -100, 8, 2]),
    ],
)
def test_tokenised_rows_under_any_name_of_the_mask(tmp_path, target, name, values):
    (row,), counts = rows_of(tmp_path, target, {"input_ids": [5, 6, 7, 8, 2], name: values})
    assert row.mask.tolist() == [False, False, False, True, True]
    assert counts.roles == {"given": [5, 2]}


def test_padding_that_attention_mask_tells_is_no_part_of_a_row(tmp_path, target):
    ids = {"input_ids": [0, 5, 6, 7, 8, 2, 0, 0], "attention_mask": [0, 1, 1, 1, 1, 1, 0, 0]}
    (row,), counts = rows_of(tmp_path, target, {**ids, "labels": ids["input_ids"]})
    assert row.ids.tolist() == [5, 6, 7, 8, 2]
    assert row.mask.all()
    assert counts.roles == {"given": [5, 5]}


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (f'{{"messages": {DEEP}}}', "not JSON"),
        ('{"input_ids": [' + "9" * 5000 + '], "loss_mask": [1]}', "not JSON"),
        ({"input_ids": [10**4000, 5, 6], "loss_mask": [0, 0, 1]}, "outside the target's"),
        ({"input_ids": [2**63, 5, 6], "loss_mask": [0, 0, 1]}, "outside the target's"),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 0, 2**70]}, "one 0 or 1 per token"),
        (
            {"input_ids": [5, 6], "loss_mask": [0, 1], "attention_mask": [1]},
            "attention_mask needs one 0 or 1 for each",
        ),
        ({"input_ids": None, "loss_mask": None}, "not a list of integers"),
        ({"input_ids": [[5]], "loss_mask": [1]}, "not a list of integers"),
        ({"input_ids": [], "loss_mask": []}, "no supervised token"),
        ({"messages": None}, "not a list of objects"),
        ({"messages": [None]}, "not a list of objects"),
        ({"messages": []}, "no assistant message"),
        ({"messages": [{"role": None, "content": None}]}, "no role"),
        ({"messages": [ASK, {"role": "assistant", "content": ""}]}, "empty answer"),
        ({"messages": [ASK, {"role": "assistant", "content": " \n"}]}, "empty answer"),
        ({"messages": [{**ASK, "content": "\ud800"}, ANSWER]}, "not valid Unicode"),
        ({"messages": [ASK, {**ANSWER, "content": "a\udfff"}]}, "not valid Unicode"),
        ({"messages": [{**ASK, "role": "\ud800"}, ANSWER]}, "refused|valid|assistant"),
        ({"conversations": {"from": "human"}}, "not a list of objects"),
        ({"text": None}, "text is of type NoneType"),
        ({"text": {"a": {"b": None}}}, "text is of type dict"),
        ({"prompt": "x", "completion": None}, "completion needs a prompt"),
        ({"completion": "x"}, "completion needs a prompt"),
        ({"prompt_ids": [4], "answer_ids": None}, "answer_ids is not a list"),
        ({"messages": [ASK, ANSWER], "tools": {"a": None}}, "tools is a dict"),
        ({}, "has fields"),
        ("null", "not a JSON object"),
        ("\x00", "not JSON"),
    ],
)
def test_hostile_rows_are_refused_by_number_and_the_rest_is_read(tmp_path, target, bad, reason):
    good = {"messages": [ASK, ANSWER]}
    rows, counts = rows_of(tmp_path, target, good, bad, good)
    assert [row.row_id for row in rows] == ["1", "3"]
    (refusal,) = counts.refusals
    assert refusal.number == 2
    assert len(refusal.reason) < 420
    assert any(part in refusal.reason for part in reason.split("|"))
    str(counts).encode("utf-8")  # what cannot be printed would end the run


def test_repeated_and_unprintable_ids_are_told_apart(tmp_path, target):
    good = {"messages": [ASK, ANSWER]}
    ids = ["a", "a", "a", "a@2", None, {"x": [None]}, "\ud800", 10**50]
    records = [good if one is None else {**good, "id": one} for one in ids]
    rows, counts = rows_of(tmp_path, target, *records)
    names = [row.row_id for row in rows]
    assert names == ["a", "a@2", "a@3", "a@2@4", "5", "{'x': [None]}", "\\ud800", str(10**50)]
    assert counts.renamed == 3
    assert "3 rows have an id that stood before" in str(counts)


def test_a_target_that_never_stops_at_the_templates_end_is_refused(tmp_path, make_target):
    from dataclasses import replace

    target = replace(make_target(), eos_ids=(5,))
    with pytest.raises(ValueError, match=r"ends every answer in <\|end\|> \(id 2\), but gen"):
        rows_of(tmp_path, target, {"messages": [ASK, ANSWER]})
    target = replace(make_target(), eos_ids=(5, 2))
    _, counts = rows_of(tmp_path, target, {"messages": [ASK, ANSWER]})
    assert counts.ends == {2: 1}


def test_render_is_apply_chat_template(make_tokenizer):
    using = Template(tokenizer=make_tokenizer(), eos_ids=(2,))
    talk = [ASK, ANSWER]
    theirs = using.tokenizer.apply_chat_template(talk, return_dict=False)
    assert using.ids(talk, prompt=False) == theirs == encode(talk, using)[0].ids
