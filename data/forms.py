"""The forms a record may have, each turned into rows of tokens with their masks."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.data.chat import Encoded, RowError, Template, encode
from outrider.data.messages import read_conversation, read_tools
from outrider.data.rendered import encode_text
from outrider.data.sources import Record
from outrider.data.target import Target

MASKS = ("loss_mask", "assistant_masks", "completion_mask")
CONVERSATIONS = ("messages", "conversations", "conversation")
IGNORED_LABEL = -100  # transformers' mark of a label without loss
# What a record that is not what it seems trips over, told as a refusal of that row.
_TRIPS = (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, UnicodeError)


class ForeignError(ValueError):
    """An answered row is another target's, or of another mode: so may be what lies beside it."""


@dataclass(frozen=True, kw_only=True)
class RecordReader:
    """Turns a record of any known form into token rows; small enough to send to other processes."""

    tokenizer: PreTrainedTokenizerBase | None
    eos_ids: tuple[int, ...]
    tokenizer_size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the chat template."""

    @classmethod
    def of(cls, target: Target, options: Mapping[str, Any]) -> "RecordReader":
        """A reader of rows for `target`."""
        return cls(
            tokenizer=target.tokenizer,
            eos_ids=target.eos_ids,
            tokenizer_size=target.tokenizer_size,
            options=options,
        )

    def encode(self, record: Record | str) -> list[Encoded]:
        """The token rows of a record; RowError says why there are none.

        Raises ForeignError for a row that another target answered.
        """
        if isinstance(record, str):
            raise RowError(record)
        forms: dict[str, Callable[[Record], list[Encoded]]] = {
            "prompt_ids": self._answered,
            "input_ids": self._tokenised,
            "messages": self._messages,
            "conversations": self._messages,
            "conversation": self._messages,
            "text": self._rendered,
            "completion": self._completed,
        }
        for name, form in forms.items():
            if name in record:
                encoded = _guarded(form, record)
                for part in encoded:
                    self._check_ids(part.ids)
                return encoded
        raise RowError(f"has fields {sorted(record)[:12]}; one of {', '.join(forms)} is needed")

    def show(self, ids: list[int]) -> str:
        """A row as text, for messages."""
        return str(ids[:200]) if self.tokenizer is None else str(self.tokenizer.decode(ids[:400]))

    @cached_property
    def template(self) -> Template:
        """The chat template, for rows that need it."""
        if self.tokenizer is None:
            raise ValueError("the target has no tokenizer; give rows as input_ids with loss_mask")
        return Template(tokenizer=self.tokenizer, eos_ids=self.eos_ids, options=self.options)

    def _check_ids(self, ids: list[int]) -> None:
        if not ids or (min(ids) >= 0 and max(ids) < self.tokenizer_size):
            return
        for place, token in enumerate(ids):
            if not 0 <= token < self.tokenizer_size:
                raise RowError(
                    f"token id {str(token)[:20]} at position {place} is outside the target's "
                    f"vocabulary (0 to {self.tokenizer_size - 1}); tokenise with the target's "
                    "tokenizer"
                )

    def _answered(self, record: Record) -> list[Encoded]:
        """Text the target wrote itself: ids as sampled, since re-tokenising could change them."""
        prompt, answer = _ints(record, "prompt_ids"), _ints(record, "answer_ids")
        if not answer:
            raise RowError("answer_ids is empty")
        messages = record.get("messages", prompt)
        if not messages or not isinstance(messages, list):
            raise RowError("messages is not a list of objects with role and content")
        if "messages" in record and self.tokenizer is not None:
            self._check_prompt(record, prompt)
        mask = [0] * len(prompt) + [1] * len(answer)
        ends = [answer[-1]] if answer[-1] in self.eos_ids else []
        spans = (("prompt", len(prompt)), ("assistant", len(mask)))
        return [Encoded(prompt + answer, mask, turn=0, end_ids=ends, spans=spans)]

    def _check_prompt(self, record: Record, prompt: list[int]) -> None:
        """Raise ForeignError where a prompt's ids are not what the template makes of its messages.

        Every row is looked at: a file may hold answers of several targets, or in several modes.
        """
        asked = read_conversation(record["messages"], self.template.dialect)
        if asked[-1]["role"] == "assistant":
            asked.pop()
        if self.template.ids(asked, read_tools(record.get("tools")), prompt=True) == prompt:
            return
        stated = record.get("template_options")
        modes = f" (the row says {stated or {}}, this run has {dict(self.options)})"
        raise ForeignError(
            "prompt_ids are not what this target's tokenizer and chat template make of the row's "
            "messages: it was generated by another target, or with other template "
            f"options{modes if stated or self.options else ''}; generate rows with this one "
            "(outrider generate), or give rows with messages only"
        )

    def _tokenised(self, record: Record) -> list[Encoded]:
        ids = _ints(record, "input_ids")
        mask = _mask(record)
        if len(ids) != len(mask) or not set(mask) <= {0, 1}:
            raise RowError(
                f"loss_mask has {len(mask)} entries for {len(ids)} input_ids, values "
                f"{sorted(set(mask))[:5]}; give one 0 or 1 per token"
            )
        seen = record.get("attention_mask", [1] * len(ids))
        if not isinstance(seen, list) or len(seen) != len(ids) or not set(seen) <= {0, 1}:
            raise RowError("attention_mask needs one 0 or 1 for each of input_ids; or leave it out")
        ids = [token for token, is_there in zip(ids, seen, strict=True) if is_there]
        mask = [on for on, is_there in zip(mask, seen, strict=True) if is_there]
        ends = [token for token, on in zip(ids, mask, strict=True) if on and token in self.eos_ids]
        spans = (("given", len(ids)),)
        return [Encoded(ids, mask, turn=0, end_ids=ends, spans=spans)]

    def conversation(self, record: Record) -> tuple[list[dict[str, Any]], list[Any] | None]:
        """Messages, as the template wants them, and tools of a record that has messages."""
        found = next(record[name] for name in CONVERSATIONS if name in record)
        messages = read_conversation(found, self.template.dialect)
        system = record.get("system")
        if isinstance(system, str) and system.strip() and messages[:1] != []:
            if messages[0]["role"] == "system":
                raise RowError("has a system field and a system message; keep one of them")
            messages.insert(0, {"role": "system", "content": system})
        return messages, read_tools(record.get("tools"))

    def _messages(self, record: Record) -> list[Encoded]:
        messages, tools = self.conversation(record)
        return encode(messages, self.template, tools)

    def _rendered(self, record: Record) -> list[Encoded]:
        if not isinstance(record["text"], str):
            raise RowError(f"text is of type {type(record['text']).__name__}; give text")
        return [encode_text(record["text"], self.template)]

    def _completed(self, record: Record) -> list[Encoded]:
        """A prompt and its completion: texts (one question, one answer) or lists of messages."""
        parts = {"user": record.get("prompt"), "assistant": record.get("completion")}
        messages: list[Any] = []
        for role, part in parts.items():
            if isinstance(part, str):
                messages.append({"role": role, "content": part})
            elif isinstance(part, list):
                messages += part
            else:
                raise RowError("completion needs a prompt, both as texts or lists of messages")
        return self._messages({"messages": messages, "tools": record.get("tools")})


def _guarded(form: Callable[[Record], list[Encoded]], record: Record) -> list[Encoded]:
    """The form's rows; what a malformed record trips over is told as a refusal of that row."""
    try:
        return form(record)
    except (*_TRIPS, json.JSONDecodeError) as error:
        raise RowError(f"is malformed: {type(error).__name__}: {error}") from error


def _ints(record: Record, name: str) -> list[int]:
    values = record.get(name)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise RowError(f"{name} is not a list of integers")
    return values


def _mask(record: Record) -> list[int]:
    """The mask of a tokenised row, under any of its usual names; true counts as 1."""
    for name in MASKS:
        if name in record:
            values = record[name]
            if not isinstance(values, list) or not all(isinstance(one, int) for one in values):
                raise RowError(f"{name} is not a list of integers")
            return [int(value) for value in values]
    if "labels" in record:
        return [int(label != IGNORED_LABEL) for label in _ints(record, "labels")]
    raise RowError("input_ids without loss_mask; mark the supervised tokens with 1")
