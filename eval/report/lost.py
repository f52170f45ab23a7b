"""Plots of what judged drafts were lost to, and of acceptance along the text."""

from collections.abc import Mapping
from typing import Any

from outrider.eval.report import plots
from outrider.eval.report.tables import BREAKDOWNS, LOSSES, parts_of


def loss_plots(shown: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Plots of these results, by the names of their lines; none of a breakdown into one part."""
    bars = {
        series: {
            "accepted": one["alpha"]["value"],
            **{name: one["loss"][name]["value"] for name in LOSSES},
        }
        for series, one in shown.items()
    }
    made = {"losses": plots.stack_plot(bars, "share of judged drafts")}
    for key, title in BREAKDOWNS.items():
        lines = {
            series: {name: part["alpha"] for name, part in parts_of(one, key).items()}
            for series, one in shown.items()
        }
        if key != "by_kind" and any(len(line) > 1 for line in lines.values()):
            made[key] = plots.bucket_plot(lines, "alpha", title)
    return made
