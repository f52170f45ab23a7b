"""The page's section on what speculation buys: speed-up by batch, where it ends, settings."""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import jinja2

from outrider.eval.report import plots


def render_tune(tune: Mapping[str, Any]) -> str:
    """The section as HTML, from the part `tune` of report.json."""
    template = files("outrider.eval.report").joinpath("tune.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["json"] = json.dumps
    return environment.from_string(template).render(
        tune=tune, plots=[_plot(one, index) for index, one in enumerate(tune["contexts"])]
    )


def _plot(one: Mapping[str, Any], index: int) -> str:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in one["predictions"]:
        lines.setdefault(row["draft"], []).append((row["batch"], row["speedup"]["value"]))
    return plots.batch_plot(lines, "speed-up over plain decoding", f"tune-{index}")
