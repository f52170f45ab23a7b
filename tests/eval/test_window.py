"""Self-speculation with sinks and a window, against a pass that hides the rest by its mask."""

import copy

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from outrider.data.cache import RowCache, query_positions
from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.window import WindowDrafter
from outrider.eval.noise import KeyedNoise
from outrider.eval.trees.loop_plans import WindowPlan

PROMPT = [5, 9, 14, 22, 8, 31, 40, 17, 50, 12, 33]


@pytest.fixture(scope="module")
def target(tiny_target):
    return Target.from_model(copy.deepcopy(tiny_target.model).double())


def hidden_logits(target, ids, drafts, plan):
    """After the last draft: a full pass over the text, then each newer token behind a mask.

    Slots lie in the order of the text here, and nothing is copied.
    """
    cache, known = RowCache(1), len(ids) - 1
    target.run(torch.tensor([ids[:-1]]), cache=cache)
    cache.advance(known)
    for step, token in enumerate([ids[-1], *drafts]):
        slots = torch.arange(known + step + 1)
        mask = (slots < plan.sinks) | (slots >= known - plan.window)
        captured = target.run(
            torch.tensor([[token]]),
            position_ids=torch.tensor([[known + step]]),
            attention_mask=mask[None, None, None],
            cache=cache,
        )
        cache.advance(1)
    return target.logits(captured.last_BTH[0, -1])


def started(target, plan, ids, temperature=0.0):
    """A drafter with the loop's cache, and a way to go on by tokens."""
    cache = RowCache(1)
    drafter = WindowDrafter(target, plan, temperature=temperature)
    drafter.share(cache)

    def verify(new):
        lengths_B = cache.lengths_B
        num_new = len(new)
        mask = torch.ones(1, 1, num_new, int(lengths_B[0]) + num_new, dtype=torch.bool)
        captured = target.run(
            torch.tensor([new]),
            position_ids=query_positions(lengths_B, num_new),
            attention_mask=mask.tril(int(lengths_B[0])),
            cache=cache,
        )
        cache.advance(num_new)
        return captured

    drafter.start(ids, verify(ids[:-1]))
    return drafter, verify


@pytest.mark.parametrize(
    "plan", [WindowPlan(3, 4, 2), WindowPlan(3, 5, 0), WindowPlan(2, 1, 1), WindowPlan(4, 90, 3)]
)
def test_drafts_are_those_of_a_pass_that_hides_the_middle(target, plan):
    for size in (2, 3, 6, 11):
        ids = PROMPT[:size]
        drafter, verify = started(target, plan, ids)
        for new in ([44], [3, 27, 19, 6], [21, 8], [30, 30, 30, 41, 7], [9]):
            noise = KeyedNoise(0, 0, len(ids))
            tokens = drafter.propose(99, noise).tree.tokens
            assert tokens[0] == ids[-1]
            assert len(tokens) == 1 + plan.length
            for step in range(plan.length):
                wanted = hidden_logits(target, ids, tokens[1 : step + 1], plan)
                assert tokens[step + 1] == int(wanted.argmax())
            # Asking twice changes nothing.
            assert drafter.propose(99, noise).tree.tokens == tokens
            drafter.accept(new, verify([ids[-1], *new[:-1]]))
            ids = [*ids, *new]


def test_drawn_drafts_carry_the_law_that_they_were_drawn_from(target):
    plan, seen = WindowPlan(3, 4, 2), set()
    for row in range(4):
        drafter, _ = started(target, plan, PROMPT, temperature=0.7)
        draft = drafter.propose(99, KeyedNoise(0, row, len(PROMPT)))
        tokens = draft.tree.tokens
        seen.add(tokens)
        for step in range(plan.length):
            wanted = hidden_logits(target, PROMPT, tokens[1 : step + 1], plan)
            law = draft.law(step + 1)
            torch.testing.assert_close(law.double(), (wanted / 0.7).softmax(-1), atol=1e-5, rtol=0)
    assert len(seen) > 1


def test_a_window_over_the_whole_text_is_always_right(target):
    decoding = Decoding(max_new_tokens=31, ignore_eos=True)
    for plan in (WindowPlan(4, 200), WindowPlan(4, 200, 0), WindowPlan(4, 1, 200)):
        found = decode(target, PROMPT, WindowDrafter(target, plan), decoding)
        assert [one.accepted for one in found.rounds] == [4] * 6


def test_a_small_window_is_sometimes_wrong(target):
    decoding = Decoding(max_new_tokens=90, ignore_eos=True)
    found = decode(target, PROMPT, WindowDrafter(target, WindowPlan(4, 2, 1)), decoding)
    accepted = [one.accepted for one in found.rounds]
    assert min(accepted) < 4
    assert max(accepted) > 0


def test_rejection_of_drawn_windows_ends_where_it_must(target):
    sampling = Sampling(temperature=0.9)
    decoding = Decoding(max_new_tokens=40, sampling=sampling, ignore_eos=True)
    drafter = WindowDrafter(target, WindowPlan(3, 200), temperature=0.9)
    found = decode(target, PROMPT, drafter, decoding)
    # q is p up to rounding: nothing is ever rejected.
    assert all(one.accepted == one.drafted for one in found.rounds[:-1])
    assert len(found.ids) == 40


def test_only_what_was_verified_since_is_copied(target, monkeypatch):
    copied, copy_slots = [], RowCache.copy_slots

    def noted(self, row, slots, other, other_row, places):
        copied.append(list(places))
        copy_slots(self, row, slots, other, other_row, places)

    monkeypatch.setattr(RowCache, "copy_slots", noted)
    drafter = WindowDrafter(target, WindowPlan(3, 4, 2))
    found = decode(target, PROMPT, drafter, Decoding(max_new_tokens=20, ignore_eos=True))
    assert copied[0] == [0, 1, *range(len(PROMPT) - 4, len(PROMPT))]
    end = len(PROMPT)
    for places, one in zip(copied[1:], found.rounds, strict=False):
        end += one.emitted
        assert places == list(range(max(end - one.emitted, end - 4), end))


def test_targets_with_windows_of_their_own_are_refused():
    config = MistralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=6,
        eos_token_id=3,
    )
    torch.manual_seed(0)
    sliding = Target.from_model(MistralForCausalLM(config))
    with pytest.raises(ValueError, match=r"has layers with a sliding window; window:3,4,2 drafts"):
        WindowDrafter(sliding, WindowPlan(3, 4, 2))
    config.sliding_window = None
    WindowDrafter(Target.from_model(MistralForCausalLM(config)), WindowPlan(3, 4, 2))


def test_slots_are_copied_without_gaps_or_not_at_all():
    def filled(length, seed):
        torch.manual_seed(seed)
        cache = RowCache(1)
        cache.update(torch.randn(1, 2, length, 3), torch.randn(1, 2, length, 3), 0)
        cache.advance(length)
        return cache

    source, into = filled(9, 0), filled(3, 1)
    old = into.keys[0].clone()
    into.copy_slots(0, [1, 4, 3], source, 0, [8, 2, 5])
    assert into.lengths_B.tolist() == [5]
    for slot, place in ((1, 8), (4, 2), (3, 5)):
        assert torch.equal(into.keys[0][0, :, slot], source.keys[0][0, :, place])
        assert torch.equal(into.values[0][0, :, slot], source.values[0][0, :, place])
    for slot in (0, 2):
        assert torch.equal(into.keys[0][0, :, slot], old[0, :, slot])
    with pytest.raises(ValueError, match="without a gap"):
        into.copy_slots(0, [7], source, 0, [1])
