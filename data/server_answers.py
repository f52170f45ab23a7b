"""A server as what answers prompts: any that speaks the OpenAI API, with many requests at once."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urljoin, urlsplit

from httpx2 import AsyncClient, Limits, Response, Timeout, TransportError

from outrider.data.anatomy import WEIGHTS
from outrider.data.answers import Answer, Decoding, Emit, Request, Speaker
from outrider.data.retry import Patience, RefusedError, Sender
from outrider.data.sampling import Sampling
from outrider.data.server_form import (
    FORMS,
    Asking,
    OtherAnswerError,
    body,
    check_sampling,
    read_answer,
    refused_field,
)
from outrider.data.template import Template

API_KEY = "OUTRIDER_API_KEY"


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers instead of this process, and how to ask it."""

    server: str | None = None
    """Address of an OpenAI-compatible server that serves the target, as http://localhost:8000/v1;
    the API key, where it wants one, is read from the variable OUTRIDER_API_KEY."""

    server_model: str | None = None
    """What the server calls the target, where that is not the target's own name."""

    server_form: Literal["auto", "ids", "text", "chat"] = "auto"
    """With server: token ids both ways, ids in and text out, or messages in and text out; auto
    takes the first that the server can do."""

    concurrency: int = 16
    """With server: requests that are under way at once."""

    request_timeout: float = 600.0
    """With server: seconds after which a silent request is sent again."""

    patience: float = 600.0
    """With server: seconds of failures, as while it restarts, after which to give up."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "request_timeout", "patience"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; give a positive number")
        if self.server is None:
            return
        parts = urlsplit(self.server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"server is {self.server!r}; give an address such as http://localhost:8000/v1"
            )
        if parts.username or parts.password or parts.query:
            raise ValueError(
                f"server holds a name, password or query, which files would keep; give the plain "
                f"address, and the API key in the environment variable {API_KEY}"
            )


class ServerAnswers:
    """Answers from a server; `open` finds its model and the best form that it can do."""

    def __init__(
        self, server: Server, speaker: Speaker, template: Template, decoding: Decoding
    ) -> None:
        assert server.server is not None
        self.server = server
        self.url = server.server.rstrip("/") + "/"
        self.speaker = speaker
        self.template = template
        self.decoding = decoding
        self.num_retries = 0
        self._asking: Asking | None = None
        self._version: str | None = None

    def open(self) -> None:
        """Ask which models are served, then for one token in each form until one is answered."""
        asyncio.run(self._open())

    def settings(self) -> dict[str, Any]:
        """Model and form, once known. Not the address: the server may move between two runs."""
        asking, server = self._asking, self.server
        chosen = None if server.server_form == "auto" else server.server_form
        folder = self._folder()
        return {
            "by": "server",
            "target_hash_covers_weights": folder is not None and any(folder.glob(WEIGHTS)),
            "server_model": server.server_model if asking is None else asking.model,
            "server_form": chosen if asking is None else asking.form,
        }

    def notes(self) -> dict[str, Any]:
        """Address, version, and the fields that this server does without."""
        unsent = sorted(self._asking.unsent) if self._asking else []
        return {"server": self.url, "server_version": self._version, "fields_not_sent": unsent}

    def answer(self, prompts: Sequence[tuple[Request, list[int]]], emit: Emit) -> None:
        """Answer (request, prompt ids) pairs, in order of completion."""
        for request, _ in prompts:
            check_sampling(request.sampling)
        try:
            asyncio.run(self._answer(prompts, emit))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _answer(self, prompts: Sequence[tuple[Request, list[int]]], emit: Emit) -> None:
        waiting = iter(prompts)
        async with self._client() as client, asyncio.TaskGroup() as group:
            sender = Sender(client, Patience(total_s=self.server.patience))
            for _ in range(min(self.server.concurrency, len(prompts))):
                group.create_task(self._work(sender, waiting, emit))
        self.num_retries += sender.num_retries

    async def _work(
        self, sender: Sender, waiting: Iterator[tuple[Request, list[int]]], emit: Emit
    ) -> None:
        assert self._asking is not None  # open comes first
        for request, ids in waiting:
            try:
                emit(await _ask(sender, self._asking, request, ids))
            except (RefusedError, OtherAnswerError) as error:
                raise ValueError(
                    f"server {self.url}, request {request.id!r}: {error}; nothing that was "
                    "answered is lost: mend it and run the same command again"
                ) from error

    async def _open(self) -> None:
        async with self._client() as client:
            sender = Sender(client, Patience(total_s=self.server.patience))
            served = await self._find_model(sender)
            self._version = await self._find_version(client)
            names = frozenset({str(served["id"]), served.get("root"), *self._own_names()})
            wanted = self.server.server_form
            failures: list[str] = []
            for form in FORMS if wanted == "auto" else (wanted,):
                asking = Asking(form, str(served["id"]), names, self.template, 8, seed=0)
                try:
                    asking = await _probe(sender, asking)
                except (RefusedError, OtherAnswerError) as error:
                    failures.append(f"{form}: {error}")
                    continue
                self._asking = asking._replace(
                    max_new_tokens=self.decoding.max_new_tokens, seed=self.decoding.seed
                )
                return
        raise ValueError(
            f"server {self.url} cannot be asked in any form ({'; '.join(failures)}); see what it "
            "was started with, or name another server"
        )

    def _client(self) -> AsyncClient:
        key = os.environ.get(API_KEY)
        return AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=Timeout(self.server.request_timeout, connect=10),
            limits=Limits(max_connections=self.server.concurrency),
        )

    async def _find_model(self, sender: Sender) -> dict[str, Any]:
        """The served model's entry: the one named, or the one that is the target by its name."""
        try:
            served = _json(await sender.send("GET", "models"))["data"]
            by_id = {str(model["id"]): model for model in served}
        except RefusedError as error:
            wants_key = error.status in (401, 403)
            remedy = f"set {API_KEY}" if wants_key else "give the address that ends in /v1"
            raise ValueError(
                f"server {self.url} does not list its models: {error}; {remedy}"
            ) from error
        except (KeyError, TypeError, OtherAnswerError) as error:
            raise ValueError(
                f"server {self.url} does not list its models as an OpenAI-compatible one does "
                f"({error}); give the address that ends in /v1"
            ) from error
        wanted, names = self.server.server_model, self._own_names()
        for name, model in by_id.items():
            if name == wanted or (wanted is None and {name, model.get("root")} & names):
                return model
        served_names = ", ".join(map(repr, by_id)) or "no model"
        if wanted is not None:
            raise ValueError(f"server {self.url} serves {served_names}, and no {wanted!r}")
        raise ValueError(
            f"server {self.url} serves {served_names}, none of which is called as the target "
            f"{self.speaker.name!r}; where one is the target, name it with server_model"
        )

    def _own_names(self) -> set[str]:
        folder = self._folder()
        places = [] if folder is None else [str(folder), str(folder.resolve())]
        return {self.speaker.name, *places}

    def _folder(self) -> Path | None:
        """Where the target's files lie; the weights need not be among them."""
        return getattr(self.speaker, "folder", None)

    async def _find_version(self, client: AsyncClient) -> str | None:
        """The server's version, from where vLLM tells it."""
        try:
            return str(_json(await client.get(urljoin(self.url, "/version")))["version"])
        except (TransportError, OtherAnswerError, KeyError, TypeError):
            return None


async def _probe(sender: Sender, asking: Asking) -> Asking:
    """The asking without the fields that the server refuses and can do without."""
    probe = Request("probe", [{"role": "user", "content": "Hello"}], Sampling(), {})
    ids = asking.template.ids(probe.messages, prompt=True)
    while True:
        sent = body(asking, probe, ids)
        try:
            read_answer(asking, probe, ids, _json(await sender.send("POST", asking.path, sent)))
        except RefusedError as error:
            name = refused_field(error.message, sent)
            if name is None:
                raise
            asking = asking._replace(unsent=asking.unsent | {name})
        else:
            return asking


async def _ask(sender: Sender, asking: Asking, request: Request, prompt_ids: list[int]) -> Answer:
    response = await sender.send("POST", asking.path, body(asking, request, prompt_ids))
    return read_answer(asking, request, prompt_ids, _json(response))


def _json(response: Response) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError as error:
        raise OtherAnswerError(f"the reply is not JSON ({response.text[:100]!r})") from error
    if not isinstance(found, dict):
        raise OtherAnswerError(f"the reply is no JSON object ({response.text[:100]!r})")
    return found
