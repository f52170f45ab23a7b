"""What a round costs by its draft, batch and context: measured on a machine, kept in a file."""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from outrider.data.files import write_whole
from outrider.eval.report.provenance import provenance
from outrider.eval.trees.plans import ChainPlan, plan_named

PLAIN = "plain"
"""The name of a round without drafts: a plain step of the target."""
FORMAT = 1


class Pieces(NamedTuple):
    """Seconds of a round."""

    draft: float
    verify: float
    other: float
    """The rule, the bookkeeping, the roll-back."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.draft + self.verify + self.other


class Costs(Protocol):
    """Where the times of rounds come from."""

    @property
    def name(self) -> str:
        """What they are of."""
        ...

    def round(self, draft: str, tokens: int, batch: int, context: float) -> Pieces:
        """A round of a draft (PLAIN for a plain step).

        `tokens` are those of a verify call for one row, `context` the positions of a row before it.
        Raises ValueError for a draft that nothing is known of.
        """
        ...


class Spread(NamedTuple):
    """A piece of a round over repeats, seconds."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""


class Point(NamedTuple):
    """A round that was measured."""

    draft: str
    tokens: int
    batch: int
    context: int
    """Mean over the rows, which were of unlike lengths."""
    pieces: Mapping[str, Spread]
    """Draft, verify and other, and their total."""
    samples: int

    def record(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**self._asdict(), "pieces": {k: v._asdict() for k, v in self.pieces.items()}}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Self:
        """What `record` made."""
        pieces = {name: Spread(**one) for name, one in record["pieces"].items()}
        place = (record["draft"], record["tokens"], record["batch"], record["context"])
        return cls(*place, pieces, record["samples"])


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """Rounds measured on one machine; between them costs go by straight lines.

    A line between chains measured gives the lengths between, which misses that matrix products are
    jagged in the number of tokens; other drafts are known only where measured. Beyond what was
    measured the last line goes on, never below the cost at its end.
    """

    points: Sequence[Point]
    target: str
    head: str | None
    dtype: str
    device: str
    threads: int | None
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Provenance: versions, machine, hashes, commit."""

    def __post_init__(self) -> None:
        if not any(point.draft == PLAIN for point in self.points):
            raise ValueError(
                "points hold no plain step; a speed-up is over plain steps: measure them too"
            )
        for point in self.points:
            bad = [name for name, one in point.pieces.items() if not one.median >= 0]
            if point.batch < 1 or point.context < 0 or bad:
                raise ValueError(
                    f"the point of {point.draft} at batch {point.batch} and context "
                    f"{point.context} has no valid {', '.join(bad) or 'place'}; give batch 1 or "
                    "more, context 0 or more, and times of 0 or more"
                )

    @property
    def name(self) -> str:
        """What was measured where."""
        machine = (self.notes.get("machine") or {}).get("processor") or self.device
        plural = "" if self.threads == 1 else "s"
        threads = f", {self.threads} thread{plural}" if self.threads else ""
        return f"{machine}{threads}, {self.dtype}, measured"

    @cached_property
    def batches(self) -> list[int]:
        """Batches measured."""
        return sorted({point.batch for point in self.points})

    @cached_property
    def contexts(self) -> list[int]:
        """Contexts measured."""
        return sorted({point.context for point in self.points})

    @cached_property
    def drafts(self) -> list[str]:
        """Drafts measured, in order."""
        return list(dict.fromkeys(point.draft for point in self.points))

    def round(self, draft: str, tokens: int, batch: int, context: float) -> Pieces:  # noqa: ARG002
        """See `Costs`; what was measured carries its own number of tokens."""
        if batch < 1:
            raise ValueError(f"batch is {batch}; give 1 or more")
        return Pieces(*(self._piece(draft, name, batch, context) for name in Pieces._fields))

    @cached_property
    def _known(self) -> dict[tuple[str, int, int], Point]:
        return {(point.draft, point.batch, point.context): point for point in self.points}

    @cached_property
    def _chains(self) -> dict[int, str]:
        """Chains measured, by length."""
        plans = {draft: plan_named(draft) for draft in self.drafts if draft != PLAIN}
        return {plan.length: d for d, plan in plans.items() if isinstance(plan, ChainPlan)}

    def _piece(self, draft: str, name: str, batch: int, context: float) -> float:
        found: dict[float, float] = {}
        for size in self.batches:
            by_context: dict[float, float] = {}
            for place in self.contexts:
                value = self._at(draft, name, size, place)
                if value is not None:
                    by_context[place] = value
            if by_context:
                found[size] = line(by_context, context)
        if not found:
            raise ValueError(
                f"draft {draft!r} was not measured (measured: {', '.join(self.drafts)}); measure "
                "it with outrider tune --measure --draft"
            )
        return line(found, batch)

    def _at(self, draft: str, name: str, batch: int, context: int) -> float | None:
        exact = self._known.get((draft, batch, context))
        if exact is not None:
            return exact.pieces[name].median
        if not draft.startswith("chain:"):
            return None
        chains: dict[float, float] = {}
        for length, measured in self._chains.items():
            point = self._known.get((measured, batch, context))
            if point is not None:
                chains[length] = point.pieces[name].median
        length = int(draft.removeprefix("chain:"))
        is_between = len(chains) > 1 and min(chains) <= length <= max(chains)
        return line(chains, length) if is_between else None

    def save(self, path: Path) -> None:
        """Keep it as JSON, for --costs."""
        record = {
            "format": FORMAT,
            "what": "outrider costs",
            "target": self.target,
            "head": self.head,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "notes": {**provenance(), **self.notes},
            "points": [point.record() for point in self.points],
        }
        write_whole(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def line(points: Mapping[float, float], place: float) -> float:
    """Straight lines through points; past either end the last line, never below the end's value."""
    places = sorted(points)
    if len(places) == 1:
        return points[places[0]]
    index = min(max(bisect_right(places, place), 1), len(places) - 1)
    left, right = places[index - 1], places[index]
    slope = (points[right] - points[left]) / (right - left)
    value = points[left] + slope * (place - left)
    if place > places[-1]:
        return max(value, points[places[-1]])
    if place < places[0]:
        # Costs do not rise towards less work.
        return min(max(value, 0.0), points[places[0]])
    return value


def read_costs(path: Path) -> MeasuredCosts:
    """The file that `MeasuredCosts.save` wrote; ValueError for any other."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if record["what"] != "outrider costs" or record["format"] != FORMAT:
            raise ValueError(f"it is {record['what']!r}, format {record['format']}")
        points = [Point.read(one) for one in record["points"]]
        names = ("target", "head", "dtype", "device", "threads", "notes")
        return MeasuredCosts(points=points, **{name: record[name] for name in names})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(
            f"costs {path} is not a file of measured costs ({type(problem).__name__}: {problem}); "
            "measure with outrider tune --measure"
        ) from problem


def merged(parts: Sequence[MeasuredCosts]) -> MeasuredCosts:
    """Costs measured apart as one. Raises ValueError where they are of unlike things."""
    first = parts[0]
    for other in parts[1:]:
        for name in ("target", "head", "dtype", "device", "threads"):
            mine, theirs = getattr(first, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(
                    f"{name} is {mine!r} in one file of costs and {theirs!r} in another; costs of "
                    "one target and head on one machine belong together: measure again"
                )
    points = [point for part in parts for point in part.points]
    return replace(first, points=points)


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    ordered = sorted(values)
    if not ordered or not all(math.isfinite(value) for value in ordered):
        raise ValueError(f"values are {ordered[:5]}; give at least one time, all finite")
    return Spread(*(_quantile(ordered, share) for share in (0.5, 0.25, 0.75)))


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
