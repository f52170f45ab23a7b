"""The demo's prompts: distinct, balanced, reproducible, and nothing of training in the held-out."""

import random
import re
from collections import Counter

import pytest

from outrider.data.demo.conversations import demo_requests
from outrider.data.demo.prompts import KINDS, Source, Stock, new_text, prompts, stock

NUM = {"train": 500, "heldout": 24}


@pytest.fixture(scope="module")
def made():
    return {split: prompts(split, num) for split, num in NUM.items()}


def text(prompt):
    (message,) = prompt.messages
    assert message["role"] == "user"
    return message["content"]


def test_no_prompt_occurs_twice(made):
    texts = [text(prompt) for split in NUM for prompt in made[split]]
    ids = [prompt.id for split in NUM for prompt in made[split]]
    assert len(set(texts)) == len(set(ids)) == len(texts) == len(KINDS) * sum(NUM.values())


def test_kinds_are_balanced_in_every_stretch(made):
    for split in NUM:
        for start in range(0, len(made[split]), len(KINDS)):
            assert [p.kind for p in made[split][start : start + len(KINDS)]] == list(KINDS)


def test_there_are_templates_enough_and_all_are_used(made):
    for split, least in {"train": 10, "heldout": 5}.items():
        for kind in KINDS:
            counts = Counter(p.template for p in made[split] if p.kind == kind)
            assert len(counts) == len(stock(kind, split).templates) >= least
            assert min(counts.values()) >= NUM[split] // len(stock(kind, split).templates) // 2


def test_heldout_shares_no_template_passage_or_function_with_training():
    checked = 0
    for kind in KINDS:
        train, heldout = stock(kind, "train"), stock(kind, "heldout")
        assert not set(train.templates) & set(heldout.templates)
        bodies = {source.text for source in train.sources} - {""}
        assert not bodies & {source.text for source in heldout.sources}
        checked += len(bodies)
    assert checked > 40


def test_every_slot_is_filled_and_the_language_is_clean(made):
    for split in NUM:
        for prompt in made[split]:
            content = text(prompt)
            assert not re.search(r"<\w+>", content), content
            assert not re.search(r"\b[Aa] [aeiou](?!ne\b)", content), content
            assert content == content.strip()
            assert content.isascii()
            assert 8 <= len(content.split()) <= 80, content


def test_prompts_are_a_function_of_the_seed_and_longer_lists_start_alike(made):
    assert prompts("train", 40) == made["train"][: 40 * len(KINDS)]
    assert prompts("train", 40, seed=1) != prompts("train", 40, seed=0)
    assert len(prompts("train", 900)) == 5400


def test_a_slot_keeps_its_value_and_numbered_slots_differ(made):
    seen = 0
    for prompt in made["train"]:
        match = re.search(r"Then (\w+) gives \d+ of them to (\w+)\..*does (\w+) have", text(prompt))
        if match:
            assert match.group(1) == match.group(3) != match.group(2)
            seen += 1
    assert seen > 10


def test_training_alternates_temperatures_and_heldout_has_both():
    train = demo_requests("train", 10)
    assert Counter((r.extra["kind"], r.sampling.temperature) for r in train) == {
        (kind, temperature): 5 for kind in KINDS for temperature in (0.0, 1.0)
    }
    heldout = demo_requests("heldout", 3)
    by_prompt = Counter(r.messages[0]["content"] for r in heldout)
    assert set(by_prompt.values()) == {2}
    assert len({r.id for r in heldout}) == len(heldout) == 36


def test_messages():
    with pytest.raises(ValueError, match="split is 'test'; choose one of train, heldout"):
        prompts("test", 1)
    one = Stock(["Hello."], [Source("", [""])])
    with pytest.raises(ValueError, match="give 1 distinct prompts of a kind; ask for fewer"):
        new_text(one, 0, random.Random(0), {"Hello."})
