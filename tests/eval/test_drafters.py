"""Drafters against brute force: every draft recomputed from the whole prefix without any cache."""

import copy

import pytest
import torch

from outrider.data.sampling import GREEDY_BELOW, Sampling
from outrider.data.target import Target
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.drafters.replay import Plain, Replay, Uniform
from outrider.eval.link import tables
from outrider.eval.noise import KeyedNoise
from outrider.eval.rules import Siblings
from outrider.eval.trees.growth import DynamicGrowth
from outrider.eval.trees.plans import ChainPlan, TreePlan, plan_named
from outrider.heads import EagleConfig, EagleHead

PREFIX = [5, 9, 14, 22, 8, 31, 40, 17]


@pytest.fixture(scope="module")
def target(tiny_target):
    return Target.from_model(copy.deepcopy(tiny_target.model).double())


SETTINGS = {
    "eagle1": {"kind": "eagle1"},
    "deep": {"num_layers": 2, "sliding_window": 5, "aux_layers": (0, 1, 3, 5)},
}


@pytest.fixture(scope="module", params=["eagle3", *SETTINGS])
def head(request, tiny_head, target):
    if request.param == "eagle3":
        return copy.deepcopy(tiny_head).double().attach(tables(target))
    torch.manual_seed(2)
    config = EagleConfig.from_target(target.config, **SETTINGS[request.param])
    return EagleHead(config).double().attach(tables(target)).eval().requires_grad_(False)


class Rows:
    """The drafter's view of a growing text, from full passes of the target."""

    def __init__(self, target, layers):
        self.target, self.layers = target, layers

    def states(self, ids, start=0):
        captured = self.target.run(torch.tensor([ids]), layers=self.layers)
        return type(captured)(*(part[:, start:] for part in captured))

    def started(self, drafter, ids):
        drafter.start(ids, self.states(ids[:-1]))
        return drafter

    def accepted(self, drafter, ids, new):
        drafter.accept(new, self.states(ids + new[:-1], start=len(ids) - 1))


def outputs(head, rows, ids, drafted):
    """Logits after `drafted` tokens beyond the text, running every row anew."""
    captured = rows.states(ids[:-1])
    feature = head.project(captured.aux_BTF, captured.last_BTH)
    following = ids[1:]
    for step in range(len(drafted) + 1):
        position = torch.arange(feature.shape[1])[None]
        hidden = head.step(feature, torch.tensor([following]), position)
        if step < len(drafted):
            # The row's own output stands in for the state that the target has not made.
            feature = torch.cat([feature, hidden[:, -1:]], dim=1)
            following = [*following, drafted[step]]
    return head.draft_logits(hidden[0, -1:])[0]


def best_first(head, rows, ids, plan):
    """The EAGLE-2 tree, with every node's law from `outputs`."""
    growth, paths = DynamicGrowth(ids[-1]), {0: []}
    for _ in range(plan.depth):
        frontier = growth.frontier
        laws = [outputs(head, rows, ids, paths[node]).log_softmax(-1) for node in frontier]
        top = [law.topk(plan.width) for law in laws]
        tokens = [head.draft_ids_W[one.indices].tolist() for one in top]
        start = len(growth.tokens)
        growth.add_level([one.values.tolist() for one in top], tokens, plan.width)
        for node in range(start, len(growth.tokens)):
            paths[node] = [*paths[growth.parents[node]], growth.tokens[node]]
    return growth.select(plan.nodes)


def test_a_chain_equals_redrafting_from_the_whole_prefix(target, head):
    drafter = HeadDrafter(head, ChainPlan(4))
    rows = Rows(target, drafter.layers)
    rows.started(drafter, PREFIX)
    tokens = list(drafter.propose(99, KeyedNoise(0, 0, 8)).tree.tokens)
    assert tokens[0] == PREFIX[-1]
    for step in range(4):
        law = outputs(head, rows, PREFIX, tokens[1 : step + 1])
        assert tokens[step + 1] == int(head.draft_ids_W[law.argmax()])


def test_drawn_chains_carry_the_very_law_they_were_drawn_from(target, head):
    drafter = HeadDrafter(head, ChainPlan(3), temperature=0.7)
    rows = Rows(target, drafter.layers)
    seen = set()
    for row in range(5):
        rows.started(drafter, PREFIX)
        draft = drafter.propose(99, KeyedNoise(0, row, 8))
        tokens = draft.tree.tokens[1:]
        seen.add(tokens)
        for step, token in enumerate(tokens):
            logits = outputs(head, rows, PREFIX, list(tokens[:step]))
            expected = head.scatter((logits / 0.7).softmax(-1)[None])[0]
            law = draft.law(step + 1)
            assert (law - expected).abs().max() < 1e-9
            assert law[token] > 0
    assert len(seen) > 1


@pytest.mark.parametrize("plan", [TreePlan(3, 3, 9), TreePlan(2, 4, 20), TreePlan(4, 1, 3)])
def test_a_tree_equals_redrafting_every_path(target, head, plan):
    drafter = HeadDrafter(head, plan)
    rows = Rows(target, drafter.layers)
    rows.started(drafter, PREFIX)
    tree = drafter.propose(99, KeyedNoise(0, 0, 8)).tree
    assert tree == best_first(head, rows, PREFIX, plan)
    # A second proposal finds nothing of the first one's rejected rows.
    rows.accepted(drafter, PREFIX, [33])
    longer = [*PREFIX, 33]
    again = drafter.propose(99, KeyedNoise(0, 0, 9)).tree
    assert again == best_first(head, rows, longer, plan)


@pytest.mark.parametrize("plan", ["chain:3", "tree:3,3,8"])
def test_accepted_drafts_are_rebuilt_from_the_targets_states(target, head, plan):
    drafter = HeadDrafter(head, plan_named(plan))
    rows = Rows(target, drafter.layers)
    rows.started(drafter, PREFIX)
    ids = PREFIX
    for new in ([50], [7, 30, 41], [12, 20]):
        drafter.propose(99, KeyedNoise(0, 0, len(ids)))
        rows.accepted(drafter, ids, new)
        ids = ids + new
        fresh = rows.started(HeadDrafter(head, plan_named(plan)), ids)
        noise = KeyedNoise(0, 0, len(ids))
        assert drafter.propose(99, noise).tree == fresh.propose(99, noise).tree
        assert drafter._cache.length == fresh._cache.length == len(ids) - 1
        used = len(ids) - 1
        assert len(fresh._cache._layers) == head.config.num_layers
        for layer, theirs in fresh._cache._layers.items():
            ours = drafter._cache._layers[layer]
            assert (ours.key[:, :, :used] - theirs.key[:, :, :used]).abs().max() < 1e-9


def test_rows_left_in_the_cache_are_noticed(target, tiny_head, monkeypatch):
    head = copy.deepcopy(tiny_head).double().attach(tables(target))
    drafter = HeadDrafter(head, ChainPlan(3))
    rows = Rows(target, drafter.layers)
    rows.started(drafter, PREFIX)
    monkeypatch.setattr(drafter._cache, "truncate", lambda length: None)
    drafter.propose(99, KeyedNoise(0, 0, 8))
    rows.accepted(drafter, PREFIX, [33])
    with pytest.raises(AssertionError, match="a row was lost"):
        drafter.propose(99, KeyedNoise(0, 0, 9))


def test_rounds_without_a_draft_lose_no_row(target, head):
    drafter = HeadDrafter(head, ChainPlan(3))
    rows = Rows(target, drafter.layers)
    rows.started(drafter, PREFIX)
    assert len(drafter.propose(0, KeyedNoise(0, 0, 8)).tree) == 1
    rows.accepted(drafter, PREFIX, [33, 12])
    ids = [*PREFIX, 33, 12]
    fresh = rows.started(HeadDrafter(head, ChainPlan(3)), ids)
    noise = KeyedNoise(0, 0, len(ids))
    assert drafter.propose(99, noise).tree == fresh.propose(99, noise).tree


@pytest.mark.parametrize("plan", ["chain:5", "tree:5,1,9"])
def test_no_draft_runs_past_the_heads_positions(target, tiny_head, plan, monkeypatch):
    config = EagleConfig.from_dict({**tiny_head.config.to_dict(), "max_position_embeddings": 10})
    head = EagleHead(config, tiny_head.draft_ids_W).double().attach(tables(target)).eval()
    positions, step = [], head.step

    def noted(feature, ids, position, *rest, **options):
        positions.extend(position.flatten().tolist())
        return step(feature, ids, position, *rest, **options)

    monkeypatch.setattr(head, "step", noted)
    drafter = HeadDrafter(head, plan_named(plan))
    rows = Rows(target, drafter.layers)
    rows.started(drafter, PREFIX)  # 7 rows: positions 7, 8 and 9 are left, so 4 drafts
    tree = drafter.propose(99, KeyedNoise(0, 0, 8)).tree
    assert max(tree.depths) == 4
    ids = list(PREFIX)
    for depth in (3, 2, 1, 0, 0):
        rows.accepted(drafter, ids, [20])
        ids.append(20)
        assert max(drafter.propose(99, KeyedNoise(0, 0, len(ids))).tree.depths) == depth
    assert max(positions) == 9


def test_a_depth_limit_is_kept(target, head):
    for plan in ("chain:5", "tree:5,1,9"):
        drafter = HeadDrafter(head, plan_named(plan))
        rows = Rows(target, drafter.layers)
        rows.started(drafter, PREFIX)
        tree = drafter.propose(2, KeyedNoise(0, 0, 8)).tree
        assert max(tree.depths) == 2


def test_drawn_trees_are_refused(tiny_head):
    with pytest.raises(ValueError, match="trees take the likeliest tokens, so give 0, or a chain"):
        HeadDrafter(tiny_head, TreePlan(2, 2, 4), temperature=1.0)


def test_replayed_text_follows_the_row():
    drafter = Replay([1, 2, 3, 4, 5, 6], 3)
    drafter.start([1, 2], None)
    noise = KeyedNoise(0, 0, 2)
    assert drafter.propose(99, noise).tree.tokens == (2, 3, 4, 5)
    assert drafter.propose(1, noise).tree.tokens == (2, 3)
    drafter.accept([3, 4, 9], None)
    assert drafter.propose(99, noise).tree.tokens == (9, 6)
    wrong = Replay([1, 2, 3, 4], 3, shift=1, vocab_size=5)
    wrong.start([1], None)
    assert wrong.propose(99, noise).tree.tokens == (1, 3, 4, 0)


def test_uniform_drafts_follow_their_law():
    drafter = Uniform(10, 2)
    drafter.start([4], None)
    drafts = [drafter.propose(99, KeyedNoise(0, row, 1)) for row in range(200)]
    tokens = {token for draft in drafts for token in draft.tree.tokens[1:]}
    assert tokens == set(range(10))
    assert drafts[0].law(1).tolist() == pytest.approx([0.1] * 10)


def test_plain_drafts_nothing():
    drafter = Plain()
    drafter.start([4, 6], None)
    assert drafter.propose(99, KeyedNoise(0, 0, 2)).tree.tokens == (6,)
    drafter.accept([7], None)
    assert drafter.propose(99, KeyedNoise(0, 0, 3)).tree.tokens == (7,)


def test_one_epsilon_decides_what_is_greedy_for_text_and_drafts(target, head):
    for temperature in (0.0, 1e-9, 0.99 * GREEDY_BELOW, GREEDY_BELOW, 0.5):
        drafter = HeadDrafter(head, ChainPlan(2), temperature=temperature)
        is_greedy = Sampling(temperature=temperature).is_greedy
        assert drafter.siblings == (Siblings.CHOSEN if is_greedy else Siblings.SINGLE)


@pytest.mark.parametrize("plan", ["drawn:2,2,6", "drawn:3,2,5", "drawn:1,3,2"])
def test_drawn_trees_carry_the_very_laws_they_were_drawn_from(target, head, plan):
    """Children without replacement: each law is q without the earlier siblings, renormalised."""
    plan = plan_named(plan)
    ids = PREFIX
    rows = Rows(target, head.config.aux_layers)
    for row in range(6):
        drafter = rows.started(HeadDrafter(head, plan, temperature=0.8), ids)
        draft = drafter.propose(8, KeyedNoise(0, row, len(ids)))
        tree = draft.tree
        assert 1 < len(tree) <= plan.nodes + 1
        for node, children in enumerate(tree.children):
            left = None
            for child in children:
                law = draft.law(child)
                assert float(law.sum()) == pytest.approx(1)
                assert law[tree.tokens[child]] > 0
                if left is not None:
                    torch.testing.assert_close(law, left / left.sum())
                left = law.clone()
                left[tree.tokens[child]] = 0
            if children:
                drafted = [tree.tokens[step] for step in tree.path(node)]
                logits_W = outputs(head, rows, ids, drafted)
                wanted = head.scatter((logits_W / 0.8).softmax(-1)[None])[0]
                torch.testing.assert_close(draft.law(children[0]), wanted, atol=1e-6, rtol=0)


def test_drawn_trees_at_temperature_zero_are_the_likeliest_ones(target, head):
    rows, found = Rows(target, head.config.aux_layers), []
    for text in ("drawn:2,3,6", "tree:2,3,6"):
        drafter = rows.started(HeadDrafter(head, plan_named(text)), PREFIX)
        found.append(drafter.propose(8, None).tree)
    assert found[0] == found[1]
