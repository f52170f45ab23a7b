"""Answers whose thinking the generation prompt has opened already, as DeepSeek-R1's does.

Such a template renders past answers without their thinking, so rendering cannot show what the model
says. What it says is known all the same: it goes on from the open tag.
"""

import re

from outrider.data.template import REASONING_FIELDS, Message, Rendered, Template

OPENED = re.compile(r"<think>(\s*)$")
# DeepSeek-R1's model card: "<think>\n" thinking "\n</think>\n\n" answer.
CLOSING = "\n</think>\n\n"


def said_aloud(prompt: Rendered, message: Message, template: Template) -> Rendered | None:
    """Prompt, thinking, answer and turn end; None unless the prompt opens the thinking.

    The answer has its thinking in a field of its own, or before `</think>` in its text; answers
    with none, or with tool calls, are left to the template.
    """
    opened, text = OPENED.search(prompt.text), _text(message)
    if opened is None or text is None or message.get("tool_calls") or template.end_id is None:
        return None
    if text.lstrip().startswith("<think>"):
        text = text.lstrip().removeprefix("<think>").removeprefix(opened[1])
    said = template.tokenise(text)
    start, end = len(prompt.text), template.text([template.end_id])
    whole = prompt.text + text + end
    moved = [(left + start, right + start) for left, right in said.offsets]
    offsets = [*prompt.offsets, *moved, (start + len(text), len(whole))] if moved else []
    return Rendered(whole, [*prompt.ids, *said.ids, template.end_id], offsets)


def _text(message: Message) -> str | None:
    """Thinking and answer as one text; None when there is no thinking."""
    content = str(message.get("content") or "")
    found = [str(message[name]) for name in REASONING_FIELDS if message.get(name)]
    if found:
        return found[0].strip() + CLOSING + content.strip()
    return content if "</think>" in content else None
