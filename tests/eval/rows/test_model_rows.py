"""A draft model for many rows drafts what it drafts for each alone, and keeps what stands."""

import copy
from itertools import pairwise

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from outrider.data.cache import RowCache
from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.model import ModelDrafter, as_draft_model, first_layers
from outrider.eval.rows import model as model_module
from outrider.eval.rows.loop import RowsRun, decode_rows
from outrider.eval.rows.model import ModelRows
from outrider.eval.trees.plans import ChainPlan

PROMPTS = [[5, 9, 14, 22], [41, 7, 7, 30, 12, 55, 8], [60], [33, 2, 11, 19, 19, 4]]
PLAN = ChainPlan(4)


@pytest.fixture(scope="module")
def target(tiny_target):
    return Target.from_model(copy.deepcopy(tiny_target.model).double())


@pytest.fixture(scope="module")
def draft(target):
    return as_draft_model(first_layers(target, 4), target)


DECODINGS = {
    "greedy": Decoding(max_new_tokens=24, ignore_eos=True),
    "rejection": Decoding(max_new_tokens=24, sampling=Sampling(temperature=1.0), seed=2),
    "match": Decoding(max_new_tokens=24, sampling=Sampling(temperature=0.7), rule="match"),
}


@pytest.mark.parametrize("name", DECODINGS)
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_rounds_are_those_of_each_row_alone(target, draft, name, batch_size):
    decoding = DECODINGS[name]
    temperature = decoding.sampling.temperature if name == "rejection" else 0.0
    drafter = ModelRows(draft, PLAN, batch_size, temperature=temperature)
    run = decode_rows(target, PROMPTS, drafter, decoding, batch_size=batch_size)
    for row, prompt in zip(run.done, PROMPTS, strict=True):
        single = ModelDrafter(draft, PLAN, temperature=temperature)
        alone = decode(target, prompt, single, decoding, row=row.number)
        assert row.new_ids == alone.ids
        assert row.rounds == alone.rounds
    assert any(one.accepted for row in run.done for one in row.rounds)


def test_drafts_that_stand_are_not_run_again(target, draft, monkeypatch):
    ran, run = [], model_module._run
    monkeypatch.setattr(
        model_module,
        "_run",
        lambda draft, cache, fed: ran.append([len(ids) for ids in fed]) or run(draft, cache, fed),
    )
    drafter = ModelRows(draft, PLAN, 1)
    (row,) = decode_rows(target, PROMPTS[3:], drafter, DECODINGS["greedy"], batch_size=1).done
    firsts = [counts[0] for counts in ran[1::4]]
    # The token after the drafts that stand, and the last of them where all stood: it was not run.
    assert firsts[0] == 1
    wanted = [2 if one.accepted == 4 else 1 for one in row.rounds[:-1]]
    assert firsts[1:] == wanted
    assert {1, 2} == set(wanted)


def test_keys_of_drafts_that_fell_are_noticed(target, draft, monkeypatch):
    truncate = RowCache.truncate

    def keep(self, lengths):
        if len(self.keys) == target.num_layers:
            truncate(self, lengths)

    monkeypatch.setattr(RowCache, "truncate", keep)
    drafter = ModelRows(draft, PLAN, 4)
    with pytest.raises(AssertionError, match="the draft's cache"):
        decode_rows(target, PROMPTS, drafter, DECODINGS["greedy"], batch_size=4)


def test_a_round_can_be_taken_back(target, draft):
    drafter = ModelRows(draft, PLAN, 4)
    run = RowsRun(target, 4, drafter, Decoding(max_new_tokens=40, ignore_eos=True))
    for slot, prompt in enumerate(PROMPTS):
        run.admit(slot, prompt, slot)
    run.round()
    saved, found = run.save(), []
    for _ in range(2):
        run.restore(saved)
        for _ in range(4):
            run.round()
        found.append([(row.new_ids, list(row.rounds)) for row in run.rows])
    assert found[0] == found[1]


def test_a_model_with_fewer_positions_drafts_as_long_as_it_can(target):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=20)
    short = Target.from_model(GPT2LMHeadModel(config).double())
    draft = as_draft_model(short, target)
    decoding = Decoding(max_new_tokens=30, ignore_eos=True)
    prompts = [*PROMPTS, list(range(4, 34))]
    run = decode_rows(target, prompts, ModelRows(draft, PLAN, 5), decoding, batch_size=5)
    for row, prompt in zip(run.done, prompts, strict=True):
        alone = decode(target, prompt, ModelDrafter(draft, PLAN), decoding)
        assert (row.new_ids, row.rounds) == (alone.ids, alone.rounds)
    assert {one.drafted for one in run.done[0].rounds} >= {0, 4}
    assert not any(one.drafted for one in run.done[4].rounds)


def test_lengths_of_the_drafts_cache_are_its_tokens(target, draft, monkeypatch):
    seen, truncate = [], RowCache.truncate

    def noted(self, lengths):
        truncate(self, lengths)
        if len(self.keys) == 4:
            seen.append(self.lengths_B.tolist())

    monkeypatch.setattr(RowCache, "truncate", noted)
    drafter = ModelRows(draft, PLAN, 4)
    decode_rows(target, PROMPTS, drafter, DECODINGS["greedy"], batch_size=4)
    full = [lengths for lengths in seen if len(lengths) == 4]
    assert len(full) > 4
    for one in zip(*full, strict=True):
        assert all(later > earlier for earlier, later in pairwise(one))
