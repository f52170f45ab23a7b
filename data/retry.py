"""HTTP requests that outlast a busy, restarting or flaky server.

Waits grow exponentially and are drawn at random up to that bound ("full jitter", M. Brooker,
Exponential Backoff and Jitter, AWS Architecture Blog 2015), so that many waiting requests do not
come back at once. A Retry-After header is obeyed where it asks for more.
"""

import asyncio
import contextlib
import random
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from httpx2 import AsyncClient, Response, TransportError
from tqdm import tqdm

# Timeouts, rate limits, and what servers and their proxies say while they are down or overloaded.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 529})


class RefusedError(ValueError):
    """The server will not do it, however often it is asked."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status
        self.message = message


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to try again, and how often."""

    total_s: float = 600.0
    """Give up on a request that has failed for so many seconds."""
    first_s: float = 0.5
    """Bound of the first wait; it doubles with every failure."""
    longest_s: float = 30.0
    """Bound of all waits."""


@dataclass
class Sender:
    """Sends requests until they are answered or refused, and counts what went wrong."""

    client: AsyncClient
    patience: Patience = field(default_factory=Patience)
    num_retries: int = 0
    chance: random.Random = field(default_factory=random.Random)
    _quiet_until: float = 0.0

    async def send(self, method: str, path: str, body: object = None) -> Response:
        """The answer of status 200.

        Raises RefusedError for other answers that will not pass, and ValueError when the server
        has failed for longer than the patience lasts.
        """
        begun, bound = time.monotonic(), self.patience.first_s
        while True:
            asked_s = 0.0
            try:
                response = await self.client.request(method, path, json=body)
            except TransportError as error:
                failure = f"{type(error).__name__} {error}".strip()
            else:
                if response.status_code == 200:
                    return response
                failure = f"status {response.status_code}: {message_of(response)}"
                if response.status_code not in PASSING:
                    raise RefusedError(response.status_code, message_of(response))
                asked_s = retry_after_s(response)
            wait_s = max(asked_s, self.chance.uniform(0, bound))
            if time.monotonic() - begun + wait_s > self.patience.total_s:
                raise ValueError(
                    f"server {self.client.base_url} has not answered for "
                    f"{self.patience.total_s:g} s (last: {failure}); start it again and run the "
                    "same command, which goes on with the rows that are missing"
                )
            self.num_retries += 1
            self._tell(failure)
            await asyncio.sleep(wait_s)
            bound = min(2 * bound, self.patience.longest_s)

    def _tell(self, failure: str) -> None:
        """A line about an outage, not more often than every half minute."""
        if time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + 30
        place, limit = self.client.base_url, self.patience.total_s
        line = f"note: server {place}: {failure}; trying again for up to {limit:g} s"
        tqdm.write(line, file=sys.stderr)


def retry_after_s(response: Response) -> float:
    """Seconds that the server asks to wait, given as a number or as a date; 0 where it does not."""
    text = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        then = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return max(0.0, (then - datetime.now(UTC)).total_seconds())


def message_of(response: Response) -> str:
    """What an error answer says, from the places that servers put it, in at most 500 characters."""
    found: Any = response.text
    with contextlib.suppress(ValueError):
        found = response.json()
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return " ".join(str(found).split())[:500]
