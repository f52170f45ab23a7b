"""The demo's prompts: short requests of six kinds, a pure function of a seed.

A prompt is a template of `templates.yaml` with its slots filled. Training and held-out prompts
share word lists, but no template, passage or function.
"""

import itertools
import random
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

KINDS = ("chat", "code_edit", "qa", "summary", "math", "extract")
SPLITS = ("train", "heldout")

_SLOT = re.compile(r"<([a-z_]+)(\d?)>")
_QUESTION = re.compile(
    r"(^|[.:?]\s+|\n|\")(who|when|what|which|where|why|how|is|can|do|on)\b(?=[^\n]*\?)"
)
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou](?!ne\b))")
_MAX_TRIES = 20


class Prompt(NamedTuple):
    """One request: `messages` is the conversation so far, a single user turn."""

    id: str
    kind: str
    template: str
    split: str
    messages: list[dict[str, str]]


class Source(NamedTuple):
    """What a request is about, and the requests that fit it."""

    text: str
    asks: list[str]


class Stock(NamedTuple):
    """What the prompts of one kind and split are made of."""

    templates: list[str]
    sources: list[Source]


def prompts(split: str, num_per_kind: int, seed: int = 0) -> list[Prompt]:
    """Distinct prompts with the kinds interleaved: the first 6 n hold n of each.

    A longer list starts with the shorter one. Raises ValueError for an unknown split, and when the
    templates cannot give that many distinct prompts.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; choose one of {', '.join(SPLITS)}")
    streams = [itertools.islice(_stream(kind, split, seed), num_per_kind) for kind in KINDS]
    return [prompt for group in zip(*streams, strict=True) for prompt in group]


@cache
def stock(kind: str, split: str) -> Stock:
    """The templates and sources of a kind in a split."""
    entry = _yaml("templates.yaml")[kind]
    any_asks = entry.get("asks_for_any", [])
    sources = [
        Source(
            source["text"],
            source.get("asks", [""]) + (any_asks if source.get("takes_any", True) else []),
        )
        for source in entry[split].get("sources", [{"text": ""}])
    ]
    return Stock(entry[split]["templates"], sources)


@cache
def words() -> dict[str, list[str]]:
    """The values of each slot."""
    numbers: dict[str, range] = {
        "small": range(2, 10),
        "teen": range(11, 20),
        "mid": range(21, 60),
        "tens": range(20, 100, 10),
        "hundreds": range(200, 1000, 100),
        "big": range(110, 980, 15),
        "dom": range(1, 29),
        "room": range(101, 340, 7),
        "year": range(1890, 2024),
        "recent_year": range(2015, 2026),
    }
    return _yaml("words.yaml") | {
        **{slot: [str(number) for number in values] for slot, values in numbers.items()},
        "percent": ["5", "10", "15", "20", "25", "30", "40", "50"],
        "hour": ["8", "9", "10", "11", "1", "2", "3", "4", "5", "6"],
        "clock": _joined(":", (8, 9, 10, 11, 1, 2, 3, 4, 5), ("00", "15", "30", "45")),
        "price": _joined(".", range(2, 30), ("00", "25", "50", "75", "99")),
        "phone": [f"555-{number:04d}" for number in range(103, 9950, 37)],
        "order": _joined("-", ("A", "B", "QX", "ZT"), range(1042, 9900, 83)),
    }


def _stream(kind: str, split: str, seed: int) -> Iterator[Prompt]:
    rng = random.Random(f"{seed}/{kind}/{split}")
    templates, sources = stock(kind, split)
    seen: set[str] = set()
    for index in itertools.count():
        # Templates and sources take turns, at different periods, so that no pair is rare.
        first = (index + index // len(templates)) % len(sources)
        which, text = new_text(
            Stock(templates, sources[first:] + sources[:first]), index, rng, seen
        )
        seen.add(text)
        yield Prompt(
            id=f"{kind}-{split}-{index:05d}",
            kind=kind,
            template=f"{kind}-{split}-{which:02d}",
            split=split,
            messages=[{"role": "user", "content": text}],
        )


def new_text(of: Stock, turn: int, rng: random.Random, seen: set[str]) -> tuple[int, str]:
    """A text not in `seen` and its template's index: the turn's own while it has one left."""
    for shift, source in itertools.product(range(len(of.templates)), of.sources):
        which = (turn + shift) % len(of.templates)
        for _ in range(_MAX_TRIES):
            text = of.templates[which].replace("<body>", source.text)
            text = text.replace("<ask>", rng.choice(source.asks))
            text = _polish(_fill(text, rng, {}))
            if text not in seen:
                return which, text
    raise ValueError(f"the templates give {len(seen)} distinct prompts of a kind; ask for fewer")


def _fill(text: str, rng: random.Random, chosen: dict[str, str]) -> str:
    """Replace every slot; the same slot takes the same value, a numbered one a different value."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if match.group(0) not in chosen:
            taken = {v for slot, v in chosen.items() if _SLOT.sub(r"\1", slot) == name}
            options = [word for word in words()[name] if word not in taken]
            chosen[match.group(0)] = _fill(rng.choice(options), rng, chosen)
        return chosen[match.group(0)]

    return _SLOT.sub(value, text)


def _polish(text: str) -> str:
    """Upper-case a question that starts a sentence, and write "an" before a vowel."""
    text = _QUESTION.sub(lambda match: match.group(1) + match.group(2).capitalize(), text)
    return _ARTICLE.sub(r"\1n ", text).strip()


def _joined(mark: str, heads: Iterable[object], tails: Iterable[object]) -> list[str]:
    return [f"{head}{mark}{tail}" for head in heads for tail in tails]


@cache
def _yaml(name: str) -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
