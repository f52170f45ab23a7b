"""All checks in order: each goes on with what earlier ones made, or is reported as skipped."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch

from outrider.data.batches import Batch
from outrider.data.collect import Collector
from outrider.data.forms import RecordReader
from outrider.data.rows import gather
from outrider.data.target import Target
from outrider.data.thinned import Thinned, thin
from outrider.train import assembly
from outrider.train.assembly import DTYPES, Ground
from outrider.train.check import head as head_checks
from outrider.train.check import rows as row_checks
from outrider.train.check import step as step_checks
from outrider.train.check import target as target_checks
from outrider.train.check import template as template_checks
from outrider.train.check.case import Case, Lacking, Sample
from outrider.train.check.finding import Finding, Verdict, failed, ok
from outrider.train.check.head import Made
from outrider.train.check.heldout import check_heldout
from outrider.train.check.needs import check_needs
from outrider.train.check.origin import check_origin
from outrider.train.check.rows import mode_fix
from outrider.train.check.shown import Shown, show
from outrider.train.plan import Plan
from outrider.train.settings import Settings
from outrider.train.tuning import tune

LEAST_FRESH = 16
"""Ids of a text to capture states on where no row can be read."""
NAMES = {
    "Target": "target",
    "Collector": "rows",
    "Made": "head",
    "Ground": "rows and head",
}
"""What parts are called."""


class Check(NamedTuple):
    """A group of findings."""

    name: str
    run: Callable[[Case], Iterable[Finding]]


@dataclass(kw_only=True)
class Report:
    """What all checks found."""

    settings: Settings
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    """By group, in order."""
    shown: list[Shown] = field(default_factory=list)
    """Sample rows, token by token."""
    seconds: float = 0.0
    case: Case

    @property
    def all(self) -> list[Finding]:
        """Every finding."""
        return [one for group in self.findings.values() for one in group]

    def count(self, verdict: Verdict) -> int:
        """How many there are of a verdict."""
        return sum(one.verdict == verdict for one in self.all)

    @property
    def plan(self) -> Plan | None:
        """What the run will take, where so much could be made."""
        return self.case.get(Plan) if Plan in self.case.parts else None

    @property
    def is_good(self) -> bool:
        """Whether training may begin."""
        return not self.count("fail")


def check(settings: Settings, *, num_shown: int = 3, every_row: bool = False) -> Report:
    """Run every check that can run on settings that a training would take.

    Of large data, rows evenly spread over it are encoded, unless `every_row` or a report of every
    row is asked for. Nothing is written but the row_report that they ask for.
    """
    start = time.perf_counter()
    wanted = settings.run.device
    is_cuda = wanted != "cpu" and torch.cuda.is_available()
    case = Case(
        settings=settings,
        device=torch.device("cuda" if is_cuda else "cpu"),
        every_row=every_row or settings.data.row_report is not None,
    )
    report = Report(settings=settings, case=case)
    for one in CHECKS:
        report.findings[one.name] = list(_guarded(one, case))
    if Collector in case.parts:
        report.shown = show(case.get(Collector), num_shown)
    report.seconds = time.perf_counter() - start
    return report


def _guarded(one: Check, case: Case) -> Iterator[Finding]:
    """The findings of a check; what it trips over becomes one."""
    try:
        yield from one.run(case)
    except Lacking as lacking:
        needed = NAMES.get(str(lacking), str(lacking))
        yield Finding(one.name, "skipped", f"needs the {needed}, which a check above did not get")
    except (ValueError, OSError) as error:
        yield failed(one.name, error)
    except Exception as error:
        if os.environ.get("OUTRIDER_TRACEBACK"):
            raise
        yield Finding(
            one.name,
            "fail",
            f"stopped by {type(error).__name__}: {error}",
            "OUTRIDER_TRACEBACK=1 shows where: report it",
        )


def _target(case: Case) -> Iterator[Finding]:
    chosen = case.settings.target
    target = case.give(
        Target,
        Target.load(chosen.target, dtype=DTYPES[chosen.target_dtype], device=case.device),
    )
    yield from target_checks.check_weights(target)
    yield from target_checks.check_vocabulary(target)
    yield from target_checks.check_tables(target)


def _rows(case: Case) -> Iterator[Finding]:
    target, data = case.get(Target), case.settings.data
    reading, sample = replace(assembly.reading_of(case.settings), cache=None), Sample()
    reader = case.give(RecordReader, RecordReader.of(target, reading.template_options))
    thinned: Thinned | None = None
    try:
        if not case.every_row:
            thinned = case.give(Thinned, thin(data.data, limit_tokens=reading.limit_tokens))
        collector = gather(data.data, reader, reading, sample.watch, thinned)
    except ValueError as error:
        yield failed("rows", error, **mode_fix(data.data, reading))
        return
    case.give(Collector, collector)
    if data.row_report is not None:
        collector.counts.write(Path(data.row_report))
    case.give(Sample, sample)
    counts = collector.counts
    most = getattr(target.config, "max_position_embeddings", None) or reading.max_length
    yield from row_checks.check_rows(data.data, collector, reading, thinned)
    yield from row_checks.check_refusals(counts)
    yield from row_checks.check_lengths(sample, counts, reading, most)
    if not collector.rows:  # told above
        return
    yield from row_checks.check_supervised(collector)
    yield from row_checks.check_ends(collector, target)
    yield from row_checks.check_starts(collector, target)


def _template(case: Case) -> Iterator[Finding]:
    target, reader = case.get(Target), case.get(RecordReader)
    if target.tokenizer is None or not target.tokenizer.chat_template:
        yield ok("template", "the target has none; rows of token ids need none")
        return
    sample, counts = case.get(Sample), case.get(Collector).counts
    found, template = template_checks.talks(sample, reader), reader.template
    yield from template_checks.check_prefixes(found, template, counts.extra_turns)
    yield from template_checks.check_answers(found, template, counts)
    yield from template_checks.check_tags(template, counts, len(found))
    yield from template_checks.check_modes(template)
    yield from template_checks.check_date(template)


def _head(case: Case) -> Iterator[Finding]:
    settings, target, rows = case.settings, case.get(Target), case.get(Collector).rows
    if not rows:
        raise Lacking("Collector")
    yield from head_checks.check_head(
        settings,
        target,
        rows,
        lambda made: case.parts.update({Made: made}),
        assembly.vocabularies(settings),
    )
    if Made not in case.parts:
        return
    yield from check_origin(settings.head.init, target)
    vocabulary, head = case.get(Made)
    is_kept = settings.head.init is not None and not settings.head.rebuild_vocab
    yield from head_checks.check_vocabulary(
        vocabulary, target, () if is_kept else rows, stands_for=case.stands_for
    )
    yield from head_checks.check_engines(head.config)
    yield from target_checks.check_rotary(head, target)
    yield from target_checks.check_positions(head.config, target, settings.data.max_length)
    head.to(case.device)


def _capture(case: Case) -> Iterator[Finding]:
    target = case.get(Target)
    rows = case.get(Collector).rows if Collector in case.parts else []
    fresh = torch.arange(min(LEAST_FRESH, target.tokenizer_size))
    ids_T = max(rows, key=len).ids if rows else fresh
    layers = case.get(Made).head.config.aux_layers if Made in case.parts else None
    yield from target_checks.check_capture(target, ids_T, layers)


def _step(case: Case) -> Iterator[Finding]:
    ground = case.give(Ground, _ground(case))
    few = replace(ground, rows=step_checks.pick(ground.rows, ground.target))
    batch = case.give(Batch, step_checks.batch_of(few))
    found = list(step_checks.check_states(few, batch))
    yield from found
    if found[0].verdict == "fail":
        return
    head, settings = ground.head, case.settings
    yield from head_checks.check_export(head, ground.target, batch)
    joint = settings.tuning
    if joint is not None:
        few = replace(few, tuning=tune(ground.target, joint, settings.run.seed))
        case.give(Ground, replace(ground, tuning=few.tuning))
    yield from step_checks.check_step(few, batch)


def _ground(case: Case) -> Ground:
    made, collector = case.get(Made), case.get(Collector)
    return Ground(
        settings=case.settings,
        target=case.get(Target),
        rows=collector.rows,
        counts=collector.counts,
        vocabulary=made.vocabulary,
        head=made.head,
        tuning=None,
    )


def _run(case: Case) -> Iterator[Finding]:
    rows = case.get(Collector).rows
    yield from check_heldout(case.settings.data, case.get(Target), rows, case.stands_for)
    ground = case.get(Ground)
    if case.settings.tuning is not None and ground.tuning is None:
        raise Lacking("step")
    yield from check_needs(ground, lambda plan: case.parts.update({Plan: plan}), case.stands_for)


CHECKS: tuple[Check, ...] = (
    Check("target", _target),
    Check("rows", _rows),
    Check("template", _template),
    Check("head", _head),
    Check("capture", _capture),
    Check("step", _step),
    Check("run", _run),
)
