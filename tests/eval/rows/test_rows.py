"""Rows decoded together write what each writes alone, whatever joins, leaves or drafts."""

from itertools import pairwise

import pytest
import torch

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.drafters.lookup import PromptLookup
from outrider.eval.link import tables
from outrider.eval.offline.texts import Text
from outrider.eval.rows import EachRow
from outrider.eval.rows.head import HeadRows
from outrider.eval.rows.loop import RowsRun, decode_rows
from outrider.eval.trees.plans import LookupPlan, StaticPlan, plan_named
from outrider.heads import EagleHead, MedusaConfig, MedusaHead

DRAFTS = ("chain:1", "chain:3", "tree:3,2,5", "tree:2,3,4")
GREEDY = Decoding(max_new_tokens=14, ignore_eos=False)
MATCH = Decoding(max_new_tokens=14, sampling=Sampling(temperature=1.0), rule="match", seed=3)


def alone(target: Target, prompts: list[list[int]], decoding: Decoding) -> list[list[int]]:
    return [decode(target, ids, None, decoding, row=i).ids for i, ids in enumerate(prompts)]


@pytest.mark.parametrize("decoding", [GREEDY, MATCH], ids=["greedy", "match"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_rows_write_what_they_write_alone(
    tiny_target: Target,
    tiny_head: EagleHead,
    greedy_texts: list[Text],
    decoding: Decoding,
    draft: str,
    batch_size: int,
) -> None:
    prompts = [text.prompt_ids for text in greedy_texts[:7]]
    drafter = HeadRows(tiny_head, plan_named(draft), batch_size)
    run = decode_rows(tiny_target, prompts, drafter, decoding, batch_size=batch_size)
    assert [row.new_ids for row in run.done] == alone(tiny_target, prompts, decoding)
    assert any(one.accepted for row in run.done for one in row.rounds)
    assert sum(time.emitted for time in run.times) == sum(len(row.new_ids) - 1 for row in run.done)


@pytest.mark.parametrize("draft", DRAFTS)
def test_rounds_are_those_of_decoding_alone(
    tiny_target: Target, tiny_head: EagleHead, greedy_texts: list[Text], draft: str
) -> None:
    """Not the text only: a wrong draft cache would leave it alone and accept other drafts."""
    prompts = [text.prompt_ids for text in greedy_texts[:6]]
    plan = plan_named(draft)
    run = decode_rows(tiny_target, prompts, HeadRows(tiny_head, plan, 4), GREEDY, batch_size=4)
    for row, ids in zip(run.done, prompts, strict=True):
        single = decode(tiny_target, ids, HeadDrafter(tiny_head, plan), GREEDY, row=row.number)
        assert [one.accepted for one in row.rounds] == [one.accepted for one in single.rounds]


def test_drawn_chains_are_those_of_decoding_alone(
    tiny_target: Target, tiny_head: EagleHead, sampled_texts: list[Text]
) -> None:
    decoding = Decoding(max_new_tokens=14, sampling=Sampling(temperature=1.0))
    prompts = [text.prompt_ids for text in sampled_texts[:6]]
    plan = plan_named("chain:3")
    drafter = HeadRows(tiny_head, plan, 4, temperature=1.0)
    run = decode_rows(tiny_target, prompts, drafter, decoding, batch_size=4)
    for row, ids in zip(run.done, prompts, strict=True):
        single = HeadDrafter(tiny_head, plan, temperature=1.0)
        found = decode(tiny_target, ids, single, decoding, row=row.number)
        assert row.new_ids == found.ids
        assert [one.accepted for one in row.rounds] == [one.accepted for one in found.rounds]


def test_heads_without_attention_and_lookup_draft_in_batches(
    tiny_target: Target, greedy_texts: list[Text]
) -> None:
    torch.manual_seed(0)
    config = MedusaConfig.from_target(tiny_target.config, tokenizer_size=61, num_draft_heads=3)
    head = MedusaHead(config).attach(tables(tiny_target)).start_from_target().eval()
    prompts = [text.prompt_ids * 2 for text in greedy_texts[:4]]
    wanted = alone(tiny_target, prompts, GREEDY)
    static = StaticPlan(((0,), (1,), (0, 0)))
    for drafter in (
        HeadRows(head, static, 3),
        EachRow(lambda: PromptLookup(LookupPlan(3, 2))),
        EachRow(),
    ):
        run = decode_rows(tiny_target, prompts, drafter, GREEDY, batch_size=3)
        assert [row.new_ids for row in run.done] == wanted


def test_a_round_can_be_taken_back(
    tiny_target: Target, tiny_head: EagleHead, greedy_texts: list[Text]
) -> None:
    drafter = HeadRows(tiny_head, plan_named("chain:2"), 3)
    run = RowsRun(tiny_target, 3, drafter, Decoding(max_new_tokens=40, ignore_eos=True))
    for slot in range(3):
        run.admit(slot, greedy_texts[slot].prompt_ids, slot)
    run.round()
    saved = run.save()
    texts: list[list[list[int]]] = []
    for draft in ("chain:2", "tree:2,2,4", "chain:2"):
        run.restore(saved)
        drafter.plan = plan_named(draft)
        for _ in range(4):
            run.round()
        texts.append([row.new_ids for row in run.rows if row])
    assert texts[0] == texts[2]
    shortest = [min(map(len, pair)) for pair in zip(texts[0], texts[1], strict=True)]
    for a, b, size in zip(texts[0], texts[1], shortest, strict=True):
        assert a[:size] == b[:size]


def test_every_timed_round_has_a_full_batch_until_idle(
    tiny_target: Target, tiny_head: EagleHead, greedy_texts: list[Text]
) -> None:
    prompts = [text.prompt_ids for text in greedy_texts[:7]]
    drafter = HeadRows(tiny_head, plan_named("chain:2"), 3)
    run = decode_rows(tiny_target, prompts, drafter, GREEDY, batch_size=3, until_idle=True)
    assert {time.rows for time in run.times} == {3}
    assert len(run.done) == 7
    whole = decode_rows(tiny_target, prompts, None, GREEDY, batch_size=3)
    sizes = [time.rows for time in whole.times]
    assert sizes[-1] < 3
    assert all(before >= after for before, after in pairwise(sizes))


def test_bad_input_is_refused(tiny_target: Target, tiny_head: EagleHead) -> None:
    with pytest.raises(ValueError, match="num_rows is 0"):
        RowsRun(tiny_target, 0)
    with pytest.raises(ValueError, match="prompt 5 has 0 tokens"):
        RowsRun(tiny_target, 1).admit(0, [], 5)
    with pytest.raises(ValueError, match=r"temperature is 1\.0 for a tree"):
        HeadRows(tiny_head, plan_named("tree:2,2,4"), 1, temperature=1.0)
    with pytest.raises(ValueError, match="write chain:LENGTH"):
        HeadRows(tiny_head, plan_named("drawn:2,2,4"), 1)
