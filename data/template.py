"""The target's chat template: how it renders, what it wants to be given, and in which mode."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
LOSS_FIELDS = ("weight", "train", "train_detail")
"""What a message says of its loss, as OpenAI's fine-tuning and Axolotl have it; not rendered."""
GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")
# Whatever a template may trip over in a row that is not of the form it expects.
_TRIPS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class RowError(ValueError):
    """This row cannot train; the message says why."""


class Rendered(NamedTuple):
    """A conversation as text and as tokens."""

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]
    """Where in the text each token stands; empty for tokenizers that cannot say."""


class Dialect(NamedTuple):
    """What a template must be given to render an answer's parts as the model writes them."""

    arguments: Literal["object", "text"]
    """Whether a tool call's arguments are an object or JSON text."""
    no_content: Literal[""] | None
    """The content of an answer that only calls tools."""
    reasoning: str | None
    """The field that the template reads thinking from; None when it reads none."""


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
        return self.render(messages, tools, prompt=prompt).ids

    def render(
        self, messages: Sequence[Message], tools: object = None, *, prompt: bool
    ) -> Rendered:
        """A conversation as `apply_chat_template` renders and tokenises it.

        Raises RowError when the template or the tokenizer refuses it.
        """
        return self.tokenise(self.write(messages, tools, prompt=prompt))

    def write(self, messages: Sequence[Message], tools: object = None, *, prompt: bool) -> str:
        """A conversation as text. Raises RowError when the template refuses it."""
        try:
            return str(self._apply(messages, tools, add_generation_prompt=prompt, tokenize=False))
        except (*_TRIPS, RecursionError) as error:
            raise RowError(f"the chat template refuses the messages: {error}") from error

    def tokenise(self, text: str) -> Rendered:
        """Text that holds its special tokens already, as tokens."""
        fast = self.tokenizer.is_fast
        try:
            found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast)
        except (TypeError, UnicodeError) as error:
            raise RowError(
                f"the text is not valid Unicode ({type(error).__name__}: {error}); a lone "
                "surrogate, say"
            ) from error
        return Rendered(text, list(found["input_ids"]), found["offset_mapping"] if fast else [])

    def tagged(self, messages: Sequence[Message], tools: object = None) -> list[int] | None:
        """The template's own {% generation %} marks, 1 per generated token; None without tags."""
        if not GENERATION_TAG.search(str(self.tokenizer.chat_template)):
            return None
        found = self._apply(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
        return [int(mark) for mark in found["assistant_masks"]]

    def text(self, ids: Sequence[int]) -> str:
        """Tokens as text, special ones too."""
        return str(self.tokenizer.decode(list(ids)))

    @cached_property
    def end_id(self) -> int | None:
        """The token that ends an answer, if generation stops at it."""
        talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        ends = [token for token in self.ids(talk, prompt=False) if token in self.eos_ids]
        return ends[-1] if ends else None

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that mark structure, not text."""
        return frozenset({*self.eos_ids, *self.tokenizer.all_special_ids})

    @cached_property
    def dialect(self) -> Dialect:
        """Found by rendering a probe in every form: templates do not say what they expect."""
        for arguments in ("object", "text"):
            for no_content in (None, ""):
                if self._shows_call(arguments, no_content):
                    return Dialect(arguments, no_content, self._reasoning_field())
        return Dialect("object", "", self._reasoning_field())

    def _shows_call(self, arguments: str, no_content: str | None) -> bool:
        """Whether a tool call comes out as a model would write it: no quotes of quotes, no None."""
        given: Any = {"zqkey": "zqvalue"}
        if arguments == "text":
            given = json.dumps(given)
        function = {"name": "zqprobe", "arguments": given}
        calls = [{"type": "function", "id": "zqprobe01", "function": function}]
        answer = {"role": "assistant", "content": no_content, "tool_calls": calls}
        empty: dict[str, Any] = {"type": "object", "properties": {}}
        tools = [
            {"type": "function", "function": {"name": "a", "description": "b", "parameters": empty}}
        ]
        part = self._added(answer, tools)
        bad = ("None", '\\"zqvalue', "'zqvalue")
        return all(word in part for word in ("zqprobe", "zqkey", "zqvalue")) and not any(
            word in part for word in bad
        )

    def _reasoning_field(self) -> str | None:
        answer = {"role": "assistant", "content": "zqsaid"}
        for name in REASONING_FIELDS:
            if "zqthought" in self._added({**answer, name: "zqthought"}, None):
                return name
        return None

    def _added(self, answer: Message, tools: object) -> str:
        """What rendering an answer adds to its question; empty when the template refuses it."""
        asked = [{"role": "user", "content": "x"}]
        try:
            before = self.write(asked, tools, prompt=False)
            return self.write([*asked, answer], tools, prompt=False).removeprefix(before)
        except RowError:
            return ""

    def _apply(self, messages: Sequence[Message], tools: object, **settings: Any) -> Any:  # noqa: ANN401
        """The tokenizer's own rendering; what it returns depends on the settings."""
        conversation: Any = [
            {name: value for name, value in message.items() if name not in LOSS_FIELDS}
            for message in messages
        ]
        given: Any = tools
        return self.tokenizer.apply_chat_template(
            conversation, tools=given, **settings, **self.options
        )


def writes_the_date(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether the chat template's text depends on the day it is rendered."""
    return tokenizer is not None and "strftime_now" in str(tokenizer.chat_template)


def template_hash(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Short hash of the chat template's text; None without one."""
    if tokenizer is None or not tokenizer.chat_template:
        return None
    return hashlib.sha256(repr(tokenizer.chat_template).encode()).hexdigest()[:16]
