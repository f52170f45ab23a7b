"""Draw the README's picture from a demo's report.

python -m outrider.scripts.readme_picture --report runs/demo/report.json
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from outrider.data.files import write_whole
from outrider.eval.report.plots import alone, kind_plot


@dataclass(frozen=True, kw_only=True)
class PictureSettings:
    """Tokens per target call by kind of prompt, from a report.json with an evaluation."""

    report: Path
    """A report.json of `outrider demo` or `outrider eval`."""

    draft: str = "chain:5"
    """The draft setting to show."""

    out: Path = Path("scripts/demo.svg")
    """The picture."""


def main(argv: Sequence[str] | None = None) -> None:
    """Read the report and write the picture."""
    settings = tyro.cli(PictureSettings, args=argv)
    evaluation = json.loads(settings.report.read_text(encoding="utf-8"))["evaluation"]
    results = evaluation["results"] if evaluation else []
    groups = {
        f"{result['sampling']}, {settings.draft}": {
            kind: part["tau"] for kind, part in result["by_kind"].items()
        }
        for result in results
        if result["draft"] == settings.draft
    }
    if not groups:
        found = ", ".join(dict.fromkeys(result["draft"] for result in results)) or "none"
        raise ValueError(f"{settings.report} has no draft {settings.draft!r}; it has {found}")
    picture = alone(kind_plot(groups, "tokens per target call", width=8.4))
    write_whole(settings.out, picture)
    print(settings.out)


if __name__ == "__main__":
    main()
