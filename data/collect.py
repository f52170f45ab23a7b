"""The length policy, names and counts of rows as they come out of their records."""

from collections import Counter
from collections.abc import Mapping

import torch

from outrider.data.chat import Encoded
from outrider.data.counts import REASON_LENGTH, Counts, Fate, Outcomes
from outrider.data.forms import RecordReader
from outrider.data.mixture import Numbered
from outrider.data.reading import FIRST_LABEL, Reading, Row
from outrider.data.workers import Outcome


class Collector:
    """Applies the length policy and counts."""

    def __init__(self, reader: RecordReader, reading: Reading) -> None:
        self.reader = reader
        self.reading = reading
        self.counts = Counts()
        self.rows: list[Row] = []
        self.tokens = 0
        self.shown: str | None = None
        """The first row without supervision, as text."""
        self.odd_ends: Counter[int] = Counter()
        """Turn ends that generation does not stop at."""
        self._names = set[str]()

    def add(self, outcome: Outcome) -> None:
        """Take in the rows of a record, or its refusal."""
        found, counts = outcome.found, self.counts
        counts.sources[found.source] = counts.sources.get(found.source, 0) + 1
        fields = found.record if isinstance(found.record, Mapping) else {}
        name = self._unique(str(fields.get("id", self._default(found))), found.number)
        if outcome.refusal is not None:
            self._note(found, name, "refused", reason=outcome.refusal)
            return
        counts.with_tools += bool(fields.get("tools"))
        counts.extra_turns += len(outcome.rows) - 1
        counts.muted += sum(part.num_muted for part in outcome.rows)
        for part in outcome.rows:
            own = f"{name}#{part.turn}" if len(outcome.rows) > 1 else name
            self._fit(part, found, own, str(fields.get("kind", "all")))

    def _default(self, found: Numbered) -> str:
        """The name of a row that has none."""
        several = len(self.counts.sources) > 1
        return f"{found.source}:{found.number}" if several else str(found.number)

    def _unique(self, name: str, number: int) -> str:
        name = _printable(name)[:REASON_LENGTH]
        self.counts.renamed += name in self._names
        while name in self._names:
            name = f"{name}@{number}"
        self._names.add(name)
        return name

    def _note(
        self,
        found: Numbered,
        name: str,
        outcome: Outcomes,
        *,
        reason: str = "",
        row: Row | None = None,
    ) -> None:
        reason = _printable(reason)
        if len(reason) > REASON_LENGTH:
            reason = f"{reason[:REASON_LENGTH]} ..."
        tokens, supervised = (0, 0) if row is None else (len(row), int(row.mask.sum()))
        self.counts.fates.append(
            Fate(found.source, found.number, name, outcome, reason, tokens, supervised)
        )
        self.tokens += tokens

    def _fit(self, part: Encoded, found: Numbered, name: str, kind: str) -> None:
        """Apply the length policy."""
        ids, mask, counts, most = part.ids, part.mask, self.counts, self.reading.max_length
        if not any(mask[FIRST_LABEL:]):
            self.shown = self.shown or self.reader.show(ids)
            counts.unsupervised.append(found.number)
            self._note(found, name, "refused", reason="no supervised token")
            return
        long = len(ids) > most
        if long:
            ids, mask = ids[:most], mask[:most]
            if self.reading.policy == "drop":
                reason = f"{len(part.ids)} tokens, longer than max_length {most}"
                self._note(found, name, "dropped", reason=reason)
                return
            if not any(mask[FIRST_LABEL:]):
                reason = f"{len(part.ids)} tokens, and no supervised one before max_length {most}"
                self._note(found, name, "dropped", reason=reason)
                return
        row = Row(
            torch.tensor(ids),
            torch.tensor(mask, dtype=torch.bool),
            name,
            kind,
            prompt_length=mask.index(1),
        )
        self.rows.append(row)
        reason = f"{len(part.ids)} tokens, cut to max_length {most}" if long else ""
        self._note(found, name, "cut" if long else "kept", reason=reason, row=row)
        counts.add_roles(part.spans, mask)
        ends = _ends(part, len(ids))
        counts.ends.update(ends)
        counts.answers += part.num_answers - (len(part.end_ids) - len(ends))
        if part.turn >= 0:
            self.odd_ends.update(token for token in ends if token not in self.reader.eos_ids)


def _printable(text: str) -> str:
    """Lone surrogates cannot be printed; they become their escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _ends(part: Encoded, length: int) -> list[int]:
    """The end tokens that survive a cut to `length`."""
    lost = [
        token for token, marked in zip(part.ids[length:], part.mask[length:], strict=True) if marked
    ]
    return part.end_ids[: len(part.end_ids) - sum(token in part.end_ids for token in lost)]
