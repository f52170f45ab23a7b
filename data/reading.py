"""A row of tokens with its mask, and the settings by which rows are read.

Letters: T tokens of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

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
    workers: int = 1
    """Processes that render and tokenise; the rows are the same for any number."""
    cache: Path | None = None
    """Folder that keeps what was read, for the next run on the same data and target."""

    def __post_init__(self) -> None:
        if self.max_length <= FIRST_LABEL:
            raise ValueError(f"max_length is {self.max_length}; a row needs at least 3 tokens")
        if self.policy not in ("cut", "drop"):
            raise ValueError(f"policy is {self.policy!r}; choose 'cut' or 'drop'")
        if self.limit_tokens is not None and self.limit_tokens < 1:
            raise ValueError(f"limit_tokens is {self.limit_tokens}; give at least 1, or none")
        if not 0 <= self.max_unsupervised <= 1:
            raise ValueError(f"max_unsupervised is {self.max_unsupervised}; it is a share, 0 to 1")
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}; give at least 1 process")
