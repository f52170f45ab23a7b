"""`outrider tune`: what speculation will buy, by draft, batch and context, and the settings for it.

Acceptance comes from a report of `outrider eval` or is one alpha; costs are measured here, read
from a file, or follow from a data sheet.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from outrider.data.target import Target
from outrider.eval.link import judged_head
from outrider.eval.report.page import write_report
from outrider.eval.report.provenance import file_hashes
from outrider.eval.trees.plans import plan_named
from outrider.eval.tune import formula
from outrider.eval.tune.acceptance import Acceptance, from_alpha, read_acceptances
from outrider.eval.tune.costs import Costs, MeasuredCosts, read_costs
from outrider.eval.tune.measure import MeasureSettings, measure
from outrider.eval.tune.result import Grid, engines, table, tune
from outrider.scripts.tune_hardware import Gpu, by_data_sheet


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What speculation buys on a machine, and the settings that follow.

    outrider tune --acceptance eval.json --gpu h100 --target ORG/MODEL --head runs/mine/best
    """

    acceptance: Path | None = None
    """Report of outrider eval --out: acceptance of every draft on one's own traffic."""

    alpha: float | None = None
    """In its place: one chance of acceptance for every draft of a chain."""

    eval_head: str | None = None
    """Which head of the report, where it has several."""

    trace: str | None = None
    """Which trace of the report, where it has several."""

    kind: str | None = None
    """Use the report's figures for prompts of this kind."""

    draft: tuple[str, ...] = ()
    """Draft plans to compare: all of the report, or chains of 1 to 8 for an alpha, if left out."""

    costs: Path | None = None
    """File of costs that --measure wrote before."""

    measure: Path | None = None
    """Measure the costs here, with --target and --head, and write them to this file."""

    target: str | None = None
    """smollm2-demo, a Hub id, or a local folder; its config is enough with --gpu."""

    head: str | None = None
    """Folder of an exported head."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of target and head."""

    device: str = "cpu"
    """Where to measure: cpu, cuda, cuda:1 ..."""

    threads: int | None = None
    """CPU threads to measure with; torch's default when left out."""

    repeats: int = 9
    """Rounds of each kind to measure."""

    batch: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Batches of the table, and with --measure those measured."""

    context: tuple[int, ...] = (1024,)
    """Positions of a row before a round, prompt and answer so far."""

    max_batch: int = 256
    """Largest batch of the schedule and of the search for the break-even batch."""

    new_tokens: int | None = None
    """Tokens of a request: also tell the speed-up of a batch whose requests start together."""

    table: bool = False
    """Print the table of best draft lengths by alpha for c = 0.05 and 0.2, and nothing else."""

    out: Path | None = None
    """Write this .json file, and a page with plots beside it."""

    hardware: Gpu = field(default_factory=Gpu)

    def __post_init__(self) -> None:
        if self.out is not None and self.out.suffix != ".json":
            raise ValueError(f"out is {self.out}; name a file that ends in .json")
        if self.table:
            return
        if (self.acceptance is None) == (self.alpha is None):
            raise ValueError(
                f"acceptance is {self.acceptance} and alpha is {self.alpha}; give one of them: a "
                "report of outrider eval --out, or one chance of acceptance"
            )
        ways = [self.costs, self.measure, self.hardware.gpu or self.hardware.bandwidth]
        if sum(way is not None for way in ways) != 1:
            raise ValueError(
                "costs come from one of --costs FILE, --measure FILE (on this machine) and --gpu "
                f"NAME (a data sheet); {sum(way is not None for way in ways)} of them are given"
            )
        if self.measure is not None and (self.target is None or self.head is None):
            raise ValueError(
                f"target is {self.target} and head is {self.head}; measuring runs both, so name "
                "them with --target and --head"
            )
        for draft in self.draft:
            plan_named(draft)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; write the report."""
    settings = tyro.cli(
        TuneSettings,
        args=argv,
        prog="outrider tune",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    if settings.table:
        print(formula.table())
        return
    acceptances = acceptances_of(settings)
    costs = costs_of(settings, acceptances)
    grid = Grid(
        batches=settings.batch,
        contexts=tuple(float(context) for context in settings.context),
        max_batch=settings.max_batch,
        new_tokens=settings.new_tokens,
    )
    result = tune(costs, acceptances, grid)
    print(table(result))
    result["engines"] = None
    if settings.head is not None:
        result["engines"] = engines(
            costs,
            acceptances,
            kind=_kind_of(settings.head),
            head=settings.head,
            context=grid.contexts[0],
            max_batch=settings.max_batch,
            batch=settings.batch[0],
        )
        show_engines(result["engines"])
    if settings.out is not None:
        title = "What speculation buys"
        notes = _notes(settings)
        paths = write_report(settings.out, {"tune": result}, notes=notes, title=title)
        print(f"{paths.json} and {paths.html}")


def show_engines(found: dict[str, Any]) -> None:
    """Print the settings, ready to paste."""
    print()
    if found["vllm"] is not None:
        print(f"vllm serve ... --speculative-config '{json.dumps(found['vllm'])}'")
    if found["sglang"] is not None:
        print("python -m sglang.launch_server ... " + " ".join(found["sglang"]))
    if found["vllm"] is None and found["sglang"] is None:
        print("no engine settings: no draft that an engine serves pays here")


def acceptances_of(settings: TuneSettings) -> list[Acceptance]:
    """The acceptance of every draft asked for."""
    if settings.alpha is not None:
        if any(not draft.startswith("chain:") for draft in settings.draft):
            raise ValueError(
                f"draft is {settings.draft}; one alpha says nothing of trees: give chains, or the "
                "report of outrider eval with --acceptance"
            )
        chains = [int(draft.removeprefix("chain:")) for draft in settings.draft]
        return from_alpha(settings.alpha, chains or range(1, 9))
    assert settings.acceptance is not None
    found = read_acceptances(
        settings.acceptance, head=settings.eval_head, trace=settings.trace, kind=settings.kind
    )
    if not settings.draft:
        return found
    known = {one.draft: one for one in found}
    missing = [draft for draft in settings.draft if draft not in known]
    if missing:
        raise ValueError(
            f"draft is {', '.join(missing)} and {settings.acceptance} has {', '.join(known)}; "
            "score it first with outrider eval --draft"
        )
    return [known[draft] for draft in settings.draft]


def costs_of(settings: TuneSettings, acceptances: Sequence[Acceptance]) -> Costs:
    """Costs from where the settings say."""
    if settings.costs is not None:
        return read_costs(settings.costs)
    if settings.measure is not None:
        return _measured(settings, [one.draft for one in acceptances])
    return by_data_sheet(settings.hardware, settings.target, settings.head, settings.dtype)


def _measured(settings: TuneSettings, drafts: Sequence[str]) -> MeasuredCosts:
    assert settings.target is not None
    assert settings.head is not None
    assert settings.measure is not None
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    dtype = getattr(torch, settings.dtype)
    target = Target.load(settings.target, dtype=dtype, device=settings.device)
    head = judged_head(settings.head, target, dtype=dtype)
    wanted = MeasureSettings(
        drafts=tuple(drafts),
        batches=settings.batch,
        contexts=settings.context,
        repeats=settings.repeats,
    )
    notes = {
        "target_hash": target.fingerprint(),
        "head_files": file_hashes(Path(settings.head)),
    }
    journal = settings.measure.with_suffix(".partial.jsonl")
    costs = measure(target, head, wanted, journal=journal, names=(settings.head, notes))
    costs.save(settings.measure)
    journal.unlink(missing_ok=True)
    return costs


def _kind_of(folder: str) -> str:
    """Kind of a head by its config.json."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"head {folder} has no config.json; name the folder of an exported head")
    values = json.loads(path.read_text(encoding="utf-8"))
    return str(((values.get("outrider") or {}).get("head") or {}).get("kind", "eagle3"))


def _notes(settings: TuneSettings) -> dict[str, Any]:
    shown = asdict(settings)
    return {
        "settings": {key: str(value) for key, value in shown.items() if key != "out"},
        "heads": {settings.head: file_hashes(Path(settings.head))} if settings.head else {},
    }
