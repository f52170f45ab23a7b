"""How far a tuned target has moved from its original, on text that the original wrote.

Letters: T positions of a text, N answer tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.data.target import Target
from outrider.eval.offline.texts import Text

CHUNK = 128
States = Callable[[Tensor], Tensor]
"""From ids [1, T] to last states [1, T, H]."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Means over answer tokens, in whose contexts both laws are compared."""

    kl: float
    """KL(original, tuned) in nats."""
    tv: float
    """Total variation: the share of sampled tokens that must differ at the least."""
    greedy_kept: float
    """Share of contexts whose most likely token is still the same."""
    tokens: int

    def record(self) -> dict[str, Any]:
        """The figures for JSON, to six significant digits."""
        return {k: v if isinstance(v, int) else float(f"{v:.6g}") for k, v in asdict(self).items()}


def text_of(drift: dict[str, Any]) -> str:
    """A recorded drift in one line."""
    return (
        f"drift from the original: KL {drift['kl']:.5f} nats and TV {drift['tv']:.4f} a token, "
        f"{drift['greedy_kept']:.2%} of greedy tokens unchanged ({drift['tokens']} tokens)"
    )


@torch.no_grad()
def measure_drift(target: Target, texts: Sequence[Text], original: States, tuned: States) -> Drift:
    """Compare both laws at every answer token of the texts; logits are `target.logits`."""
    sums = torch.zeros(3, dtype=torch.float64)
    tokens = 0
    for text in texts:
        ids_T = torch.tensor(text.prompt_ids + text.answer_ids, device=target.device)
        answer = slice(len(text.prompt_ids) - 1, len(ids_T) - 1)
        both = [states(ids_T[None])[0, answer] for states in (original, tuned)]
        tokens += len(text.answer_ids)
        for ours_NH, theirs_NH in zip(*(x.split(CHUNK) for x in both), strict=True):
            sums += _compare(target.logits(ours_NH), target.logits(theirs_NH)).cpu()
    kl, tv, kept = (sums / max(1, tokens)).tolist()
    return Drift(kl=kl, tv=tv, greedy_kept=kept, tokens=tokens)


def _compare(original_NV: Tensor, tuned_NV: Tensor) -> Tensor:
    """Sums over contexts of KL, total variation and equal argmax, in float64."""
    log_p, log_q = (x.double().log_softmax(-1) for x in (original_NV, tuned_NV))
    kl = (log_p.exp() * (log_p - log_q)).sum()
    tv = 0.5 * (log_p.exp() - log_q.exp()).abs().sum()
    return torch.stack([kl, tv, (original_NV.argmax(-1) == tuned_NV.argmax(-1)).sum()])
