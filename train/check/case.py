"""What is checked: settings, and the parts that earlier checks have made of them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from outrider.data.chat import Encoded
from outrider.data.collect import Collector
from outrider.data.mixture import Numbered
from outrider.data.thinned import Thinned
from outrider.data.workers import Outcome
from outrider.train.settings import Settings

T = TypeVar("T")
SAMPLE = 32
"""Records kept for the checks that look at single ones."""


class Lacking(Exception):  # noqa: N818 - a signal to the runner
    """A part that an earlier check did not come to make."""


class Kept(NamedTuple):
    """A record of the sample and the rows it gave."""

    found: Numbered
    rows: list[Encoded]


class Lengths(NamedTuple):
    """A row before the length policy."""

    tokens: int
    first: int
    """Length at which its first supervised token is in."""


@dataclass(kw_only=True)
class Sample:
    """Records evenly spaced over the data, however many there are, and the length of every row."""

    kept: list[Kept] = field(default_factory=list)
    lengths: list[Lengths] = field(default_factory=list)
    stride: int = 1
    seen: int = 0

    def watch(self, outcome: Outcome) -> None:
        """Take in what a record gave; every `stride`-th is kept, and every other one dropped."""
        for row in outcome.rows:
            first = next((place for place, on in enumerate(row.mask) if on and place > 1), None)
            if first is not None:
                self.lengths.append(Lengths(len(row.ids), first + 1))
        if self.seen % self.stride == 0:
            self.kept.append(Kept(outcome.found, outcome.rows))
            if len(self.kept) > SAMPLE:
                self.kept, self.stride = self.kept[::2], 2 * self.stride
        self.seen += 1


@dataclass(kw_only=True)
class Case:
    """Settings with the parts that checks have given so far, by type."""

    settings: Settings
    device: torch.device
    every_row: bool = False
    """Encode every row, however long that takes."""
    parts: dict[type[Any], Any] = field(default_factory=dict)

    def give(self, kind: type[T], part: T) -> T:
        """Keep a part for later checks."""
        self.parts[kind] = part
        return part

    def get(self, kind: type[T]) -> T:
        """A part that an earlier check gave. Raises Lacking."""
        if kind not in self.parts:
            raise Lacking(kind.__name__)
        return self.parts[kind]

    @property
    def stands_for(self) -> float:
        """Records of the data for each one that was encoded; 1 where all were."""
        if Thinned not in self.parts:
            return 1.0
        thinned, collector = self.get(Thinned), self.get(Collector)
        limit = self.settings.data.max_tokens
        if collector.counts.limit_reached and limit is not None and thinned.stride > 1:
            return limit / collector.tokens
        return thinned.read / max(len(thinned.found), 1)
