"""What messages say, and what of it is missing from the text that the template renders."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from outrider.data.template import REASONING_FIELDS, Message

TAKEN = " "
"""Stands where a part was found: no part holds white space once it is squashed."""


class _Part(NamedTuple):
    """Something said, as it may be rendered."""

    text: str
    forms: tuple[str, ...]
    """Without white space, the likeliest first."""
    value: object = None
    """Of an object or a list: what it holds, for templates that write its members one by one."""


def said_parts(message: Message) -> list[str]:
    """Every text of an answer that the model itself produced, and the names of its calls."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [str(part.get("text") or "") for part in content if isinstance(part, Mapping)]
    else:
        parts = [str(content or "")]
    parts += [str(message.get(name) or "") for name in REASONING_FIELDS]
    parts += [str(function.get("name") or "") for function in _functions(message)]
    return [part for part in parts if part.strip()]


def lost_parts(message: Message, turn: str) -> list[str]:
    """The parts of an answer that are missing from its rendered turn.

    Each has a place of its own there: thinking that stands inside the answer alone is missing.
    White space does not count, since templates trim and wrap, nor how arguments are written.
    """
    parts = [_Part(text, (_squash(text),)) for text in said_parts(message)]
    for function in _functions(message):
        parts += _given(function.get("arguments"))
    return [part.text for part in _missing(parts, turn)]


def lost_context(messages: Sequence[Message], prompt: str) -> tuple[int, str] | None:
    """The first message that a rendered prompt leaves out, and the part; None when none.

    Answers are passed over: templates may rewrite their history. A tool's result may be written
    anew as JSON is.
    """
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            continue
        content = message.get("content")
        texts = [content]
        if isinstance(content, list):
            texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        # One by one: two messages of the same text may stand in one place, as in a merged turn.
        for part in (part for text in texts for part in _given(text)):
            if _missing([part], prompt):
                return index, part.text
    return None


def _missing(parts: Sequence[_Part], text: str) -> list[_Part]:
    """Those without a place of their own in a text, inner ones in place of what held them."""
    known, lost = list(parts), list[_Part]()
    left = _squash(text)
    waiting = sorted(known, key=_size)
    while waiting:  # the longest first, so that none is found inside another
        part = waiting.pop()
        found = next((form for form in part.forms if form in left), None)
        if found is not None:
            left = left.replace(found, TAKEN, 1)
        elif part.value is not None:
            inner = _members(part.value)
            known += inner
            waiting = sorted([*waiting, *inner], key=_size)
        else:
            lost.append(part)
    return [part for part in known if part in lost]


def _functions(message: Message) -> list[Mapping[str, Any]]:
    return [call.get("function", call) for call in message.get("tool_calls") or []]


def _size(part: _Part) -> int:
    return len(part.forms[0])


def _squash(text: str) -> str:
    return "".join(text.split())


def _given(arguments: object) -> list[_Part]:
    """The arguments of a call, an object or its JSON text."""
    if not isinstance(arguments, str):
        return _value(arguments)
    try:
        parts = _value(json.loads(arguments))
    except (ValueError, RecursionError):
        return _value(arguments)
    return [part._replace(forms=(_squash(arguments), *part.forms)) for part in parts]


def _value(value: object) -> list[_Part]:
    """A value as one part; none where nothing of it need be written, as for null."""
    if value is None or value in ("", {}, []):
        return []
    if isinstance(value, (Mapping, list)):
        forms = [json.dumps(value, ensure_ascii=is_ascii) for is_ascii in (False, True)]
        return [_part(forms[0], forms, value)]
    if isinstance(value, str):
        return [_part(value, _spellings(value))] if value.strip() else []
    return [_part(str(value), _numbers(value))]


def _members(value: object) -> list[_Part]:
    """What an object or a list holds, keys too."""
    if isinstance(value, Mapping):
        kept = {str(key): one for key, one in value.items() if one is not None}
        keys = [_part(key, _spellings(key)) for key in kept if key.strip()]
        return [*keys, *(part for one in kept.values() for part in _value(one))]
    assert isinstance(value, list)
    return [part for one in value for part in _value(one)]


def _part(text: str, forms: list[str], value: object = None) -> _Part:
    return _Part(text, tuple(dict.fromkeys(map(_squash, forms))), value)


def _spellings(text: str) -> list[str]:
    """A text as templates write it: bare, in JSON, in JSON in JSON, in Python."""
    plain, ascii_only = (
        json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)
    )
    return [
        text,
        plain,
        ascii_only,
        json.dumps(plain, ensure_ascii=False)[1:-1],
        json.dumps(ascii_only)[1:-1],
        repr(text)[1:-1],
    ]


def _numbers(value: Any) -> list[str]:  # noqa: ANN401
    """A number or a truth value in JSON and in Python; 2.0 may be written 2."""
    forms = [json.dumps(value), str(value)]
    if isinstance(value, float):
        forms += [f"{value:g}", f"{value:.0f}" if value.is_integer() else str(value)]
    return forms
