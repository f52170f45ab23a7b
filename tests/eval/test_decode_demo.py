"""On the real target: every held-out answer again, drafted, token for token.

The stored greedy answers come from batched plain decoding: the greedy rule must write them again.
Sample-and-match must write what the loop itself samples plainly with the same seed.
"""

import random

import pytest
import torch

from outrider.data.sampling import Sampling, row_key
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters import Draft
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.drafters.replay import Replay
from outrider.eval.link import tables
from outrider.eval.offline.texts import read_texts
from outrider.eval.trees.plans import plan_named, write_static
from outrider.eval.trees.tree import Tree, chain
from outrider.heads import EagleConfig, EagleHead

pytestmark = pytest.mark.slow

LENGTH = 48


class Forks(Replay):
    """A tree along the right text: at every depth the right token among wrong siblings."""

    def propose(self, max_depth, noise):
        path = super().propose(max_depth, noise).tree.tokens
        rng = random.Random(self._place)
        tokens, parents, parent = [path[0]], [-1], 0
        for token in path[1:]:
            right = token if rng.random() < 0.8 else token + 1
            children = rng.sample([right, token + 2, token + 3], 3)
            parents += [parent] * 3
            parent = len(tokens) + children.index(right)
            tokens += children
        return Draft(Tree(tuple(tokens), tuple(parents)))


@pytest.fixture(scope="module")
def target():
    return Target.load("smollm2-demo")


class Chain(Replay):
    """A chain along the right text that goes wrong one token in five."""

    def propose(self, max_depth, noise):
        tokens = list(super().propose(max_depth, noise).tree.tokens)
        rng = random.Random(self._place)
        drafts = [token if rng.random() < 0.8 else token + 1 for token in tokens[1:]]
        return Draft(chain(tokens[0], drafts))


def assert_written_again(target, texts, decoding, shape=Forks):
    """Draft along each answer; rows are keyed by name."""
    rounds = tokens = 0
    for text in texts:
        drafter = shape([*text.prompt_ids, *text.answer_ids], 5)
        found = decode(target, text.prompt_ids, drafter, decoding, row=row_key(text.row_id))
        assert found.ids == text.answer_ids[:LENGTH], text.row_id
        rounds += len(found.rounds)
        tokens += len(found.ids)
    # Wrong turns were taken, and right ones kept.
    assert 0.2 < rounds / tokens < 0.7


@pytest.mark.timeout(3600)
def test_every_held_out_greedy_answer_is_written_again(target):
    texts = read_texts("demo:heldout", Sampling())
    assert len(texts) >= 120
    assert_written_again(target, texts, Decoding(max_new_tokens=LENGTH, rule="greedy"))


def sampled(target, text, decoding):
    plain = decode(target, text.prompt_ids, None, decoding, row=row_key(text.row_id))
    return text._replace(answer_ids=plain.ids)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_sampled_answers_are_written_again_on_chains_and_trees(target, temperature):
    sampling = Sampling(temperature=temperature)
    decoding = Decoding(max_new_tokens=LENGTH, sampling=sampling, rule="match", seed=1)
    texts = read_texts("demo:heldout", Sampling(temperature=1.0), per_kind=6)
    texts = [sampled(target, text, decoding) for text in texts]
    assert_written_again(target, texts, decoding, Forks)
    assert_written_again(target, texts, decoding, Chain)


@pytest.mark.parametrize("plan", ["chain:3", "tree:4,4,12", "static", "drawn:3,2,8"])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_an_untrained_head_changes_nothing(target, temperature, plan, tmp_path):
    if plan == "static":
        plan = f"static:{tmp_path / 'tree.json'}"
        write_static(tmp_path / "tree.json", [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
    if plan.startswith("drawn") and temperature:
        pytest.skip("drawn drafts follow q, so their rules keep the law and not the tokens")
    torch.manual_seed(0)
    config = EagleConfig.from_target(
        target.config, draft_vocab_size=8192, tokenizer_size=target.tokenizer_size
    )
    head = EagleHead(config, torch.arange(8192)).attach(tables(target)).eval()
    sampling = Sampling(temperature=temperature)
    rule = "greedy" if sampling.is_greedy else "match"
    decoding = Decoding(max_new_tokens=16, sampling=sampling, rule=rule)
    source = Sampling() if sampling.is_greedy else Sampling(temperature=1.0)
    for text in read_texts("demo:heldout", source, per_kind=1):
        text = sampled(target, text, decoding)
        drafter = HeadDrafter(head, plan_named(plan))
        found = decode(target, text.prompt_ids, drafter, decoding, row=row_key(text.row_id))
        assert found.ids == text.answer_ids, text.row_id
