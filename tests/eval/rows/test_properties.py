"""Whatever trees are drafted, wherever texts end, however rows are batched: one text.

Batched decoding, decoding alone and plain decoding write the same, greedy or sampled.
"""

import copy
import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters import Draft
from outrider.eval.rows import EachRow
from outrider.eval.rows.loop import RowsRun
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.tree import Tree

VOCAB = 61
FEW = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def target(tiny_target):
    return Target.from_model(copy.deepcopy(tiny_target.model).double())


class Sprouts:
    """Random trees around the right text, another in every round; some are the root alone."""

    layers = ()
    siblings = Siblings.CHOSEN

    def __init__(self, texts, seed):
        self._texts, self._seed = texts, seed

    def start(self, ids, captured):
        self._text = next(t for t in self._texts if t[: len(ids) - 1] == list(ids[:-1]))
        self._root, self._place = ids[-1], len(ids)

    def accept(self, ids, captured):
        self._root, self._place = ids[-1], self._place + len(ids)

    def propose(self, max_depth, noise):
        rng = random.Random(self._seed * 1000 + self._place)
        right, tokens, parents, depths = [0], [self._root], [-1], [0]
        for node in range(1, rng.choice([1, 2, 4, 9])):
            parent = rng.choice([right[-1], rng.randrange(node)])
            depth = depths[parent] + 1
            if depth > max_depth:
                continue
            place = self._place + depth - 1
            is_right = parent == right[-1] and place < len(self._text) and rng.random() < 0.7
            token = self._text[place] if is_right else rng.randrange(VOCAB)
            if is_right:
                right.append(len(tokens))
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
            if len(tokens) <= node:  # a node was left out: parents count those that are there
                break
        return Draft(Tree(tuple(tokens), tuple(parents)))


CASES = st.fixed_dictionaries(
    {
        "prompts": st.lists(
            st.lists(st.integers(4, VOCAB - 1), min_size=1, max_size=12),
            min_size=1,
            max_size=6,
            unique_by=tuple,
        ),
        "seed": st.integers(0, 999),
        "batch_size": st.integers(1, 6),
        "count": st.integers(1, 20),
        "eos": st.sets(st.integers(0, VOCAB - 1), max_size=6),
        "sampling": st.sampled_from(
            [
                Sampling(),
                Sampling(repetition_penalty=1.3),
                Sampling(temperature=0.8, top_p=0.9),
                Sampling(temperature=1.1, presence_penalty=0.6, frequency_penalty=0.2),
            ]
        ),
        "chunk": st.sampled_from([None, 1, 5]),
    }
)


@FEW
@given(case=CASES)
def test_batched_alone_and_plain_are_one(target, case):
    ending = replace(target, eos_ids=tuple(case["eos"]))
    rule = "greedy" if case["sampling"].is_greedy else "match"
    decoding = Decoding(
        max_new_tokens=case["count"],
        sampling=case["sampling"],
        rule=rule,
        seed=case["seed"],
        prefill_chunk=case["chunk"],
    )
    prompts = case["prompts"]
    plain = [decode(ending, ids, None, decoding, row=row) for row, ids in enumerate(prompts)]
    texts = [[*ids, *one.ids, *range(9)] for ids, one in zip(prompts, plain, strict=True)]
    # Longest first: a prompt may begin as another does.
    texts.sort(key=len, reverse=True)
    make = partial(Sprouts, texts, case["seed"])
    alone = [decode(ending, ids, make(), decoding, row=row) for row, ids in enumerate(prompts)]
    assert [one.ids for one in alone] == [one.ids for one in plain]
    size = min(case["batch_size"], len(prompts))
    rows = RowsRun(ending, size, EachRow(make), decoding).decode(prompts)
    assert [row.new_ids for row in rows] == [one.ids for one in plain]
    assert [row.rounds for row in rows] == [one.rounds for one in alone]
    assert [row.finish for row in rows] == [one.finish for one in plain]


def test_the_trees_are_many_and_some_stand(target):
    """The property would be empty if nothing forked or nothing stood."""
    prompt = [5, 9, 14, 22]
    decoding = Decoding(max_new_tokens=60, ignore_eos=True)
    text = [*prompt, *decode(target, prompt, None, decoding).ids]
    shapes, propose = set(), Sprouts.propose
    drafter = Sprouts([text], 3)
    drafter.propose = lambda *more: shapes.add((one := propose(drafter, *more)).tree.parents) or one
    found = decode(target, prompt, drafter, decoding)
    assert len(shapes) > 8
    assert any(max(parents.count(node) for node in parents) > 1 for parents in shapes)
    assert {one.accepted for one in found.rounds} >= {0, 1, 2}
