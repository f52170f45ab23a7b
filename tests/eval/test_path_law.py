"""The decode loop's exact law where p depends on the path: every coin and draw is a branch.

The loop runs whole, with its cache, trees and roll-backs, on a tiny model; only the noise is
replaced. Its law must be the target's up to what rounding in float32 does to the weights.
"""

import itertools
from fractions import Fraction

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.data.penalties import Prefix
from outrider.data.sampling import Sampling, process
from outrider.data.target import Target
from outrider.eval import decode as decode_module
from outrider.eval.certificate.law import Branching, distance, outcomes
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters import Draft
from outrider.eval.drafters.replay import Plain
from outrider.eval.trees.tree import Tree, chain

VOCAB, LENGTH, PROMPT = 3, 3, [2, 2]
TREE = ((1, 2, 1, 0, 2), (0, 0, 1, 1, 2))
"""Tokens and parents of the drafted nodes: [2, 2, 1]."""

SAMPLINGS = {
    "repetition": Sampling(temperature=0.8, repetition_penalty=1.8),
    "counts": Sampling(temperature=1.0, presence_penalty=0.9, frequency_penalty=0.6),
    "bad words": Sampling(temperature=1.0, bad_words=("2,1", "1,0,2", "1,1")),
    "everything": Sampling(
        temperature=1.3,
        repetition_penalty=0.7,
        frequency_penalty=-0.8,
        logit_bias=((0, 0.5),),
        bad_words=("0,0",),
        top_p=0.9,
        min_p=0.1,
        filters="joint",
    ),
}


class Fixed(Plain):
    """Drafts the same tree every round."""

    draws = False

    def propose(self, max_depth, noise):
        tokens, parents = TREE
        return Draft(Tree((self._root, *tokens), (-1, *parents)))


class Drawn(Plain):
    """A chain of two, drawn from a law of its own."""

    law_V = torch.tensor([0.5, 0.125, 0.375])

    def propose(self, max_depth, noise):
        tokens = [noise.draw(depth, self.law_V) for depth in range(2)]
        return Draft(chain(self._root, tokens), lambda node: self.law_V)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
        eos_token_id=None,
    )
    return Target.from_model(LlamaForCausalLM(config))


def wanted(target, sampling):
    """The law of plain decoding without a cache, prefix by prefix."""
    law = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = Fraction(1)
        for step, token in enumerate(text):
            ids = [*PROMPT, *text[:step]]
            logits_1V = target.logits(target.run(torch.tensor([ids])).last_BTH[0, -1:])
            p_V = process(logits_1V, sampling, [Prefix(ids, len(PROMPT))])[0]
            chance *= Fraction(float(p_V[token]))
        law[text] = chance
    assert abs(sum(law.values()) - 1) < 1e-5
    return law


def emitted(target, sampling, drafter, rule, monkeypatch):
    """The law of the loop's text, and whether a draft was ever accepted."""
    law, any_accepted = {}, False
    decoding = Decoding(max_new_tokens=LENGTH, sampling=sampling, rule=rule)

    def run(random):
        monkeypatch.setattr(decode_module._Run, "_noise", lambda self: random)
        return decode(target, PROMPT, drafter, decoding)

    for weight, found in outcomes(run):
        text = tuple(found.ids)
        law[text] = law.get(text, Fraction(0)) + weight
        any_accepted |= any(one.accepted for one in found.rounds)
    assert any_accepted
    return law


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(
    ("drafter", "rule"), [(Fixed, "match"), (Fixed, "point_mass"), (Drawn, "rejection")]
)
def test_the_loops_law_is_the_targets(target, name, drafter, rule, monkeypatch):
    sampling = SAMPLINGS[name]
    law = emitted(target, sampling, drafter(), rule, monkeypatch)
    assert distance(law, wanted(target, sampling)) < 1e-5


@pytest.mark.parametrize("name", ["repetition", "counts", "bad words"])
def test_one_penalty_for_all_nodes_is_found(target, name, monkeypatch):
    """A published engine's relaxed form: every node is judged with the root's path."""
    law = decode_module._Run.law
    monkeypatch.setattr(
        decode_module._Run, "law", lambda self, logits_V, tree, node: law(self, logits_V, tree, 0)
    )
    found = emitted(target, SAMPLINGS[name], Fixed(), "match", monkeypatch)
    assert distance(found, wanted(target, SAMPLINGS[name])) > 1e-3


def test_a_penalty_that_is_left_out_is_found(target, monkeypatch):
    plain = Sampling(temperature=0.8)
    found = emitted(target, plain, Fixed(), "match", monkeypatch)
    assert distance(found, wanted(target, SAMPLINGS["repetition"])) > 1e-3


@pytest.fixture(autouse=True)
def _quiet_branching(monkeypatch):
    # A float32 quotient may exceed one by its last bit.
    coin = Branching.coin
    monkeypatch.setattr(
        Branching, "coin", lambda self, depth, slot, p: coin(self, depth, slot, min(1, float(p)))
    )
