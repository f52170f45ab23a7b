"""Exact expected rounds for a given text: acceptance inside a round is a chain of coins.

B rows, T places in the text (0 is the prefill's token), K drafts at most, L = K + 1 draft lengths
(0 is plain decoding), J = K + 1 outcomes of a round (how many drafts it accepts).

A round that starts at place t drafts for t, t + 1, ...; given the text, its draft number i (from 0)
is accepted with probability a[t, i] = min(1, q / p) at the text's token, independently.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Renewal(NamedTuple):
    """What decoding a text with drafts of length 0 to K would do, in expectation."""

    rounds_BL: Tensor
    """Expected target calls after the prefill."""
    visits_BLT: Tensor
    """Chance that a round starts at each place."""


def survival(accept_BTK: Tensor) -> Tensor:
    """Chance that at least j drafts are accepted, j = 0..K: [B, T, J]."""
    ones_BT1 = accept_BTK.new_ones(*accept_BTK.shape[:2], 1)
    return torch.cat([ones_BT1, accept_BTK.cumprod(-1)], -1)


def outcome(accept_BTK: Tensor) -> Tensor:
    """Chance that a round of length l accepts exactly j drafts: [B, T, L, J]."""
    reach_BTJ = survival(accept_BTK)
    stop_BTJ = reach_BTJ - torch.nn.functional.pad(reach_BTJ[..., 1:], (0, 1))
    count_J = torch.arange(reach_BTJ.shape[-1], device=accept_BTK.device)
    length_L1 = count_J[:, None]
    # A full house of l accepted drafts is never followed by a rejection.
    inside_BTLJ = torch.where(count_J < length_L1, stop_BTJ[..., None, :], 0)
    return torch.where(count_J == length_L1, reach_BTJ[..., None, :], inside_BTLJ)


def renewal(accept_BTK: Tensor, tokens_B: Tensor) -> Renewal:
    """Solve for the rounds of every row and length at once.

    Args:
        accept_BTK: Acceptance of draft i of a round that starts at place t, for the text's token.
        tokens_B: Tokens of each row, the prefill's (place 0) included.

    A round cut by the end of the text counts as one call. Cost: T steps of B * L * J.
    """
    accept_BTK = accept_BTK.double()
    num_rows, num_places, num_drafts = accept_BTK.shape
    step_BTLJ = outcome(accept_BTK)
    inside_BT = (torch.arange(num_places, device=accept_BTK.device) < tokens_B[:, None]).double()
    padded = (num_rows, num_drafts + 1, max(num_places, 2) + num_drafts + 1)
    rounds_BLT, visits_BLT = accept_BTK.new_zeros(padded), accept_BTK.new_zeros(padded)
    for t in range(num_places - 1, 0, -1):
        after_BLJ = rounds_BLT[:, :, t + 1 : t + num_drafts + 2]
        value_BL = 1 + (step_BTLJ[:, t] * after_BLJ).sum(-1)
        rounds_BLT[:, :, t] = value_BL * inside_BT[:, t, None]
    visits_BLT[:, :, 1] = 1
    for t in range(1, num_places):
        here_BL1 = visits_BLT[:, :, t, None]
        visits_BLT[:, :, t + 1 : t + num_drafts + 2] += here_BL1 * step_BTLJ[:, t]
    return Renewal(rounds_BLT[:, :, 1], visits_BLT[..., :num_places] * inside_BT[:, None])
