"""Several sources read as one, in shares that hold at every moment of the reading.

The order is a pure function of names and weights: no random numbers, so that a stopped or limited
run sees the same rows again.
"""

import math
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from outrider.data.sources import Record, records


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

    Raises ValueError naming a weight that is no finite number above 0, a source without a weight,
    and one named twice, under whatever path.
    """
    pieces = source.split(",")
    found = [_weighted(piece) for piece in pieces]
    parts = [part for part in found if part is not None]
    if not parts and not (len(pieces) > 1 and all(map(_is_there, pieces))):
        return [Part(source, 1.0)]
    if len(parts) < len(found):
        bare = pieces[found.index(None)]
        raise ValueError(
            f"data {source!r}: {bare.strip()!r} has no weight; give every source of a mix its "
            "weight, as a.jsonl=0.7,b.jsonl=0.3"
        )
    for part in parts:
        if not 0 < part.weight < math.inf:
            raise ValueError(
                f"data {source!r}: the weight of {part.name!r} is {part.weight}; give a finite "
                "number above 0, or leave that source out"
            )
    places = [_place(part.name) for part in parts]
    twice = [
        part.name for part, place in zip(parts, places, strict=True) if places.count(place) > 1
    ]
    if twice:
        raise ValueError(
            f"data {source!r} names a source twice ({', '.join(twice)}); add up its weights"
        )
    return parts


def _weighted(piece: str) -> Part | None:
    """NAME=NUMBER; None for anything else, as a name that holds an equals sign."""
    name, _, weight = piece.rpartition("=")
    try:
        return Part(name.strip(), float(weight)) if name.strip() else None
    except ValueError:
        return None


def _is_there(name: str) -> bool:
    return bool(name.strip()) and Path(name.strip()).expanduser().exists()


def _place(name: str) -> str:
    """What a source is known by: the same for a file or folder under any path."""
    return str(Path(name).expanduser().resolve()) if _is_there(name) else name


class Mixture:
    """The records of a mix, each with its number in its source.

    The next row comes from the source that is furthest behind its share. The mix ends with the
    first source that has no more rows, since its share could not be kept after that. Iterating
    raises ValueError naming a source without any row.
    """

    def __init__(self, source: str) -> None:
        self.parts = parts_of(source)
        self.ran_out: str | None = None
        """The source that ended a mix of several."""

    def __iter__(self) -> Iterator[Numbered]:
        streams = [_begun(part.name) for part in self.parts]
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


def _begun(name: str) -> Iterator[Record | str]:
    """The records of a source that has some."""
    stream = records(name)
    first = next(stream, None)
    if first is None:
        raise ValueError(f"data {name!r} has no row: it is empty; fill it, or name another source")
    return chain([first], stream)
