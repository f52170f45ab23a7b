"""What came of the drafts in a call of `generate`."""

from dataclasses import dataclass

from transformers.generation import GenerateDecoderOnlyOutput

from outrider.eval.metrics import Counts, Round, count


@dataclass(frozen=True, kw_only=True)
class RowStatistics:
    """One row's part."""

    new_tokens: int
    """Tokens written."""
    rounds: tuple[Round, ...]
    """Its calls of the target after the prefill: drafted, accepted and emitted tokens of each."""
    finish: str
    """`stop` at an end token or stop string, `length` at the most tokens or the position limit."""

    @property
    def tokens_per_call(self) -> float:
        """Tokens per call of the target after the prefill, the prefill's own token excluded."""
        return count([self.rounds]).tau


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """All rows' part, and the time that they took together."""

    rows: tuple[RowStatistics, ...]
    """In the order of the prompts."""
    target_calls: int
    """Calls of the target after the prefills; one call serves all rows at work."""
    prefill_seconds: float
    """Prompts and first tokens."""
    draft_seconds: float
    verify_seconds: float
    other_seconds: float

    @property
    def counts(self) -> Counts:
        """Rounds of all rows summed; see `outrider.eval.metrics`."""
        return count([row.rounds for row in self.rows])

    @property
    def tokens_per_call(self) -> float:
        """tau: tokens a row writes per call of the target, pooled over the rows."""
        return self.counts.tau

    @property
    def new_tokens(self) -> int:
        """Tokens written by all rows."""
        return sum(row.new_tokens for row in self.rows)

    def __str__(self) -> str:
        """One line."""
        seconds = (self.draft_seconds, self.verify_seconds, self.other_seconds)
        return (
            f"{self.new_tokens} tokens in {len(self.rows)} rows, {self.target_calls} target calls, "
            f"{self.tokens_per_call:.2f} tokens a call and row; prefill {self.prefill_seconds:.2f} "
            f"s, draft {seconds[0]:.2f} s, verify {seconds[1]:.2f} s, other {seconds[2]:.2f} s"
        )


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What transformers returns for return_dict_in_generate=True, and statistics."""

    statistics: Statistics | None = None
