"""`--fix`: a recipe with corrected settings and a file of cleaned rows, in a folder of their own.

Nothing of the user's is changed; what is written here the trainers take by --recipe.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outrider.data.collect import Collector
from outrider.data.counts import Counts
from outrider.data.files import write_whole
from outrider.data.mixture import Mixture, parts_of
from outrider.train.check.finding import Finding
from outrider.train.check.runner import Report
from outrider.train.recipe import to_yaml
from outrider.train.settings import Settings

RECIPE, ROWS = "recipe.yaml", "rows.jsonl"


class Fixed(NamedTuple):
    """What was written."""

    recipe: Path
    changes: dict[str, Any]
    """By flag name."""


def check_folder(folder: Path) -> None:
    """ValueError unless the folder is new, empty, or holds nothing but earlier fixes."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"fix is {str(folder)!r}, which is a file; name a folder")
    others = {one.name for one in folder.iterdir()} - {RECIPE, ROWS} if folder.exists() else set()
    if others:
        raise ValueError(
            f"fix is {str(folder)!r}, which holds {sorted(others)[0]}; name a new folder, so that "
            "no file of yours is changed"
        )


def write_fixes(report: Report, folder: Path, before: Collection[str] = ()) -> Fixed | None:
    """Write what mends the report's findings; None where nothing can be mended safely.

    `before` names settings that earlier fixes changed.
    """
    changes = fixes_of(report.all)
    rows = cleaned(report)
    if rows is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / ROWS
        write_whole(path, "".join(json.dumps(record, default=str) + "\n" for record in rows))
        changes["data"] = str(path)
    if not changes:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / RECIPE, recipe_text(report.settings, changes, before))
    return Fixed(folder / RECIPE, changes)


def fixes_of(findings: Iterable[Finding]) -> dict[str, Any]:
    """The changes of all findings; where two change one setting, failures and earlier ones win."""
    order = sorted(findings, key=lambda one: one.verdict != "fail")
    changes: dict[str, Any] = {}
    for one in order:
        for key, value in one.fix.items():
            changes.setdefault(key, value)
    return changes


def recipe_text(settings: Settings, changes: Mapping[str, Any], before: Collection[str]) -> str:
    """The settings with the changes, as a recipe."""
    named = ", ".join(sorted({*changes, *before}))
    return f"# Written by outrider check --fix; changed: {named}.\n{to_yaml(settings, changes)}"


def cleaned(report: Report) -> list[Mapping[str, Any]] | None:
    """The records without those that were refused whole; None where none was, or all.

    Only for data that lies in one file on this machine.
    """
    source = report.settings.data.data
    if Collector not in report.case.parts or not Path(source).expanduser().is_file():
        return None
    counts = report.case.get(Collector).counts
    refused = refused_whole(counts)
    if not refused or len(refused) == counts.read or len(parts_of(source)) > 1:
        return None
    return list(_kept(source, refused))


def refused_whole(counts: Counts) -> set[int]:
    """Numbers of records of which no row trains."""
    good = {one.number for one in counts.fates if one.outcome != "refused"}
    return {one.number for one in counts.fates} - good


def _kept(source: str, refused: set[int]) -> Iterator[Mapping[str, Any]]:
    for one in Mixture(source):
        if one.number not in refused and isinstance(one.record, Mapping):
            yield one.record
