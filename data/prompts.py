"""Prompts from a file of conversations, as requests to the target."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.data.answers import Request
from outrider.data.forms import CONVERSATIONS
from outrider.data.messages import read_conversation, read_tools
from outrider.data.sampling import Sampling, Stream, row_key, uniform
from outrider.data.sources import Record, records
from outrider.data.template import Dialect, RowError

CHAT_FORM = Dialect("text", None, "reasoning_content")
"""Messages as servers take them, for those that come in another form."""

_WRITTEN_HERE = {
    "retokenised",
    "text_gives_other_ids",
    "sampling",
    "prompt",
    "completion",
    "prompt_ids",
    "answer_ids",
    "temperature",
    "seed",
    "finish",
    "template_options",
}


def read_requests(source: str, sampling: Sampling) -> list[Request]:
    """One request a row; fields that are not the prompt's are carried into the answered row.

    A row holds messages in any form that rows to train on may have (a last answer is dropped, to be
    given anew), or `prompt`, a text or messages. `id` is optional. Raises ValueError naming the row
    without a question, one that cannot be read, and rows of the same id.
    """
    requests, numbers = list[Request](), dict[str, int]()
    for number, record in enumerate(records(source), start=1):
        try:
            if isinstance(record, str):
                raise RowError(f"is {record}")
            request = _request(record, number, sampling)
            first = numbers.setdefault(request.id, number)
            if first != number:
                raise RowError(f"has the id {request.id!r} of row {first}; give each its own id")
        except RowError as error:
            raise ValueError(f"{source} row {number} {error}; mend or remove it") from error
        requests.append(request)
    if not requests:
        raise ValueError(f"{source} has no rows; name a file of prompts")
    return requests


def _request(record: Record, number: int, sampling: Sampling) -> Request:
    row: dict[str, Any] = dict(record)
    stated = row.pop("id", None)
    name = f"row-{number:06d}" if stated is None else str(stated)
    if not _is_unicode(name):
        raise RowError(f"has the id {name!r}, which is not valid Unicode")
    found = [row.pop(field) for field in CONVERSATIONS if field in row]
    try:
        messages = _question(next((one for one in found if one is not None), _asked(row)))
        read_tools(row.get("tools"))
    except RowError as error:
        raise RowError(f"cannot be asked: {error}") from error
    if not messages:
        raise RowError(
            f"has no question; give messages ({', '.join(CONVERSATIONS)}) in which a user speaks "
            "last, or last before the answer, or give `prompt`"
        )
    system = row.pop("system", None)
    if not isinstance(system, str | None):
        raise RowError(f"has a system field that is {system!r}; give a text, or none")
    if system is not None and system.strip():
        if messages[0].get("role") == "system":
            raise RowError("has a system field and a system message; keep one")
        messages = [{"role": "system", "content": system}, *messages]
    extra = {key: value for key, value in row.items() if key not in _WRITTEN_HERE}
    return Request(name, messages, sampling, extra)


def _asked(row: Record) -> object:
    """The messages of a row's prompt, which may be a text."""
    prompt = row.get("prompt") or []
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}] if prompt.strip() else list[object]()
    return prompt


def _question(found: object) -> list[dict[str, Any]]:
    """The conversation up to the question; empty when there is none.

    Messages whose roles are a template's own are left as they are.
    """
    read = read_conversation(found, CHAT_FORM)
    given: Any = found
    if all(one.get("role") == other["role"] for one, other in zip(given, read, strict=True)):
        read = [dict(one) for one in given]
    if read and read[-1]["role"] == "assistant":
        read.pop()
    return read if read and read[-1]["role"] in ("user", "tool") else []


def _is_unicode(text: str) -> bool:
    """Whether a text can be encoded: a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
