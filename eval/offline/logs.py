"""Rows of text in the forms that servers log, made into prompt_ids and answer_ids.

Forms, told by their fields; a line of a log is one of them, or {"request": ..., "response": ...}
around one:

    prompt_ids, answer_ids                            outrider generate
    prompt_token_ids, outputs[].token_ids             vLLM's RequestOutput
    choices[].token_ids, and prompt_token_ids beside  vLLM's OpenAI replies, asked with
      it or in the choice                             "return_token_ids": true
    input_ids, output_ids                             SGLang's /generate with ids

A prompt that the reply does not repeat is read from the request (prompt_token_ids, input_ids, or
prompt as a list of ids). What a request says of its sampling must agree with what is asked for.
Text without ids is refused: made into tokens anew it may not be what the target drew.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.data.sampling import Sampling

_PROMPT = ("prompt_ids", "prompt_token_ids", "input_ids", "prompt")
_ANSWER = ("answer_ids", "token_ids", "output_ids")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

Record = Mapping[str, Any]


def answered(record: Record) -> Iterator[dict[str, Any]]:
    """The answers of a line as rows with prompt_ids, answer_ids, and what it says beside them.

    Several answers to one prompt are several rows, numbered in their ids. A line of another form
    comes as it is.
    """
    request = _part(record, "request")
    reply = _part(record, "response") or record
    choices = reply.get("choices") or reply.get("outputs") or [reply]
    if not isinstance(choices, list) or not all(isinstance(one, Mapping) for one in choices):
        choices = [reply]  # no answers in a form that is known
    for number, choice in enumerate(choices):
        found = {**record, **({"requested": request} if request else {})}
        for name, fields in (("prompt_ids", _PROMPT), ("answer_ids", _ANSWER)):
            places = (choice, reply, request, record) if name == "prompt_ids" else (choice,)
            ids = _ids(places, fields)
            if ids is not None:
                found[name] = ids
        ident = record.get("id") or reply.get("id") or reply.get("request_id")
        if ident is not None:
            found["id"] = f"{ident}-{number}" if len(choices) > 1 else str(ident)
        yield found


def is_drawn_with(record: Record, sampling: Sampling) -> bool:
    """Whether a row says nothing else of its sampling than this."""
    stated = record.get("sampling")
    requested = record.get("requested")
    try:
        if isinstance(stated, Mapping):
            return Sampling.from_record(stated) == sampling
        if isinstance(requested, Mapping):
            # Engines write "no top-k" as -1.
            asked = {name: requested[name] for name in _SAMPLING if requested.get(name) is not None}
            asked["top_k"] = max(0, asked.get("top_k", sampling.top_k))
            return all(getattr(sampling, name) == value for name, value in asked.items())
    except TypeError as error:
        raise ValueError(f"its sampling cannot be read ({error})") from error
    return record.get("temperature", sampling.temperature) == sampling.temperature


def _part(record: Record, name: str) -> Record:
    found = record.get(name)
    return found if isinstance(found, Mapping) else {}


def _ids(places: Sequence[Record], fields: Sequence[str]) -> list[int] | None:
    for place in places:
        for name in fields:
            found = place.get(name)
            if isinstance(found, list) and found and all(type(one) is int for one in found):
                return found
    return None
