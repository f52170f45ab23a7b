"""Rows of tokens with their masks, from any source: read, counted, judged, kept for next time."""

from collections.abc import Callable

from outrider.data.collect import Collector
from outrider.data.counts import Counts
from outrider.data.forms import RecordReader
from outrider.data.mixture import Mixture
from outrider.data.reading import FIRST_LABEL, Reading, Row
from outrider.data.rowcache import Read, load_read, read_key, save_read
from outrider.data.target import Target
from outrider.data.thinned import Thinned
from outrider.data.workers import Outcome, encode_all

__all__ = ["FIRST_LABEL", "Counts", "Reading", "Row", "gather", "judge", "read_rows"]


def read_rows(source: str, target: Target, reading: Reading) -> Read:
    """Every row of `source` that can train `target`'s draft head, and what became of the others.

    `source` is one of `records`, or a mix of several: a.jsonl=0.7,b.parquet=0.3. Raises ValueError
    when nothing or too little of it can train, and for rows that another target answered.
    """
    reader = RecordReader.of(target, reading.template_options)
    key = None if reading.cache is None else read_key(source, reader, reading)
    if key is None or reading.cache is None:
        return _read(source, reader, reading)
    path = reading.cache / f"{key}.safetensors"
    found = load_read(path)
    if found is None:
        found = _read(source, reader, reading)
        save_read(path, found)
    return found


def gather(
    source: str,
    reader: RecordReader,
    reading: Reading,
    watch: Callable[[Outcome], None] | None = None,
    thinned: Thinned | None = None,
) -> Collector:
    """All rows of `source` with their counts, not judged; `watch` sees what each record gave.

    `thinned` are records of `source` that stand for all, and are read alone; a limit of tokens is
    then of all that they stand for. Raises ValueError for data that cannot be read, and for rows
    that another target answered.
    """
    collector, mixture = Collector(reader, reading), Mixture(source)
    counts, found, stride = collector.counts, iter(mixture), 1
    if thinned is not None:
        found, stride = iter(thinned.found), thinned.stride
    for outcome in encode_all(reader, found, reading.workers):
        if reading.limit_tokens is not None and stride * collector.tokens >= reading.limit_tokens:
            counts.limit_reached = True
            break
        collector.add(outcome)
        if watch is not None:
            watch(outcome)
    ran_out = mixture.ran_out if thinned is None else thinned.ran_out
    counts.ran_out = None if counts.limit_reached else ran_out
    if reader.tokenizer is not None:
        counts.end_names = {token: reader.show([token]) for token in counts.ends}
    return collector


def _read(source: str, reader: RecordReader, reading: Reading) -> Read:
    collector = gather(source, reader, reading)
    judge(source, collector, reading)
    return Read(collector.rows, collector.counts)


def judge(source: str, collector: Collector, reading: Reading) -> None:
    """Refuse data that would train on nothing, mostly nothing, or never on the end of an answer."""
    counts, reader = collector.counts, collector.reader
    share = len(counts.unsupervised) / max(counts.read, 1)
    if share > reading.max_unsupervised:
        raise ValueError(
            f"data {source!r}: {len(counts.unsupervised)} of {counts.read} rows have no supervised "
            f"token ({share:.0%}, allowed max_unsupervised {reading.max_unsupervised:.0%}); first "
            f"such row: {counts.unsupervised[0]}, rendered:\n{collector.shown}\nThe answers in it "
            f"are not where the target's chat template puts them: give the rows as messages, or "
            f"correct their loss_mask"
        )
    if not collector.rows:
        raise ValueError(f"data {source!r}: no row is left to train on\n{counts}")
    odd = collector.odd_ends
    if odd and odd.total() == counts.ends.total() and reader.eos_ids:
        ends = ", ".join(f"{reader.show([token])} (id {token})" for token in odd)
        stops = ", ".join(f"{reader.show([token])} (id {token})" for token in reader.eos_ids)
        raise ValueError(
            f"data {source!r}: the chat template ends every answer in {ends}, but generation with "
            f"this target stops at {stops} only, so that its real turn end would never be trained "
            f"or never stop it; put all ends into eos_token_id of its generation_config.json"
        )
