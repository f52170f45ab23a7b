"""Masks under the templates of twelve families, written from their public documentation.

templates/NAME.jinja is the template, and families.yaml has its special tokens, conversations, and
the whole text and the answers to expect, written by hand.
"""

from pathlib import Path

import pytest
import yaml

from outrider.data.chat import RowError, encode
from outrider.data.messages import read_conversation

FOLDER = Path(__file__).parent / "templates"
FAMILIES = yaml.safe_load((FOLDER / "families.yaml").read_text(encoding="utf-8"))
CASES = [
    pytest.param(family, case, id=f"{family}-{case['name']}")
    for family, facts in FAMILIES.items()
    for case in facts["cases"]
]

RENDERED = [param for param in CASES if "rows" in param.values[1]]


def encoded(case, using):
    messages = read_conversation(case["messages"], using.dialect)
    return encode(messages, using, case.get("tools"))


def spans(row):
    """The supervised spans as lists of ids."""
    found, last = [], 0
    for token, on in zip(row.ids, row.mask, strict=True):
        if on and not last:
            found.append([])
        if on:
            found[-1].append(token)
        last = on
    return found


def test_twelve_families_name_the_page_they_follow():
    assert len(FAMILIES) == 12
    for family in FAMILIES:
        first = (FOLDER / f"{family}.jinja").read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith("{#- ")
        assert "format: " in first


@pytest.mark.parametrize(("family", "case"), CASES)
def test_text_and_answers_are_those_written_by_hand(family, case, template_of):
    using = template_of(family, case.get("options"))
    if "refused" in case:
        with pytest.raises(RowError, match=case["refused"]):
            encoded(case, using)
        return
    rows = encoded(case, using)
    assert [using.text(row.ids) for row in rows] == [row["text"] for row in case["rows"]]
    for row, wanted in zip(rows, case["rows"], strict=True):
        found = spans(row)
        assert [using.text(span) for span in found] == wanted["answers"]
        # The last token of each answer, and no other in it, is one at which generation stops.
        assert all(span[-1] in using.eos_ids for span in found)
        assert not any(token in using.eos_ids for span in found for token in span[:-1])
        assert row.end_ids == [span[-1] for span in found]
        assert row.num_answers == len(found)


@pytest.mark.parametrize(("family", "case"), RENDERED)
def test_a_row_goes_on_from_the_very_prompt_that_the_model_is_given(family, case, template_of):
    """The tokens before the first answer are the library's own rendering of the prompt."""
    using = template_of(family, case.get("options"))
    messages = read_conversation(case["messages"], using.dialect)
    for row in encoded(case, using):
        first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
        asked = messages[: row.turn] if len(case["rows"]) > 1 else messages[:first]
        prompt = using.tokenizer.apply_chat_template(
            asked,
            tools=case.get("tools"),
            add_generation_prompt=True,
            return_dict=False,
            **using.options,
        )
        assert row.ids[: len(prompt)] == prompt
        assert row.mask.index(1) == len(prompt)


@pytest.mark.parametrize(
    ("family", "dialect"),
    [
        ("chatml", ("object", None, None)),
        ("llama3", ("object", None, None)),
        ("mistral", ("object", None, None)),
        ("qwen3", ("object", None, "reasoning_content")),
        ("deepseek_r1", ("text", None, None)),
        ("harmony", ("object", None, "reasoning_content")),
        ("granite", ("object", None, None)),
    ],
)
def test_what_a_template_wants_is_found_by_probing(family, dialect, template_of):
    assert template_of(family).dialect == dialect


@pytest.mark.parametrize("family", ["chatml", "qwen3", "granite", "llama3", "harmony"])
def test_arguments_as_text_and_as_object_give_the_same_row(family, template_of):
    using = template_of(family)
    rows = []
    for arguments in ({"city": "Rome"}, '{"city": "Rome"}'):
        call = {"name": "weather", "arguments": arguments}
        for calls in ([call], [{"type": "function", "function": call}]):
            talk = [
                {"role": "user", "content": "Rome?"},
                {"role": "assistant", "content": None, "tool_calls": calls},
            ]
            (row,) = encode(read_conversation(talk, using.dialect), using)
            rows.append((row.ids, row.mask))
    assert all(row == rows[0] for row in rows)
    assert '"city": "Rome"' in using.text(rows[0][0])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("family", ["qwen3", "harmony", "deepseek_r1"])
def test_thinking_under_any_name_is_rendered(family, name, template_of):
    using = template_of(family)
    talk = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Yes.", name: "Think first."},
    ]
    (row,) = encode(read_conversation(talk, using.dialect), using)
    (answer,) = (using.text(span) for span in spans(row))
    assert answer.index("Think first.") < answer.index("Yes.")


def test_roles_are_told_apart_where_the_template_lets_them(template_of):
    using = template_of("phi")
    talk = [
        {"role": "system", "content": "Write."},
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "no"},
    ]
    (row,) = encode(talk, using)
    texts, start = [], 0
    for role, end in row.spans:
        texts.append((role, using.text(row.ids[start:end])))
        start = end
    assert texts == [
        ("system", "<|system|>Write.<|end|>"),
        ("user", "<|user|>Hello there<|end|>"),
        ("assistant", "<|assistant|>yes<|end|>"),
        ("user", "<|user|>why<|end|>"),
        ("assistant", "<|assistant|>no<|end|><|endoftext|>"),
    ]


def test_an_end_token_inside_an_answer_is_refused(template_of):
    using = template_of("zephyr")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b</s>c"}]
    with pytest.raises(RowError, match=r"goes on after </s>, at which generation stops"):
        encode(talk, using)
