"""What of a run's features is stored already: known by the store's key, or why nobody can say."""

from pathlib import Path
from typing import NamedTuple

from outrider.data.layout import Packed
from outrider.train.assembly import Ground, features_left, is_stored, layout, vocabularies
from outrider.train.check.finding import Finding, ok
from outrider.train.duration import clock
from outrider.train.plan import Plan, gib

NAME = "stored features"


class Stored(NamedTuple):
    """What is still to be stored."""

    left: float
    """Bytes on this machine's disks."""
    finding: Finding | None = None
    is_known: bool = True
    """Or else `left` is the size of all of them, of which some may be there."""


def find_stored(ground: Ground, plan: Plan, stands_for: float) -> Stored:
    """What of the features is there; a cloud is not asked. Each row stands for so many."""
    place, size = ground.store_folder, plan.disk.features
    if not is_stored(ground.settings):
        return Stored(0)
    if "://" in place:
        return Stored(0, ok(NAME, f"{place} is not asked: training takes what is there"))
    if not any(Path(place).glob("*/key.json")):
        return Stored(size, ok(NAME, f"none yet in {place}"))
    reason = unknown(ground, stands_for)
    if reason is not None:
        told = f"{place} holds some, and whether they are this run's cannot be told: {reason}"
        return Stored(size, ok(NAME, f"{told}; all figures are those of none"), is_known=False)
    left = features_left(ground)
    whose = "all of this run's" if not left else "a part of this run's"
    if left == size:
        whose = "others than this run's"
    seconds = plan.time.features * left / size
    told = f"{place} holds {whose}; left: {gib(left)} of {gib(size)}, about {clock(seconds)}"
    return Stored(left, ok(NAME, told))


def unknown(ground: Ground, stands_for: float) -> str | None:
    """Why nobody can say yet which stored features are this run's; None where it can be said."""
    if stands_for != 1:
        return "their key covers every row, and only a sample was read (--every-row reads all)"
    vocabulary = ground.vocabulary
    keeps_laws = isinstance(layout(ground), Packed)
    is_in_key = keeps_laws and ground.settings.data.teacher_over == "draft"
    if vocabulary is not None and vocabulary.stands_in and is_in_key:
        return (
            "packed ones keep laws over the draft vocabulary, which the target chooses by its "
            f"probability when training starts ({vocabularies(ground.settings)} has none for these "
            "rows yet)"
        )
    return None
