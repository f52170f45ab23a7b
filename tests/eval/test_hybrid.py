"""Copies and a head's drafts in one tree: what is merged, what is left out, and what it counts."""

import itertools
import random

import pytest
import torch

from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.drafters.hybrid import Costs, HybridDrafter, Rate
from outrider.eval.drafters.lookup import PromptLookup
from outrider.eval.drafters.suffix import SuffixDrafter
from outrider.eval.noise import KeyedNoise
from outrider.eval.trees.merge import PathTree
from outrider.eval.trees.plans import LookupPlan, SuffixPlan, plan_named
from outrider.eval.trees.tree import Tree, chain

REPEATED = [41, 7, 30, 12, 18, 41, 7, 30, 12, 18, 41, 7]
FREE = Costs(model=0, node=0)
DEAR = Costs(model=1e9, node=0)


def paths(tree):
    """The token paths from the root, as a set."""
    return {tuple(tree.tokens[one] for one in tree.path(node)) for node in range(len(tree))}


def prefixes(path):
    return {tuple(path[:size]) for size in range(len(path) + 1)}


def test_merged_paths_share_what_they_begin_with():
    rng = random.Random(0)
    for _ in range(50):
        merged, wanted = PathTree(9), {()}
        for _ in range(rng.randrange(1, 6)):
            path = [rng.randrange(3) for _ in range(rng.randrange(5))]
            nodes = merged.add(path)
            wanted |= prefixes(path)
            tree = merged.tree()
            assert [tree.tokens[node] for node in nodes] == path
            assert [0, *nodes][:-1] == [tree.parents[node] for node in nodes]
        shape = [-1, *(rng.randrange(size) for size in range(1, 7))]
        other = Tree((9, *(rng.randrange(3) for _ in shape[1:])), tuple(shape))
        nodes = merged.add_tree(other)
        tree = merged.tree()
        assert paths(tree) == wanted | paths(other)
        assert len(tree) == len(paths(tree))
        for node, number in enumerate(nodes):
            ours = [tree.tokens[one] for one in tree.path(number)]
            assert ours == [other.tokens[one] for one in other.path(node)]


@pytest.mark.parametrize("plan", ["chain:3", "tree:3,3,8"])
@pytest.mark.parametrize(
    "text", [lambda: PromptLookup(LookupPlan(6)), lambda: SuffixDrafter(SuffixPlan(6))]
)
def test_a_round_holds_both_drafts_as_each_would_make_them(tiny_target, tiny_head, plan, text):
    """The model's caches stay right over rounds, those in which it does not draft among them."""
    hybrids = {
        "both": HybridDrafter(text(), HeadDrafter(tiny_head, plan_named(plan)), FREE),
        "turns": HybridDrafter(text(), HeadDrafter(tiny_head, plan_named(plan)), DEAR),
    }
    parts = text(), HeadDrafter(tiny_head, plan_named(plan))
    answer = decode(tiny_target, REPEATED, None, Decoding(max_new_tokens=40, ignore_eos=True)).ids
    ids = [*REPEATED, *answer]
    layers = parts[1].layers

    def states(start, stop):
        captured = tiny_target.run(torch.tensor([ids[:stop]]), layers=layers)
        return type(captured)(*(one[:, start:] for one in captured))

    length, num_merged, num_skipped = len(REPEATED) + 1, 0, 0
    for one in (*hybrids.values(), *parts):
        one.start(ids[:length], states(0, length - 1))
    for turn, size in enumerate((1, 3, 1, 5, 2, 1, 4, 1)):
        noise = KeyedNoise(0, 0, length)
        copied, drafted = (one.propose(99, noise).tree for one in parts)
        both = hybrids["both"].propose(99, noise).tree
        # Nothing costs anything, so the model always has a place.
        assert paths(drafted) <= paths(both) <= paths(copied) | paths(drafted)
        num_merged += paths(copied) <= paths(both) and len(copied) > 1
        # Here the model drafts every other time, and sees the rounds between afterwards.
        hybrids["turns"]._costs = FREE if turn % 2 else DEAR
        alone = hybrids["turns"].propose(99, noise).tree
        if turn % 2 or len(copied) == 1:
            assert paths(drafted) <= paths(alone) <= paths(copied) | paths(drafted)
        else:
            assert alone.is_chain
            assert alone.tokens == copied.tokens[: len(alone)]
            num_skipped += 1
        new = ids[length : length + size]
        length += size
        for one in (*hybrids.values(), *parts):
            one.accept(new, states(length - size - 1, length - 1))
    assert num_merged > 2
    assert num_skipped > 1


def test_free_nodes_never_cost_a_round(tiny_target, tiny_head):
    def rounds(drafter, prompt):
        decoding = Decoding(max_new_tokens=40, ignore_eos=True)
        return len(decode(tiny_target, prompt, drafter, decoding).rounds)

    plan, total = plan_named("chain:3"), [0, 0, 0]
    for prompt in (REPEATED, [5, 9, 14, 22], [8, 8, 8], [20, 33, 47, 11, 20]):
        head = HeadDrafter(tiny_head, plan)
        lookup = PromptLookup(LookupPlan(3))
        found = [rounds(head, prompt), rounds(lookup, prompt)]
        found.append(rounds(HybridDrafter(lookup, head, FREE), prompt))
        total = [one + more for one, more in zip(total, found, strict=True)]
    assert total[2] < min(total[:2])


def test_a_copy_that_often_fails_is_left_out_and_one_that_holds_is_not(tiny_head, tiny_target):
    class Scripted(PromptLookup):
        def propose(self, max_depth, noise):
            super().propose(max_depth, noise)
            self.matched = 1
            return type("D", (), {"tree": chain(self._ids[-1], [self.guess] * 6)})()

    def used(guess, text, sizes):
        copy = Scripted(LookupPlan(6))
        copy.guess = guess
        hybrid = HybridDrafter(copy, HeadDrafter(tiny_head, plan_named("chain:2")))
        layers, start = tiny_head.config.aux_layers, 4
        hybrid.start(
            text[:start], tiny_target.run(torch.tensor([text[: start - 1]]), layers=layers)
        )
        for size in sizes:
            tree = hybrid.propose(99, KeyedNoise(0, 0, start)).tree
            captured = tiny_target.run(torch.tensor([text[: start + size - 1]]), layers=layers)
            kept = type(captured)(*(one[:, -size:] for one in captured))
            hybrid.accept(text[start : start + size], kept)
            start += size
        return sum(token == guess for token in tree.tokens[1:]), len(tree) - 1

    prompt = [20, 33, 47]
    text = decode(tiny_target, prompt, None, Decoding(max_new_tokens=40, ignore_eos=True)).ids
    other = next(token for token in range(61) if token not in text)
    assert used(other, [*prompt, *text], [2] * 18) == (0, 2)
    # Six copies that always hold: no room left in which the model could help.
    assert used(50, [*prompt, *[50] * 99], [7] * 12) == (6, 6)


def test_expected_hits_follow_the_rates():
    rate = Rate(0.5, 0.75, weight=4)
    for hits, is_missed in ((0, True), (3, True), (2, False), (0, False)):
        rate.note(hits, is_missed=is_missed)
    # First drafts: 2 + two of three; later ones: 3 + 2 + 1 of 4 + 3 + 1.
    assert rate.first == pytest.approx(4 / 7)
    assert rate.later == pytest.approx(6 / 8)
    law = [4 / 7 * 0.75**depth for depth in range(5)]
    found = list(itertools.islice(rate.expected(), 6))
    assert found == pytest.approx([sum(law[:count]) for count in range(6)])


def test_drawn_drafts_and_negative_costs_are_refused(tiny_head):
    drawn = HeadDrafter(tiny_head, plan_named("chain:3"), temperature=1.0)
    with pytest.raises(ValueError, match="drafts single tokens; a tree of both kinds has no law"):
        HybridDrafter(PromptLookup(LookupPlan(4)), drawn)
    for bad in ({"model": -1.0}, {"node": float("nan")}):
        with pytest.raises(ValueError, match="give a cost of 0 or more"):
            Costs(**bad)
