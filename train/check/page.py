"""A report as lines for the terminal, as a self-contained page, and as JSON."""

import json
import textwrap
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import jinja2

from outrider.train.check.finding import Finding
from outrider.train.check.runner import Report
from outrider.train.check.shown import Piece, Shown

SCHEMA_VERSION = 1
WIDTH = 100
MARGIN = 28
COLORS = {"ok": "32", "warn": "33", "fail": "1;31", "skipped": "2"}
SUPERVISED, SPECIAL, PLAIN = "42;30", "1;35", "2"
LEGEND = "supervised: {}; ... leaves tokens out"


def text(report: Report, *, is_colored: bool) -> str:
    """The whole report as lines; marks stand in for colours where there are none."""
    lines = [_paint(title(report), "1", is_colored), ""]
    for group, findings in report.findings.items():
        lines.append(_paint(group, "1", is_colored))
        for one in findings:
            lines += _finding(one, is_colored=is_colored)
    if report.shown:
        marked = _paint("marked", SUPERVISED, on=True) if is_colored else "between {{ and }}"
        lines += ["", _paint("sample rows", "1", is_colored), f"  {LEGEND.format(marked)}"]
        lines += [line for row in report.shown for line in _row(row, is_colored=is_colored)]
    return "\n".join([*lines, "", verdict(report)])


def title(report: Report) -> str:
    """What was checked."""
    flat = report.settings.flat()
    return f"outrider check: target {flat['target']}, data {flat['data']}, head {flat['head']}"


def verdict(report: Report) -> str:
    """The last line."""
    counts = ", ".join(
        f"{report.count(one)} {word}"
        for one, word in (("ok", "ok"), ("warn", "to know"), ("fail", "wrong"))
    )
    skipped = report.count("skipped")
    more = f", {skipped} skipped" if skipped else ""
    end = "ready to train" if report.is_good else "NOT READY: mend what is marked fail"
    return f"{counts}{more}; {report.seconds:.0f} s: {end}"


def _finding(one: Finding, *, is_colored: bool) -> Iterator[str]:
    head = f"  {_paint(f'{one.verdict:<7}', COLORS[one.verdict], is_colored)} {one.name:<17} "
    body = _wrapped(one.seen)
    yield head + body[0]
    yield from (" " * MARGIN + line for line in body[1:])
    for index, line in enumerate(_wrapped(one.remedy) if one.remedy else []):
        yield " " * (MARGIN - 2) + ("> " if index == 0 else "  ") + line


def _wrapped(given: str) -> list[str]:
    lines: list[str] = []
    for line in given.splitlines():
        lines += textwrap.wrap(
            line, WIDTH - MARGIN, break_on_hyphens=False, break_long_words=False
        ) or [""]
    return lines or [""]


def _row(row: Shown, *, is_colored: bool) -> Iterator[str]:
    yield _paint(f"  row {row.row_id}, {row.tokens} tokens", "4", is_colored)
    whole, was = "", False
    for piece in row.pieces:
        if not is_colored and piece.is_supervised != was:
            whole += "{{" if piece.is_supervised else "}}"
        was = piece.is_supervised
        whole += _piece(piece, is_colored=is_colored)
    if was and not is_colored:
        whole += "}}"
    yield from (f"    {line}" for line in whole.split("\n"))


def _piece(piece: Piece, *, is_colored: bool) -> str:
    if not is_colored:
        return piece.text
    color = SUPERVISED if piece.is_supervised else PLAIN
    color = f"{color};{SPECIAL}" if piece.is_special else color
    return "\n".join(_paint(part, color, on=True) for part in piece.text.split("\n"))


def _paint(words: str, color: str, on: bool) -> str:
    return f"\x1b[{color}m{words}\x1b[0m" if on and words else words


def record(report: Report) -> dict[str, Any]:
    """The report as plain values."""
    return {
        "schema_version": SCHEMA_VERSION,
        "is_good": report.is_good,
        "seconds": round(report.seconds, 2),
        "settings": {key: _plain(value) for key, value in report.settings.flat().items()},
        "findings": [
            {"group": group, **one.to_dict()}
            for group, findings in report.findings.items()
            for one in findings
        ],
        "plan": None if report.plan is None else report.plan.record(),
        "rows": [
            {"row_id": row.row_id, "tokens": row.tokens, "pieces": [[*x] for x in row.pieces]}
            for row in report.shown
        ],
    }


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def to_json(report: Report) -> str:
    """The report as JSON text."""
    return json.dumps(record(report), indent=1) + "\n"


def to_html(report: Report) -> str:
    """The report as one page without links to anything."""
    source = files("outrider.train.check").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source).render(
        title=title(report),
        verdict=verdict(report),
        is_good=report.is_good,
        groups=report.findings,
        shown=report.shown,
    )
