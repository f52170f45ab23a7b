"""Where a text ends: at an end token, at a stop string, or at its most tokens.

Tokens come in blocks, so the end may lie inside one: what was accepted beyond it is cut.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from outrider.data.target import Target


class Cut(NamedTuple):
    """How much of a block reaches the text."""

    count: int
    """Its first so many tokens."""
    finish: str
    """`stop` at an end token or stop string, `length` at the most tokens; empty: it goes on."""


class StopStrings:
    """Finds the token that completes a stop string, by transformers' own criterion.

    The string may begin in tokens long before, the prompt's among them, and the token may reach
    beyond its end: it is kept whole, as `generate(stop_strings=...)` keeps it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._criterion = StopStringCriteria(tokenizer, list(strings))
        self._reach = self._criterion.maximum_token_len

    def first(self, ids: Sequence[int], tokens: Sequence[int]) -> int | None:
        """Index in `tokens`, which follow `ids`, of the first that completes one."""
        # Every token holds at least one character: no match reaches further back.
        text = [*ids[-self._reach :], *tokens]
        for index in range(len(tokens)):
            end = len(text) - len(tokens) + index + 1
            window = torch.tensor([text[max(0, end - self._reach) : end]])
            if bool(self._criterion(window, None)[0]):
                return index
        return None


class Ending:
    """When texts of one target and one way of decoding end."""

    def __init__(
        self, target: Target, stop_strings: Sequence[str] = (), *, ignore_eos: bool = False
    ) -> None:
        if stop_strings and target.tokenizer is None:
            raise ValueError(
                f"stop_strings is {list(stop_strings)} and the target {target.name} has no "
                "tokenizer to find them with; give the tokenizer too"
            )
        self._eos = frozenset() if ignore_eos else frozenset(target.eos_ids)
        self._strings: StopStrings | None = None
        if stop_strings and target.tokenizer is not None:
            self._strings = StopStrings(target.tokenizer, stop_strings)

    def cut(self, ids: Sequence[int], tokens: Sequence[int], room: int) -> Cut:
        """What of `tokens`, which follow `ids`, reaches a text that has room for so many more."""
        count = next((i for i, token in enumerate(tokens, 1) if token in self._eos), None)
        finish = "" if count is None else "stop"
        inside = tokens[: min(room, len(tokens) if count is None else count)]
        found = None if self._strings is None else self._strings.first(ids, inside)
        if found is not None:
            return Cut(found + 1, "stop")
        if len(inside) == room and (count is None or count > room):
            return Cut(room, "length")
        return Cut(len(inside), finish)
