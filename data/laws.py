"""A target's law over a vocabulary by its likeliest ids, what they sum to, and what is left.

Letters: N positions, M ids kept, H hidden size, W ids of the vocabulary that the law is over.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.data.target import Target

CHUNK = 1024


class TopLaw(NamedTuple):
    """Laws at any positions [...], zeros where no law is kept."""

    ids: Tensor
    """Target ids [..., M], likeliest first; int32."""
    log_probs: Tensor
    """Their log probabilities [..., M] over the vocabulary; with the normaliser, their logits."""
    log_normaliser: Tensor
    """Log of the sum of exp(logit) over the whole vocabulary [...], ids not kept included."""
    tail: Tensor
    """Probability of all ids that are not kept [...]."""
    num_rest: int
    """How many ids that is."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All but the number."""
        return self.ids, self.log_probs, self.log_normaliser, self.tail

    def map(self, change: Callable[[Tensor], Tensor]) -> "TopLaw":
        """The same change of all tensors."""
        ids, log_probs, log_normaliser, tail = map(change, self.tensors)
        return TopLaw(ids, log_probs, log_normaliser, tail, self.num_rest)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The output rows of a target for the ids that laws are over."""

    target: Target
    ids_W: Tensor
    """Target ids, rising."""

    @classmethod
    def of(cls, target: Target, draft_ids_W: Tensor | None) -> "Vocabulary":
        """These ids, or all that the target's tokenizer makes.

        Raises ValueError for an id that the target does not have.
        """
        top = 0 if draft_ids_W is None else int(draft_ids_W.max())
        if top >= target.vocab_size:
            raise ValueError(
                f"the vocabulary of the stored laws holds id {top}; this target's ids are 0 to "
                f"{target.vocab_size - 1}: choose the draft vocabulary for it again"
            )
        return cls(
            target, torch.arange(target.tokenizer_size) if draft_ids_W is None else draft_ids_W
        )

    def __len__(self) -> int:
        return len(self.ids_W)

    @cached_property
    def table_WH(self) -> Tensor:  # noqa: N802 - a dimension suffix
        """In float32: logits are rounded once, when they are stored."""
        return self.target.output_VH[self.ids_W.to(self.target.device)].float()

    def top(self, last_NH: Tensor, size: int) -> TopLaw:
        """The laws after states [N, H], with places in `ids_W` for ids."""
        parts = [self._top(chunk, size) for chunk in last_NH.split(CHUNK)]
        ids, log_probs, log_normaliser, tail = map(torch.cat, zip(*parts, strict=True))
        return TopLaw(ids, log_probs, log_normaliser, tail, len(self) - size)

    def _top(self, last_NH: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        is_short = last_NH.dtype == torch.bfloat16 == self.target.dtype and not last_NH.is_cuda
        with short_factors() if is_short else nullcontext():
            logits_NW = last_NH.float() @ self.table_WH.T
        if self.target.softcap is not None:
            logits_NW = torch.tanh(logits_NW / self.target.softcap) * self.target.softcap
        top = logits_NW.topk(size, dim=-1)
        # The largest logit less the log of its probability: softmax runs far faster than logsumexp.
        largest_N1 = logits_NW.softmax(-1).gather(-1, top.indices[:, :1])
        log_normaliser_N = top.values[:, 0] - largest_N1[:, 0].log()
        log_probs_NM = top.values - log_normaliser_N[:, None]
        tail_N = (1 - log_probs_NM.double().exp().sum(-1)).clamp(min=0).float()
        return top.indices.int(), log_probs_NM, log_normaliser_N, tail_N


@contextmanager
def short_factors() -> Generator[None]:
    """Let oneDNN multiply float32 matrices as bfloat16 ones, with float32 sums.

    Where the factors are bfloat16 numbers, their products are exact and only the order of the sums
    differs; it takes half the time on a CPU that multiplies bfloat16.
    """
    backend: Any = torch.backends.mkldnn  # its stub lacks the setting
    setting = backend.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
