"""Prompts from a file of conversations, as requests to the target."""

from typing import Any

from outrider.data.generate import Request
from outrider.data.sampling import Sampling
from outrider.data.sources import records

_WRITTEN_HERE = {
    "prompt",
    "prompt_ids",
    "answer_ids",
    "temperature",
    "seed",
    "finish",
    "template_options",
}


def read_requests(source: str, sampling: Sampling) -> list[Request]:
    """One request a row; fields that are not the prompt's are carried into the answered row.

    A row holds `messages` (role and content; a last answer is dropped, to be given anew) or
    `prompt`, a text. `id` is optional. Raises ValueError naming the row that has neither.
    """
    requests = []
    for number, record in enumerate(records(source), start=1):
        if isinstance(record, str):
            raise ValueError(f"{source} row {number} is {record}; mend or remove it")
        row: dict[str, Any] = dict(record)
        name = str(row.pop("id", f"row-{number:06d}"))
        messages = _messages(row.pop("messages", None), row.get("prompt"))
        if not messages:
            raise ValueError(
                f"{source} row {number} has no question; give `messages` in which a user speaks "
                "last, or last before the answer, or give `prompt`"
            )
        extra = {key: value for key, value in row.items() if key not in _WRITTEN_HERE}
        requests.append(Request(name, messages, sampling, extra))
    if not requests:
        raise ValueError(f"{source} has no rows; name a file of prompts")
    return requests


def _messages(found: object, prompt: object) -> list[dict[str, str]]:
    """The conversation up to the question; empty when there is none."""
    if isinstance(found, list):
        turns: list[dict[str, str]] = [dict(turn) for turn in found]
        if turns and turns[-1].get("role") == "assistant":
            turns = turns[:-1]
        return turns if turns and turns[-1].get("role") in ("user", "tool") else []
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}]
    return []
