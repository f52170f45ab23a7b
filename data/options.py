"""The mode a chat template is run in: parsed from flags, saved with heads, compared later."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

# Decided by the rows and by what is rendered, never by the user.
TAKEN = ("messages", "conversation", "tools", "documents", "add_generation_prompt", "tokenize")


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Template options from NAME=VALUE words; a value is JSON where it can be, else text.

    Raises ValueError for a word without `=`, a name twice, and names that are not the user's.
    """
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(
                f"template_options has {word!r}; write NAME=VALUE, as enable_thinking=false"
            )
        if name in TAKEN or name in options:
            raise ValueError(
                f"template_options names {name!r}, which "
                + (
                    "stands there already"
                    if name in options
                    else "rows decide; give it in the rows"
                )
            )
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def state_options(options: Mapping[str, Any]) -> str:
    """Options as one text that is equal for equal modes; empty for none."""
    return json.dumps(options, sort_keys=True) if options else ""


def chat_notes(
    template: str | None, options: Mapping[str, Any], num_with_tools: int
) -> dict[str, Any]:
    """What a head's config keeps of the mode its rows were rendered in; `template` is a hash."""
    return {
        "template": template,
        "template_options": dict(options),
        "rows_with_tools": num_with_tools,
    }


def mode_difference(notes: Mapping[str, Any], stated: str, where: str) -> str | None:
    """How the mode in a head's notes differs from the one `stated` by what it meets in `where`.

    `notes` is what `chat_notes` gave, empty for heads that keep none, which differ from nothing.
    """
    if "template_options" not in notes:
        return None
    ours = state_options(notes["template_options"])
    if ours == stated:
        return None
    return (
        f"the head was trained with template options {ours or '(none)'}, {where} has "
        f"{stated or '(none)'}"
    )
