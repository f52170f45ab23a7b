"""What a trace records of a row: the target's law at every answer token.

N answer tokens, T prompt and answer tokens, H hidden size, V vocabulary, M most likely tokens.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.offline.contexts import Place, target_law
from outrider.eval.offline.policy import OnPolicy, check_text

_BATCH_TOKENS = 2048
_CHUNK = 128
_LIKELIEST = 16


def answer_law(
    target: Target, ids_T: Tensor, last_TH: Tensor, prompt_length: int, sampling: Sampling
) -> tuple[dict[str, Tensor], OnPolicy]:
    """Per answer token, what the target's law said; a chunk of [N, V] at a time."""
    num = len(ids_T) - prompt_length
    chunks: list[dict[str, Tensor]] = []
    policy = OnPolicy(is_greedy=sampling.is_greedy)
    for first in range(0, num, _CHUNK):
        places_N = torch.arange(first, min(first + _CHUNK, num)) + prompt_length
        places = [Place(ids_T, position, prompt_length) for position in places_N.tolist()]
        logits_NV, probs_NV = target_law(target, last_TH[places_N - 1], places, sampling)
        ids_N = ids_T[places_N]
        policy += check_text(logits_NV, probs_NV, ids_N, target.dtype, sampling)
        top = logits_NV.topk(min(_LIKELIEST, logits_NV.shape[-1]), dim=-1)
        chunks.append(
            {
                "log_normaliser_N": logits_NV.logsumexp(-1),
                "logprob_N": probs_NV.gather(-1, ids_N[:, None])[:, 0].log(),
                # Of greedy text the processed law is a point mass; how sure the target was is not.
                "entropy_N": torch.special.entr(
                    logits_NV.softmax(-1) if sampling.is_greedy else probs_NV
                ).sum(-1),
                "top_ids_NM": top.indices,
                "top_logits_NM": top.values,
            }
        )
    return {key: torch.cat([chunk[key] for chunk in chunks]) for key in chunks[0]}, policy


def groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Rows of like length, few enough that a padded batch stays small."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if group and (len(group) + 1) * lengths[i] > _BATCH_TOKENS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
