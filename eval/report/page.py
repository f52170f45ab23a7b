"""report.json and report.html: every figure with its definition and where it came from.

Schema of report.json: report.schema.json beside this file (parts that were not run are null):
  schema_version, title, definitions {name: text}
  provenance   created, versions, machine, commit, command, and what the caller adds: target and
               head hashes, data hash, settings, seeds, dtype
  evaluation   traces, results (with losses, ends of rounds, and parts by kind, place, context and
               entropy), differences; see outrider.eval.offline.evaluate
  bench        settings, rows [draft, kind, speedup {value, low, high}, tau, ...], cost {c, verify};
               see outrider.eval.bench
  tune         costs, acceptance, contexts [context, predictions, best, schedule, break_even,
               throughput, requests], engines {vllm, sglang}; see outrider.eval.tune.result
  training     [{step, loss, tau}]
  passage      title, prompt, pieces [{text, mark}], tokens, calls
"""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from outrider.data.files import write_whole
from outrider.eval.metrics import DEFINITIONS
from outrider.eval.report import plots
from outrider.eval.report.lost import loss_plots
from outrider.eval.report.passage import LEGEND
from outrider.eval.report.provenance import plain, provenance
from outrider.eval.report.tables import BREAKDOWNS, LOSSES, OFF_POLICY, parts_of, text_of
from outrider.eval.report.tuning import render_tune

SCHEMA_VERSION = 2
_PARTS = ("evaluation", "bench", "tune", "training", "passage")

Figures = Mapping[str, Any]


class Paths(NamedTuple):
    """Where the two files of a report are."""

    json: Path
    html: Path


def build_report(
    run_folder: Path,
    *,
    evaluation: Figures | None = None,
    bench: Figures | None = None,
    training: Sequence[Figures] | None = None,
    passage: Figures | None = None,
    notes: Figures | None = None,
    title: str = "Outrider report",
) -> Paths:
    """Write report.json and report.html into a run's folder; parts that are None are left out.

    Args:
        run_folder: Where the two files go.
        evaluation: From `evaluate`.
        bench: From `bench`.
        training: From `read_training`.
        passage: From `passage`.
        notes: Added to the provenance: hashes, settings, seeds, dtype.
        title: Heading of the page.
    """
    parts = {"evaluation": evaluation, "bench": bench, "training": training, "passage": passage}
    return write_report(run_folder / "report.json", parts, notes=notes, title=title)


def write_report(path: Path, parts: Figures, *, notes: Figures | None, title: str) -> Paths:
    """Write a report to a .json file and its page beside it; absent parts are null."""
    report = plain(
        {
            "schema_version": SCHEMA_VERSION,
            "title": title,
            "provenance": {**provenance(), **(notes or {})},
            "definitions": DEFINITIONS,
            **{name: parts.get(name) for name in _PARTS},
        }
    )
    paths = Paths(path, path.with_suffix(".html"))
    write_whole(paths.json, json.dumps(report, indent=1, allow_nan=False))
    write_whole(paths.html, render(report))
    return paths


def read_training(run_folder: Path) -> list[dict[str, Any]] | None:
    """Loss and held-out tau by step from a training run's folder; None when it has no log."""
    rows: list[dict[str, Any]] = []
    for name, key in (("metrics.jsonl", "loss"), ("heldout.jsonl", "tau")):
        path = run_folder / name
        if path.exists():
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            rows += [{"step": line["step"], key: _last(line[key])} for line in lines if key in line]
    return sorted(rows, key=lambda row: row["step"]) or None


def _last(value: Any) -> Any:  # noqa: ANN401 - a line of a log
    """Held-out tau comes by draft length: take the longest."""
    return list(value.values())[-1] if isinstance(value, Mapping) else value


def render(report: Figures) -> str:
    """The page of a report that came from report.json."""
    template = (
        files("outrider.eval.report").joinpath("report.html.jinja").read_text(encoding="utf-8")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"figure": _figure, "spread": _spread, "share": _share}
    return environment.from_string(template).render(
        report=report,
        headlines=_headlines(report),
        plots=_plots(report),
        legend=LEGEND,
        tune=render_tune(report["tune"]) if report["tune"] else "",
        off_policy=OFF_POLICY if _is_off_policy(report) else "",
        losses=LOSSES,
        breakdowns=BREAKDOWNS,
        text_of=text_of,
        parts_of=parts_of,
        provenance=_rows(report["provenance"]),
        **_pivots(report),
    )


def _plots(report: Figures) -> dict[str, str]:
    made: dict[str, str] = {}
    evaluation, bench = report["evaluation"], report["bench"]
    if evaluation and evaluation["results"]:
        results = evaluation["results"]
        longest = _longest_chain(results)
        shown = [result for result in results if result["draft"] == longest]
        lines = {_series(result, results): result["survival"] for result in shown}
        made["survival"] = plots.survival_plot(lines)
        made["longest"] = longest
        groups = {
            _series(result, results): {k: part["tau"] for k, part in result["by_kind"].items()}
            for result in shown
        }
        made["kinds"] = plots.kind_plot(groups, f"tokens per target call, {longest}")
        if all("loss" in result for result in results):
            made |= loss_plots({_series(one, results): one for one in shown})
        made["lengths"] = plots.length_plot(_by_draft(results), "tokens per target call", "lengths")
    if bench and bench["rows"]:
        made["speed"] = plots.length_plot(
            _speedups(bench["rows"]), "speed-up over plain decoding", "speed"
        )
        best = _best_draft(bench["rows"])
        kinds = {
            best: {
                row["kind"]: row["speedup"]
                for row in bench["rows"]
                if row["draft"] == best and row["kind"] != "all"
            }
        }
        if kinds[best]:
            made["speed_kinds"] = plots.kind_plot(
                kinds, f"speed-up over plain decoding, {best}", width=5.4
            )
    if report["training"]:
        made["training"] = plots.training_plot(report["training"])
    return made


def _pivots(report: Figures) -> dict[str, Any]:
    """Tables of one figure by draft and kind of prompt."""
    results = report["evaluation"]["results"] if report["evaluation"] else []
    speed: dict[str, dict[str, float]] = {}
    for row in report["bench"]["rows"] if report["bench"] else []:
        speed.setdefault(row["draft"], {})[row["kind"]] = row["speedup"]["value"]
    tau = {
        f"{_series(result, results)}, {result['draft']}": {
            "all": result["tau"]["value"],
            **{kind: part["tau"]["value"] for kind, part in result["by_kind"].items()},
        }
        for result in results
    }
    return {
        "positions": max((len(result["survival"]) for result in results), default=0),
        "tau_rows": tau,
        "tau_kinds": list(dict.fromkeys(kind for cells in tau.values() for kind in cells)),
        "speed_rows": speed,
        "speed_kinds": list(dict.fromkeys(kind for cells in speed.values() for kind in cells)),
    }


def _headlines(report: Figures) -> list[dict[str, str]]:
    """The three or four figures that a reader looks for first."""
    found: list[dict[str, str]] = []
    evaluation, bench = report["evaluation"], report["bench"]
    if evaluation and evaluation["results"]:
        results = evaluation["results"]
        longest = _longest_chain(results)
        for result in [one for one in results if one["draft"] == longest][:2]:
            found.append(
                {
                    "value": _figure(result["tau"]["value"], 2),
                    "name": "tokens per target call",
                    "note": f"{_series(result, results)}, {longest}, {result['tokens']} tokens",
                }
            )
    if bench and bench["rows"]:
        best = next(
            row
            for row in bench["rows"]
            if row["kind"] == "all" and row["draft"] == _best_draft(bench["rows"])
        )
        found.append(
            {
                "value": f"{best['speedup']['value']:.2f}x",
                "name": "plain decoding's speed",
                "note": f"{best['draft']}, median over prompts, 95% {_spread(best['speedup'])}",
            }
        )
    return found


def _is_off_policy(report: Figures) -> bool:
    results = report["evaluation"]["results"] if report["evaluation"] else []
    return any(one.get("off_policy") for one in results)


def _longest_chain(results: Sequence[Figures]) -> str:
    chains = [one["draft"] for one in results if one["draft"].startswith("chain:")]
    if not chains:
        return results[0]["draft"]
    return max(chains, key=lambda draft: int(draft.partition(":")[2]))


def _best_draft(rows: Sequence[Figures]) -> str:
    whole = [row for row in rows if row["kind"] == "all"]
    return max(whole, key=lambda row: row["speedup"]["value"])["draft"]


def _by_draft(results: Sequence[Figures]) -> dict[str, dict[str, Figures]]:
    groups: dict[str, dict[str, Figures]] = {}
    for result in results:
        groups.setdefault(_series(result, results), {})[result["draft"]] = result["tau"]
    return groups


def _speedups(rows: Sequence[Figures]) -> dict[str, dict[str, Figures]]:
    return {"all prompts": {row["draft"]: row["speedup"] for row in rows if row["kind"] == "all"}}


def _series(result: Figures, results: Sequence[Figures]) -> str:
    """Name of a line: the head where there are several, and the text."""
    heads = {one["head"] for one in results}
    return f"{result['head']}, {text_of(result)}" if len(heads) > 1 else text_of(result)


def _rows(value: Figures, prefix: str = "") -> list[tuple[str, str]]:
    """Nested provenance as flat (name, text) pairs."""
    found: list[tuple[str, str]] = []
    for key, inner in value.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(inner, Mapping):
            found += _rows(inner, f"{name}: ")
        elif inner is not None:
            found.append((name, str(inner)))
    return found


def _figure(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread(interval: Figures, digits: int = 2) -> str:
    if interval["low"] is None:
        return ""
    return f"{interval['low']:.{digits}f} to {interval['high']:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
