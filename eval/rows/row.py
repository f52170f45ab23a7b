"""Rows of a batch, what their prompts leave, and where a round's time goes.

Letters: V vocabulary.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from outrider.data.cache import RowCache
from outrider.data.target import Captured
from outrider.eval.metrics import Round


@dataclass(kw_only=True, eq=False)
class Row:
    """A row at work or done."""

    number: int
    """Which of the prompts it is."""
    key: int
    """Its number in the noise's key."""
    ids: list[int]
    """Prompt and new tokens."""
    num_prompt: int
    budget: int
    """Tokens to write at most."""
    rounds: list[Round] = field(default_factory=list)
    finish: str = ""
    """`stop` at an end token or stop string, `length` at the budget; empty while it is at work."""
    seconds: float = 0.0
    """What its prefill took, the first token included."""

    @property
    def new_ids(self) -> list[int]:
        """What it wrote."""
        return self.ids[self.num_prompt :]


class RoundTime(NamedTuple):
    """Where the time of a round went, seconds."""

    draft: float
    verify: float
    other: float
    rows: int
    """Rows at work."""
    emitted: int
    """Tokens that all of them wrote."""

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.draft + self.verify + self.other


class Prefill(NamedTuple):
    """A prompt that has been run; what it leaves is read only."""

    cache: RowCache
    captured: Captured
    logits_1V: Tensor
