"""Messages of every common form, brought into the one form that the target's template renders."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.data.template import LOSS_FIELDS, REASONING_FIELDS, Dialect, Message, RowError

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_call": "assistant",
}
"""ShareGPT's names for who speaks."""


def read_conversation(found: object, dialect: Dialect) -> list[dict[str, Any]]:
    """Messages with role and content as the template wants them.

    Takes `role`/`content` and ShareGPT's `from`/`value`; content as text or as a list of text
    parts; tool calls nested or flat, arguments as text or object; thinking under any usual name.
    Raises RowError naming the message.
    """
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise RowError("messages is not a list of objects with role and content")
    return [_message(one, index, dialect) for index, one in enumerate(found)]


def read_tools(found: object) -> list[Any] | None:
    """Tool definitions from a list or its JSON text; None when there are none."""
    if isinstance(found, str):
        found = _json(found, "tools") if found.strip() else None
    if found is None or found == []:
        return None
    if not isinstance(found, list):
        raise RowError(f"tools is a {_name(found)}; give a list of tool definitions")
    return [_json(one, "tools") if isinstance(one, str) else one for one in found]


def has_loss(message: Message, index: int) -> bool:
    """Whether an answer is to be trained on: not with `weight` 0 or `train` false.

    Raises RowError for other values than 0, 1, true and false, for two fields that contradict each
    other, and for loss on parts of a message.
    """
    stated = {name: message[name] for name in LOSS_FIELDS if message.get(name) is not None}
    if stated.pop("train_detail", None):
        raise RowError(
            f"message {index} has train_detail, loss on parts of a message, which is not read; "
            "give weight 0 or 1 for the whole message"
        )
    for name, value in stated.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            allowed = "0 or 1" if name == "weight" else "true or false"
            raise RowError(f"message {index}: {name} is {value!r}; give {allowed}, or leave it out")
    if len({bool(value) for value in stated.values()}) > 1:
        raise RowError(f"message {index} has {stated}, which contradict each other; keep one")
    return all(stated.values())


def _message(found: Mapping[str, Any], index: int, dialect: Dialect) -> dict[str, Any]:
    kept = {key: value for key, value in found.items() if value is not None}
    speaker = _speaker(kept, index)
    content = _content(kept.pop("content", kept.pop("value", None)), index)
    calls = _calls(kept, content, speaker, index)
    role = SPEAKERS.get(speaker, speaker)
    if content is None and role in ("system", "developer", "user"):
        raise RowError(
            f"message {index} ({role}) has no content, which templates write as the word None; "
            "give it text or leave the row out"
        )
    message: dict[str, Any] = {"role": role, "content": "" if content is None else content}
    thoughts = [kept.pop(name) for name in REASONING_FIELDS if name in kept]
    if any(thoughts):
        name = dialect.reasoning or REASONING_FIELDS[0]
        message[name] = _content(next(filter(None, thoughts)), index)
    if calls:
        message["tool_calls"] = [_call(call, index, dialect) for call in calls]
        message["content"] = dialect.no_content if speaker == "function_call" else content
        message["content"] = message["content"] or dialect.no_content
    for name in ("from", "role", "value", "content", "tool_calls", "function_call"):
        kept.pop(name, None)
    return {**kept, **message}


def _speaker(message: Mapping[str, Any], index: int) -> str:
    """Who speaks. ShareGPT's names are a fixed list; which roles there are, the template knows."""
    speaker = message.get("role", message.get("from"))
    if not isinstance(speaker, str) or not speaker:
        raise RowError(f"message {index} has no role")
    if "role" not in message and speaker not in SPEAKERS:
        raise RowError(f"message {index} is from {speaker!r}; known are {', '.join(SPEAKERS)}")
    return speaker


def _content(found: object, index: int) -> str | None:
    if found is None or isinstance(found, str):
        return found
    if not isinstance(found, list):
        raise RowError(f"message {index} has content of type {_name(found)}; give text")
    return "".join(_part(part, index) for part in found)


def _part(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else _name(part)
    raise RowError(f"message {index} has a part of type {kind!r}; only text can be trained on")


def _calls(
    message: Mapping[str, Any], content: str | None, speaker: str, index: int
) -> Sequence[Any]:
    """The tool calls of a message, wherever it keeps them."""
    if speaker == "function_call":  # ShareGPT: the call is the text
        found = _json(str(content), f"message {index}'s function call")
        return found if isinstance(found, list) else [found]
    calls = message.get("tool_calls")
    if isinstance(calls, str):
        calls = _json(calls, f"message {index}'s tool_calls") if calls.strip() else None
    if not calls and isinstance(message.get("function_call"), Mapping):
        calls = [message["function_call"]]
    if calls is not None and not isinstance(calls, list):
        raise RowError(f"message {index} has tool_calls of type {_name(calls)}; give a list")
    return calls or []


def _call(call: object, index: int, dialect: Dialect) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RowError(
            f"message {index} has a tool call without a name; give "
            '{"function": {"name": ..., "arguments": {...}}}'
        )
    assert isinstance(call, Mapping)
    arguments = function.get("arguments", function.get("parameters"))
    given: object = {} if arguments is None or arguments == "" else arguments
    if dialect.arguments == "object" and isinstance(given, str):
        given = _json(given, f"message {index}'s tool call arguments")
    if dialect.arguments == "text" and not isinstance(given, str):
        given = json.dumps(given, ensure_ascii=False)
    rest = {key: call[key] for key in ("id",) if call.get(key) is not None}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": given}}


def _json(text: str, what: str) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what} is not JSON ({error}); write it as JSON") from error


def _name(found: object) -> str:
    return type(found).__name__
