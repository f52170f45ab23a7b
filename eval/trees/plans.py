"""Draft plans: how far ahead to draft, and in which shape."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from outrider.data.files import write_whole
from outrider.eval.trees.growth import DynamicGrowth, Growth, StaticGrowth

FORMS = (
    "chain:LENGTH, tree:DEPTH,WIDTH,NODES, drawn:DEPTH,WIDTH,NODES, static:FILE, "
    "lookup:LENGTH,NGRAM or suffix:LENGTH,MATCH"
)


@dataclass(frozen=True)
class ChainPlan:
    """Draft `length` tokens, each after the last."""

    length: int

    def __post_init__(self) -> None:
        _at_least_one("chain length", self.length)

    @property
    def depth(self) -> int:
        """The most tokens one round can accept."""
        return self.length


@dataclass(frozen=True)
class TreePlan:
    """Draft an EAGLE-2 tree: `depth` levels, `width` nodes expanded in each, `nodes` kept."""

    depth: int
    width: int
    nodes: int

    def __post_init__(self) -> None:
        _at_least_one("tree depth", self.depth)
        _at_least_one("tree width", self.width)
        _at_least_one("tree nodes", self.nodes)

    @property
    def label(self) -> str:
        """How it is written."""
        return f"tree:{self.depth},{self.width},{self.nodes}"

    def start(self, root: int) -> Growth:
        """A tree of this plan, not yet grown."""
        return DynamicGrowth(root)


@dataclass(frozen=True)
class DrawnPlan:
    """The same shape planned by order statistics and filled by draws without replacement."""

    depth: int
    width: int
    nodes: int

    def __post_init__(self) -> None:
        _at_least_one("drawn depth", self.depth)
        _at_least_one("drawn width", self.width)
        _at_least_one("drawn nodes", self.nodes)


@dataclass(frozen=True)
class StaticPlan:
    """A fixed tree by ranks: (0, 2) is the third likeliest child of the likeliest child."""

    paths: tuple[tuple[int, ...], ...]
    label: str = "static"
    """How it is written."""

    def __post_init__(self) -> None:
        if not self.paths or len(set(self.paths)) < len(self.paths):
            raise ValueError(f"a static tree has {len(self.paths)} paths; give one or more, unlike")
        known = {(), *self.paths}
        for path in self.paths:
            if not path or path[:-1] not in known or min(path) < 0:
                raise ValueError(
                    f"static path {list(path)} has no parent in the tree or a rank below 0; list "
                    "every node, ranks counted from 0"
                )

    @property
    def depth(self) -> int:
        """The most tokens one round can accept."""
        return max(map(len, self.paths))

    @property
    def width(self) -> int:
        """Likeliest tokens that are looked at under each node."""
        return 1 + max(path[-1] for path in self.paths)

    @property
    def nodes(self) -> int:
        """Drafted tokens."""
        return len(self.paths)

    def start(self, root: int) -> Growth:
        """A tree of this plan, not yet grown."""
        return StaticGrowth(root, self.paths)


@dataclass(frozen=True)
class LookupPlan:
    """Draft `length` tokens that followed the last `ngram` tokens, or fewer, before."""

    length: int
    ngram: int = 3

    def __post_init__(self) -> None:
        _at_least_one("lookup length", self.length)
        _at_least_one("lookup ngram", self.ngram)

    @property
    def depth(self) -> int:
        """The most tokens one round can accept."""
        return self.length

    @property
    def label(self) -> str:
        """How it is written."""
        return f"lookup:{self.length},{self.ngram}"


@dataclass(frozen=True)
class SuffixPlan:
    """Draft up to `length` tokens that most often followed the last `match` tokens, or fewer."""

    length: int
    match: int = 8

    def __post_init__(self) -> None:
        _at_least_one("suffix length", self.length)
        _at_least_one("suffix match", self.match)

    @property
    def depth(self) -> int:
        """The most tokens one round can accept."""
        return self.length

    @property
    def label(self) -> str:
        """How it is written."""
        return f"suffix:{self.length},{self.match}"


LikeliestPlan: TypeAlias = TreePlan | StaticPlan
"""Trees of likeliest tokens, any rule of which accepts alike."""
HeadPlan: TypeAlias = ChainPlan | LikeliestPlan | DrawnPlan
"""Drafts of a head."""
TextPlan: TypeAlias = LookupPlan | SuffixPlan
"""Drafts that the text so far decides, without any model."""
Plan: TypeAlias = HeadPlan | TextPlan


def plan_named(text: str) -> Plan:
    """Read a plan as it is written. Raises ValueError for anything else than `FORMS`."""
    kind, _, rest = text.partition(":")
    if kind == "static" and rest:
        return read_static(Path(rest), label=text)
    numbers = rest.split(",")
    if all(number.isdecimal() for number in numbers):
        values = [int(number) for number in numbers]
        if kind == "chain" and len(values) == 1:
            return ChainPlan(values[0])
        if kind == "tree" and len(values) == 3:
            return TreePlan(*values)
        if kind == "drawn" and len(values) == 3:
            return DrawnPlan(*values)
        if kind == "lookup" and len(values) in (1, 2):
            return LookupPlan(*values)
        if kind == "suffix" and len(values) in (1, 2):
            return SuffixPlan(*values)
    raise ValueError(
        f"draft is {text!r}; write chain:LENGTH, such as chain:3, or tree:DEPTH,WIDTH,NODES, such "
        "as tree:4,4,16, or drawn:DEPTH,WIDTH,NODES for drawn trees, static:FILE for a tree of "
        "outrider tree, or lookup:LENGTH,NGRAM for prompt lookup, or suffix:LENGTH,MATCH for the "
        "most frequent continuation of the text's own suffixes"
    )


def expand(drafts: Sequence[str]) -> tuple[str, ...]:
    """The drafts with every range of lengths written out: chain:1-3 is chain:1, chain:2, chain:3.

    Raises ValueError for a range that is empty or starts below 1.
    """
    found: list[str] = []
    for draft in drafts:
        kind, _, rest = draft.partition(":")
        bounds, comma, more = rest.partition(",")
        first, dash, last = bounds.partition("-")
        if kind not in ("chain", "lookup", "suffix") or not dash:
            found.append(draft)
            continue
        ends = [int(end) if end.isdecimal() else 0 for end in (first, last)]
        if not 1 <= ends[0] <= ends[1]:
            raise ValueError(f"draft is {draft!r}; write a range of lengths as chain:1-8")
        found += [f"{kind}:{length}{comma}{more}" for length in range(ends[0], ends[1] + 1)]
    return tuple(dict.fromkeys(found))


def is_drawn(plan: Plan) -> bool:
    """Whether a plan's tokens are drawn when the text is sampled."""
    return isinstance(plan, ChainPlan | DrawnPlan)


def write_static(
    path: Path, paths: Sequence[tuple[int, ...]], notes: Mapping[str, Any] | None = None
) -> None:
    """Write a static tree as JSON: `paths` of ranks from the root, and `notes` on its making."""
    plan = StaticPlan(tuple(sorted(paths, key=lambda one: (len(one), one))))
    record = {"format": 1, "paths": [list(one) for one in plan.paths], "notes": dict(notes or {})}
    write_whole(path, json.dumps(record) + "\n")


def read_static(path: Path, *, label: str = "static") -> StaticPlan:
    """Read what `write_static` wrote. Raises ValueError for any other file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        found = tuple(tuple(_rank(rank) for rank in one) for one in record["paths"])
    except OSError as error:
        raise ValueError(
            f"the static tree {path} cannot be read ({error.strerror}); name a file of outrider "
            "tree"
        ) from error
    except (ValueError, KeyError, TypeError) as error:  # JSON that is not a tree's, too
        raise ValueError(
            f"{path} is not a static tree; name a file of outrider tree, which holds `paths`, each "
            "a list of ranks from the root"
        ) from error
    return StaticPlan(found, label)


def _rank(value: object) -> int:
    if type(value) is not int:  # neither a float nor true
        raise TypeError(f"rank {value!r} is not a whole number")
    return value


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}; draft at least 1")
