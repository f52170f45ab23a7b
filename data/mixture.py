"""Several sources read as one, in shares that hold at every moment of the reading.

The order is a pure function of names and weights: no random numbers, so that a stopped or limited
run sees the same rows again.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from outrider.data.sources import Record, records

WEIGHTED = re.compile(r"\s*(?P<name>[^\s=].*?)=(?P<weight>[0-9]*\.?[0-9]+)\s*")


class Numbered(NamedTuple):
    """A record and where it stands."""

    source: str
    number: int
    """Counted from 1 in the source."""
    record: Record | str


class Part(NamedTuple):
    """One source of a mix."""

    name: str
    weight: float
    """Its share of the rows is weight over the sum of weights."""


def parts_of(source: str) -> list[Part]:
    """The sources of a mix: `a.jsonl=0.7,b.parquet=0.3`; anything else is one source.

    Raises ValueError for weights of zero, and for a source named twice.
    """
    found = [WEIGHTED.fullmatch(part) for part in source.split(",")]
    matches = [match for match in found if match is not None]
    if len(matches) < len(found):
        if matches:
            raise ValueError(
                f"data {source!r}: give every source of a mix its weight, as "
                "a.jsonl=0.7,b.jsonl=0.3"
            )
        return [Part(source, 1.0)]
    parts = [Part(match["name"], float(match["weight"])) for match in matches]
    names = [part.name for part in parts]
    if min(part.weight for part in parts) <= 0:
        raise ValueError(f"data {source!r}: a weight is 0; leave that source out")
    if len(set(names)) < len(names):
        raise ValueError(f"data {source!r} names a source twice; add up its weights")
    return parts


class Mixture:
    """The records of a mix, each with its number in its source.

    The next row comes from the source that is furthest behind its share. The mix ends with the
    first source that has no more rows, since its share could not be kept after that.
    """

    def __init__(self, source: str) -> None:
        self.parts = parts_of(source)
        self.ran_out: str | None = None
        """The source that ended a mix of several."""

    def __iter__(self) -> Iterator[Numbered]:
        streams = [records(part.name) for part in self.parts]
        taken = [0] * len(streams)
        whole = sum(part.weight for part in self.parts)
        while True:
            due = sum(taken) + 1
            behind = [
                part.weight / whole * due - had for part, had in zip(self.parts, taken, strict=True)
            ]
            place = behind.index(max(behind))
            record = next(streams[place], None)
            if record is None:
                self.ran_out = self.parts[place].name if len(self.parts) > 1 else None
                return
            taken[place] += 1
            yield Numbered(self.parts[place].name, taken[place], record)
