"""Results as text: a table for the terminal, and Markdown for a README or an issue."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from outrider.eval.metrics import refuse_lossy
from outrider.eval.report.lines import aligned

Figures = Mapping[str, Any]

OFF_POLICY = "OFF-POLICY: not the target's own text; these figures are not those of decoding"
LOSSES = ("vocabulary", "head", "shape", "rule")


def table(evaluation: Figures) -> str:
    """The results as lines of text, a row per head, trace and draft."""
    columns = ("head", "text", "draft", "tau [95%]", "alpha", "alpha*", "survival by position")
    refuse_lossy(evaluation["results"])
    rows = [columns]
    rows += [
        (
            one["head"],
            text_of(one),
            one["draft"],
            interval(one["tau"], 3),
            number(one["alpha"]["value"]),
            number(one["alpha_star"]["value"]),
            " ".join(number(depth["value"]) for depth in one["survival"]),
        )
        for one in evaluation["results"]
    ]
    return "\n".join([*aligned(rows), *_notes(evaluation)])


def losses(evaluation: Figures) -> str:
    """What each result's judged drafts were lost to, as lines of text; rows add up to 1."""
    rows: list[Sequence[str]] = [("head", "text", "draft", "accepted", *LOSSES)]
    rows += [
        (
            one["head"],
            text_of(one),
            one["draft"],
            number(one["alpha"]["value"]),
            *(number(one["loss"][name]["value"]) for name in LOSSES),
        )
        for one in evaluation["results"]
    ]
    return "\n".join(aligned(rows))


def markdown(evaluation: Figures) -> str:
    """Tables of an evaluation in Markdown: all results, and the parts of each head's best draft."""
    refuse_lossy(evaluation["results"])
    results = evaluation["results"]
    parts = [
        _table(
            ("head", "text", "draft", "rule", "tau [95%]", "alpha", "alpha*", "prompts", "tokens"),
            [
                (
                    *_names(one),
                    one["rule"],
                    interval(one["tau"]),
                    interval(one["alpha"]),
                    interval(one["alpha_star"]),
                    str(one["prompts"]),
                    str(one["tokens"]),
                )
                for one in results
            ],
        ),
        "Where judged drafts were lost; a row adds up to 1.\n\n"
        + _table(
            ("head", "text", "draft", "accepted", *LOSSES),
            [
                (
                    *_names(one),
                    interval(one["alpha"]),
                    *(interval(one["loss"][name]) for name in LOSSES),
                )
                for one in results
            ],
        ),
    ]
    best = _best(results)
    parts += [_parts(best, key, title) for key, title in BREAKDOWNS.items()]
    if evaluation["differences"]:
        parts.append(_differences(evaluation["differences"]))
    return "\n\n".join([*_notes(evaluation), *filter(None, parts)]) + "\n"


BREAKDOWNS = {
    "by_kind": "kind of prompt",
    "by_place": "place in the answer",
    "by_context": "tokens of context",
    "by_entropy": "entropy of the target, nats",
}
"""Keys of a result that hold its parts, and what those are parts by."""


def parts_of(result: Figures, key: str) -> dict[str, Figures]:
    """The parts of a result by name."""
    found = result.get(key) or {}
    return dict(found) if isinstance(found, Mapping) else {one["name"]: one for one in found}


def text_of(result: Figures) -> str:
    """The text that a result is on: its sampling, a subset's size, and whose it is not.

    Of several traces of one sampling the name comes first.
    """
    name = result.get("text")
    words = [result["sampling"]] if name is None else [name, result["sampling"]]
    if subset := result.get("subset"):
        words.append(f"{subset['texts']} of {subset['of']} texts, seed {subset['seed']}")
    if result.get("off_policy"):
        words.append("off-policy")
    return ", ".join(words)


def _notes(evaluation: Figures) -> list[str]:
    return [OFF_POLICY] if any(one.get("off_policy") for one in evaluation["results"]) else []


def _best(results: Sequence[Figures]) -> list[Figures]:
    """The draft of most tokens a call, for each head and text."""
    found: dict[tuple[str, str], Figures] = {}
    for one in results:
        key = one["head"], one["trace"]
        if key not in found or _or_zero(one["tau"]) > _or_zero(found[key]["tau"]):
            found[key] = one
    return list(found.values())


def _or_zero(one: Figures) -> float:
    value = one["value"]
    return 0.0 if value is None or value != value else value


def _parts(results: Sequence[Figures], key: str, title: str) -> str:
    rows = [
        (
            *_names(one),
            name.replace("_", " "),
            str(part["prompts"]),
            f"{part['tokens']:.0f}",
            interval(part["tau"]),
            interval(part["alpha"]),
            *(number(part["loss"][loss]["value"]) for loss in LOSSES),
        )
        for one in results
        for name, part in parts_of(one, key).items()
    ]
    if not rows:
        return ""
    columns = ("head", "text", "draft", title, "prompts", "tokens", "tau [95%]", "alpha [95%]")
    return f"By {title}.\n\n" + _table((*columns, *(f"lost: {one}" for one in LOSSES)), rows)


def _differences(found: Sequence[Figures]) -> str:
    rows = [
        (
            one["head"],
            one["against"],
            one["trace"],
            one["draft"],
            kind.replace("_", " "),
            interval(part["tau"]),
            interval(part["alpha"]),
        )
        for one in found
        for kind, part in {"all": one, **one["by_kind"]}.items()
    ]
    columns = ("head", "less", "text", "draft", "kind", "tau [95%]", "alpha [95%]")
    return "Differences, paired by prompt.\n\n" + _table(columns, rows)


def _names(result: Figures) -> tuple[str, str, str]:
    return result["head"], text_of(result), result["draft"]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """On one line, and neither a column's end nor HTML: names come from people's files."""
    return escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def interval(one: Figures, digits: int = 3) -> str:
    """A figure with its bounds, where there are any."""
    low, high = one["low"], one["high"]
    if low is None or low != low:
        return number(one["value"], digits)
    return f"{number(one['value'], digits)} [{number(low, digits)}, {number(high, digits)}]"


def signed(one: Figures, digits: int = 3) -> str:
    """A difference with its sign, and bounds where there are any."""
    value, low, high = one["value"], one["low"], one["high"]
    if value is None or value != value:
        return "-"
    bounds = "" if low is None or low != low else f" [{low:+.{digits}f}, {high:+.{digits}f}]"
    return f"{value:+.{digits}f}{bounds}"


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None or value != value else f"{round(value, digits) + 0.0:.{digits}f}"
