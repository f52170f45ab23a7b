"""What became of every row: kept, cut, dropped or refused, by number and with the reason."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from outrider.data.files import write_whole

REASON_LENGTH = 400
Outcomes = Literal["kept", "cut", "dropped", "refused"]


class Refusal(NamedTuple):
    """A row that cannot train."""

    number: int
    """Counted from 1 in the source."""
    reason: str


class Fate(NamedTuple):
    """What became of one row."""

    source: str
    number: int
    """Counted from 1 in the source."""
    row_id: str
    outcome: Outcomes
    reason: str = ""
    tokens: int = 0
    supervised: int = 0


@dataclass(kw_only=True)
class Counts:
    """What became of every row: read + extra_turns == kept + cut + dropped + refused."""

    sources: dict[str, int] = field(default_factory=dict)
    """Rows read from each source."""
    extra_turns: int = 0
    """Rows added because a template rewrites history: one row per answer then."""
    fates: list[Fate] = field(default_factory=list)
    """Every row, in order."""
    unsupervised: list[int] = field(default_factory=list)
    """Numbers of the refused rows that had no supervised token."""
    renamed: int = 0
    """Rows whose id another row had before them."""
    muted: int = 0
    """Answers that their messages exempt from the loss, by weight 0 or train false."""
    with_tools: int = 0
    """Rows that came with tool definitions."""
    roles: dict[str, list[int]] = field(default_factory=dict)
    """Tokens of each role in the rows that train, and how many of them are supervised."""
    ends: Counter[int] = field(default_factory=Counter)
    """How often each end token is trained, by id."""
    answers: int = 0
    """Answers that train to their end."""
    end_names: dict[int, str] = field(default_factory=dict)
    limit_reached: bool = False
    ran_out: str | None = None
    """The source whose end was the end of a mix."""

    @property
    def read(self) -> int:
        """Rows read."""
        return sum(self.sources.values())

    @property
    def kept(self) -> int:
        """Rows that train untouched."""
        return self._number("kept")

    @property
    def cut(self) -> int:
        """Rows that train, cut to max_length."""
        return self._number("cut")

    @property
    def dropped(self) -> int:
        """Rows too long, or with nothing left to train on after the cut."""
        return self._number("dropped")

    @property
    def refused(self) -> int:
        """Rows that cannot train."""
        return self._number("refused")

    @property
    def refusals(self) -> list[Refusal]:
        """The refused rows with their reasons."""
        return [Refusal(one.number, one.reason) for one in self._refused()]

    @property
    def tokens(self) -> int:
        """Tokens that train or are context of those that do."""
        return sum(one.tokens for one in self.fates)

    @property
    def supervised(self) -> int:
        """Tokens that train."""
        return sum(one.supervised for one in self.fates)

    def add_roles(self, spans: Iterable[tuple[str, int]], mask: list[int]) -> None:
        """Count a row's tokens by whose they are; spans may reach past a row that was cut."""
        start = 0
        for role, end in spans:
            end = min(end, len(mask))
            tally = self.roles.setdefault(role, [0, 0])
            tally[0] += end - start
            tally[1] += sum(mask[start:end])
            start = end

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON."""
        # asdict would make a Counter of a Counter's pairs.
        return vars(self) | {"fates": [list(one) for one in self.fates]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """What `to_dict` gave, after JSON made its keys text."""
        return cls(
            **values
            | {
                "fates": [Fate(*one) for one in values["fates"]],
                "ends": Counter({int(key): value for key, value in values["ends"].items()}),
                "end_names": {int(key): value for key, value in values["end_names"].items()},
            }
        )

    def write(self, path: Path) -> None:
        """Every row's fate as JSON lines."""
        lines = (json.dumps(one._asdict()) + "\n" for one in self.fates)
        write_whole(path, "".join(lines))

    def __str__(self) -> str:
        """A few lines for the console."""
        turns = f", {self.extra_turns} added as turns of their own" if self.extra_turns else ""
        stopped = " (stopped at the token limit)" if self.limit_reached else ""
        ends = ", ".join(self._ends()) or "none"
        lines = [
            (
                f"rows: {self.read} read, {self.kept} kept, {self.cut} cut, "
                f"{self.dropped} dropped, {self.refused} refused{turns}{stopped}"
            ),
            (
                f"tokens: {self.tokens}, of them supervised: {self.supervised}; "
                f"turn ends trained: {ends} (of {self.answers} answers)"
            ),
            f"tokens by role: {', '.join(self._roles()) or 'none'}",
        ]
        if len(self.sources) > 1 or self.ran_out:
            lines.append(self._mix())
        if self.muted:
            lines.append(
                f"no loss on {self.muted} answers, whose messages have weight 0 or train false"
            )
        if self.renamed:
            lines.append(
                f"note: {self.renamed} rows have an id that stood before; they are named ID@NUMBER"
            )
        refused = self._refused()
        lines += [f"  row {one.number}{self._of(one)} refused: {one.reason}" for one in refused[:5]]
        if len(refused) > 5:
            lines.append(f"  and {len(refused) - 5} more")
        return "\n".join(lines)

    def _number(self, outcome: str) -> int:
        return sum(one.outcome == outcome for one in self.fates)

    def _refused(self) -> list[Fate]:
        return [one for one in self.fates if one.outcome == "refused"]

    def _ends(self) -> list[str]:
        return [
            f"{self.end_names.get(token, token)} {times} times"
            for token, times in self.ends.items()
        ]

    def _roles(self) -> list[str]:
        whole = max(self.tokens, 1)
        return [
            f"{role} {tokens} ({tokens / whole:.0%}; {supervised / max(tokens, 1):.0%} supervised)"
            for role, (tokens, supervised) in self.roles.items()
        ]

    def _of(self, fate: Fate) -> str:
        return f" of {fate.source}" if len(self.sources) > 1 else ""

    def _mix(self) -> str:
        parts = ", ".join(f"{name} {number}" for name, number in self.sources.items())
        ended = f"; {self.ran_out} ran out and ended the mix" if self.ran_out else ""
        return f"rows by source: {parts}{ended}"
