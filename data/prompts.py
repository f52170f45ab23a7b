"""Prompts from a file of conversations, as requests to the target."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.data.answers import Request
from outrider.data.sampling import Sampling, Stream, row_key, uniform
from outrider.data.sources import records

_WRITTEN_HERE = {
    "retokenised",
    "text_gives_other_ids",
    "sampling",
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
        system = row.pop("system", None)
        if not isinstance(system, str | None):
            raise ValueError(f"{source} row {number}: system is {system!r}; give a text, or none")
        if system is not None and system.strip():
            if messages[0].get("role") == "system":
                raise ValueError(
                    f"{source} row {number} has a system field and a system message; keep one"
                )
            messages = [{"role": "system", "content": system}, *messages]
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


def parse_temperatures(text: str) -> dict[float, float]:
    """Temperatures and their shares, summing to 1: `0,0.7,1` or, weighted, `0=2,1=1`.

    Raises ValueError naming the part that is no temperature or no weight.
    """
    weights: dict[float, float] = {}
    for part in text.split(","):
        name, equals, weight = part.partition("=")
        try:
            temperature, share = float(name), float(weight) if equals else 1.0
        except ValueError:
            temperature, share = -1.0, 0.0
        if not (0 <= temperature < 100 and 0 < share < float("inf")) or temperature in weights:
            raise ValueError(
                f"temperatures has {part!r}; write each once, as 0,0.7,1 or with weights above 0 "
                "as 0=2,1=1"
            )
        weights[temperature] = share
    total = sum(weights.values())
    return {temperature: share / total for temperature, share in weights.items()}


def mix_temperatures(
    requests: list[Request], shares: Mapping[float, float], seed: int
) -> list[Request]:
    """Requests with one of the temperatures each, drawn by its share from (seed, row id) alone."""
    mixed: list[Request] = []
    for request in requests:
        # Position 0 is no token's: the coin is independent of those that the answer is drawn with.
        left = uniform(seed, row_key(request.id), 0, Stream.TARGET)
        chosen = next(iter(shares))
        for temperature, share in shares.items():
            chosen = temperature
            left -= share
            if left < 0:
                break
        mixed.append(request._replace(sampling=replace(request.sampling, temperature=chosen)))
    return mixed
