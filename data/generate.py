"""On-policy text: the frozen target answers prompts, by plain decoding with continuous batching.

An answer depends on the target, the prompt, the row's id and the seed, not on the batch around it.

Letters: B rows of a batch, N some of them, T positions, H hidden size, V vocabulary.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from outrider.data.cache import RowCache, attention_masks, query_positions
from outrider.data.chat import RowError, Template
from outrider.data.messages import read_conversation, read_tools
from outrider.data.penalties import Prefix
from outrider.data.rowfile import PartialRows, write_rows
from outrider.data.sampling import Sampling, Stream, draw_rows, process, row_key, uniform
from outrider.data.target import Target

# Prompts are sorted by length within windows of this many: those prefilled together need little
# padding, and an interrupted run has still answered the list from its start.
SORT_WINDOW = 48
# Prompts prefilled in one padded pass.
PREFILL_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How long answers get, and how many are decoded at once."""

    max_new_tokens: int = 128
    """Longest answer in tokens, the end token included."""
    batch_size: int = 32
    """Rows decoded at once; changes speed and memory, not the answers."""
    seed: int = 0
    """Together with a row's id, the key of its noise."""

    def __post_init__(self) -> None:
        for name, value in (
            ("max_new_tokens", self.max_new_tokens),
            ("batch_size", self.batch_size),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


class Request(NamedTuple):
    """A prompt to answer."""

    id: str
    """Names the row and keys its noise."""
    messages: list[dict[str, str]]
    """The conversation so far, the user's turn last."""
    sampling: Sampling
    extra: dict[str, Any]
    """Copied into the finished row."""


class Answer(NamedTuple):
    """A finished request."""

    request: Request
    prompt_ids: list[int]
    answer_ids: list[int]
    """The very ids that were drawn, the end token included."""
    finish: str
    """`stop` at an end token, `length` at max_new_tokens."""


class Written(NamedTuple):
    """What a run left in its files."""

    num_rows: int
    num_answer_tokens: int
    num_new_rows: int
    """Rows answered by this call; the others were found finished."""


class _Slot(NamedTuple):
    """A row at work; `answer_ids` grows in place."""

    request: Request
    prompt_ids: list[int]
    answer_ids: list[int]
    key: int


def generate(target: Target, requests: Sequence[Request], out: Path, decoding: Decoding) -> Written:
    """`generate_files` with one file."""
    return generate_files(target, {out: requests}, decoding)


def generate_files(
    target: Target,
    wanted: Mapping[Path, Sequence[Request]],
    decoding: Decoding,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Written:
    """Answer every request into its file, one JSON row each, in the order given.

    `options` go to the chat template, and the rows state them. Finished rows are kept beside the
    first file, as `FILE.partial.jsonl`, until all are done, so that the same call goes on where a
    stopped one was. Raises ValueError for repeated ids, for a prompt that does not fit the target,
    and for a partial file made with other settings or prompts.
    """
    requests = [request for several in wanted.values() for request in several]
    prompts = list(zip(requests, prompt_ids(target, requests, options), strict=True))
    _check(prompts, target, decoding)
    first = next(iter(wanted))
    path = first.with_name(f"{first.name}.partial.jsonl")
    mode = {"template_options": dict(options)} if options else {}
    with PartialRows(path, _settings(target, requests, decoding) | mode) as partial:
        for request, ids in prompts:
            _check_same(partial.rows.get(request.id), request, ids, path)
        todo = [pair for pair in prompts if pair[0].id not in partial.rows]
        for answer in _with_progress(answers(target, todo, decoding), len(prompts), len(todo)):
            partial.append(_row(answer, target, decoding, mode))
    for out, several in wanted.items():
        write_rows(out, [partial.rows[request.id] for request in several])
    path.unlink()
    num_tokens = sum(len(partial.rows[request.id]["answer_ids"]) for request in requests)
    return Written(len(requests), num_tokens, len(todo))


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
            _emit(slots, _step(target, slots, cache), decoding.seed)


def prompt_ids(
    target: Target,
    requests: Sequence[Request],
    options: Mapping[str, Any] = MappingProxyType({}),
) -> list[list[int]]:
    """Ids of each conversation under the target's own template, ready for the answer.

    Raises ValueError when the target has no chat template, or it refuses a conversation.
    """
    if target.tokenizer is None:
        raise ValueError(f"target {target.name!r} has no tokenizer; load it from a folder with one")
    template = Template(tokenizer=target.tokenizer, eos_ids=target.eos_ids, options=options)
    found: list[list[int]] = []
    for request in requests:
        try:
            messages = read_conversation(request.messages, template.dialect)
            tools = read_tools(request.extra.get("tools"))
            found.append(template.ids(messages, tools, prompt=True))
        except RowError as error:
            raise ValueError(f"request {request.id!r}: {error}") from error
    return found


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
        _emit(fresh, _prefill(target, fresh, fresh_cache), seed)
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


def _with_progress(found: Iterable[Answer], num_rows: int, num_todo: int) -> Iterator[Answer]:
    num_tokens = 0
    with tqdm(total=num_rows, initial=num_rows - num_todo, unit="row", mininterval=2) as bar:
        for answer in found:
            yield answer
            num_tokens += len(answer.answer_ids)
            bar.set_postfix_str(f"{num_tokens / bar.format_dict['elapsed']:.0f} tok/s", False)
            bar.update(1)


def _row(
    answer: Answer, target: Target, decoding: Decoding, mode: Mapping[str, Any]
) -> dict[str, Any]:
    assert target.tokenizer is not None  # prompt_ids has refused such a target
    text = target.tokenizer.decode(answer.answer_ids, skip_special_tokens=True)
    request = answer.request
    stated = request.sampling.record()
    return {
        "id": request.id,
        **request.extra,
        "temperature": request.sampling.temperature,
        **({"sampling": stated} if stated.keys() - {"temperature"} else {}),
        "seed": decoding.seed,
        **mode,
        "messages": [*request.messages, {"role": "assistant", "content": text}],
        "prompt_ids": answer.prompt_ids,
        "answer_ids": answer.answer_ids,
        "finish": answer.finish,
    }


def _settings(target: Target, requests: Sequence[Request], decoding: Decoding) -> dict[str, Any]:
    """All that an answer depends on besides its prompt."""
    samplings = {json.dumps(asdict(request.sampling)) for request in requests}
    return {
        "target": target.fingerprint()[:16],
        "dtype": str(target.dtype),
        "max_new_tokens": decoding.max_new_tokens,
        "seed": decoding.seed,
        "samplings": [json.loads(text) for text in sorted(samplings)],
    }


def _check(
    prompts: Sequence[tuple[Request, list[int]]], target: Target, decoding: Decoding
) -> None:
    ids = {request.id for request, _ in prompts}
    if len(ids) < len(prompts):
        raise ValueError(f"{len(prompts)} requests share {len(ids)} ids; give each its own id")
    limit = target.config.max_position_embeddings
    for request, tokens in prompts:
        if len(tokens) + decoding.max_new_tokens > limit:
            raise ValueError(
                f"request {request.id!r} has {len(tokens)} tokens and max_new_tokens is "
                f"{decoding.max_new_tokens}; the target holds {limit}: shorten one of them"
            )


def _check_same(row: dict[str, Any] | None, request: Request, ids: list[int], path: Path) -> None:
    if row is None:
        return
    if row["prompt_ids"] != ids or row["temperature"] != request.sampling.temperature:
        raise ValueError(
            f"{path} answers another prompt under id {request.id!r}; delete it to start again, or "
            "name another output"
        )
