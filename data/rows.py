"""Rows of tokens with their masks, from any source: length policy, refusals, and honest counts.

Letters: T tokens of a row.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from outrider.data.chat import Encoded, RowError
from outrider.data.forms import RecordReader
from outrider.data.sources import Record, records
from outrider.data.target import Target

# The first token a draft head can be trained on: row 0 holds token 1 as input and predicts token 2.
FIRST_LABEL = 2


@dataclass(frozen=True, eq=False)
class Row:
    """One document: token ids and what of it is supervised."""

    ids: Tensor
    mask: Tensor
    """True where the token is supervised."""
    row_id: str
    kind: str
    """What sort of text, for figures by kind."""
    prompt_length: int
    """Tokens before the first supervised one."""

    def __len__(self) -> int:
        """Tokens."""
        return len(self.ids)


class Refusal(NamedTuple):
    """A row that cannot train."""

    number: int
    """Counted from 1 in the source."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What to read and how rows are cut to length."""

    max_length: int = 512
    """Longest row in tokens."""
    policy: Literal["cut", "drop"] = "cut"
    """What happens to longer rows: cut to max_length, or dropped."""
    limit_tokens: int | None = None
    """Stop reading once this many tokens are kept."""
    max_unsupervised: float = 0.1
    """Refuse the data when a larger share of its rows has nothing to train on."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the chat template, as enable_thinking: the mode the head is trained for."""

    def __post_init__(self) -> None:
        if self.max_length <= FIRST_LABEL:
            raise ValueError(f"max_length is {self.max_length}; a row needs at least 3 tokens")
        if self.policy not in ("cut", "drop"):
            raise ValueError(f"policy is {self.policy!r}; choose 'cut' or 'drop'")
        if self.limit_tokens is not None and self.limit_tokens < 1:
            raise ValueError(f"limit_tokens is {self.limit_tokens}; give at least 1, or none")
        if not 0 <= self.max_unsupervised <= 1:
            raise ValueError(f"max_unsupervised is {self.max_unsupervised}; it is a share, 0 to 1")


@dataclass(kw_only=True)
class Counts:
    """What became of every row: read + extra_turns == kept + cut + dropped + refused."""

    read: int = 0
    extra_turns: int = 0
    """Rows added because a template rewrites history: one row per answer then."""
    kept: int = 0
    """Untouched."""
    cut: int = 0
    """Cut to max_length and kept."""
    dropped: int = 0
    """Too long, or nothing left to train on after the cut."""
    refusals: list[Refusal] = field(default_factory=list)
    unsupervised: list[int] = field(default_factory=list)
    """Numbers of the refused rows that had no supervised token."""
    tokens: int = 0
    supervised: int = 0
    ends: Counter[int] = field(default_factory=Counter)
    """How often each end token is trained, by id."""
    end_names: dict[int, str] = field(default_factory=dict)
    limit_reached: bool = False

    @property
    def refused(self) -> int:
        """Rows that cannot train."""
        return len(self.refusals)

    def __str__(self) -> str:
        """A few lines for the console."""
        turns = f", {self.extra_turns} added as turns of their own" if self.extra_turns else ""
        ends = [
            f"{self.end_names.get(token, token)} {times} times"
            for token, times in self.ends.items()
        ]
        stopped = " (stopped at the token limit)" if self.limit_reached else ""
        lines = [
            (
                f"rows: {self.read} read, {self.kept} kept, {self.cut} cut, "
                f"{self.dropped} dropped, {self.refused} refused{turns}{stopped}"
            ),
            (
                f"tokens: {self.tokens}, of them supervised: {self.supervised}; "
                f"turn ends trained: {', '.join(ends) or 'none'}"
            ),
        ]
        lines += [f"  row {number} refused: {reason}" for number, reason in self.refusals[:5]]
        if self.refused > 5:
            lines.append(f"  and {self.refused - 5} more")
        return "\n".join(lines)


def read_rows(source: str, target: Target, reading: Reading) -> tuple[list[Row], Counts]:
    """Every row of `source` that can train `target`'s draft head, and what became of the others."""
    counts, rows = Counts(), list[Row]()
    shown: str | None = None
    reader = RecordReader(target, reading.template_options)
    for number, record in enumerate(records(source), start=1):
        if reading.limit_tokens is not None and counts.tokens >= reading.limit_tokens:
            counts.limit_reached = True
            break
        counts.read += 1
        try:
            encoded = reader.encode(record)
        except RowError as error:
            counts.refusals.append(Refusal(number, str(error)))
            continue
        counts.extra_turns += len(encoded) - 1
        for part in encoded:
            if not any(part.mask[FIRST_LABEL:]):
                shown = shown or reader.show(part.ids)
                counts.refusals.append(Refusal(number, "no supervised token"))
                counts.unsupervised.append(number)
            else:
                _fit(
                    part,
                    _names(record, number, part, several=len(encoded) > 1),
                    rows,
                    counts,
                    reading,
                )
    if target.tokenizer is not None:
        counts.end_names = {token: reader.show([token]) for token in counts.ends}
    _judge(source, rows, counts, reading, shown)
    return rows, counts


class _Name(NamedTuple):
    row_id: str
    kind: str


def _names(record: Record | str, number: int, part: Encoded, *, several: bool) -> _Name:
    fields = record if isinstance(record, Mapping) else {}
    name = str(fields.get("id", number))
    return _Name(f"{name}#{part.turn}" if several else name, str(fields.get("kind", "all")))


def _fit(part: Encoded, name: _Name, rows: list[Row], counts: Counts, reading: Reading) -> None:
    """Apply the length policy and count."""
    ids, mask = part.ids, part.mask
    long = len(ids) > reading.max_length
    if long:
        ids, mask = ids[: reading.max_length], mask[: reading.max_length]
    if long and (reading.policy == "drop" or not any(mask[FIRST_LABEL:])):
        counts.dropped += 1
        return
    counts.cut += long
    counts.kept += not long
    counts.tokens += len(ids)
    counts.supervised += sum(mask)
    counts.ends.update(_ends(part, len(ids)))
    rows.append(
        Row(
            torch.tensor(ids),
            torch.tensor(mask, dtype=torch.bool),
            *name,
            prompt_length=mask.index(1),
        )
    )


def _ends(part: Encoded, length: int) -> list[int]:
    """The end tokens that survive a cut to `length`."""
    lost = [
        token for token, marked in zip(part.ids[length:], part.mask[length:], strict=True) if marked
    ]
    return part.end_ids[: len(part.end_ids) - sum(token in part.end_ids for token in lost)]


def _judge(
    source: str, rows: list[Row], counts: Counts, reading: Reading, shown: str | None
) -> None:
    """Refuse data that would train on nothing, or mostly nothing."""
    share = len(counts.unsupervised) / max(counts.read, 1)
    if share > reading.max_unsupervised:
        raise ValueError(
            f"data {source!r}: {len(counts.unsupervised)} of {counts.read} rows have no supervised "
            f"token ({share:.0%}, allowed max_unsupervised {reading.max_unsupervised:.0%}); first "
            f"such row: {counts.unsupervised[0]}, rendered:\n{shown}\nThe answers in it are not "
            f"where the target's chat template puts them: give the rows as messages, or correct "
            f"their loss_mask"
        )
    if not rows:
        raise ValueError(f"data {source!r}: no row is left to train on\n{counts}")
