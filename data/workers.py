"""Records encoded by several processes, in order: the result is that of one process."""

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from typing import NamedTuple

from outrider.data.chat import Encoded, RowError
from outrider.data.forms import ForeignError, RecordReader
from outrider.data.mixture import Numbered

CHUNK = 64  # records sent to a process at once
AHEAD = 4  # chunks in flight for each process


class Outcome(NamedTuple):
    """What a record gave."""

    found: Numbered
    rows: list[Encoded]
    refusal: str | None


def encode_all(
    reader: RecordReader, found: Iterable[Numbered], workers: int = 1
) -> Iterator[Outcome]:
    """Every record's rows or refusal, in the order of `found`; `workers` processes share them.

    Raises ValueError naming a row that another target answered.
    """
    if workers == 1:
        for one in found:
            yield Outcome(one, *_encode(reader, one))
        return
    stream = iter(found)
    chunks = iter(lambda: tuple(islice(stream, CHUNK)), ())
    # Fork would copy torch's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start, initargs=(reader,)) as pool:
        waiting: deque[tuple[tuple[Numbered, ...], Future[list[_Encoding]]]] = deque()
        try:
            while True:
                for chunk in islice(chunks, AHEAD * workers - len(waiting)):
                    waiting.append((chunk, pool.submit(_encode_chunk, chunk)))
                if not waiting:
                    return
                chunk, future = waiting.popleft()
                for one, encoding in zip(chunk, future.result(), strict=True):
                    yield Outcome(one, *encoding)
        finally:
            pool.shutdown(cancel_futures=True)


_Encoding = tuple[list[Encoded], str | None]
_readers: list[RecordReader] = []


def _start(reader: RecordReader) -> None:
    """Keep this process's reader."""
    _readers.append(reader)


def _encode_chunk(chunk: Iterable[Numbered]) -> list[_Encoding]:
    return [_encode(_readers[0], one) for one in chunk]


def _encode(reader: RecordReader, one: Numbered) -> _Encoding:
    try:
        return reader.encode(one.record), None
    except RowError as error:
        return [], str(error)
    except ForeignError as error:
        raise ValueError(f"data {one.source!r} row {one.number}: {error}") from error
