"""Masks by render boundaries: what the model would say is supervised, or the row is refused."""

import pytest

from outrider.data.chat import RowError, Template, encode
from outrider.data.rendered import encode_text

END, TURN = 2, 1


@pytest.fixture
def template(make_tokenizer):
    def make(name, **options):
        return Template(tokenizer=make_tokenizer(name), eos_ids=(END,), options=options)

    return make


def chat(*contents):
    return [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]


def supervised(encoded, using):
    """The supervised spans as texts."""
    spans, last = [], False
    for token, on in zip(encoded.ids, encoded.mask, strict=True):
        if on and not last:
            spans.append([])
        if on:
            spans[-1].append(token)
        last = bool(on)
    return [using.text(span) for span in spans]


def test_c01_supervised_text_is_the_answers(template):
    using = template("chatml")
    rows = [
        chat("Hello", "Hello there"),
        chat("What is the time?", "four."),
        chat("Hi", "I am fine.", "And you?", "yes, no.", "why", "Paris\n\nand code"),
        [{"role": "system", "content": "Write a short line."}, *chat("a fox", "  spaced out ")],
    ]
    for messages in rows:
        (encoded,) = encode(messages, using)
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        assert supervised(encoded, using) == [answer + "<|end|>" for answer in answers]
        assert encoded.ids == using.ids(messages, prompt=False)


def test_a_trailing_question_is_left_out(template):
    using = template("chatml")
    (encoded,) = encode(chat("Hello", "there", "why"), using)
    assert using.text(encoded.ids).endswith("there<|end|>\n")


def test_text_that_looks_like_markers_inside_an_answer_does_not_move_the_mask(template):
    using = template("chatml")
    (encoded,) = encode(chat("say", "user\nassistant\n end"), using)
    assert supervised(encoded, using) == ["user\nassistant\n end<|end|>"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "system", "content": "x"}, *chat("a", "b")], "no system role"),
        ([*chat("a"), *chat("a", "b")], "roles must alternate"),
        ([{"role": "assistant", "content": "b"}], "no assistant message answers"),
        ([{"role": "assistant", "content": "hi"}, *chat("a", "b")], "roles must alternate"),
        (chat("a", ""), "empty answer"),
        (chat("a"), "no assistant message"),
        ([{"content": "x"}], "has no role"),
        ([{"role": "user", "content": None}, {"role": "assistant", "content": "x"}], "template"),
    ],
)
def test_c02_a_template_with_rules_refuses_with_the_reason(messages, reason, template):
    with pytest.raises(RowError, match=reason):
        encode(messages, template("strict"))


def test_c02_a_lenient_template_takes_what_it_can_render(template):
    using = template("chatml")
    (encoded,) = encode([*chat("a"), *chat("a", "b")], using)
    assert supervised(encoded, using) == ["b<|end|>"]
    greeting = {"role": "assistant", "content": "hi"}
    (encoded,) = encode([greeting, *chat("a", "b")], using)
    assert supervised(encoded, using) == ["b<|end|>"]  # the greeting answers nothing


THINKING = chat("Hello", "<think>Thinking first</think>yes", "why", "<think>then</think>no.")


def test_c03_stripped_thinking_gives_one_row_per_turn(template):
    using = template("strips_earlier_thinking")
    first, second = encode(THINKING, using)
    assert "Thinking first" not in using.text(using.ids(THINKING, prompt=False))  # the trap
    assert first.ids == using.ids(THINKING[:2], prompt=False)
    assert second.ids == using.ids(THINKING, prompt=False)
    assert supervised(first, using) == ["<think>Thinking first</think>yes<|end|>"]
    assert supervised(second, using) == ["<think>then</think>no.<|end|>"]
    for row, asked in ((first, THINKING[:1]), (second, THINKING[:3])):
        prompt = using.ids(asked, prompt=True)
        assert row.ids[: len(prompt)] == prompt
        assert row.mask[: len(prompt)] == [0] * len(prompt)
        assert row.mask[len(prompt)] == 1


def test_c03_kept_thinking_stays_one_row(template):
    using = template("chatml")
    (encoded,) = encode(THINKING, using)
    assert len(supervised(encoded, using)) == 2


def test_c03_an_answer_that_the_template_cuts_is_refused(template):
    with pytest.raises(RowError, match=r"removes part of the answer \('<think>"):
        encode(THINKING, template("strips_all_thinking"))


def test_c03_a_prompt_that_opens_thinking_needs_answers_that_begin_with_it(template):
    using = template("opens_thinking")
    (encoded,) = encode(chat("a", "<think> think </think>b"), using)
    assert supervised(encoded, using) == [" think </think>b<|end|>"]
    with pytest.raises(RowError, match="differ from what the model sees"):
        encode(chat("a", "b"), using)


@pytest.mark.parametrize("role", ["system", "tool"])
def test_context_that_the_template_leaves_out_is_refused(role, template):
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": "Be short, please."}]
    messages.append({"role": "assistant", "content": "yes"})
    shown = template("chatml")
    assert len(encode(messages, shown)) == 1
    blind = template("chatml")
    whole = blind.tokenizer.chat_template
    blind.tokenizer.chat_template = (
        "{% set messages = messages | rejectattr('role', 'equalto', '"
        + role
        + "') | list %}"
        + whole
    )
    with pytest.raises(RowError, match=rf"message 1 \({role}\) is left out .*'Be short, please"):
        encode(messages, blind)


def test_c04_the_turn_end_is_supervised_though_it_is_the_pad_token(template):
    using = template("chatml")
    for answers in (1, 3):
        (encoded,) = encode(chat(*["Hello", "yes"] * answers), using)
        marked = [i for i, on in enumerate(encoded.mask) if on and encoded.ids[i] == END]
        assert len(marked) == answers
        assert encoded.end_ids == [END] * answers
        assert all(encoded.mask[i + 1] == 0 for i in marked)  # the line break is the template's
        assert sum(token == END for token in encoded.ids) == 2 * answers


def test_tags_decide_within_the_answer_and_the_end_is_added(template):
    plain, tagged = template("chatml"), template("tagged")
    messages = chat("Hello", "Paris", "why", "I am fine.")
    (ours,), (theirs,) = encode(messages, plain), encode(messages, tagged)
    assert sum(tagged.tagged(messages)) == sum(theirs.mask) - 2  # the tags leave the ends out
    assert ours.ids == theirs.ids
    assert ours.mask == theirs.mask


def test_tags_in_the_wrong_place_are_refused(template):
    with pytest.raises(RowError, match="outside every answer"):
        encode(chat("Hello", "Paris"), template("tags_the_user"))


def test_tags_say_nothing_of_an_answer_that_the_template_cannot_show(make_tokenizer):
    tokenizer = make_tokenizer("tagged")
    opened = tokenizer.chat_template.replace(
        "{{ '<|turn|>assistant\n' }}{% endif %}", "{{ '<|turn|>assistant\n<think>\n' }}{% endif %}"
    )
    assert opened != tokenizer.chat_template
    tokenizer.chat_template = opened.replace(
        "{{ message['content'] }}{% endgen",
        "{{ message['content'].split('</think>')[-1] }}{% endgen",
    )
    using = Template(tokenizer=tokenizer, eos_ids=(END,))
    (encoded,) = encode(chat("Hello", "<think>\nso</think>Paris"), using)
    assert supervised(encoded, using) == ["so</think>Paris<|end|>"]


def test_tools_and_reasoning_pass_through(template):
    using = template("tools")
    call = {"function": {"name": "clock", "arguments": {"zone": "here"}}}
    messages = [
        {"role": "user", "content": "What is the time?"},
        {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": [call]},
        {"role": "tool", "content": "four"},
        {"role": "assistant", "content": "It is four."},
    ]
    (encoded,) = encode(messages, using, tools=[{"name": "clock"}])
    first, second = supervised(encoded, using)
    assert first.startswith("<think>look</think><call>{")
    assert '"clock"' in first
    assert second == "It is four.<|end|>"
    assert using.text(encoded.ids).startswith('<|turn|>system\n[{"name": "clock"}]')
    with pytest.raises(RowError, match=r"removes part of the answer \('look'\)"):
        encode([messages[0], {**messages[1], "content": "x"}], template("chatml"))


def test_bos_stands_once_and_twice_is_refused(template):
    using = template("strict")
    (encoded,) = encode(chat("a", "b"), using)
    assert encoded.ids.count(0) == 1
    twice = using.tokenizer.chat_template.replace("{{ bos_token }}", "{{ bos_token + bos_token }}")
    using.tokenizer.chat_template = twice
    with pytest.raises(RowError, match="BOS token twice"):
        encode(chat("a", "b"), using)


def test_rendered_text_is_masked_by_the_templates_marker(template):
    using = template("chatml")
    messages = chat("Hello", "Paris \u00e9", "why", "no.")
    (encoded,) = encode(messages, using)
    again = encode_text(using.text(encoded.ids), using)
    assert (again.ids, again.mask) == (encoded.ids, encoded.mask)
    other = encode_text("### User: hi\n### Bot: yes\n", using)
    assert not any(other.mask)


def test_templates_that_cannot_serve_are_refused(template):
    with pytest.raises(ValueError, match="has no chat template"):
        template(None)
    with pytest.raises(ValueError, match="no marker before answers"):
        encode_text("x", template("plain_text"))
