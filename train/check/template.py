"""The chat template on the user's own conversations: prefixes, tags, history, modes, the date."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes

from outrider.data.counts import Counts
from outrider.data.forms import CONVERSATIONS, RecordReader
from outrider.data.said import lost_parts
from outrider.data.template import GENERATION_TAG, Message, RowError, Template, writes_the_date
from outrider.train.check.case import Kept, Sample
from outrider.train.check.finding import Finding, fail, ok, warn

GIVEN = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("raise_exception", "strftime_now", "namespace", "range", "dict", "loop", "custom_tools"),
}
"""Names that are no modes: what the tokenizer passes to every template."""
ENDS = re.compile(r"\{%-?\s*(generation|endgeneration)\s*-?%\}")

STRFTIME = re.compile(r"strftime_now\(\s*['\"]([^'\"]+)['\"]")


class Talk(NamedTuple):
    """A conversation of the sample."""

    number: int
    messages: list[dict[str, Any]]
    tools: list[Any] | None


def talks(sample: Sample, reader: RecordReader) -> list[Talk]:
    """The sample's conversations, as the template wants them."""
    found: list[Talk] = []
    for kept in sample.kept:
        talk = _talk(kept, reader)
        if talk is not None:
            found.append(talk)
    return found


def _talk(kept: Kept, reader: RecordReader) -> Talk | None:
    record = kept.found.record
    if not isinstance(record, Mapping) or not any(name in record for name in CONVERSATIONS):
        return None
    try:
        messages, tools = reader.conversation(record)
    except (RowError, TypeError, AttributeError, LookupError):
        return None  # told as a refused row
    return Talk(kept.found.number, messages, tools) if messages else None


def check_prefixes(found: list[Talk], template: Template, extra_turns: int) -> Iterator[Finding]:
    """Each message's rendering extends the one before, and each prompt its answer's."""
    name, checked, broken = "template prefixes", 0, list[str]()
    for talk in found:
        for count in range(1, len(talk.messages)):
            extends = _extends(talk, count, template)
            checked += extends is not None
            if extends is False:
                broken.append(f"row {talk.number} message {count}")
                break
    if not checked:
        yield ok(name, "no row of the sample has several messages")
    elif not broken:
        yield ok(
            name, f"{checked} of {checked} messages extend the text ({len(found)} sample rows)"
        )
    else:
        yield warn(
            name,
            f"rewrites history in {len(broken)} of {len(found)} sample rows, first {broken[0]}: "
            "what stands before a message changes when it follows, so each answer trains after "
            f"what the model sees then (rows added: {extra_turns})",
            "nothing, if all is kept; one row an answer costs more tokens than one a conversation",
        )


def _extends(talk: Talk, count: int, template: Template) -> bool | None:
    """Whether one message more extends the text, and an answer the prompt that asks for it.

    None where the template refuses the part.
    """
    try:
        before = template.write(talk.messages[:count], talk.tools, prompt=False)
        whole = template.write(talk.messages[: count + 1], talk.tools, prompt=False)
        if talk.messages[count].get("role") == "assistant":
            asked = template.write(talk.messages[:count], talk.tools, prompt=True)
            if not whole.startswith(asked):
                return False
    except RowError:
        return None
    ends = ("", *(template.text([token]) for token in template.eos_ids))
    return any(whole.startswith(before.removesuffix(end)) for end in ends)


def check_answers(found: list[Talk], template: Template, counts: Counts) -> Iterator[Finding]:
    """No part of an answer (thinking, tool calls) is removed where it is the last message."""
    name, lost = "answers whole", list[str]()
    for talk in found:
        said = [place for place, one in enumerate(talk.messages) if one.get("role") == "assistant"]
        for place in said:
            part = _lost(talk.messages[: place + 1], talk.tools, template)
            if part is not None:
                lost.append(f"row {talk.number} message {place} loses {part[:60]!r}")
                break
    refused = [one for one in counts.fates if "removes part of the answer" in one.reason]
    if refused:
        told = fail if len(refused) > 0.1 * len(counts.fates) else warn
        first = lost[0] if lost else f"row {refused[0].number}: {refused[0].reason[:120]}"
        yield told(
            name,
            f"the template strips answers: {first}; rows refused for it: {len(refused)}",
            "give thinking in reasoning_content, set the template's mode (--template-options), or "
            "let the target answer (outrider generate), whose rows need no rendering",
        )
    elif lost:
        yield ok(
            name,
            f"the template strips answers ({lost[0]}); rows hold them after the prompt, as the "
            "model says them",
        )
    else:
        yield ok(name, f"thinking, text and calls are rendered ({len(found)} sample rows)")


def _lost(messages: Sequence[Message], tools: object, template: Template) -> str | None:
    try:
        whole = template.write(messages, tools, prompt=False)
    except RowError:
        return None
    parts = lost_parts(messages[-1], whole)
    return parts[0] if parts else None


def check_tags(template: Template, counts: Counts, num_sample: int) -> Iterator[Finding]:
    """The template's own {% generation %} tags, where it has them, agree with the boundaries."""
    name = "generation tags"
    if not GENERATION_TAG.search(str(template.tokenizer.chat_template)):
        yield ok(name, "none in the template: masks follow from render boundaries")
        return
    astray = [one for one in counts.fates if "generation tags" in one.reason]
    if astray:
        yield fail(
            name,
            f"rows that disagree: {len(astray)}, first row {astray[0].number}: "
            f"{astray[0].reason[:200]}",
            "correct the tags in the target's chat template, or take them out: boundaries do "
            "without",
        )
    else:
        yield ok(name, f"agree with render boundaries in all rows ({num_sample} in the sample)")


def modes_of(template: Template) -> set[str]:
    """Names that the template reads, and that neither the tokenizer nor it itself sets.

    One that it sets only where it is not defined, a default, is a mode too.
    """
    text = ENDS.sub("", str(template.tokenizer.chat_template))
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    try:
        tree = environment.parse(text)
    except jinja2.TemplateSyntaxError:
        return set()
    names = list(tree.find_all(nodes.Name))
    own = {one.name for one in names if one.ctx == "store"}
    tests = [one.node for one in tree.find_all(nodes.Test) if one.name in ("defined", "undefined")]
    tests += [one.node for one in tree.find_all(nodes.Filter) if one.name in ("default", "d")]
    asked = {one.name for one in tests if isinstance(one, nodes.Name)}
    free = meta.find_undeclared_variables(tree) - GIVEN - (own - asked)
    return {name for name in free if not name.endswith("_token")}


def check_modes(template: Template) -> Iterator[Finding]:
    """The options given are ones that the template reads."""
    name, known, given = "template options", modes_of(template), dict(template.options)
    stray = sorted(set(given) - known)
    if stray:
        close = difflib.get_close_matches(stray[0], sorted(known), n=1)
        mended = {close[0] if key == stray[0] and close else key: x for key, x in given.items()}
        mended = {key: value for key, value in mended.items() if key in known}
        yield fail(
            name,
            f"{', '.join(stray)} is given, and the template reads "
            f"{', '.join(sorted(known)) or 'no options'}",
            f"did you mean {close[0]}?" if close else "leave it out of --template-options",
            template_options=words(mended),
        )
        return
    free = sorted(known - set(given))
    stated = ", ".join(words(given)) or "none given"
    more = f"; the template also reads {', '.join(free)}" if free else ""
    yield ok(name, f"{stated}{more}")


def words(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Options as the flag takes them."""
    plain = {True: "true", False: "false"}
    return tuple(
        f"{key}={plain[value] if isinstance(value, bool) else value}"
        for key, value in options.items()
    )


def check_date(template: Template) -> Iterator[Finding]:
    """A template that writes today's date gives other rows tomorrow."""
    name, fix = "date", dict[str, Any]()
    if not writes_the_date(template.tokenizer):
        yield ok(name, "the template writes none")
        return
    pins = [one for one in modes_of(template) if "date" in one]
    given = [one for one in pins if one in template.options]
    if given:
        yield ok(name, f"pinned: {given[0]}={template.options[given[0]]}")
        return
    if pins:
        form = STRFTIME.search(str(template.tokenizer.chat_template))
        today = date.today().strftime(form[1] if form else "%d %b %Y")
        fix = {"template_options": (*words(template.options), f"{pins[0]}={today}")}
    yield warn(
        name,
        "the chat template writes today's date, so rows read on another day differ",
        f"pin it: --template-options '{fix['template_options'][-1]}'"
        if fix
        else "where it has an option for that, pin it with --template-options",
        **fix,
    )
