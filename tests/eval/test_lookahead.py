"""Lookahead decoding against the algorithm written out, with a whole pass for every guess."""

import copy

import pytest
import torch

from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.lookahead import LookaheadDrafter
from outrider.eval.trees.loop_plans import LookaheadPlan

PROMPTS = ([5, 9, 14, 22], [41, 7, 30, 12, 41, 7, 30, 12], [60])


@pytest.fixture(scope="module")
def target(tiny_target):
    return Target.from_model(copy.deepcopy(tiny_target.model).double())


class Slow:
    """Rows of the window one above the other, the pool a plain list, nothing shared or cached."""

    def __init__(self, target, prompt, plan):
        self.target, self.plan, self.text, self.known = target, plan, list(prompt), {}
        self.pool = []
        self.text.append(self.next(self.text))
        self.keep_all(range(len(self.text)))
        self.rows = [
            [self.filler(column)[row] for column in range(plan.window)]
            for row in range(plan.ngram - 1)
        ]

    def next(self, ids):
        key = tuple(ids)
        if key not in self.known:
            logits = self.target.logits(self.target.run(torch.tensor([ids])).last_BTH[0, -1])
            self.known[key] = int(logits.argmax())
        return self.known[key]

    def filler(self, column):
        size = len(self.text)
        first = (size * 31 + column * 17) % size
        return [self.text[(first + row) % size] for row in range(self.plan.ngram - 1)]

    def keep(self, gram):
        self.pool = [one for one in self.pool if one != gram] + [gram]

    def keep_all(self, ends):
        for end in ends:
            if end + 1 >= self.plan.ngram:
                self.keep(self.text[end + 1 - self.plan.ngram : end + 1])

    def paths(self):
        grams = [one[1:] for one in reversed(self.pool) if one[0] == self.text[-1]]
        columns = [
            self.rows[0][: column + 1] + [row[column] for row in self.rows[1:]]
            for column in range(self.plan.window)
        ]
        return grams[: self.plan.pool], columns

    def round(self):
        """Tokens accepted in this round."""
        grams, columns = self.paths()
        text, accepted = self.text, []
        while any(path[: len(accepted) + 1] == [*accepted, self.next([*text, *accepted])]
                  for path in grams + columns):  # fmt: skip
            accepted.append(self.next([*text, *accepted]))
        new = [*accepted, self.next([*text, *accepted])]
        guesses = [self.next([*text, *path]) for path in columns]
        for column, guess in enumerate(guesses):
            self.keep([*(row[column] for row in self.rows), guess])
        self.rows = [*self.rows[1:], guesses]
        start = len(text)
        self.text += new
        self.keep_all(range(start, len(self.text)))
        passed = min(len(accepted), self.plan.window)
        kept = self.plan.window - passed
        fresh = [self.filler(column) for column in range(kept, self.plan.window)]
        self.rows = [
            row[passed:] + [filler[number] for filler in fresh]
            for number, row in enumerate(self.rows)
        ]
        return len(accepted)


PLANS = [LookaheadPlan(4, 3, 3), LookaheadPlan(1, 2, 1), LookaheadPlan(3, 5, 2)]


@pytest.mark.parametrize("plan", PLANS)
def test_every_round_accepts_what_the_slow_algorithm_does(target, plan):
    accepted = 0
    for prompt in PROMPTS:
        decoding = Decoding(max_new_tokens=50, ignore_eos=True)
        found = decode(target, prompt, LookaheadDrafter(plan), decoding)
        slow = Slow(target, prompt, plan)
        for one in found.rounds[:-1]:
            assert slow.round() == one.accepted
        assert found.ids[: len(slow.text) - len(prompt)] == slow.text[len(prompt) :]
        accepted += sum(one.accepted for one in found.rounds)
    assert accepted > 10


def test_a_tree_holds_both_branches(target):
    drafter = LookaheadDrafter(LookaheadPlan(3, 3, 2))
    slow = Slow(target, PROMPTS[1], LookaheadPlan(3, 3, 2))
    drafter.start(slow.text, None)
    tree = drafter.propose(99, None).tree
    paths = {tuple(tree.tokens[one] for one in tree.path(node)) for node in range(len(tree))}
    grams, columns = slow.paths()
    assert paths == {tuple(one[:size]) for one in grams + columns for size in range(len(one) + 1)}
    assert max(drafter.propose(2, None).tree.depths) == 2
    assert len(drafter.propose(0, None).tree) == 1


def test_the_pool_keeps_the_newest_of_each_first_token():
    drafter = LookaheadDrafter(LookaheadPlan(1, 2, 2))
    drafter.start([1, 2, 1, 3, 1, 4, 1, 3, 1], None)
    tree = drafter.propose(1, None).tree
    # After 1 came 2, 3, 4 and 3 again: the newest two are kept, newest first.
    assert tree.tokens[:3] == (1, 3, 4)
    assert len(drafter._pool[1]) == 2
