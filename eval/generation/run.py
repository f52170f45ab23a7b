"""Decode a batch of prompts with drafts, called as transformers' `generate` is.

Dimensions: B rows, T positions of the padded prompts.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self, TypeAlias, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode, position_limit
from outrider.eval.drafters.model import DraftModel
from outrider.eval.generation.models import (
    Head,
    as_found,
    drafter_of,
    drafts_with,
    plan_of,
    rows_drafter_of,
    target_of,
    temperature_of,
)
from outrider.eval.generation.outcome import RowStatistics, SpeculativeOutput, Statistics
from outrider.eval.generation.prompts import Prompts, padded, rows_of, take_ids
from outrider.eval.generation.settings import Wanted, read_settings
from outrider.eval.rows.loop import RowsRun
from outrider.eval.trees.plans import Plan
from outrider.heads import DraftHead

OnTokens: TypeAlias = Callable[[int, Sequence[int]], None]
"""Hears of a row, by its place in the batch, its new tokens as they come."""


def generate(  # noqa: PLR0913 - transformers' names, and few of our own
    model: PreTrainedModel | Target,
    inputs: object = None,
    *,
    head: Head | None = None,
    draft: str | None = None,
    rule: str | None = None,
    generation_config: GenerationConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    streamer: BaseStreamer | None = None,
    seed: int | None = None,
    on_tokens: OnTokens | None = None,
    on_statistics: Callable[[Statistics], None] | None = None,
    **settings: Any,  # noqa: ANN401 - checked one by one
) -> Tensor | SpeculativeOutput:
    """Write what `model.generate` would, with fewer calls of the model.

    Greedy text is that of transformers token for token, but for near ties that rounding turns;
    sampled text follows the same law, from noise of its own. Each row is decoded as if alone: its
    padding is no part of it, its repetition penalty does not see it, and a sampled row does not
    depend on its neighbours or its place among them.

    Args:
        model: A causal LM of transformers, left as it is, or an outrider Target.
        inputs: What a tokenizer returns, or its input_ids [B, T]; padded on either side.
            `generate(model, **inputs)` does as well.
        head: What drafts: the folder of an exported head, a loaded DraftHead, or a smaller model
            with the same tokenizer. None: nothing but the text.
        draft: How it drafts: chain:3, tree:4,4,16, drawn:3,2,8, static:FILE, or of the text alone
            lookup:10 or suffix:8. Left out: chain:3 for a head, chain:5 for a model, no drafts
            without either.
        rule: Name of the verification rule; see `outrider.eval.rules.RULES`.
        generation_config: In place of the model's own.
        tokenizer: Needed for stop_strings, as in transformers.
        streamer: For a batch of one, such as TextStreamer.
        seed: Keys the noise of sampling; drawn from torch's generator when left out, so that
            torch.manual_seed sets it.
        on_tokens: Called with a row's place and its new tokens; for batches of any size.
        on_statistics: Called with the statistics, which return_dict_in_generate=True returns too.
        settings: max_new_tokens, max_length, do_sample, temperature, top_k, top_p, min_p,
            repetition_penalty, eos_token_id, pad_token_id, stop_strings, prefill_chunk_size and
            return_dict_in_generate, with transformers' meaning and defaults.

    Returns:
        Sequences [B, T + longest answer]: the prompts as they came and the answers, padded behind;
        with return_dict_in_generate=True a ModelOutput of them and `statistics`.

    Raises:
        ValueError: For any other setting; for a model whose state cannot be rolled back; for a
            head or a draft plan that does not fit; for inputs that are not text.
    """
    more = dict(settings)
    with as_found(model, head):
        target = target_of(model, tokenizer)
        ids_BT, mask_BT = take_ids(inputs, more)
        wanted = read_settings(target.model, generation_config, more, ids_BT.shape[1])
        prompts = Prompts(ids_BT, rows_of(ids_BT, mask_BT, wanted.hidden_id))
        _check_streamer(streamer, prompts)
        decoding = _decoding(wanted, rule, seed)
        drafts = _Drafts.made(head, draft, target, tokenizer, decoding)
        target = replace(target, eos_ids=wanted.eos_ids, tokenizer=tokenizer or target.tokenizer)
        _warn_of_limit(target, prompts, decoding)
        if streamer is not None:
            streamer.put(prompts.ids_BT.cpu())
        hear = _listener(streamer, on_tokens)
        decode_all = _decode_one if len(prompts.rows) == 1 else _decode_rows
        found = decode_all(target, prompts, decoding, drafts, hear)
        if streamer is not None:
            streamer.end()
    if on_statistics is not None:
        on_statistics(found.statistics)
    sequences = padded(prompts.ids_BT, found.answers, wanted.pad_id)
    if not wanted.returns_dict:
        return sequences
    return SpeculativeOutput(
        sequences=cast(torch.LongTensor, sequences), statistics=found.statistics
    )


def _check_streamer(streamer: BaseStreamer | None, prompts: Prompts) -> None:
    if streamer is not None and len(prompts.rows) > 1:
        raise ValueError(
            f"streamer is given for {len(prompts.rows)} rows, which come at unlike paces; "
            "stream one, or use on_tokens"
        )


class _Drafts(NamedTuple):
    plan: Plan | None
    drafting: DraftHead | DraftModel | None
    temperature: float

    @classmethod
    def made(
        cls,
        head: Head | None,
        draft: str | None,
        target: Target,
        tokenizer: PreTrainedTokenizerBase | None,
        decoding: Decoding,
    ) -> Self:
        drafting = drafts_with(head, target, tokenizer)
        plan = plan_of(draft, drafting)
        return cls(plan, drafting, temperature_of(plan, decoding))


class _Found(NamedTuple):
    answers: list[list[int]]
    statistics: Statistics


def _decoding(wanted: Wanted, rule: str | None, seed: int | None) -> Decoding:
    if seed is None:  # greedy text has no use for one, and must not move torch's generator
        seed = 0 if wanted.sampling.is_greedy else int(torch.randint(1 << 62, ()))
    return Decoding(
        max_new_tokens=wanted.max_new_tokens,
        sampling=wanted.sampling,
        rule=rule,
        seed=seed,
        stop_strings=wanted.stop_strings,
        prefill_chunk=wanted.prefill_chunk,
    )


def _warn_of_limit(target: Target, prompts: Prompts, decoding: Decoding) -> None:
    limit, longest = position_limit(target), max(map(len, prompts.rows))
    if longest + decoding.max_new_tokens > limit:
        warnings.warn(
            f"a prompt of {longest} tokens and {decoding.max_new_tokens} new ones go beyond the "
            f"{limit} positions of the model; its answer ends there",
            stacklevel=3,
        )


def _listener(streamer: BaseStreamer | None, on_tokens: OnTokens | None) -> OnTokens | None:
    if streamer is None and on_tokens is None:
        return None

    def hear(row: int, tokens: Sequence[int]) -> None:
        if streamer is not None:
            streamer.put(torch.tensor([tokens]))  # a block at once, as assisted generation puts it
        if on_tokens is not None:
            on_tokens(row, tokens)

    return hear


def _decode_one(
    target: Target, prompts: Prompts, decoding: Decoding, drafts: _Drafts, hear: OnTokens | None
) -> _Found:
    drafter = drafter_of(*drafts)
    found = decode(
        target,
        prompts.rows[0],
        drafter,
        decoding,
        row=prompts.keys[0],
        on_tokens=None if hear is None else lambda tokens, _: hear(0, tokens),
    )
    row = RowStatistics(new_tokens=len(found.ids), rounds=tuple(found.rounds), finish=found.finish)
    seconds = found.seconds
    statistics = Statistics(
        rows=(row,),
        target_calls=len(found.rounds),
        prefill_seconds=seconds.prefill,
        draft_seconds=seconds.draft,
        verify_seconds=seconds.verify,
        other_seconds=seconds.other,
    )
    return _Found([found.ids], statistics)


def _decode_rows(
    target: Target, prompts: Prompts, decoding: Decoding, drafts: _Drafts, hear: OnTokens | None
) -> _Found:
    num_rows = len(prompts.rows)
    run = RowsRun(target, num_rows, rows_drafter_of(*drafts, num_rows), decoding)
    run.on_tokens = None if hear is None else lambda row, tokens, _: hear(row, tokens)
    rows = run.decode(prompts.rows, prompts.keys)
    found = [
        RowStatistics(new_tokens=len(row.new_ids), rounds=tuple(row.rounds), finish=row.finish)
        for row in rows
    ]
    statistics = Statistics(
        rows=tuple(found),
        target_calls=len(run.times),
        prefill_seconds=sum(row.seconds for row in rows),
        draft_seconds=sum(one.draft for one in run.times),
        verify_seconds=sum(one.verify for one in run.times),
        other_seconds=sum(one.other for one in run.times),
    )
    return _Found([row.new_ids for row in rows], statistics)
