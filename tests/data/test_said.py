"""What of an answer a template removed: thinking that the answer repeats, arguments of calls."""

import json

import pytest

from outrider.data.chat import RowError, Template, encode
from outrider.data.messages import read_conversation
from outrider.data.said import lost_parts

ASK = {"role": "user", "content": "What is the time?"}
HARD = {
    "city": "R\u00f6m \"the\"\n\teternal\\n <b> & 'so'",
    "num": 3,
    "share": 2.0,
    "tiny": 1e-7,
    "is_it": True,
    "none": None,
    "empty": "",
    "inner": {"ids": [1, 2, {"deep": "zwei \u2028"}], "left": []},
}
TAGS = (
    "{% for key, one in call.function.arguments.items() %}{{ '<parameter=' + key + '>\n' + "
    "WRITTEN + '\n</parameter>' }}{% endfor %}"
)
AS_TEXT = "(one if one is string else one | string)"
AS_JSON = "(one if one is string else one | tojson)"
WRITINGS = {
    "object": "{{ call.function.arguments | tojson }}",
    "indented": "{{ call.function.arguments | tojson(indent=2) }}",
    "tags": TAGS.replace("WRITTEN", AS_JSON),
    "tags-python": TAGS.replace("WRITTEN", AS_TEXT),
    "sorted": TAGS.replace("WRITTEN", AS_JSON).replace(".items()", " | dictsort"),
    "ascii": "{{ call.function.arguments | tojson(ensure_ascii=True) }}",
    "twice": TAGS.replace("WRITTEN", "(one | tojson | tojson)"),
    "python": TAGS.replace("WRITTEN", "('%r' | format(one))"),
}
FAULTS = {
    "none": "",
    "the last": TAGS.replace("WRITTEN", AS_JSON).replace(".items()", ".items() | list)[:-1]")
    .replace("in call", "in (call"),
    "names only": TAGS.replace("WRITTEN", "''"),
    "values only": TAGS.replace("WRITTEN", AS_JSON).replace("key +", "'' +"),
    "cut": TAGS.replace("WRITTEN", "(one | string)[:4]"),
}  # fmt: skip


@pytest.fixture
def using(make_tokenizer):
    def make(written, answer="{{ message['content'] or '' }}"):
        tokenizer = make_tokenizer("chatml")
        tokenizer.chat_template = (
            "{% for message in messages %}{{ '<|turn|>' + message['role'] + '\n' }}" + answer
            + "{% for call in message.tool_calls or [] %}{{ '<call>' + call.function.name }}"
            + written + "{{ '</call>' }}{% endfor %}{{ '<|end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
        )  # fmt: skip
        return Template(tokenizer=tokenizer, eos_ids=(2,))

    return make


def called(*arguments, **fields):
    calls = [{"function": {"name": "clock", "arguments": one}} for one in arguments]
    return {"role": "assistant", "tool_calls": calls, **fields}


def row(answer, template, asked=ASK):
    (encoded,) = encode(read_conversation([asked, answer], template.dialect), template)
    return template.text([token for token, on in zip(encoded.ids, encoded.mask, strict=True) if on])


@pytest.mark.parametrize("name", WRITINGS)
def test_arguments_may_be_written_in_any_way(name, using):
    template = using(WRITINGS[name])
    text = row(called(HARD, {"city": "Rome", "num": 3}, {"num": 3}, {}), template)
    assert text.count("<call>clock") == 4
    assert "eternal" in text


@pytest.mark.parametrize("name", FAULTS)
def test_c03_arguments_that_the_template_removes_are_refused(name, using):
    arguments = {"first": "Hello there", "last": "Paris, France"}
    lost = {"none": "first", "the last": "last", "names only": "Hello", "values only": "first"}
    with pytest.raises(RowError, match=f"removes part of the answer \\('{lost.get(name, 'Hel')}"):
        row(called(arguments), using(FAULTS[name]))


def test_arguments_of_every_call_have_a_place(using):
    once = using(WRITINGS["object"].replace("{{", "{% if loop.first %}{{") + "{% endif %}")
    assert "Rome" in row(called({"city": "Rome"}), once)
    with pytest.raises(RowError, match="removes part of the answer"):
        row(called({"city": "Rome"}, {"city": "Rome"}), once)


def test_c03_thinking_that_the_answer_repeats_is_no_thinking_rendered(using):
    answer = {"role": "assistant", "content": "Paris is it.", "reasoning_content": "Paris"}
    with pytest.raises(RowError, match=r"removes part of the answer \('Paris'\)"):
        row(answer, using(""))
    shown = "{{ message.reasoning_content | default('') }}{{ message['content'] }}"
    assert row(answer, using("", shown)) == "ParisParis is it.<|end|>"
    same = {"role": "assistant", "content": "yes", "reasoning_content": "yes"}
    with pytest.raises(RowError, match=r"removes part of the answer \('yes'\)"):
        row(same, using(""))
    assert row(same, using("", shown)) == "yesyes<|end|>"


def test_a_name_inside_an_argument_is_no_name_rendered():
    answer = called({"who": "the clock"})
    assert lost_parts(answer, '{"who": "the clock"}') == ["clock"]
    assert lost_parts(answer, 'clock {"who": "the clock"}') == []


def test_text_that_is_no_json_and_deep_text_are_arguments_too():
    deep = "[" * 5000 + "]" * 5000
    for text in ("f(x)", '{"a": ', deep):
        assert lost_parts(called(text), f"clock {text}") == []
        assert lost_parts(called(text), "clock") == [text]


@pytest.mark.parametrize(
    "family", ["chatml", "llama3", "mistral", "qwen3", "phi", "harmony", "granite", "command_r"]
)
@pytest.mark.parametrize("form", ["object", "text"])
def test_the_families_templates_lose_no_argument(family, form, template_of):
    given = json.dumps(HARD, indent=1) if form == "text" else HARD
    call = {"id": "call00001", "function": {"name": "clock", "arguments": given}}
    assert "eternal" in row({"role": "assistant", "tool_calls": [call]}, template_of(family))
