"""How an OpenAI-compatible server is asked, and how its answers become token ids.

Three forms, best first. `ids`: /completions is given token ids and returns token ids (vLLM from
0.10.2, SGLang), so that no text is ever tokenised anew. `text`: it is given ids and returns text.
`chat`: /chat/completions is given messages and renders them with its own template. In the last two
`answer_ids` are what the target's tokenizer makes of the text, and the rows say so.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from outrider.data.answers import Answer, Request
from outrider.data.sampling import Sampling, row_key
from outrider.data.template import Template

FormName = Literal["ids", "text", "chat"]
FORMS: tuple[FormName, ...] = ("ids", "text", "chat")
# Sampling settings that only some servers know, with the value at which they do nothing. They are
# sent even then, since servers otherwise take the defaults of the model's generation_config.json.
EXTENSIONS: dict[str, Any] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
# Further fields that a server may do without.
HINTS = (
    "seed",
    "stop_token_ids",
    "skip_special_tokens",
    "return_token_ids",
    "chat_template_kwargs",
)


class Asking(NamedTuple):
    """All that decides how requests are put to a server."""

    form: FormName
    model: str
    names: frozenset[str | None]
    """What replies may call the model."""
    template: Template
    max_new_tokens: int
    seed: int
    unsent: frozenset[str] = frozenset()
    """Fields that the server refuses and can do without."""

    @property
    def path(self) -> str:
        """Where requests go, below the server's address."""
        return "chat/completions" if self.form == "chat" else "completions"


class OtherAnswerError(ValueError):
    """The answer is not of the form that was asked for, or not to what was asked."""


def body(asking: Asking, request: Request, prompt_ids: list[int]) -> dict[str, Any]:
    """The JSON body that asks for one answer."""
    sampling = request.sampling
    made: dict[str, Any] = {
        "model": asking.model,
        "max_tokens": asking.max_new_tokens,
        "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "top_k": sampling.top_k or EXTENSIONS["top_k"],
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        # 31 bits: some servers keep seeds in a signed int.
        "seed": row_key(f"{asking.seed} {request.id}") >> 33,
        "stop_token_ids": list(asking.template.eos_ids),
    }
    if sampling.logit_bias:
        made["logit_bias"] = {str(token): amount for token, amount in sampling.logit_bias}
    if asking.form == "ids":
        made |= {"prompt": prompt_ids, "return_token_ids": True}
    else:
        made["skip_special_tokens"] = False
    if asking.form == "text":
        made["prompt"] = prompt_ids
    if asking.form == "chat":
        made |= {"messages": request.messages}
        made |= {"tools": request.extra["tools"]} if request.extra.get("tools") else {}
        made |= {"chat_template_kwargs": dict(asking.template.options)}
    return {
        name: value
        for name, value in made.items()
        if name not in asking.unsent or _is_needed(name, value)
    }


def refused_field(message: str, sent: Mapping[str, Any]) -> str | None:
    """The field that a server's complaint names, of those that it need not know."""
    fields = (name for name in (*HINTS, *EXTENSIONS) if name in sent and name in message)
    return next((name for name in fields if not _is_needed(name, sent[name])), None)


def _is_needed(name: str, value: object) -> bool:
    """Whether leaving the field out would change what is asked for."""
    if name == "chat_template_kwargs":
        return bool(value)
    return name in EXTENSIONS and value != EXTENSIONS[name]


def check_sampling(sampling: Sampling) -> None:
    """ValueError for settings that a server cannot be asked for."""
    if sampling.bad_words:
        raise ValueError("bad_words are token ids, which no server takes; leave them out")
    if sampling.filters == "joint":
        raise ValueError("filters is joint, but a server filters in its own way; leave it out")
    if any(abs(amount) > 100 for _, amount in sampling.logit_bias):
        raise ValueError("logit_bias is beyond 100, which servers clip; use -100 to 100")


def read_answer(
    asking: Asking, request: Request, prompt_ids: list[int], found: Mapping[str, Any]
) -> Answer:
    """The answer in a server's reply. Raises OtherAnswerError where the reply cannot be one."""
    if found.get("model") not in (None, *asking.names):
        raise OtherAnswerError(f"the reply is by model {found['model']!r}, not {asking.model!r}")
    try:
        choice = found["choices"][0]
        finish = choice["finish_reason"]
    except (KeyError, IndexError, TypeError) as error:
        raise OtherAnswerError(f"the reply has no choice ({str(found)[:200]})") from error
    if finish not in ("stop", "length"):
        raise OtherAnswerError(f"the answer ended by {finish!r}, which is neither stop nor length")
    usage = found.get("usage") or {}
    if asking.form == "ids":
        answer = Answer(request, prompt_ids, _given_ids(choice, prompt_ids), finish)
    else:
        answer = _from_text(asking, request, prompt_ids, choice, usage)
    ids = _ended(asking.template, answer.answer_ids, finish)
    _check(ids, asking)
    is_same = answer.is_same_count and usage.get("completion_tokens", len(ids)) == len(ids)
    if asking.form == "ids" and not is_same:
        raise OtherAnswerError(
            f"the reply has {len(ids)} token ids and counts {usage['completion_tokens']}"
        )
    return answer._replace(answer_ids=ids, is_same_count=is_same)


def _given_ids(choice: Mapping[str, Any], prompt_ids: list[int]) -> list[int]:
    ids, prompt = choice.get("token_ids"), choice.get("prompt_token_ids")
    if not isinstance(ids, list):
        raise OtherAnswerError("the reply has no token_ids")
    if prompt is not None and prompt != prompt_ids:
        raise OtherAnswerError("the reply is to other prompt_token_ids than were sent")
    return [int(token) for token in ids]


def _from_text(
    asking: Asking,
    request: Request,
    prompt_ids: list[int],
    choice: Mapping[str, Any],
    usage: Mapping[str, Any],
) -> Answer:
    """The answer as the target's own tokenizer reads it after the prompt."""
    num_prompt = usage.get("prompt_tokens", len(prompt_ids))
    if num_prompt != len(prompt_ids):
        raise OtherAnswerError(
            f"the server made {num_prompt} tokens of a prompt that is {len(prompt_ids)} by the "
            "target's own template; start it with the target's tokenizer and chat template"
        )
    text = choice["message"].get("content") if asking.form == "chat" else choice.get("text")
    if not isinstance(text, str):
        raise OtherAnswerError(
            "the reply has no text; start the server without tool and reasoning parsers"
        )
    template = asking.template
    whole = template.tokenise(template.text(prompt_ids) + text).ids
    follows = whole[: len(prompt_ids)] == prompt_ids
    ids = whole[len(prompt_ids) :] if follows else template.tokenise(text).ids
    finish = str(choice["finish_reason"])
    return Answer(request, prompt_ids, ids, finish, is_retokenised=True, is_same_count=follows)


def _ended(template: Template, ids: list[int], finish: str) -> list[int]:
    """The ids with the end token that servers may leave out."""
    ends = template.eos_ids
    if finish == "length" or not ends or (ids[-1:] and ids[-1] in ends):
        return ids
    return [*ids, ends[0] if template.end_id is None else template.end_id]


def _check(ids: list[int], asking: Asking) -> None:
    if not ids:
        raise OtherAnswerError("the answer is empty")
    early = [place for place, token in enumerate(ids[:-1]) if token in asking.template.eos_ids]
    if early:
        raise OtherAnswerError(
            f"the answer goes on after its end token (number {early[0] + 1} of {len(ids)}); start "
            "the server with the target's own generation_config.json"
        )
    # Text may well give more tokens than were drawn.
    if asking.form == "ids" and len(ids) > asking.max_new_tokens:
        raise OtherAnswerError(f"the answer has {len(ids)} tokens, of {asking.max_new_tokens}")
