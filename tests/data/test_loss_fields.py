"""Answers that their messages exempt from the loss: OpenAI's `weight` and Axolotl's `train`."""

import json

import pytest

from outrider.data.chat import RowError, Template, encode
from outrider.data.messages import has_loss
from outrider.data.rows import Reading, read_rows

NO, YES = {"weight": 0}, {"weight": 1}


def user(text):
    return {"role": "user", "content": text}


def said(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained(rows, target):
    return [target.tokenizer.decode(row.ids[row.mask].tolist()) for row in rows]


@pytest.mark.parametrize("template", ["chatml", "tagged"])
@pytest.mark.parametrize("mute", [NO, {"weight": 0.0}, {"train": False}, {"train": 0, "weight": 0}])
def test_an_exempt_answer_is_context_and_no_more(tmp_path, make_target, template, mute):
    target = make_target(template)
    talk = [
        *(user("Hello"), said("wrong", **mute), user("why"), said("Paris", **YES)),
        *(user("and"), said("bad", **mute), user("Hello"), said("fine", train=True)),
        *(user("more"), said("last", **mute)),
    ]
    source = write(tmp_path / "rows.jsonl", [{"messages": talk}])
    (row,), counts = read_rows(source, target, Reading())
    assert trained([row], target) == ["Paris<|end|>fine<|end|>"]
    bare = [{key: one[key] for key in ("role", "content")} for one in talk[:8]]
    assert row.ids.tolist() == target.tokenizer.apply_chat_template(bare, return_dict=False)
    assert (counts.muted, counts.answers, counts.kept) == (3, 2, 1)
    assert "no loss on 3 answers, whose messages have weight 0 or train false" in str(counts)


def test_where_history_is_rewritten_exempt_answers_give_no_row(tmp_path, make_target):
    target = make_target("strips_earlier_thinking")
    talk = [
        *(user("a"), said("<think>one</think>yes"), user("b"), said("<think>two</think>no", **NO)),
        *(user("c"), said("<think>three</think>Paris")),
    ]
    source = write(tmp_path / "rows.jsonl", [{"messages": talk}])
    rows, counts = read_rows(source, target, Reading())
    assert trained(rows, target) == [
        "<think>one</think>yes<|end|>",
        "<think>three</think>Paris<|end|>",
    ]
    assert (counts.muted, counts.extra_turns, counts.answers) == (1, 1, 2)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"weight": 0.5}, "message 1: weight is 0.5; give 0 or 1, or leave it out"),
        ({"weight": -1}, "message 1: weight is -1; give 0 or 1"),
        ({"weight": "0"}, "message 1: weight is '0'; give 0 or 1"),
        ({"weight": [0]}, "message 1: weight is [0]; give 0 or 1"),
        ({"train": "false"}, "message 1: train is 'false'; give true or false"),
        ({"train": True, "weight": 0}, "message 1 has {'weight': 0, 'train': True}, which contr"),
        ({"train_detail": [{"begin_offset": 0}]}, "message 1 has train_detail, loss on parts"),
        ({"weight": 0}, "every answer has weight 0 or train false"),
    ],
)
def test_odd_values_refuse_the_row_by_number(tmp_path, target, fields, reason):
    good = {"messages": [user("Hello"), said("Paris", weight=None, train_detail=[])]}
    bad = {"messages": [user("Hello"), said("Paris", **fields)]}
    sharegpt = {"conversations": [{"from": "human", "value": "Hello"}]}
    sharegpt["conversations"].append({"from": "gpt", "value": "Paris", **fields})
    rows, counts = read_rows(write(tmp_path / "r.jsonl", [good, bad, sharegpt]), target, Reading())
    assert trained(rows, target) == ["Paris<|end|>"]
    assert [one.number for one in counts.refusals] == [2, 3]
    assert all(one.reason.startswith(reason) for one in counts.refusals)


def test_not_a_number_is_no_weight():
    with pytest.raises(RowError, match="message 3: weight is nan"):
        has_loss(said("x", weight=float("nan")), 3)


def test_templates_do_not_see_the_fields(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content']", "(message | tojson)"
    )
    using = Template(tokenizer=tokenizer, eos_ids=(2,))
    (row,) = encode([user("Hello"), said("a", **NO), user("b"), said("Paris", train=True)], using)
    assert "weight" not in using.text(row.ids)
    assert "train" not in using.text(row.ids)
