"""`outrider check`: target, data, head and one step are checked before anything is spent.

It takes the flags and recipes of the trainers. Exit status 1 when something is wrong, each with its
remedy; 2 for flags that are wrong themselves.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from outrider.data.files import write_whole
from outrider.train.check import page
from outrider.train.check.fixes import check_folder, write_fixes
from outrider.train.check.runner import Report, check
from outrider.train.recipe import entry_of, expand
from outrider.train.settings import Settings

OUTPUT = "runs/checked"
"""Where the run is thought to go; nothing is written there."""
MOST_FIXES = 3
DESCRIPTION = """Check target, data, head and one step before anything is spent.

Takes the flags and recipes of the trainers (--head names the kind) and exits with 1 when something
is wrong, saying what to do."""


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """How the report is given."""

    html: Path | None = None
    """Write the page to this file, too."""

    json: Path | None = None
    """Write every finding (name, verdict, what was seen, the remedy) to this file."""

    fix: Path | None = None
    """Write what can be mended safely into this new folder: recipe.yaml, which the trainers take by
    --recipe, and rows.jsonl, the data without its refused rows; then check that instead."""

    every_row: bool = False
    """Encode every row. Otherwise rows evenly spread over large data stand for all, so that a check
    takes no more than a minute; --fix and --row-report always encode every row."""

    show: int = 3
    """Rows to show token by token."""

    def __post_init__(self) -> None:
        for name in ("html", "json"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.absolute().parent.is_dir():
                raise ValueError(f"{name} is {path}, and there is no folder {path.parent}")
        if self.show < 0:
            raise ValueError(f"show is {self.show}; give 0 or more rows")
        if self.fix is not None:
            check_folder(self.fix)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report, and what was mended; exit with 1 when something is wrong."""
    given = list(sys.argv[1:] if argv is None else argv)
    ours, settings = parse(given, entry_of(given))
    use_free_threads(settings.run.threads)
    report = check(settings, num_shown=ours.show, every_row=ours.every_row or ours.fix is not None)
    print(page.text(report, is_colored=is_colored()))
    if ours.fix is not None:
        report = mend(report, ours, type(settings))
    if ours.html is not None:
        write_whole(ours.html, page.to_html(report))
    if ours.json is not None:
        write_whole(ours.json, page.to_json(report))
    if not report.is_good:
        sys.exit(1)


def parse(argv: Sequence[str], entry: type[Settings]) -> tuple[CheckSettings, Settings]:
    """The command's own settings and the trainer's, from one command line."""
    both = dataclasses.make_dataclass(
        "Check", [("check", CheckSettings), ("training", entry)], kw_only=True, frozen=True
    )
    words = expand(["--output", OUTPUT, *argv], entry)
    found: Any = tyro.cli(
        both,
        args=words,
        prog="outrider check",
        description=DESCRIPTION,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    return found.check, found.training


def use_free_threads(wanted: int | None) -> None:
    """At most the threads a trainer would use, and no more than processors are idle.

    Threads that wait for one another's turn on a busy machine take ten times the processor time of
    one thread for a check's small passes.
    """
    wanted = wanted or torch.get_num_threads()
    torch.set_num_threads(max(1, min(wanted, round(num_processors() - os.getloadavg()[0]))))


def num_processors() -> int:
    """Processors that this process may run on."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def is_colored() -> bool:
    """Whether the terminal takes colours (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def mend(report: Report, ours: CheckSettings, entry: type[Settings]) -> Report:
    """Write the fixes and check what they make of the run, as long as there are new ones."""
    assert ours.fix is not None
    changed: dict[str, Any] = {}
    for _ in range(MOST_FIXES):
        fixed = write_fixes(report, ours.fix, changed)
        if fixed is None:
            break
        changed |= fixed.changes
        print(f"\nwrote {fixed.recipe}, which changes:")
        for key, value in fixed.changes.items():
            print(f"  {key}: {report.settings.flat()[key]} -> {value}")
        _, settings = parse(["--recipe", str(fixed.recipe)], entry)
        report = check(settings, num_shown=ours.show, every_row=True)
        print("\n" + page.text(report, is_colored=is_colored()))
    if not changed:
        print("nothing here can be fixed safely" if not report.is_good else "nothing to fix")
    return report
