"""What the run asked for will take: steps, memory, disk, time."""

import shutil
from collections.abc import Iterator

from outrider.data.store import store_bytes
from outrider.train.assembly import Ground, is_stored, layout, local_folder
from outrider.train.check.finding import Finding, fail, ok
from outrider.train.check.step import Speed
from outrider.train.plan import GIB, describe, existing


def check_needs(ground: Ground, speed: Speed) -> Iterator[Finding]:
    """What --plan says of steps, memory, disk and time; features must fit on the disk."""
    told = dict(sections(describe(ground)))
    for heading, body in told.items():
        if heading not in ("settings", "data", "head"):  # told by other checks
            yield ok(heading, body)
    if "time" not in told:
        yield from check_time(ground, speed)
    if not is_stored(ground.settings) or "://" in ground.store_folder:
        return
    size = store_bytes(ground.rows, layout(ground))
    free = shutil.disk_usage(existing(local_folder(ground.settings))).free
    if size > free:
        yield fail(
            "disk space",
            f"features take {size / GIB:.1f} GiB in {ground.store_folder}, where "
            f"{free / GIB:.1f} GiB are free",
            "store less (--feature-dtype int8 or int4), elsewhere (--store), or nothing (--online)",
        )


def sections(told: str) -> Iterator[tuple[str, str]]:
    """Parts of a plan: the first word of a line that is not indented, and what stands below it."""
    heading, body = "", list[str]()
    for line in told.splitlines():
        if line.startswith(" "):
            body.append(line.strip())
            continue
        if heading:
            yield heading, "; ".join(body)
        heading, _, rest = line.partition(" ")
        body = [word for word in (rest.rstrip(":"),) if word not in ("", "(estimate)")]
        heading = heading.rstrip(":")
    if heading:
        yield heading, "; ".join(body)


def check_time(ground: Ground, speed: Speed) -> Iterator[Finding]:
    """Hours at the speed of the passes that were made here."""
    epochs, tokens = ground.settings.run.epochs, sum(len(row) for row in ground.rows)
    passes = 1 if is_stored(ground.settings) else epochs
    target, steps = passes * tokens / speed.target, epochs * tokens / speed.step
    yield ok(
        "time",
        f"about {duration(target + steps)} at the speed seen here: {duration(target)} for the "
        f"target's passes ({speed.target:.0f} tokens a second), {duration(steps)} for "
        f"{epochs} x {tokens} tokens ({speed.step:.0f}); optimiser and evaluations come on top",
    )


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
