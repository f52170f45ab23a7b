"""What the run asked for will take: steps, memory, disk and time, as --plan tells them."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from outrider.train.assembly import Ground, is_stored, local_folder
from outrider.train.check.finding import Finding, fail, ok, warn
from outrider.train.check.stored import Stored, find_stored
from outrider.train.job import Disk
from outrider.train.plan import Plan, existing, gib, job_of, plan_here


class Part(NamedTuple):
    """What a run writes into one folder."""

    name: str
    folder: Path
    size: float
    """Bytes."""


def check_needs(
    ground: Ground, keep: Callable[[Plan], None], stands_for: float = 1.0
) -> Iterator[Finding]:
    """The plan's figures; what is written must fit on its disks. `keep` is given the plan.

    Each of the ground's rows stands for so many.
    """
    job = replace(job_of(ground), scale=stands_for)
    plan = plan_here(job)
    keep(plan)
    yield ok("steps", plan.work + (" (estimated from the sample)" if stands_for != 1 else ""))
    if ground.tuning is not None:
        told = job.joint.lines(ground.settings, plan.steps.total)
        yield ok("joint", " ".join(line.strip() for line in told))
    for section in plan.sections():
        yield ok(section.name, section.told())
    stored = find_stored(ground, plan, stands_for)
    if stored.finding is not None:
        yield stored.finding
    yield check_space(ground, plan.disk, stored)


def check_space(ground: Ground, disk: Disk, stored: Stored) -> Finding:
    """What goes to each file system, and what is free there; features in a cloud are not asked.

    Features that are stored already need no more room. Where nobody can say which are, too little
    room is a warning: training knows, and refuses before it computes any that do not fit.
    """
    settings, name = ground.settings, "disk space"
    heads = Part(
        "checkpoints and heads", Path(settings.run.output), disk.checkpoints + disk.exports
    )
    is_whole = stored.left == disk.features
    title = "features" if is_whole else "the features that are not stored yet"
    features = Part(title, local_folder(settings), stored.left)
    is_here = is_stored(settings) and "://" not in ground.store_folder
    told, wrong, is_sure = list[str](), list[str](), False
    for group in by_device([heads, features] if is_here else [heads]):
        size = sum(part.size for part in group)
        free = shutil.disk_usage(existing(group[0].folder)).free
        what = " and ".join(f"{part.name} ({part.folder})" for part in group)
        told.append(f"{what} take {gib(size)} of {gib(free)} that are free")
        wrong += [told[-1]] if size > free else []
        is_sure |= sum(part.size for part in group if part is heads or stored.is_known) > free
    if not wrong:
        return ok(name, "; ".join(told))
    if not is_sure:
        return warn(
            name,
            "; ".join(wrong),
            "some of the features may be stored already: training tells, and refuses before it "
            "computes any that do not fit",
        )
    return fail(
        name,
        "; ".join(wrong),
        "store less (--feature-dtype int8 or int4), elsewhere (--store), or nothing (--online); "
        "keep fewer checkpoints (--keep-last), or name another --output",
    )


def by_device(parts: list[Part]) -> list[list[Part]]:
    """Parts that share a file system, together."""
    found: dict[int, list[Part]] = {}
    for part in parts:
        found.setdefault(existing(part.folder).stat().st_dev, []).append(part)
    return [*found.values()]
