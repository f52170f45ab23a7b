"""What moves logits before the temperature: bias, penalties and bans, each along its row's path.

Pure functions, one processor each; `outrider.data.sampling.process` calls them in its order.
Letters: N rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Prefix(NamedTuple):
    """The tokens before the one to be decided; in a draft tree, those from the root to the node."""

    ids: Sequence[int]
    """Prompt and answer so far, drafted ancestors included."""
    num_prompt: int
    """How many of them are the prompt's."""


def add_bias(logits_NV: Tensor, bias: Sequence[tuple[int, float]]) -> Tensor:
    """Add to the logits of single tokens. Raises ValueError for ids outside the vocabulary."""
    ids = [token for token, _ in bias]
    _check_ids("logit_bias", ids, logits_NV.shape[-1])
    added_V = torch.zeros(logits_NV.shape[-1], device=logits_NV.device)
    added_V[ids] = torch.tensor([amount for _, amount in bias], device=logits_NV.device)
    return logits_NV + added_V


def penalise_repeats(logits_NV: Tensor, prefixes: Sequence[Prefix], penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of tokens on the path, prompt included (CTRL).

    Keskar et al. 2019, section 4.1, in the form of transformers and vLLM.
    """
    is_seen_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
    for row, prefix in enumerate(prefixes):
        is_seen_NV[row, list(prefix.ids)] = True
    lowered_NV = torch.where(logits_NV > 0, logits_NV / penalty, logits_NV * penalty)
    return torch.where(is_seen_NV, lowered_NV, logits_NV)


def penalise_counts(
    logits_NV: Tensor, prefixes: Sequence[Prefix], presence: float, frequency: float
) -> Tensor:
    """Subtract `presence` once, and `frequency` for each use, of tokens in the answer so far.

    The prompt does not count: OpenAI's definition, which vLLM and SGLang follow.
    """
    uses_NV = torch.zeros_like(logits_NV)
    for row, prefix in enumerate(prefixes):
        ids = torch.tensor(
            prefix.ids[prefix.num_prompt :], dtype=torch.long, device=logits_NV.device
        )
        uses_NV[row].index_add_(0, ids, torch.ones_like(ids, dtype=uses_NV.dtype))
    return logits_NV - frequency * uses_NV - presence * (uses_NV > 0)


def ban(
    logits_NV: Tensor, words: Sequence[Sequence[int]], prefixes: Sequence[Prefix] | None
) -> Tensor:
    """Forbid the last token of each word where the path ends with the tokens before it.

    `prefixes` is needed for words of two tokens or more. Raises ValueError for ids outside the
    vocabulary, and where no token is left.
    """
    _check_ids("bad_words", [token for word in words for token in word], logits_NV.shape[-1])
    banned_NV = logits_NV.clone()
    for word in words:
        *before, last = word
        if not before:
            banned_NV[:, last] = -math.inf
            continue
        assert prefixes is not None, "a word of several tokens is banned along a path"
        for row, prefix in enumerate(prefixes):
            if list(prefix.ids[-len(before) :]) == before:
                banned_NV[row, last] = -math.inf
    if bool((banned_NV.max(-1).values == -math.inf).any()):
        raise ValueError(
            f"bad_words is {[list(word) for word in words]}, which forbids every token at one "
            "place; leave some allowed"
        )
    return banned_NV


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"{name} names tokens {wrong}; this target has ids 0 to {vocab_size - 1}")
