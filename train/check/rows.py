"""The rows: what became of each, what of it is supervised, where it ends, how long it is."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from outrider.data.collect import Collector
from outrider.data.counts import Counts, Fate
from outrider.data.mixture import Mixture
from outrider.data.rows import Reading, judge
from outrider.data.target import Target
from outrider.data.thinned import Thinned
from outrider.train.check.case import Lengths, Sample
from outrider.train.check.finding import Finding, fail, failed, ok, warn
from outrider.train.check.template import words

SHOWN = 5
WHOLE = 0.98
"""Share of rows that a proposed length keeps whole."""
STEP = 64
"""A proposed length is a multiple of this."""


def check_rows(
    source: str, collector: Collector, reading: Reading, thinned: Thinned | None = None
) -> Iterator[Finding]:
    """Every row is counted; what training refuses, and more rows lost than are allowed, fails.

    Of `thinned` data those are counted that were encoded, and it is told how many there are.
    """
    counts, name = collector.counts, "rows"
    lost = counts.refused + counts.dropped
    turns = f" (and {counts.extra_turns} added, a row for each answer)"
    seen = (
        f"{counts.read} read{turns if counts.extra_turns else ''}: {counts.kept} kept, "
        f"{counts.cut} cut, {counts.dropped} dropped, {counts.refused} refused"
    )
    if counts.limit_reached:
        seen += "; stopped at max_tokens"
    if thinned is not None and thinned.stride > 1:
        seen = (
            f"a sample, 1 of {thinned.stride} of {thinned.read} records: {seen}; what follows "
            "is of these alone (--every-row encodes all)"
        )
    share = lost / max(len(counts.fates), 1)
    if lost and (share > reading.max_unsupervised or not collector.rows):
        yield fail(
            name,
            f"{seen}; {share:.0%} of the rows are lost (allowed max_unsupervised "
            f"{reading.max_unsupervised:.0%})",
            "mend what the findings below name, or raise --max-unsupervised to accept it",
        )
    elif lost:
        yield warn(name, seen, "the findings below name them")
    elif not collector.rows:
        yield fail(name, seen, "give data with at least one row")
    else:
        yield ok(name, seen)
    yield from _judged(source, collector, reading)


def _judged(source: str, collector: Collector, reading: Reading) -> Iterator[Finding]:
    """What training itself would refuse the data for."""
    try:
        judge(source, collector, reading)
    except ValueError as error:
        if "no row is left" not in str(error):  # told with the counts
            yield _masks(error)


def _masks(error: ValueError) -> Finding:
    """A refusal of training, whose remedy stands after a colon or in its last line."""
    text = str(error)
    if "no supervised token" in text:
        seen, _, remedy = text.rpartition("\n")
        return fail("masks", seen, remedy)
    return failed("turn ends", error)


def check_refusals(counts: Counts) -> Iterator[Finding]:
    """Refused rows by reason, with their numbers."""
    refused = [one for one in counts.fates if one.outcome == "refused"]
    if not refused:
        yield ok("refused rows", "none")
        return
    share = len(refused) / len(counts.fates)
    yield warn(
        "refused rows",
        f"{len(refused)} ({share:.1%}): {by_reason(refused)}",
        "correct them" + (", or let --fix write the data without them" if share < 1 else ""),
    )


def by_reason(fates: Sequence[Fate]) -> str:
    """The reasons, most frequent first, each with the numbers of its first rows.

    Reasons that differ in numbers only are one, told as of its first row.
    """
    alike: dict[str, list[Fate]] = {}
    for one in fates:
        alike.setdefault(re.sub(r"\d+", "#", _short(one.reason)), []).append(one)
    most = sorted(alike.values(), key=len, reverse=True)
    parts = [
        f"rows {_listed([one.number for one in group])}: {_short(group[0].reason)}"
        for group in most[:SHOWN]
    ]
    more = sum(len(group) for group in most[SHOWN:])
    return "; ".join(parts) + (f"; and {more} for other reasons" if more else "")


def _short(reason: str) -> str:
    """A reason without its remedy."""
    return reason.partition(";")[0][:160]


def _listed(rows: Sequence[int]) -> str:
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return ", ".join(map(str, rows[:SHOWN])) + more


def check_supervised(collector: Collector) -> Iterator[Finding]:
    """Supervised tokens, by whose they are; rows all of whose tokens are supervised."""
    counts, name = collector.counts, "supervised tokens"
    roles = ", ".join(
        f"{role} {inside} of {tokens} ({inside / max(tokens, 1):.0%})"
        for role, (tokens, inside) in counts.roles.items()
    )
    seen = f"{counts.supervised} of {counts.tokens}: {roles}"
    whole = sum(bool(row.mask.all()) for row in collector.rows)
    if whole == len(collector.rows):
        yield warn(
            name,
            f"{seen}; every token of every row, the prompts' too",
            "a head drafts answers only: mark the prompts' tokens with 0 in loss_mask",
        )
    else:
        yield ok(name, seen)


def check_ends(collector: Collector, target: Target) -> Iterator[Finding]:
    """Answers train to the token at which generation stops; ends that never do are told above."""
    counts, name = collector.counts, "turn ends"
    times = counts.ends.total()
    if times and collector.odd_ends.total() == times:
        return
    ends = ", ".join(
        f"{counts.end_names.get(token, token)} {often} times"
        for token, often in counts.ends.items()
    )
    seen = f"trained: {ends or 'none'} (of {counts.answers} answers)"
    if times == 0 and target.eos_ids:
        yield warn(
            name,
            seen,
            "the head will not learn where answers end; end them with a token of "
            f"eos_token_id {list(target.eos_ids)}, supervised",
        )
    else:
        yield ok(name, seen)


def check_starts(collector: Collector, target: Target) -> Iterator[Finding]:
    """The BOS token stands once where the tokenizer puts it."""
    tokenizer, name = target.tokenizer, "BOS"
    bos = None if tokenizer is None else tokenizer.bos_token_id
    if tokenizer is None or not isinstance(bos, int):
        yield ok(name, "the tokenizer has none")
        return
    starts = Counter(_leading(row.ids.tolist(), bos) for row in collector.rows)
    twice = [r.row_id for r in collector.rows if _leading(r.ids.tolist(), bos) > 1]
    seen = f"{tokenizer.decode([bos])} begins {len(collector.rows) - starts[0]} rows"
    if twice:
        yield fail(
            name,
            f"rows that begin with BOS twice: {len(twice)} ({', '.join(twice[:SHOWN])})",
            "take one out: the target never sees it twice when it is served",
        )
    elif starts[0] and tokenizer("x")["input_ids"][:1] == [bos]:
        without = [r.row_id for r in collector.rows if _leading(r.ids.tolist(), bos) == 0]
        yield warn(
            name,
            f"{starts[0]} rows lack the BOS token that the tokenizer adds "
            f"({', '.join(without[:SHOWN])})",
            "begin them with it if served prompts do",
        )
    else:
        yield ok(name, f"{seen}, never twice")


def _leading(ids: list[int], token: int) -> int:
    return next((place for place, one in enumerate(ids) if one != token), len(ids))


def check_lengths(sample: Sample, counts: Counts, reading: Reading, most: int) -> Iterator[Finding]:
    """Rows against max_length; `most` is what the target has positions for."""
    name, lengths = "lengths", sorted(one.tokens for one in sample.lengths)
    if not lengths:
        return
    limit = reading.max_length
    middle, longest = lengths[len(lengths) // 2], lengths[-1]
    seen = f"median {middle}, longest {longest}, max_length {limit}"
    long = sum(length > limit for length in lengths)
    if not long:
        yield ok(name, seen)
        return
    better = min(proposed(sample.lengths), most)
    seen += (
        f"; {long} of {len(lengths)} rows are longer: {counts.cut} cut, {counts.dropped} dropped"
    )
    told = warn
    if counts.dropped / max(len(counts.fates), 1) > reading.max_unsupervised:
        told = fail
    kept = sum(length <= better for length in lengths) / len(lengths)
    if better <= limit:
        yield told(name, seen, f"the target has {most} positions; split the longer rows")
    else:
        remedy = f"--max-length {better} keeps {kept:.0%} of the rows whole"
        yield told(name, seen, remedy, max_length=better)


def proposed(lengths: Sequence[Lengths]) -> int:
    """The least multiple of STEP that keeps nearly all rows whole."""
    whole = sorted(one.tokens for one in lengths)
    enough = whole[math.ceil(WHOLE * len(whole)) - 1]
    return -(-enough // STEP) * STEP


def mode_fix(source: str, reading: Reading) -> dict[str, Any]:
    """The template options that answered rows state, where they are others than the reading's."""
    for one in islice(Mixture(source), 1):
        if isinstance(one.record, Mapping) and "prompt_ids" in one.record:
            stated = one.record.get("template_options") or {}
            if dict(stated) != dict(reading.template_options):
                return {"template_options": words(stated)}
    return {}
