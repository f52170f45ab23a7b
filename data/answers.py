"""Prompts to answer, answers, and what rendering the one and reading the other takes.

The target need not be in this process: `Speaker` names what is used of it, which `Target` has and
`TargetFiles` reads from its files without the weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from outrider.data.anatomy import eos_ids, files_hash, find_folder
from outrider.data.chat import RowError, Template, check_context
from outrider.data.messages import read_conversation, read_tools
from outrider.data.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How long answers get, and how many are decoded at once."""

    max_new_tokens: int = 128
    """Longest answer in tokens, the end token included."""
    batch_size: int = 32
    """Rows decoded at once; changes speed and memory, not the answers."""
    seed: int = 0
    """Together with a row's id, the key of its noise."""

    def __post_init__(self) -> None:
        for name, value in (
            ("max_new_tokens", self.max_new_tokens),
            ("batch_size", self.batch_size),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


class Request(NamedTuple):
    """A prompt to answer."""

    id: str
    """Names the row and keys its noise."""
    messages: list[dict[str, Any]]
    """The conversation so far, the user's turn last."""
    sampling: Sampling
    extra: dict[str, Any]
    """Copied into the finished row."""


class Answer(NamedTuple):
    """A finished request."""

    request: Request
    prompt_ids: list[int]
    answer_ids: list[int]
    """The very ids that were drawn, the end token included; see `is_retokenised`."""
    finish: str
    """`stop` at an end token, `length` at max_new_tokens."""
    is_retokenised: bool = False
    """Whether only text came back, so that `answer_ids` are what the tokenizer makes of it."""
    is_same_count: bool = True
    """Where retokenised: whether that gave as many tokens as were drawn."""


Emit = Callable[[Answer], None]


class Answers(Protocol):
    """What answers prompts: the target in this process, or a server."""

    def open(self) -> None:
        """Find out what `settings` needs to know. Raises ValueError where answers cannot come."""
        ...

    def settings(self) -> dict[str, Any]:
        """What the answers depend on; before `open`, None stands for what is not known yet."""
        ...

    def notes(self) -> dict[str, Any]:
        """Facts of this run that the manifest keeps, but that may change between runs."""
        ...

    def answer(self, prompts: Sequence[tuple[Request, list[int]]], emit: Emit) -> None:
        """Answer (request, prompt ids) pairs in any order, each by one call of `emit`."""
        ...


class Speaker(Protocol):
    """What is used of a target to render prompts and to read answers."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None: ...
    @property
    def config(self) -> PretrainedConfig: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def fingerprint(self) -> str:
        """SHA-256 over config, weights and tokenizer."""
        ...


@dataclass(frozen=True, kw_only=True)
class TargetFiles:
    """A target's tokenizer and config, without loading its weights."""

    name: str
    tokenizer: PreTrainedTokenizerBase | None
    config: PretrainedConfig
    """The text config: nested ones are unwrapped."""
    eos_ids: tuple[int, ...]
    folder: Path

    @classmethod
    def load(cls, name: str) -> Self:
        """Read `smollm2-demo`, a local folder, or a Hub id, of which no weights are fetched."""
        folder = find_folder(name, weights=False)
        try:
            config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # whatever transformers or tokenizers raise
            raise ValueError(
                f"target {name!r} ({folder}) has no config and tokenizer that load: "
                f"{type(error).__name__}: {error}; name a model's folder or Hub id"
            ) from error
        stated = None
        if (folder / "generation_config.json").is_file():
            stated = GenerationConfig.from_pretrained(folder)
        ends = eos_ids(stated, config, tokenizer)
        return cls(name=name, tokenizer=tokenizer, config=config, eos_ids=ends, folder=folder)

    def fingerprint(self) -> str:
        """SHA-256 over the files of the model that are here, as `Target.fingerprint`."""
        return files_hash(self.folder)


def template_of(speaker: Speaker, options: Mapping[str, Any]) -> Template:
    """The chat template. Raises ValueError when the target has no tokenizer or no template."""
    if speaker.tokenizer is None:
        raise ValueError(
            f"target {speaker.name!r} has no tokenizer; load it from a folder with one"
        )
    return Template(tokenizer=speaker.tokenizer, eos_ids=speaker.eos_ids, options=options)


def prompt_ids(
    speaker: Speaker,
    requests: Sequence[Request],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[list[int]]:
    """Ids of each conversation under the target's own template, ready for the answer.

    Raises ValueError when the target has no chat template, or it refuses a conversation.
    """
    template = template_of(speaker, options)
    found: list[list[int]] = []
    for request in requests:
        try:
            messages = read_conversation(request.messages, template.dialect)
            tools = read_tools(request.extra.get("tools"))
            rendered = template.render(messages, tools, prompt=True)
            check_context(messages, rendered.text)
        except RowError as error:
            raise ValueError(f"request {request.id!r}: {error}; mend or remove it") from error
        found.append(rendered.ids)
    return found
