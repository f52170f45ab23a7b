"""`outrider drift`: acceptance in production against the offline prediction, route by route."""

import json
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import tyro

from outrider.data.files import write_whole
from outrider.eval.production.drift import Prediction, Verdict, judge
from outrider.eval.production.engine_log import read_windows
from outrider.eval.production.window import Window
from outrider.eval.report.lines import aligned
from outrider.eval.report.provenance import plain, provenance


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """What the engine said, and which prediction it is held against."""

    log: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    """File or http(s) address: metrics text of vLLM or SGLang (several scrapes in order give
    windows between them), a log, or JSON lines of SGLang's answers with meta_info; repeat."""

    head: str | None = None
    """Which head of the prediction, where it has several."""

    trace: str | None = None
    """Which trace of the prediction, where it has several: that of the served sampling."""

    draft: str | None = None
    """chain:LENGTH as served; told from the engine's positions when left out."""

    kind: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """ROUTE=KIND: hold this route against the prediction for prompts of one kind; repeat."""

    log_interval: int = 40
    """SGLang's --decode-log-interval."""

    level: float = 0.05
    """Most chance of any false alarm, over all windows together."""

    def __post_init__(self) -> None:
        if not self.log:
            raise ValueError("no log given; name the engine's metrics or log with --log")
        if not 0 < self.level < 1 or self.log_interval < 1:
            raise ValueError(
                f"level is {self.level}, log_interval {self.log_interval}; give a chance between 0 "
                "and 1, and 1 step or more"
            )
        for text in self.kind:
            if "=" not in text:
                raise ValueError(f"kind is {text!r}; write ROUTE=KIND")


@dataclass(frozen=True, kw_only=True)
class Settings(LogSettings):
    """What the engine said, and what was predicted."""

    prediction: Path
    """The .json file of an outrider eval of the served head, with the served chain length."""

    out: Path | None = None
    """Write this .json file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is not None and self.out.suffix != ".json":
            raise ValueError(f"out is {self.out}; name a file that ends in .json")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; exit status 1 where acceptance has drifted."""
    settings = tyro.cli(
        Settings, args=argv, prog="outrider drift", config=(tyro.conf.FlagCreatePairsOff,)
    )
    verdicts = hold(settings, read_results(settings.prediction))
    if settings.out is not None:
        record: dict[str, Any] = {"schema_version": 1, "provenance": provenance()}
        record |= {"level": settings.level, "windows": [asdict(one) for one in verdicts]}
        write_whole(settings.out, json.dumps(plain(record), indent=1, allow_nan=False) + "\n")
        print(settings.out)
    if any(one.is_drift for one in verdicts):
        raise SystemExit(1)


def hold(settings: LogSettings, results: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Hold every window of the logs against the results of an evaluation, and print the table."""
    sources = [(Path(one).name or one, read_source(one)) for one in settings.log]
    windows = read_windows(sources, log_interval=settings.log_interval)
    if not windows:
        raise ValueError(
            f"{', '.join(name for name, _ in sources)} has no calls that judged a draft yet; read "
            "the engine's figures again once it has served with the head"
        )
    windows += totals(windows)
    kinds = dict(text.rsplit("=", 1) for text in settings.kind)
    if strange := set(kinds) - {window.route for window in windows}:
        raise ValueError(
            f"--kind names the routes {sorted(strange)}; the logs have "
            f"{sorted({window.route for window in windows})}"
        )
    pairs = [(one, predict(results, one, settings, kinds.get(one.route))) for one in windows]
    verdicts = judge(pairs, level=settings.level)
    print(drift_table(verdicts))
    drifted = [one for one in verdicts if one.is_drift]
    for one in drifted:
        worst = one.worst
        print(
            f"drift: {one.window.route}, {one.window.when}: {worst.what} {worst.found:.3f}, "
            f"predicted {worst.predicted:.3f} ({one.prediction.label}), p = {one.p_holm:.2g} over "
            "all windows"
        )
    untested = sum(not one.compared for one in verdicts)
    if untested == len(verdicts):
        print("nothing was tested: no window has counts")
    elif not drifted:
        rest = f"; {untested} without counts were not tested" if untested else ""
        print(f"no drift at level {settings.level:g} over all windows{rest}")
    for note in sorted({note for one in windows for note in one.notes}):
        print(f"note: {note}")
    return verdicts


def read_source(place: str) -> str:
    """The text of a file or an address; /metrics is understood where an address has no path."""
    if place.startswith(("http://", "https://")):
        address = place if urlsplit(place).path.strip("/") else place.rstrip("/") + "/metrics"
        with urllib.request.urlopen(address, timeout=30) as answer:
            return answer.read().decode("utf-8", errors="replace")
    return Path(place).read_text(encoding="utf-8", errors="replace")


def totals(windows: Sequence[Window]) -> list[Window]:
    """Every route that has several windows with counts, over all of them.

    Windows of unlike positions, the length changed in between, add up to no chain's figures.
    """
    routes: dict[str, list[Window]] = {}
    for window in windows:
        if window.rounds:
            routes.setdefault(window.route, []).append(window)
    return [
        _total(several)
        for several in routes.values()
        if len(several) > 1 and len({len(one.accepted_at) for one in several}) == 1
    ]


def _total(several: Sequence[Window]) -> Window:
    depth = len(several[0].accepted_at)
    told = [one.requests for one in several if one.requests is not None]
    return replace(
        several[0],
        when=f"all {len(several)} windows",
        rounds=sum(one.rounds for one in several),
        accepted=sum(one.accepted for one in several),
        accepted_at=tuple(sum(one.accepted_at[i] for one in several) for i in range(depth)),
        requests=sum(told) if len(told) == len(several) else None,
        has_one_length=all(one.has_one_length for one in several),
    )


def read_results(path: Path) -> list[dict[str, Any]]:
    """The results of an outrider eval file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        results = (found.get("evaluation") or {}).get("results")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not JSON of outrider eval ({error})") from error
    if not results:
        raise ValueError(f"{path} holds no evaluation; make it with outrider eval --out")
    return results


def predict(
    results: Sequence[Mapping[str, Any]], window: Window, settings: LogSettings, kind: str | None
) -> Prediction:
    """The one result that a window is held against. ValueError when none or several fit."""
    draft = settings.draft
    if draft is None:
        if not window.accepted_at:
            chains = sorted({str(one["draft"]) for one in results})
            draft = chains[0] if len(chains) == 1 else None
        else:
            draft = f"chain:{len(window.accepted_at)}"
    wanted = {"draft": draft, "head": settings.head, "trace": settings.trace}
    fitting = [
        one
        for one in results
        if all(value is None or one[key] == value for key, value in wanted.items())
    ]
    if len(fitting) != 1:
        has = "; ".join(
            f"--head {one['head']!r} --trace {one['trace']!r} --draft {one['draft']}"
            for one in results
        )
        asked = ", ".join(f"{key} {value!r}" for key, value in wanted.items() if value is not None)
        raise ValueError(
            f"{len(fitting)} predictions fit {asked or 'no choice'}; the file has {has}: choose "
            "one, or score the served chain length with outrider eval --draft"
        )
    result: Mapping[str, Any] = fitting[0]
    label = f"{result['head']}, {result['trace']}, {result['draft']}"
    if kind is not None:
        by_kind = result.get("by_kind", {})
        if kind not in by_kind:
            raise ValueError(f"the prediction has no kind {kind!r}, only {sorted(by_kind)}")
        result, label = by_kind[kind], f"{label}, {kind}"
    return Prediction.of(result, window.engine, label=label)


def drift_table(verdicts: Sequence[Verdict]) -> str:
    """Lines of text, a row per window."""
    rows = [("route", "when", "calls", "length", "predicted", "by position", "predicted", "p", "")]
    for one in verdicts:
        window, rates = one.window, one.prediction.depths
        at = [found.found for found in one.compared if found.what != "length"]
        rows.append(
            (
                window.route,
                window.when,
                f"{window.rounds:.0f}" if window.rounds else "-",
                f"{window.mean_length:.3f}",
                f"{1 + one.prediction.length.value:.3f}",
                " ".join(f"{rate:.3f}" for rate in at) or "-",
                " ".join(f"{rate.value:.3f}" for rate in rates),
                f"{one.p_holm:.2g}" if one.compared else "-",
                "DRIFT" if one.is_drift else "",
            )
        )
    about = (
        "calls judge drafts; length is 1 + accepted a call; by position: accepted of those judged "
        "there; p: Student's t with prompts' own spread, Bonferroni in a window, Holm over windows"
    )
    return "\n".join([*aligned(rows), about])
