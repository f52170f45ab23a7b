"""Conversation -> token ids and the mask of what is supervised, by the target's own template.

Boundaries come from rendering: the prompt of an answer is the conversation before it, rendered with
the generation prompt; the answer is what rendering one message more adds. Both are compared as
*tokens*. Where a template rewrites history (thinking stripped from earlier turns), each answer
becomes a row of its own: what the model sees and says at that turn.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
Message = Mapping[str, Any]
GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")


class RowError(ValueError):
    """This row cannot train; the message says why."""


class Encoded(NamedTuple):
    """A row of tokens; mask 1 marks the tokens that are supervised."""

    ids: list[int]
    mask: list[int]
    turn: int
    """Number of the last answered message, counted from 0."""
    end_ids: list[int]
    """The end token trained at each supervised turn; missing where the template has none."""


class _Turn(NamedTuple):
    """One answer: the row up to its end, where the answer starts, where supervision ends."""

    index: int
    ids: list[int]
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Template:
    """The target's chat template with what decides how it renders."""

    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the template, as `enable_thinking`: the mode the head is trained for."""

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise ValueError(
                "the target's tokenizer has no chat template, so messages cannot be rendered; "
                "give rows as input_ids with loss_mask, or add a chat_template.jinja to the target"
            )

    def ids(self, messages: Sequence[Message], tools: object = None, *, prompt: bool) -> list[int]:
        """Tokens of a conversation, with the generation prompt if `prompt`."""
        try:
            found = self._apply(messages, tools, add_generation_prompt=prompt, return_dict=False)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RowError(f"the chat template refuses the messages: {error}") from error
        return [int(token) for token in found]

    def tagged(self, messages: Sequence[Message], tools: object = None) -> list[int] | None:
        """The template's own {% generation %} marks, 1 per generated token; None without tags."""
        if not GENERATION_TAG.search(str(self.tokenizer.chat_template)):
            return None
        found = self._apply(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
        return [int(mark) for mark in found["assistant_masks"]]

    def text(self, ids: Sequence[int]) -> str:
        """Tokens as text, special ones too."""
        return str(self.tokenizer.decode(list(ids)))

    def _apply(self, messages: Sequence[Message], tools: object, **settings: Any) -> Any:  # noqa: ANN401
        """The tokenizer's own rendering; what it returns depends on the settings."""
        conversation: Any = [dict(message) for message in messages]
        given: Any = tools
        return self.tokenizer.apply_chat_template(
            conversation, tools=given, **settings, **self.options
        )


def encode(messages: Sequence[Message], template: Template, tools: object = None) -> list[Encoded]:
    """One row for the conversation, or one per answer where the template rewrites history."""
    indices = _answers(messages)
    turns = [_turn(messages, index, template, tools) for index in indices]
    whole = turns[-1].ids
    if all(turn.ids == whole[: len(turn.ids)] for turn in turns):
        groups = [turns]
    else:
        groups = [[turn] for turn in turns]
    return [_row(group, messages, template, tools) for group in groups]


def encode_text(text: str, template: Template) -> Encoded:
    """A conversation that is rendered already: supervised are the spans after the answer marker."""
    opener = answer_marker(template)
    closers = [template.text([token]) for token in template.eos_ids]
    found = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = [int(token) for token in found["input_ids"]]
    mask = [0] * len(ids)
    pattern = re.escape(opener) + "(.*?(?:" + "|".join([*map(re.escape, closers), "$"]) + "))"
    for span in re.finditer(pattern, text, re.DOTALL):
        low, high = span.span(1)
        for place, (left, right) in enumerate(found["offset_mapping"]):
            if low <= left and right <= high and right > left:
                mask[place] = 1
    ends = [ids[i] for i in range(len(ids)) if mask[i] and ids[i] in template.eos_ids]
    return Encoded(ids, mask, turn=-1, end_ids=ends)


def answer_marker(template: Template) -> str:
    """The text that the template puts before every answer."""
    ask = [{"role": "user", "content": "x"}]
    closed = template.ids(ask, prompt=False)
    opened = template.ids(ask, prompt=True)
    marker = template.text(opened[len(closed) :])
    if opened[: len(closed)] != closed or not marker.strip():
        raise ValueError(
            "the target's template puts no marker before answers, so rendered text cannot be "
            "masked; give rows as messages"
        )
    return marker


def _answers(messages: Sequence[Message]) -> list[int]:
    """The answers to supervise: assistant messages that reply to something."""
    asked = False
    found: list[int] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            raise RowError(f"message {index} has no role")
        if role in ("user", "tool"):
            asked = True
        elif role == "assistant" and asked:
            found.append(index)
    if not found:
        raise RowError("no assistant message answers a user message")
    return found


def _turn(messages: Sequence[Message], index: int, template: Template, tools: object) -> _Turn:
    message = messages[index]
    if not any(_said(message)):
        raise RowError(f"message {index} is an empty answer")
    prompt = template.ids(messages[:index], tools, prompt=True)
    ids = template.ids(messages[: index + 1], tools, prompt=False)
    if ids[: len(prompt)] != prompt:
        raise RowError(
            f"message {index}: rendered with its answer, the prompt's tokens differ from what the "
            f"model sees when it is asked; this template cannot show what the model would say"
        )
    bos = template.tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise RowError("the row begins with the BOS token twice; take it out of the messages")
    lost = _lost(message, template.text(ids[len(prompt) :]))
    if lost:  # some generation prompts open the thinking that the answer goes on with
        before = template.ids(messages[:index], tools, prompt=False)
        if ids[: len(before)] == before:
            lost = _lost(message, template.text(ids[len(before) :]))
    if lost:
        raise RowError(
            f"message {index}: the template removes part of the answer ({lost[0][:60]!r}), so the "
            f"row would not be what the model says"
        )
    return _Turn(
        index, ids, len(prompt), len(prompt) + _answer_length(ids[len(prompt) :], template)
    )


def _lost(message: Message, turn: str) -> list[str]:
    """The parts of an answer that are missing from its rendered turn."""
    rendered = _squash(turn)
    return [part for part in _said(message) if _squash(part) not in rendered]


def _said(message: Message) -> list[str]:
    """Every part of an answer that the model itself produced and a template must keep."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [str(part.get("text") or "") for part in content if isinstance(part, Mapping)]
    else:
        parts = [str(content or "")]
    parts += [str(message.get(name) or "") for name in REASONING_FIELDS]
    for call in message.get("tool_calls") or []:
        parts.append(str(call.get("function", call).get("name") or ""))
    return [part for part in parts if part.strip()]


def _squash(text: str) -> str:
    """Without white space: templates trim and re-wrap answers."""
    return "".join(text.split())


def _answer_length(region: list[int], template: Template) -> int:
    """Tokens of the answer with its turn end, without what the template adds after that."""
    length = len(region)
    while length and not template.text([region[length - 1]]).strip():
        length -= 1  # a line break after the turn end is the template's, never the model's
    ends = [place for place in range(len(region)) if region[place] in template.eos_ids]
    if ends and ends[-1] + 1 >= length:
        return ends[-1] + 1
    return length


def _row(
    turns: list[_Turn], messages: Sequence[Message], template: Template, tools: object
) -> Encoded:
    last = turns[-1]
    mask = [0] * len(last.ids)
    for turn in turns:
        mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
    tags = template.tagged(messages[: last.index + 1], tools)
    if tags is not None:
        earlier = any(message.get("role") == "assistant" for message in messages[: turns[0].index])
        mask = _cross_check(mask, tags, turns, first=turns[0].start if earlier else 0)
    ends = [turn.ids[turn.end - 1] for turn in turns]
    special = {*template.eos_ids, *template.tokenizer.all_special_ids}
    return Encoded(last.ids, mask, last.index, [token for token in ends if token in special])


def _cross_check(mask: list[int], tags: list[int], turns: list[_Turn], *, first: int) -> list[int]:
    """The template's tags decide inside an answer; the turn end is supervised in any case.

    Before token `first` lie answers that are not supervised here: their tags say nothing.
    """
    inside = [0] * len(mask)
    for turn in turns:
        inside[turn.start : len(turn.ids)] = [1] * (len(turn.ids) - turn.start)
    astray = [i for i in range(first, len(mask)) if tags[i] and not inside[i]]
    if astray:
        raise RowError(
            f"the template's generation tags mark token {astray[0]}, which is outside every answer "
            f"by its own rendering; correct the template"
        )
    both = [marked * tagged for marked, tagged in zip(mask, tags, strict=True)]
    for turn in turns:
        if not any(both[turn.start : turn.end]):
            raise RowError(
                f"message {turn.index}: the template's generation tags leave the answer unmarked; "
                f"correct the template"
            )
        both[turn.end - 1] = 1
    return both
