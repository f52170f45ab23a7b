"""Static trees: ranks against drafting, growth against every tree, files, and use as a draft."""

import itertools

import numpy as np
import pytest

from outrider.data.sampling import Sampling
from outrider.eval.bench import BenchSettings
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.offline.traces import build_trace
from outrider.eval.offline.tree import score_tree
from outrider.eval.trees.calibrate import (
    Ranks,
    accept_by_rank,
    grow_by_hits,
    grow_by_rank,
    text_ranks,
)
from outrider.eval.trees.plans import ChainPlan, StaticPlan, plan_named, write_static

LAYERS = (1, 3, 5)


@pytest.fixture(scope="module")
def trace(tiny_target, greedy_texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    return build_trace(tiny_target, greedy_texts, folder, sampling=Sampling(), layers=LAYERS)


@pytest.fixture(scope="module")
def ranks(tiny_head, tiny_target, trace):
    return text_ranks(tiny_head, trace, tiny_target, depth=3, width=3)


def trees(nodes, depth, width):
    """Every set of `nodes` rank paths that holds each path's parent, and each earlier sibling."""
    paths = [p for n in range(1, depth + 1) for p in itertools.product(range(width), repeat=n)]
    for chosen in itertools.combinations(paths, nodes):
        known = set(chosen) | {()}
        if all(path[:-1] in known for path in chosen):
            yield chosen


def random_ranks(seed, count=60, depth=3, width=2):
    rng = np.random.default_rng(seed)
    return Ranks(ranks_NK=rng.integers(0, width + 1, size=(count, depth)), width=width)


def accepted(ranks, paths):
    """How deep the text of each start goes into a tree, on average."""
    known = set(paths)
    total = 0
    for row in ranks.ranks_NK.tolist():
        total += sum(tuple(row[:n]) in known for n in range(1, len(row) + 1))
    return total / len(ranks.ranks_NK)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_growth_by_hits_is_the_best_of_all_trees(nodes):
    for seed in range(3):
        ranks = random_ranks(seed)
        tree = grow_by_hits(ranks, nodes)
        assert tree.accepted == pytest.approx(accepted(ranks, tree.paths))
        best = max(accepted(ranks, paths) for paths in trees(nodes, 3, 2))
        assert tree.accepted == pytest.approx(best)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_the_dynamic_programme_is_the_best_of_all_trees(nodes):
    for seed in range(3):
        table_KW = np.random.default_rng(seed).dirichlet(np.ones(3), size=3)[:, :2]

        def value(paths, table_KW=table_KW):
            return sum(
                np.prod([table_KW[depth, rank] for depth, rank in enumerate(path)])
                for path in paths
            )

        tree = grow_by_rank(table_KW, nodes)
        assert len(tree.paths) == nodes
        assert tree.accepted == pytest.approx(value(tree.paths))
        assert tree.accepted == pytest.approx(max(value(paths) for paths in trees(nodes, 3, 2)))


def test_acceptance_by_rank_is_conditional_on_the_path():
    ranks = Ranks(ranks_NK=np.array([[0, 1], [0, 0], [1, 2], [2, 0]]), width=2)
    assert accept_by_rank(ranks).tolist() == [[0.5, 0.25], [1 / 3, 1 / 3]]


def test_joint_hits_beat_products_of_marginals_where_depths_hang_together():
    rows = [[0, 1, 1]] * 5 + [[1, 0, 0]] * 4 + [[0, 0, 1]]
    ranks = Ranks(ranks_NK=np.array(rows), width=2)
    joint, by_rank = grow_by_hits(ranks, 4), grow_by_rank(accept_by_rank(ranks), 4)
    assert joint.accepted > accepted(ranks, by_rank.paths)


def test_ranks_are_those_of_drafting(tiny_head, tiny_target, trace, ranks):
    """A chain follows rank 0, so its hits along the text are the ranks' leading zeros."""
    assert (ranks.ranks_NK == 0).any()
    starts = sum(length - 1 for length in (trace.row(i).num_tokens for i in range(len(trace))))
    assert len(ranks.ranks_NK) == starts
    checked = 0
    for index in range(4):
        row = trace.row(index)
        text = row.ids_T.tolist()
        for place in range(1, row.num_tokens):
            cut = row.prompt_length + place
            captured = tiny_target.run(row.ids_T[None, : cut - 1], layers=LAYERS)
            drafter = HeadDrafter(tiny_head, ChainPlan(3))
            drafter.start(text[:cut], captured)
            drafted = drafter.propose(3, None).tree.tokens[1:]
            hits = 0
            while hits < 3 and cut + hits < len(text) and drafted[hits] == text[cut + hits]:
                hits += 1
            rows = _of_row(ranks, trace, index)
            found = next((k for k, rank in enumerate(rows[place - 1]) if rank), 3)
            assert found == hits
            checked += 1
    assert checked > 40


def _of_row(ranks, trace, index):
    """Rank rows of one trace row; batches are sorted by length."""
    order = sorted(range(len(trace)), key=lambda i: trace.lengths[i])
    start = sum(trace.row(i).num_tokens - 1 for i in order[: order.index(index)])
    return ranks.ranks_NK[start : start + trace.row(index).num_tokens - 1].tolist()


def test_a_fitted_tree_is_written_read_and_drafted(tiny_head, tiny_target, trace, ranks, tmp_path):
    tree = grow_by_hits(ranks, 6)
    write_static(tmp_path / "tree.json", tree.paths, {"accepted": tree.accepted})
    spec = f"static:{tmp_path / 'tree.json'}"
    plan = plan_named(spec)
    assert isinstance(plan, StaticPlan)
    assert set(plan.paths) == set(tree.paths)
    drafter = HeadDrafter(tiny_head, plan)
    rounds = tokens = 0
    for index in range(len(trace)):
        row = trace.row(index)
        prompt, answer = row.ids_T[: row.prompt_length], row.ids_T[row.prompt_length :]
        decoding = Decoding(max_new_tokens=len(answer))
        found = decode(tiny_target, prompt.tolist(), drafter, decoding)
        assert found.ids == answer.tolist()
        assert all(one.drafted == 6 for one in found.rounds)
        rounds, tokens = rounds + len(found.rounds), tokens + len(found.ids) - 1
    score = score_tree(tiny_head, trace, tiny_target, plan)
    assert score.draft == spec
    assert score.tau == pytest.approx(tokens / rounds)
    assert BenchSettings(drafts=(spec,)).drafts == (spec,)


def test_bad_trees_and_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"static path \[1, 0\] has no parent in the tree"):
        StaticPlan(((0,), (1, 0)))
    with pytest.raises(ValueError, match="has 0 paths; give one or more"):
        StaticPlan(())
    with pytest.raises(ValueError, match=r"cannot be read \(No such file"):
        plan_named(f"static:{tmp_path / 'none.json'}")
    (tmp_path / "other.json").write_text('{"tree": 3}')
    with pytest.raises(ValueError, match="is not a static tree; name a file of outrider tree"):
        plan_named(f"static:{tmp_path / 'other.json'}")
    for rank in ("Infinity", "0.9", "true", '"0"'):
        (tmp_path / "odd.json").write_text(f'{{"paths": [[{rank}]]}}')
        with pytest.raises(ValueError, match="is not a static tree"):
            plan_named(f"static:{tmp_path / 'odd.json'}")
    with pytest.raises(ValueError, match="nodes is 0; draft at least 1"):
        grow_by_hits(random_ranks(0), 0)
