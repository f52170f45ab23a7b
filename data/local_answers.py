"""The target answers prompts in this process, by plain decoding with continuous batching.

An answer depends on the target, the prompt, the row's id and the seed, and on the batch around it
by rounding alone: products of other shapes may turn a near tie.

Letters: B rows of a batch, N some of them, T positions, H hidden size, V vocabulary.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.data.answers import Answer, Decoding, Emit, Request
from outrider.data.cache import RowCache, attention_masks, query_positions
from outrider.data.packed_linears import packed_linears
from outrider.data.penalties import Prefix
from outrider.data.sampling import Sampling, Stream, draw_rows, process, row_key, uniform
from outrider.data.target import Target

# Prompts are sorted by length within windows of this many: those prefilled together need little
# padding, and an interrupted run has still answered the list from its start.
SORT_WINDOW = 48
# Prompts prefilled in one padded pass.
PREFILL_ROWS = 8


class LocalAnswers:
    """The target in this process as what answers prompts."""

    def __init__(self, target: Target, decoding: Decoding) -> None:
        self.target = target
        self.decoding = decoding

    def open(self) -> None:
        """Nothing to do: the target is there."""

    def settings(self) -> dict[str, Any]:
        """What the answers depend on besides target, prompts, sampling and `decoding`."""
        return {"by": "process", "dtype": str(self.target.dtype)}

    def notes(self) -> dict[str, Any]:
        """Nothing that may differ between runs whose rows may stand together."""
        return {}

    def answer(self, prompts: Sequence[tuple[Request, list[int]]], emit: Emit) -> None:
        """Answer (request, prompt ids) pairs, in any order."""
        with packed_linears(self.target):
            for answer in answers(self.target, prompts, self.decoding):
                emit(answer)


class _Slot(NamedTuple):
    """A row at work; `answer_ids` grows in place."""

    request: Request
    prompt_ids: list[int]
    answer_ids: list[int]
    key: int


def answers(
    target: Target, prompts: Sequence[tuple[Request, list[int]]], decoding: Decoding
) -> Iterator[Answer]:
    """Answers to (request, prompt ids) pairs, in order of completion."""
    waiting = deque(_sorted_in_windows(prompts))
    slots: list[_Slot | None] = [None] * min(decoding.batch_size, len(prompts))
    cache = RowCache(len(slots))
    while waiting or any(slots):
        _refill(target, slots, waiting, cache, decoding.seed)
        for row, slot in enumerate(slots):
            finish = slot and _finish(slot.answer_ids, target.eos_ids, decoding.max_new_tokens)
            if slot and finish:
                yield Answer(slot.request, slot.prompt_ids, slot.answer_ids, finish)
                slots[row] = None
                cache.reset_row(row)
        if waiting and not all(slots):
            continue
        going = [row for row, slot in enumerate(slots) if slot]
        if 2 * len(going) <= len(slots):
            # The last rows of a run: stop computing the empty ones.
            cache.keep_rows(going)
            slots = [slots[row] for row in going]
        if going:
            _emit(slots, _made(target, _step(target, slots, cache)), decoding.seed)


def _refill(
    target: Target,
    slots: list[_Slot | None],
    waiting: deque[tuple[Request, list[int]]],
    cache: RowCache,
    seed: int,
) -> None:
    """Prefill waiting prompts into empty rows, a group at a time, and draw their first tokens."""
    empty = [row for row, slot in enumerate(slots) if slot is None][: len(waiting)]
    for start in range(0, len(empty), PREFILL_ROWS):
        rows = empty[start : start + PREFILL_ROWS]
        fresh = [
            _Slot(request, ids, [], row_key(request.id))
            for request, ids in (waiting.popleft() for _ in rows)
        ]
        fresh_cache = RowCache(len(fresh))
        _emit(fresh, _made(target, _prefill(target, fresh, fresh_cache)), seed)
        for index, row in enumerate(rows):
            cache.replace_row(row, fresh_cache, index)
            slots[row] = fresh[index]


def _prefill(target: Target, slots: Sequence[_Slot], cache: RowCache) -> Tensor:
    """Feed the prompts, padded on the right; logits [B, V] after each."""
    lengths = [len(slot.prompt_ids) for slot in slots]
    ids_BT = torch.zeros(len(slots), max(lengths), dtype=torch.long)
    for row, slot in enumerate(slots):
        ids_BT[row, : lengths[row]] = torch.tensor(slot.prompt_ids)
    last_BTH = _forward(target, ids_BT, cache)
    cache.advance(lengths)
    # The output head reads one position a row: it is a fifth of a small target's cost.
    return target.logits(last_BTH[torch.arange(len(slots)), torch.tensor(lengths) - 1])


def _step(target: Target, slots: Sequence[_Slot | None], cache: RowCache) -> Tensor:
    """Feed each row its newest token, an empty one token 0; logits [B, V]."""
    ids_B1 = torch.tensor([[slot.answer_ids[-1] if slot else 0] for slot in slots])
    last_B1H = _forward(target, ids_B1, cache)
    cache.advance([int(slot is not None) for slot in slots])
    return target.logits(last_B1H[:, 0])


def _forward(target: Target, ids_BT: Tensor, cache: RowCache) -> Tensor:
    """States [B, T, H] after the final norm."""
    num_new = ids_BT.shape[1]
    lengths_B = cache.lengths_B.to(target.device)
    return target.run(
        ids_BT.to(target.device),
        position_ids=query_positions(lengths_B, num_new),
        attention_mask=attention_masks(target.config, lengths_B, num_new, target.dtype),
        cache=cache,
    ).last_BTH


def _made(target: Target, logits_BV: Tensor) -> Tensor:
    """Logits [B, V] that draw only ids which the tokenizer makes, none of the table's padding."""
    if target.tokenizer_size >= logits_BV.shape[-1]:
        return logits_BV
    ids_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    return logits_BV.masked_fill(ids_V >= target.tokenizer_size, -torch.inf)


def _emit(slots: Sequence[_Slot | None], logits_BV: Tensor, seed: int) -> None:
    """Draw each row's next token, keyed by the row and the token's position in it."""
    groups: dict[Sampling, list[tuple[int, _Slot]]] = {}
    for row, slot in enumerate(slots):
        if slot:
            groups.setdefault(slot.request.sampling, []).append((row, slot))
    for sampling, members in groups.items():
        logits_NV = logits_BV[[row for row, _ in members]]
        prefixes = [
            Prefix(slot.prompt_ids + slot.answer_ids, len(slot.prompt_ids)) for _, slot in members
        ]
        coins = [
            uniform(seed, slot.key, len(path.ids), Stream.TARGET)
            for (_, slot), path in zip(members, prefixes, strict=True)
        ]
        tokens = draw_rows(process(logits_NV, sampling, prefixes), coins).tolist()
        for (_, slot), token in zip(members, tokens, strict=True):
            slot.answer_ids.append(token)


def _finish(answer_ids: Sequence[int], eos_ids: Sequence[int], max_new_tokens: int) -> str | None:
    if answer_ids[-1] in eos_ids:
        return "stop"
    return "length" if len(answer_ids) == max_new_tokens else None


def _sorted_in_windows(
    prompts: Sequence[tuple[Request, list[int]]],
) -> Iterator[tuple[Request, list[int]]]:
    for start in range(0, len(prompts), SORT_WINDOW):
        yield from sorted(prompts[start : start + SORT_WINDOW], key=lambda pair: len(pair[1]))
