"""Sampled decoding follows the target's exact law, judged by an e-process; planted faults do not.

The e-process is a bet against the law, fair under it: reaching 1,000 has probability at most 0.001
however long one looks (Ville).
"""

import itertools
import math
from collections import Counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.data.sampling import Sampling, Stream, process
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.link import tables
from outrider.eval.noise import KeyedNoise
from outrider.eval.rules import rule_named
from outrider.eval.trees.plans import plan_named
from outrider.heads import EagleConfig, EagleHead

VOCAB, LENGTH, PROMPT, SAMPLING = 3, 3, [1, 2], Sampling(temperature=0.8)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.2,
        eos_token_id=None,
    )
    return Target.from_model(LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def head(target):
    torch.manual_seed(1)
    config = EagleConfig.from_target(target.config, aux_layers=(0, 1, 2))
    head = EagleHead(config).attach(tables(target)).eval()
    with torch.no_grad():
        head.lm_head.weight.mul_(10)  # opinionated, and often wrong
    return head


def exact_law(target):
    law = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        last_BTH = target.run(torch.tensor([[*PROMPT, *text]])).last_BTH
        probs = process(target.logits(last_BTH[0, len(PROMPT) - 1 : -1]), SAMPLING)
        law[text] = math.prod(float(row[token]) for row, token in zip(probs, text, strict=True))
    assert sum(law.values()) == pytest.approx(1, abs=1e-5)
    return law


def is_noticed(texts, law):
    """Whether bets on the frequencies so far (Dirichlet mixture, a = 1/2) ever pay 1,000 for 1."""
    seen, log_wealth = Counter(), 0.0
    for total, text in enumerate(texts):
        log_wealth += math.log((seen[text] + 0.5) / (total + 0.5 * len(law)) / law[text])
        if log_wealth > math.log(1000):
            return True
        seen[text] += 1
    return False


def sampled(target, head, plan, rule, count):
    temperature = 0.8 if rule_named(rule).draws_drafts else 0.0
    drafter = HeadDrafter(head, plan_named(plan), temperature=temperature)
    decoding = Decoding(max_new_tokens=LENGTH, sampling=SAMPLING, rule=rule)
    accepted = drafted = 0
    for row in range(count):
        found = decode(target, PROMPT, drafter, decoding, row=row)
        accepted += sum(one.accepted for one in found.rounds)
        drafted += sum(one.drafted for one in found.rounds)
        yield tuple(found.ids)
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        ("chain:2", "rejection"),
        ("chain:2", "block"),
        ("chain:2", "k_sequential"),
        ("tree:2,2,4", "point_mass"),
        ("tree:2,2,4", "one_coin"),
    ],
)
def test_sampled_texts_follow_the_exact_law(target, head, plan, rule):
    assert not is_noticed(sampled(target, head, plan, rule, 250), exact_law(target))


def test_drafts_and_coins_from_one_stream_are_noticed(target, head, monkeypatch):
    monkeypatch.setattr(
        KeyedNoise, "draft", lambda self, depth: self._uniform(depth, Stream.ACCEPT)
    )
    assert is_noticed(sampled(target, head, "chain:2", "rejection", 1000), exact_law(target))


def test_a_loosened_threshold_is_noticed(target, head, monkeypatch):
    coin = KeyedNoise.coin
    monkeypatch.setattr(
        KeyedNoise, "coin", lambda self, depth, slot, p: coin(self, depth, slot, float(p) / 0.7)
    )
    assert is_noticed(sampled(target, head, "tree:2,2,4", "point_mass", 1000), exact_law(target))
