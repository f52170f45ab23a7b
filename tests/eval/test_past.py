"""Suffix drafts over past answers, against counts made anew from the texts that should be kept."""

import random

import pytest

from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.past import LEAST_CHANCE, Counts, PastTexts
from outrider.eval.drafters.suffix import SuffixDrafter
from outrider.eval.trees.plans import SuffixPlan

PROMPTS = ([5, 9, 14, 22], [41, 7, 30, 12], [5, 9, 14, 22])


def counted(texts, match):
    """n-gram -> token -> times, place by place."""
    found = {}
    for text in texts:
        for end in range(1, len(text)):
            for size in range(1, min(match, end) + 1):
                after = found.setdefault(tuple(text[end - size : end]), {})
                after[text[end]] = after.get(text[end], 0) + 1
    return found


def held(counts):
    return {
        gram: {token: one.count for token, one in after.items()}
        for gram, after in counts._after.items()
    }


def test_the_store_holds_the_latest_texts_and_forgets_the_rest():
    rng = random.Random(0)
    for match, room in ((3, 40), (8, 25), (1, 5)):
        store, texts = PastTexts(match, room), []
        for _ in range(60):
            text = [rng.randrange(5) for _ in range(rng.randrange(0, 15))]
            store.add(text)
            texts.append(text[-room:])
            while sum(map(len, texts)) > room:
                texts.pop(0)
            assert store.num_tokens == sum(map(len, texts)) <= room
            assert held(store.counts) == counted(texts, match)
            assert len(store.counts) <= room * match


def test_a_text_longer_than_the_room_leaves_its_end():
    store = PastTexts(3, 6)
    store.add(list(range(100)))
    assert store.num_tokens == 6
    assert store.counts.guess([95], 9).tokens == [96, 97, 98, 99]
    assert store.counts.guess([50], 9).tokens == []


def test_a_guess_follows_the_counts_and_says_what_it_expects():
    counts, text = Counts(2), [1, 2, 3, 1, 2, 4, 1, 2, 3, 5]
    for end in range(1, len(text)):
        counts.add(text[:end], text[end])
    guess = counts.guess([9, 1, 2], 2)
    # After (1, 2) came 3 twice and 4 once; after (2, 3) came 1 and then, later, 5.
    assert guess.tokens == [3, 5]
    assert guess.matched == 2
    assert guess.score == pytest.approx(2 / 3 + 2 / 3 / 2)
    assert counts.guess([7], 5) == ([], 0, 0.0)
    assert LEAST_CHANCE == 0.1


def test_a_second_answer_is_drafted_from_the_first(tiny_target):
    drafter = SuffixDrafter(SuffixPlan(6, 4), past=500)
    alone = SuffixDrafter(SuffixPlan(6, 4))
    decoding = Decoding(max_new_tokens=30, ignore_eos=True)
    rounds = []
    for prompt in PROMPTS:
        found, other = (decode(tiny_target, prompt, one, decoding) for one in (drafter, alone))
        assert found.ids == other.ids
        rounds.append((len(found.rounds), len(other.rounds)))
    assert rounds[0][0] == rounds[0][1]
    assert rounds[2][0] < rounds[2][1]


def test_the_store_holds_whole_answers_and_no_prompts(tiny_target):
    drafter = SuffixDrafter(SuffixPlan(6, 4), past=500)
    answers = []
    for prompt in PROMPTS:
        for count in (1, 2, 17):
            decoding = Decoding(max_new_tokens=count, ignore_eos=True)
            found = decode(tiny_target, prompt, drafter, decoding)
            if found.rounds:  # an answer of one token follows nothing and is followed by nothing
                answers.append(found.ids)
    assert list(drafter._past._texts) == answers
