"""Plots as inline SVG that takes its colours from the page, so light and dark both read well."""

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Stand-ins that no plot uses otherwise; `_themed` turns them into the page's own colours.
_INK, _GRID, _PAPER = "#010203", "#040506", "#070809"
_SERIES = ("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05", "#0a0b06")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "outrider",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
}

Line = Mapping[str, float]
"""An interval: value, low, high."""


def survival_plot(lines: Mapping[str, Sequence[Line]]) -> str:
    """Chance that at least i drafts of a round are accepted, by depth i; one line a result."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(5.4, 3.6)
        for index, (name, points) in enumerate(lines.items()):
            depth = [i + 1 + 0.06 * (index - (len(lines) - 1) / 2) for i in range(len(points))]
            _errors(axes, depth, points, index, name, line=True)
        deepest = max(len(points) for points in lines.values())
        axes.set_xticks(range(1, deepest + 1))
        axes.set_xlim(0.7, deepest + 0.3)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("draft position in the round")
        axes.set_ylabel("share of rounds that accept it")
        _legend(axes, len(lines))
        return _svg(figure, "survival", "Acceptance by draft position with 95% intervals")


def kind_plot(groups: Mapping[str, Mapping[str, Line]], label: str, *, width: float = 9.6) -> str:
    """One row a kind, one dot a result: groups maps result name to kind to interval."""
    kinds = sorted({kind for group in groups.values() for kind in group})
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(width, 1.2 + 0.42 * max(2, len(kinds)))
        for index, (name, group) in enumerate(groups.items()):
            shift = 0.16 * (index - (len(groups) - 1) / 2)
            rows = [(kinds.index(kind) + shift, group[kind]) for kind in kinds if kind in group]
            _errors(axes, [y for y, _ in rows], [p for _, p in rows], index, name, across=True)
        axes.axvline(1.0, color=_INK, linewidth=1, linestyle=(0, (2, 3)))
        axes.set_yticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds])
        axes.set_ylim(len(kinds) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(label)
        _legend(axes, len(groups))
        return _svg(figure, f"kinds-{label[:8].strip()}", f"{label}, by kind of prompt")


def stack_plot(rows: Mapping[str, Mapping[str, float | None]], label: str) -> str:
    """One bar a result, cut into parts that add up to the whole."""
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(9.6, 1.3 + 0.42 * max(2, len(rows)))
        names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
        left = [0.0] * len(rows)
        for index, name in enumerate(names):
            width = [parts.get(name) or 0.0 for parts in rows.values()]
            colour = _SERIES[index % len(_SERIES)]
            axes.barh(range(len(rows)), width, left=left, height=0.62, color=colour, label=name)
            left = [a + b for a, b in zip(left, width, strict=True)]
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, 1)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(label)
        _legend(axes, len(names))
        return _svg(figure, "losses", "Judged drafts: accepted, and what the rest were lost to")


def bucket_plot(lines: Mapping[str, Mapping[str, Line]], label: str, title: str) -> str:
    """A figure along an axis cut into buckets, one line a result."""
    names = list(dict.fromkeys(name for line in lines.values() for name in line))
    names.sort(key=lambda name: float(name.split()[0]))
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(5.4, 3.6)
        for index, (series, line) in enumerate(lines.items()):
            shift = 0.08 * (index - (len(lines) - 1) / 2)
            found = [
                (names.index(name) + shift, point)
                for name, point in line.items()
                if point["value"] is not None and point["value"] == point["value"]
            ]
            _errors(axes, [x for x, _ in found], [p for _, p in found], index, series, line=True)
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axes.set_ylim(bottom=0)
        axes.set_xlabel(title)
        axes.set_ylabel(label)
        _legend(axes, len(lines))
        return _svg(figure, f"by-{title}", f"{label} by {title}, with 95% intervals")


def length_plot(groups: Mapping[str, Mapping[str, Line]], label: str, name: str) -> str:
    """One column a draft setting, one dot a result; the dashed line is plain decoding."""
    settings = list(dict.fromkeys(draft for group in groups.values() for draft in group))
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(5.4, 3.6)
        for index, (series, group) in enumerate(groups.items()):
            shift = 0.1 * (index - (len(groups) - 1) / 2)
            points = [(settings.index(d) + shift, group[d]) for d in settings if d in group]
            _errors(axes, [x for x, _ in points], [p for _, p in points], index, series)
        axes.axhline(1.0, color=_INK, linewidth=1, linestyle=(0, (2, 3)))
        axes.set_xticks(range(len(settings)), settings)
        axes.set_xlim(-0.5, len(settings) - 0.5)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("draft")
        axes.set_ylabel(label)
        _legend(axes, len(groups))
        return _svg(figure, name, f"{label} by draft setting; the dashed line is plain decoding")


def batch_plot(lines: Mapping[str, Sequence[tuple[int, float]]], label: str, name: str) -> str:
    """One line a draft over the batch, on a logarithmic axis; the dashed line is plain decoding."""
    batches = sorted({batch for points in lines.values() for batch, _ in points})
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(9.6, 3.8)
        for index, (draft, points) in enumerate(lines.items()):
            axes.plot(
                *zip(*points, strict=True),
                label=draft,
                color=_SERIES[index % len(_SERIES)],
                marker=_MARKERS[index % len(_MARKERS)],
                linestyle="-" if index < len(_SERIES) else (0, (4, 2)),
                linewidth=1.6,
                markersize=5,
            )
        axes.axhline(1.0, color=_INK, linewidth=1, linestyle=(0, (2, 3)))
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("rows in the batch")
        axes.set_ylabel(label)
        _legend(axes, len(lines))
        return _svg(figure, name, f"{label} by batch; the dashed line is plain decoding")


def training_plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """Training loss, and held-out tokens per target call where it was measured."""
    losses = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    heldout = [(row["step"], row["tau"]) for row in rows if row.get("tau") is not None]
    with mpl.rc_context(_STYLE):
        figure, axes = _axes(9.6, 3.4)
        if losses:
            axes.plot(*zip(*losses, strict=True), color=_SERIES[0], linewidth=1.6)
            axes.set_ylabel("training loss", color=_SERIES[0])
        axes.set_xlabel("optimizer step")
        if heldout:
            right = axes.twinx() if losses else axes
            right.plot(*zip(*heldout, strict=True), color=_SERIES[1], marker="s", markersize=4.5)
            right.set_ylabel("held-out tokens per target call", color=_SERIES[1])
            right.grid(visible=False)
        return _svg(figure, "training", "Training loss and held-out acceptance by optimizer step")


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    return figure, axes


def _errors(
    axes: Axes,
    places: Sequence[float],
    points: Sequence[Line],
    index: int,
    name: str,
    *,
    line: bool = False,
    across: bool = False,
) -> None:
    # Where nothing was counted there is no point; a gap keeps the place.
    values = [_number(point["value"]) for point in points]
    # A lone prompt has no interval: its bounds are None or NaN.
    low = [max(0.0, value - _bound(p, "low")) for value, p in zip(values, points, strict=True)]
    high = [max(0.0, _bound(p, "high") - value) for value, p in zip(values, points, strict=True)]
    x, y = (values, places) if across else (places, values)
    axes.errorbar(
        x,
        y,
        xerr=[low, high] if across else None,
        yerr=None if across else [low, high],
        label=name,
        color=_SERIES[index % len(_SERIES)],
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=6,
        markeredgecolor=_PAPER,
        markeredgewidth=0.8,
        linestyle="-" if line else "none",
        linewidth=1.6,
        elinewidth=1.6,
        capsize=0,
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _bound(point: Line, name: str) -> float:
    bound = point.get(name)
    return _number(point["value"]) if bound is None or bound != bound else bound


def _legend(axes: Axes, count: int) -> None:
    if count > 1:
        columns = min(count, 2 if axes.bbox.width < 600 else 4)
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), borderaxespad=0.2, ncols=columns)


def _svg(figure: Figure, name: str, label: str) -> str:
    """The figure as one <svg> element with ids of its own and the page's colours."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    prefix = re.sub(r"[^a-z0-9]+", "-", name.lower())
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = text.replace("url(#", f"url(#{prefix}-")
    # A fixed size would not fit a phone; the view box keeps the shape.
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(label, quote=True)}" ', 1)
    return _themed(text)


def _themed(text: str) -> str:
    text = text.replace(_INK, "currentColor").replace(_GRID, "var(--grid)")
    text = text.replace(_PAPER, "var(--paper)")
    for index, colour in enumerate(_SERIES):
        text = text.replace(colour, f"var(--series-{index + 1})")
    return text


_LIGHT = {"ink": "#1c2128", "grid": "#dcdfe3", "paper": "#fbfaf7"}
_DARK = {"ink": "#e4e7ea", "grid": "#343b44", "paper": "#14171b"}
_HUES = {
    "light": ("#0b63ad", "#b8480a", "#0d7a56", "#7d43a8", "#8a6a00", "#a3264f"),
    "dark": ("#62b4f7", "#f2955a", "#4fcf9f", "#c79af0", "#dcc05a", "#f285a8"),
}


def alone(svg: str) -> str:
    """A plot as a file of its own, with the report's colours for light and dark."""

    def rule(page: Mapping[str, str], hues: Sequence[str]) -> str:
        series = "".join(f"--series-{i}:{hue};" for i, hue in enumerate(hues, start=1))
        names = f"--grid:{page['grid']};--paper:{page['paper']};"
        return f"svg{{color:{page['ink']};background:{page['paper']};{names}{series}}}"

    dark = f"@media (prefers-color-scheme:dark){{{rule(_DARK, _HUES['dark'])}}}"
    style = f"<style>{rule(_LIGHT, _HUES['light'])}{dark}</style>"
    head, tail = svg.split(">", 1)
    if "xmlns=" not in head:
        head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return f"{head}>{style}{tail}"
