"""What the run asked for will take: steps, memory, disk, time."""

import shutil
from collections.abc import Iterator

from outrider.train.assembly import Ground, is_stored, local_folder
from outrider.train.check.finding import Finding, fail, ok
from outrider.train.check.step import Speed
from outrider.train.plan import GIB, describe, existing, feature_bytes


def check_needs(ground: Ground) -> Iterator[Finding]:
    """What --plan says of steps, memory and disk; features must fit on the disk."""
    for heading, body in sections(describe(ground)):
        if heading not in ("settings", "data", "head"):  # told above
            yield ok(heading, body)
    needs = feature_bytes(ground)
    if needs and "://" not in ground.store_folder:
        free = shutil.disk_usage(existing(local_folder(ground.settings))).free
        if needs > free:
            yield fail(
                "disk",
                f"features take {needs / GIB:.1f} GiB in {ground.store_folder}, where "
                f"{free / GIB:.1f} GiB are free",
                "store less (--feature-dtype int8 or int4), elsewhere (--store), or nothing "
                "(--online)",
            )


def sections(told: str) -> Iterator[tuple[str, str]]:
    """Parts of a plan: a heading that ends in a colon, and the indented lines below it."""
    heading, body = "", list[str]()
    for line in told.splitlines():
        if line.startswith(" "):
            body.append(line.strip())
            continue
        if body:
            yield heading, "; ".join(body)
        heading, body = line.partition(" (")[0].rstrip(":"), list[str]()
    if body:
        yield heading, "; ".join(body)


def check_time(ground: Ground, speed: Speed) -> Iterator[Finding]:
    """Hours at the speed of the passes that were made here."""
    epochs, tokens = ground.settings.run.epochs, sum(len(row) for row in ground.rows)
    passes = 1 if is_stored(ground.settings) else epochs
    target, steps = passes * tokens / speed.target, epochs * tokens / speed.step
    yield ok(
        "time",
        f"about {duration(target + steps)} at the speed seen here: {duration(target)} for the "
        f"target's passes ({speed.target:.0f} tokens a second), {duration(steps)} for {epochs} "
        f"epochs of {tokens} tokens ({speed.step:.0f}); optimiser and evaluations come on top",
    )


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
