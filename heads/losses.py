"""Training objectives as pure functions: a loss per position, its sum and count, nothing hidden.

Every objective takes the draft's logits and the target's probabilities over the same vocabulary
and returns one loss per row, in fp32 or better. heads/slopes.py has their gradients in closed form,
which training uses; heads/objective.py mixes them.

Letters: N rows, W draft vocabulary, C outcomes (top tokens and the tail), D feature size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = 1e-30


@dataclass(frozen=True)
class Total:
    """A sum and the number of positions behind it: add Totals first, divide once."""

    sum: Tensor
    count: Tensor

    def __add__(self, other: "Total") -> "Total":
        return Total(self.sum + other.sum, self.count + other.count)

    def mean(self) -> Tensor:
        """Average per counted position; zero when nothing was counted."""
        return self.sum / self.count.clamp(min=1)


def total(loss_N: Tensor, mask_N: Tensor) -> Total:
    """Sum over masked-in rows; a masked-out row counts nothing, even when it is not finite."""
    kept = mask_N.bool()
    return Total(loss_N.masked_fill(~kept, 0).sum(), kept.sum())


def _log_probs(logits_NW: Tensor) -> Tensor:
    exact = torch.promote_types(logits_NW.dtype, torch.float32)
    return F.log_softmax(logits_NW, dim=-1, dtype=exact)


def _entropy(teacher_NW: Tensor) -> Tensor:
    return -torch.xlogy(teacher_NW, teacher_NW).sum(-1)


def soft_ce(logits_NW: Tensor, teacher_NW: Tensor) -> Tensor:
    """Cross-entropy from the target's law to the draft's."""
    return -(teacher_NW * _log_probs(logits_NW)).sum(-1)


def kl(logits_NW: Tensor, teacher_NW: Tensor) -> Tensor:
    """KL(target, draft): soft_ce less the target's entropy, so zero is perfect."""
    return soft_ce(logits_NW, teacher_NW) - _entropy(teacher_NW)


def reverse_kl(logits_NW: Tensor, teacher_NW: Tensor) -> Tensor:
    """KL(draft, target); a token the target excludes costs log of a tiny floor."""
    log_q = _log_probs(logits_NW)
    return (log_q.exp() * (log_q - teacher_NW.clamp(min=TINY).log())).sum(-1)


def jsd(logits_NW: Tensor, teacher_NW: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats, log 2 at most (Lin 1991)."""
    q_NW = _log_probs(logits_NW).exp()
    middle_NW = (teacher_NW + q_NW) / 2
    return _entropy(middle_NW) - (_entropy(teacher_NW) + _entropy(q_NW)) / 2


def hard_ce(logits_NW: Tensor, teacher_NW: Tensor) -> Tensor:
    """Cross-entropy to the target's likeliest token."""
    best_N1 = teacher_NW.argmax(-1, keepdim=True)
    return -_log_probs(logits_NW).gather(-1, best_N1).squeeze(-1)


def tv(logits_NW: Tensor, teacher_NW: Tensor) -> Tensor:
    """Total variation distance: exactly one minus the acceptance of rejection sampling."""
    return 0.5 * (teacher_NW - _log_probs(logits_NW).exp()).abs().sum(-1)


def acceptance(logits_NW: Tensor, teacher_NW: Tensor) -> Tensor:
    """Sum of min(p, q): the chance that a drafted token is accepted."""
    return torch.minimum(teacher_NW, _log_probs(logits_NW).exp()).sum(-1)


def lk_alpha(logits_NW: Tensor, teacher_NW: Tensor) -> Tensor:
    """Minus log acceptance (Samarin et al. 2026, "LK Losses", arXiv 2602.23881)."""
    return -acceptance(logits_NW, teacher_NW).clamp(min=TINY).log()


def lk_lambda(logits_NW: Tensor, teacher_NW: Tensor, decay: float = 3.0) -> Tensor:
    """Mix w KL + (1 - w) TV, w = exp(-decay * acceptance) held constant in the gradient.

    The hybrid of the same paper. w belongs to the row, as in speculators (losses/eager.py);
    Model-Optimizer takes one w a draft depth, from the mean acceptance there.
    """
    weight_N = (-decay * acceptance(logits_NW, teacher_NW).detach()).exp()
    kl_N, tv_N = kl(logits_NW, teacher_NW), tv(logits_NW, teacher_NW)
    return weight_N * kl_N + (1 - weight_N) * tv_N


OBJECTIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "soft_ce": soft_ce,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "hard_ce": hard_ce,
    "tv": tv,
    "lk_alpha": lk_alpha,
    "lk_lambda": lk_lambda,
}


def coarsen(logits_NW: Tensor, teacher_NW: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Both laws over the teacher's top_k tokens and one more outcome, "any other token".

    The last outcome holds the whole mass of the tail, on both sides, so both laws still sum to one
    and the teacher's probabilities are the exact ones. A divergence between the coarse laws is at
    most the one between the whole laws, and zero where the draft has the teacher's probability of
    every top token: how it spreads the tail over tokens is then its own affair.

    Returns:
        Log-probabilities of the draft (which serve as logits) and probabilities of the teacher,
        [N, top_k + 1]; as they were if top_k is not less than W.
    """
    if top_k >= teacher_NW.shape[-1]:
        return logits_NW, teacher_NW
    log_q_NW = _log_probs(logits_NW)
    top_NC, ids_NC = teacher_NW.topk(top_k, dim=-1)
    tail_N1 = teacher_NW.scatter(-1, ids_NC, 0).sum(-1, keepdim=True)
    rest_NW = log_q_NW.scatter(-1, ids_NC, float("-inf"))
    log_q_NC = torch.cat([log_q_NW.gather(-1, ids_NC), rest_NW.logsumexp(-1, keepdim=True)], -1)
    return log_q_NC, torch.cat([top_NC, tail_N1], -1)


def smooth_l1(predicted_ND: Tensor, state_ND: Tensor) -> Tensor:
    """EAGLE-1's feature loss: smooth L1 with threshold 1, averaged over channels, per row."""
    exact = torch.promote_types(predicted_ND.dtype, torch.float32)
    loss_ND = F.smooth_l1_loss(predicted_ND.to(exact), state_ND.to(exact), reduction="none")
    return loss_ND.mean(-1)


def channel_noise(state_BTD: Tensor, counted_BT: Tensor, share: float) -> Tensor:
    """The states plus normal noise of `share` times each channel's own standard deviation.

    The deviation is taken over the positions that are counted: leave out padding, and the first
    position of every document, whose state is many times larger than all others.
    """
    exact = torch.promote_types(state_BTD.dtype, torch.float32)
    state_ND = state_BTD[counted_BT].to(exact)
    if not len(state_ND):
        return state_BTD
    noise = torch.randn(state_BTD.shape, dtype=exact, device=state_BTD.device)
    scaled = noise * (share * state_ND.std(0, correction=0))
    return state_BTD + scaled.to(state_BTD.dtype)


def feature_noise(state_BTD: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """EAGLE-1's augmentation: uniform noise in +-0.1 times 512 / T (EAGLE's train/main.py).

    T is the row length, so shorter rows are disturbed more.
    """
    noise = torch.rand(state_BTD.shape, generator=generator, device=state_BTD.device)
    scaled = (noise - 0.5) * 0.2 * 512 / state_BTD.shape[1]
    return state_BTD + scaled.to(state_BTD.dtype)
