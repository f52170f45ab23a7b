"""The target that a head to start from was trained for: its notes name it, and this one may differ.

A fine-tune of the same base is a fair start, so another target is told and not refused; what cannot
work (other sizes, a draft vocabulary of other tokens) is refused where the head is made.
"""

from collections.abc import Iterator

from outrider.data.target import Target
from outrider.data.template import template_hash
from outrider.heads.formats import read_notes
from outrider.train.check.finding import Finding, ok, warn
from outrider.train.settings import SHIPPED

NAME = "start from"


def check_origin(init: str | None, target: Target) -> Iterator[Finding]:
    """Whether the head in `init` was trained for this very target, by hash, and its template."""
    if init is None or init == SHIPPED:
        return
    notes = read_notes(init)
    trained_on, name = notes.get("target_fingerprint"), notes.get("target")
    if trained_on is None:
        yield ok(NAME, f"the head in init {init!r} does not say what target it was trained for")
        return
    if trained_on == target.fingerprint():
        yield ok(NAME, f"the head in init {init!r} was trained for this very target")
    else:
        yield warn(
            NAME,
            f"the head in init {init!r} was trained for {name} (hash {trained_on[:12]}), and this "
            f"target is {target.name} (hash {target.fingerprint()[:12]})",
            "a fine-tune of the same base is a fair start, for another model leave --init out",
        )
    ours, theirs = template_hash(target.tokenizer), (notes.get("chat") or {}).get("template")
    if ours is not None and theirs is not None and ours != theirs:
        yield warn(
            NAME,
            f"the head in init {init!r} was trained with chat template {theirs}, and this target's "
            f"is {ours}",
            "it goes on with this one",
        )
