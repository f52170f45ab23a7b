"""Case C17 in batches: rows of unlike lengths, each drafted for, write what plain decoding writes.

And the faults that such loops were shipped with, each planted and seen.
"""

import copy
from dataclasses import replace

import pytest
import torch

from outrider.data.cache import RowCache
from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters import Draft
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.drafters.replay import Uniform
from outrider.eval.link import tables
from outrider.eval.rows import EachRow
from outrider.eval.rows import head as head_module
from outrider.eval.rows import loop as loop_module
from outrider.eval.rows.head import HeadRows
from outrider.eval.rows.loop import RowsRun, decode_rows
from outrider.eval.trees.plans import plan_named
from outrider.eval.trees.tree import chain
from outrider.heads import EagleHead

PROMPTS = [[5, 9, 14, 22], [41, 7, 7, 30, 12, 55, 8], [60], [33, 2, 11, 19, 19, 4]]
VOCAB = 61
SHAPES = ["chain", "wrong", "mixed", "uneven", "forks"]
HEADS = ["chain:4", "tree:3,3,8"]
PLAIN = Decoding(max_new_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tiny_target):
    """Double precision: no near tie can hide or excuse a difference."""
    return Target.from_model(copy.deepcopy(tiny_target.model).double())


@pytest.fixture(scope="module")
def head(tiny_head, target):
    return copy.deepcopy(tiny_head).double().attach(tables(target)).eval()


def whole_passes(target, prompt, count, penalty=1.0):
    """The slowest reference: a pass over all tokens for every new one."""
    ids = list(prompt)
    for _ in range(count):
        logits = target.logits(target.run(torch.tensor([ids])).last_BTH[0, -1])
        for token in set(ids):
            logits[token] = (
                logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
            )
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def texts(target):
    return [whole_passes(target, prompt, 30) for prompt in PROMPTS]


def drafters(known, head, texts, prompts=PROMPTS):
    """One of each kind, by name."""
    rows = [[*prompt, *text, *range(9)] for prompt, text in zip(prompts, texts, strict=True)]
    found = {shape: known(rows, 4, shape) for shape in SHAPES}
    found["uniform"] = EachRow(lambda: Uniform(VOCAB, 3))
    for plan in HEADS:
        found[plan] = HeadRows(head, plan_named(plan), len(prompts))
        found[f"alone {plan}"] = EachRow(lambda plan=plan: HeadDrafter(head, plan_named(plan)))
    return found


NAMES = [*SHAPES, "uniform", *HEADS, *(f"alone {plan}" for plan in HEADS)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 2, 30])
def test_c17_greedy_rows_equal_plain_decoding(target, head, known, texts, name, count):
    drafter = drafters(known, head, texts)[name]
    decoding = replace(PLAIN, max_new_tokens=count)
    run = decode_rows(target, PROMPTS, drafter, decoding, batch_size=4)
    assert [row.new_ids for row in run.done] == [text[:count] for text in texts]
    assert {row.finish for row in run.done} == {"length"}
    for row in run.done:
        assert len(row.new_ids) == 1 + sum(one.emitted for one in row.rounds)


def test_c17_perfect_drafts_stand_and_wrong_ones_fall_in_every_row(target, head, known, texts):
    made = drafters(known, head, texts)
    decoding = replace(PLAIN, max_new_tokens=26)
    run = decode_rows(target, PROMPTS, made["chain"], decoding, batch_size=4)
    for row in run.done:
        assert [(one.accepted, one.emitted) for one in row.rounds] == [(4, 5)] * 5
    run = decode_rows(target, PROMPTS, made["wrong"], decoding, batch_size=4)
    for row in run.done:
        assert [(one.accepted, one.emitted) for one in row.rounds] == [(0, 1)] * 25


@pytest.mark.parametrize("name", NAMES)
def test_c17_a_prompt_one_token_short_of_the_limit(target, head, known, texts, name):
    limit = target.config.max_position_embeddings
    generator = torch.Generator().manual_seed(3)
    long = torch.randint(4, VOCAB, (limit - 1,), generator=generator).tolist()
    prompts = [PROMPTS[0], long, long[:-2]]
    wanted = [texts[0][:12], whole_passes(target, long, 1), whole_passes(target, long[:-2], 3)]
    drafter = drafters(known, head, wanted, prompts)[name]
    decoding = replace(PLAIN, max_new_tokens=12)
    run = decode_rows(target, prompts, drafter, decoding, batch_size=3)
    assert [row.new_ids for row in run.done] == wanted


@pytest.mark.parametrize("name", NAMES)
def test_c17_end_tokens_inside_accepted_blocks(target, head, known, texts, name):
    for index in (3, 8):
        ending = replace(target, eos_ids=(texts[0][index], texts[1][index + 1]))
        wanted = [
            text[: min((i for i, one in enumerate(text) if one in ending.eos_ids), default=29) + 1]
            for text in texts
        ]
        drafter = drafters(known, head, texts)[name]
        decoding = replace(PLAIN, ignore_eos=False)
        run = decode_rows(ending, PROMPTS, drafter, decoding, batch_size=4)
        assert [row.new_ids for row in run.done] == wanted
        assert any(row.finish == "stop" for row in run.done)


@pytest.mark.parametrize("name", NAMES)
def test_c17_a_repetition_penalty_sees_each_rows_path(target, head, known, texts, name):
    wanted = [whole_passes(target, prompt, 20, 1.3) for prompt in PROMPTS]
    assert sum(a[:20] != b for a, b in zip(texts, wanted, strict=True)) >= 2
    sampling = Sampling(repetition_penalty=1.3)
    decoding = replace(PLAIN, max_new_tokens=20, sampling=sampling)
    drafter = drafters(known, head, wanted)[name]
    run = decode_rows(target, PROMPTS, drafter, decoding, batch_size=4)
    assert [row.new_ids for row in run.done] == wanted


SAMPLINGS = [
    Sampling(temperature=0.6, top_k=20, top_p=0.9, min_p=0.02),
    Sampling(
        temperature=1.2,
        repetition_penalty=1.2,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logit_bias=((11, 2.0),),
        bad_words=("7,7", "30"),
    ),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rule", ["match", "point_mass"])
def test_sampled_rows_are_those_of_any_batch_and_order(target, head, rule, sampling):
    """Of drafts too: a point mass's text depends on which drafts it saw."""
    decoding = Decoding(max_new_tokens=16, sampling=sampling, rule=rule, seed=4, ignore_eos=True)
    for plan in map(plan_named, HEADS):
        keys = [900 + place for place in range(4)]
        run = RowsRun(target, 4, HeadRows(head, plan, 4), decoding)
        together = [row.new_ids for row in run.decode(PROMPTS, keys)]
        for prompt, key, text in zip(PROMPTS, keys, together, strict=True):
            assert decode(target, prompt, HeadDrafter(head, plan), decoding, row=key).ids == text
        run = RowsRun(target, 3, HeadRows(head, plan, 3), decoding)
        again = [row.new_ids for row in run.decode(PROMPTS[::-1], keys[::-1])]
        assert again[::-1] == together


def test_drawn_drafts_do_not_depend_on_a_neighbour_at_its_limit(target, head):
    """A row with no room for long drafts must not shorten those of others: their text hangs on
    them under rejection."""
    limit = target.config.max_position_embeddings
    decoding = Decoding(
        max_new_tokens=30, sampling=Sampling(temperature=1.0), rule="rejection", ignore_eos=True
    )
    plan = plan_named("chain:4")
    prompts = [PROMPTS[0], [5 + place % 50 for place in range(limit - 4)]]
    run = RowsRun(target, 2, HeadRows(head, plan, 2, temperature=1.0), decoding)
    together = run.decode(prompts)
    for row in together:
        single = HeadDrafter(head, plan, temperature=1.0)
        alone = decode(target, prompts[row.number], single, decoding, row=row.number)
        assert row.new_ids == alone.ids
        assert [one.drafted for one in row.rounds] == [one.drafted for one in alone.rounds]


def test_three_runs_in_one_process_give_identical_numbers(target, head):
    prefills, found = {}, []
    for _ in range(3):
        drafter = HeadRows(head, plan_named("tree:3,3,8"), 2)
        run = decode_rows(target, PROMPTS, drafter, PLAIN, batch_size=2, prefills=prefills)
        found.append([(row.new_ids, row.rounds) for row in run.done])
    assert found[0] == found[1] == found[2]
    assert any(one.accepted for _, rounds in found[0] for one in rounds)


def test_rows_are_streamed_as_they_come(target, head, texts):
    heard = {number: [] for number in range(4)}
    run = RowsRun(target, 2, HeadRows(head, plan_named("chain:4"), 2), PLAIN)
    run.on_tokens = lambda number, ids, is_drafted: heard[number].append((list(ids), is_drafted))
    rows = run.decode(PROMPTS)
    for row in rows:
        blocks = [ids for ids, _ in heard[row.number]]
        assert [len(ids) for ids in blocks] == [1, *(one.emitted for one in row.rounds)]
        assert [token for ids in blocks for token in ids] == texts[row.number]
        kept = sum(min(one.accepted, one.emitted) for one in row.rounds)
        assert sum(sum(flags) for _, flags in heard[row.number]) == kept


# Planted faults, each of which someone shipped: the text changes or an assertion trips.


def texts_of(target, drafter, decoding=PLAIN):
    return [
        row.new_ids for row in decode_rows(target, PROMPTS, drafter, decoding, batch_size=4).done
    ]


def test_padding_that_could_be_accepted_is_noticed(target, head, known, texts, monkeypatch):
    """Medusa: a pad candidate is token 0, and stands where the likeliest token is 0."""
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        model.lm_head.weight[0] = 3 * model.lm_head.weight.sum(0)  # often the likeliest
    often = Target.from_model(model)
    wanted = [whole_passes(often, prompt, 30) for prompt in PROMPTS]
    assert sum(text.count(0) for text in wanted) > 20
    uneven = drafters(known, head, wanted)["uneven"]
    assert texts_of(often, uneven) == wanted
    propose = EachRow.propose

    def padded(self, max_depths, noises):
        drafts = propose(self, max_depths, noises)
        longest = max(len(draft.tree) for draft in drafts)
        return [
            Draft(chain(one.tokens[0], [*one.tokens[1:], *[0] * (longest - len(one))]))
            for one in (draft.tree for draft in drafts)
        ]

    # As such loops have it: drafts of padding that are verified as if they had been run.
    verify = RowsRun._verify

    def unseen(self, trees):
        captured, logits = verify(self, trees)
        for index, tree in enumerate(trees):
            pads = len(tree.tokens) - len("".join(map(chr, tree.tokens[1:])).rstrip("\0")) - 1
            if pads:
                logits[index, len(tree) - pads :] = logits[index, len(tree) - pads - 1]
        return captured, logits

    monkeypatch.setattr(EachRow, "propose", padded)
    monkeypatch.setattr(RowsRun, "_verify", unseen)
    assert texts_of(often, uneven) != wanted


def test_an_uncompacted_row_is_noticed(target, head, known, texts, monkeypatch):
    """SGLang #15360: a scattered path's keys left where they were."""

    def first_slots(self, row, start, keep):
        lengths = self.lengths_B.tolist()
        lengths[row] = start + len(keep)
        self.truncate(lengths)

    monkeypatch.setattr(RowCache, "compact", first_slots)
    assert texts_of(target, drafters(known, head, texts)["forks"]) != texts


@pytest.mark.parametrize("fault", ["mask", "positions"])
def test_a_mask_or_positions_of_the_longest_row_are_noticed(
    target, head, known, texts, monkeypatch, fault
):
    """eBay/spec_dec: rows that accept unlike numbers lose step in masks or position ids."""
    if fault == "positions":
        real = loop_module.query_positions
        monkeypatch.setattr(
            loop_module,
            "query_positions",
            lambda lengths, *more: real(lengths.max().expand_as(lengths), *more),
        )
    else:
        masks = loop_module.attention_masks
        monkeypatch.setattr(
            loop_module,
            "attention_masks",
            lambda config, lengths, *more: masks(config, lengths.max().expand_as(lengths), *more),
        )
    assert texts_of(target, drafters(known, head, texts)["mixed"]) != texts


@pytest.mark.parametrize("name", ["mixed", "uneven"])
def test_keys_of_rejected_drafts_that_stay_are_noticed(
    target, head, known, texts, monkeypatch, name
):
    """EAGLE #336, as users feared."""
    monkeypatch.setattr(RowCache, "truncate", lambda self, lengths: None)
    with pytest.raises(AssertionError, match="in the cache"):
        texts_of(target, drafters(known, head, texts)[name])


def test_entries_of_rejected_drafts_that_stay_in_the_head_are_noticed(target, head, monkeypatch):
    monkeypatch.setattr(head_module.RowHeadCache, "set_lengths", lambda self, lengths: None)
    drafter = HeadRows(head, plan_named("chain:4"), 4)
    with pytest.raises(AssertionError):
        texts_of(target, drafter)


def test_penalties_that_do_not_see_the_drafted_path_are_noticed(
    target, head, known, texts, monkeypatch
):
    """vLLM #18902: penalties of the tokens before the draft alone."""
    sampling = Sampling(repetition_penalty=1.3)
    decoding = replace(PLAIN, max_new_tokens=20, sampling=sampling)
    wanted = [whole_passes(target, prompt, 20, 1.3) for prompt in PROMPTS]
    law_at = loop_module.law_at

    def at_root(logits_V, sampling, ids, num_prompt, tree, node):
        return law_at(logits_V, sampling, ids, num_prompt, tree, 0)

    monkeypatch.setattr(loop_module, "law_at", at_root)
    assert texts_of(target, drafters(known, head, wanted)["chain"], decoding) != wanted


def test_a_bonus_from_raw_logits_is_noticed(target, head, monkeypatch):
    """EAGLE, Spec-Bench: the last token of a round drawn without the temperature."""
    sampling = Sampling(temperature=0.5)
    decoding = replace(PLAIN, max_new_tokens=20, sampling=sampling, rule="match")
    wanted = texts_of(target, None, decoding)
    assert texts_of(target, HeadRows(head, plan_named("chain:2"), 4), decoding) == wanted
    law_at = loop_module.law_at

    def raw(logits_V, sampling, ids, num_prompt, tree, node):
        leaf = not tree.children[node] and len(tree) > 1
        chosen = Sampling(temperature=1.0) if leaf else sampling
        return law_at(logits_V, chosen, ids, num_prompt, tree, node)

    monkeypatch.setattr(loop_module, "law_at", raw)
    assert texts_of(target, HeadRows(head, plan_named("chain:2"), 4), decoding) != wanted


def rounds_of(target, drafter):
    run = decode_rows(target, PROMPTS, drafter, PLAIN, batch_size=4)
    return [row.new_ids for row in run.done], [row.rounds for row in run.done]


@pytest.mark.parametrize("fault", ["states", "parents", "positions"])
def test_faults_of_the_draft_change_what_is_accepted_and_no_text(
    target, head, texts, monkeypatch, fault
):
    """ik_llama.cpp #2296, SGLang #8409: seeded one position early, or from the wrong parent."""
    plan = plan_named("tree:3,3,8")
    _, right = rounds_of(target, HeadRows(head, plan, 4))
    if fault == "states":
        accept = HeadRows.accept

        def early(self, tokens, captured, kept):
            accept(self, tokens, captured, [[0] * len(nodes) for nodes in kept])

        monkeypatch.setattr(HeadRows, "accept", early)
    elif fault == "parents":
        mask = head_module._tree_mask
        monkeypatch.setattr(head_module, "_tree_mask", lambda base, seen: mask(base, seen.flip(1)))
    else:
        step = type(head).step

        def shifted(self, feature, ids, position, *more):
            return step(self, feature, ids, (position - 3).clamp(min=0), *more)

        monkeypatch.setattr(type(head), "step", shifted)
    found, wrong = rounds_of(target, HeadRows(head, plan, 4))
    assert found == texts
    assert wrong != right


def test_a_slot_that_keeps_the_last_rows_entries_is_noticed(target, head, monkeypatch):
    """vLLM #41838's kind: what a row before left changes what is drafted for later ones."""
    torch.manual_seed(5)
    untrained = EagleHead(head.config, head.draft_ids_W).double().attach(tables(target)).eval()
    verify, trees = RowsRun._verify, []

    def noted(self, drafted):
        trees.extend(drafted)
        return verify(self, drafted)

    def drafts():
        trees.clear()
        drafter = HeadRows(untrained, plan_named("chain:4"), 1)
        decode_rows(target, PROMPTS, drafter, PLAIN, batch_size=1)
        return list(trees)

    monkeypatch.setattr(RowsRun, "_verify", noted)
    right = drafts()
    assert drafts() == right
    copy_row = head_module.RowHeadCache.replace_row

    def late(self, row, other):
        if not self.length:
            copy_row(self, row, other)
        else:  # the numbers are the new row's, the entries the old one's
            lengths = self.lengths_B.clone()
            lengths[row] = other.lengths_B[0]
            self.set_lengths(lengths)

    monkeypatch.setattr(head_module.RowHeadCache, "replace_row", late)
    assert drafts() != right
