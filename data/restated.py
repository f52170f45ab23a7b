"""Answers put after a prompt that the template cannot show them after.

Two kinds: a prompt that opens the thinking itself, as DeepSeek-R1's, whose template then renders
past answers without it; and a prompt whose history the template rewrites as soon as the answer
stands, as GPT-OSS drops the analysis before a tool call once there is a final answer.
"""

import re
from collections.abc import Sequence

from outrider.data.said import lost_parts
from outrider.data.template import REASONING_FIELDS, Message, Rendered, RowError, Template

OPENED = re.compile(r"<think>(\s*)$")
# DeepSeek-R1's model card: "<think>\n" thinking "\n</think>\n\n" answer.
CLOSING = "\n</think>\n\n"


def restated(
    messages: Sequence[Message],
    prompt: Rendered,
    whole: Rendered,
    template: Template,
    tools: object,
) -> Rendered | None:
    """The prompt followed by what the model says to it; None where that cannot be known.

    `whole` is the conversation up to the answer, its last message, as the template renders it.
    """
    answer = messages[-1]
    said = _thought(prompt, answer, template)
    if said is None:
        said = _rendered(answer, whole, template, tools)
    if said is None:
        return None
    found = template.tokenise(said)
    start = len(prompt.text)
    moved = [(left + start, right + start) for left, right in found.offsets]
    offsets = [*prompt.offsets, *moved] if moved else []
    return Rendered(prompt.text + said, [*prompt.ids, *found.ids], offsets)


def _thought(prompt: Rendered, answer: Message, template: Template) -> str | None:
    """Thinking, answer and turn end, where the prompt opens the thinking.

    The answer has its thinking in a field of its own, or before `</think>` in its text. Without
    any, and for tool calls, nothing tells what the model would say.
    """
    opened, text = OPENED.search(prompt.text), _text(answer)
    if opened is None or text is None or answer.get("tool_calls") or template.end_id is None:
        return None
    if text.lstrip().startswith("<think>"):
        text = text.lstrip().removeprefix("<think>").removeprefix(opened[1])
    return text + template.text([template.end_id])


def _text(answer: Message) -> str | None:
    content = str(answer.get("content") or "")
    found = [str(answer[name]) for name in REASONING_FIELDS if answer.get(name)]
    if found:
        return found[0].strip() + CLOSING + content.strip()
    return content if "</think>" in content else None


def _rendered(answer: Message, whole: Rendered, template: Template, tools: object) -> str | None:
    """The answer as the template writes it after a lone question and, the same, at the end."""
    asked: list[Message] = [{"role": "user", "content": "x"}]
    try:
        closed = template.write(asked, tools, prompt=False)
        opened = template.write(asked, tools, prompt=True)
        alone = template.write([*asked, answer], tools, prompt=False)
    except RowError:
        return None
    said = alone[len(opened) :]
    if not alone.startswith(opened) or not opened.startswith(closed):
        return None
    if lost_parts(answer, said):
        return None
    return said if whole.text.endswith(opened[len(closed) :] + said) else None
