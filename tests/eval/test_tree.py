"""Draft trees: shapes, masks, and the growth of dynamic trees, against brute force."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.eval.trees.growth import DynamicGrowth
from outrider.eval.trees.plans import ChainPlan, TreePlan, plan_named
from outrider.eval.trees.tree import Tree, chain, shape_from_counts


@st.composite
def shapes(draw):
    num_nodes = draw(st.integers(1, 12))
    return (-1, *(draw(st.integers(0, node - 1)) for node in range(1, num_nodes)))


@given(shapes())
def test_shape_facts_equal_brute_force(parents):
    tree = Tree(tuple(range(len(parents))), parents)
    for node in range(len(tree)):
        path = [node]
        while path[-1] != 0:
            path.append(parents[path[-1]])
        assert tree.path(node) == tuple(reversed(path[:-1]))
        assert tree.depths[node] == len(path) - 1
        assert tree.ancestors[node].nonzero().flatten().tolist() == sorted(path)
        assert tree.children[node] == tuple(
            child for child, parent in enumerate(parents) if parent == node
        )


def test_a_chain_sees_everything_before():
    tree = chain(5, [6, 7])
    assert (tree.tokens, tree.parents) == ((5, 6, 7), (-1, 0, 1))
    assert tree.is_chain
    assert torch.equal(tree.ancestors, torch.ones(3, 3, dtype=torch.bool).tril())
    assert not Tree((0, 1, 2), (-1, 0, 0)).is_chain
    assert len(chain(5, [])) == 1


def test_shapes_come_from_child_counts():
    assert shape_from_counts([2, 1]) == (-1, 0, 0, 1)
    assert shape_from_counts([3, 0, 2]) == (-1, 0, 0, 0, 2, 2)
    assert shape_from_counts([]) == (-1,)
    for counts in ([1, 1, 1, 0, 1], [-1]):
        with pytest.raises(ValueError, match="negative or for a node that does not exist"):
            shape_from_counts(counts)


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((1, 2), (-1,), "2 tokens and 1 parents; give one parent per token"),
        ((1, 2), (0, 0), "node 0 is the root, its parent -1"),
        ((1, 2), (-1, 1), "node 1 has parent 1; a parent comes before its node: 0 to 0"),
    ],
)
def test_bad_trees_are_refused(tokens, parents, message):
    with pytest.raises(ValueError, match=message):
        Tree(tokens, parents)


def grow(log_probs_at, depth, width, vocab):
    """A tree over a small vocabulary whose law depends on the path's last token."""
    growth = DynamicGrowth(0)
    for _ in range(depth):
        rows = [log_probs_at(growth.tokens[node]) for node in growth.frontier]
        top = [row.topk(min(width, vocab)) for row in rows]
        growth.add_level([t.values.tolist() for t in top], [t.indices.tolist() for t in top], width)
    return growth


def test_growth_keeps_the_best_scored_connected_nodes():
    vocab, depth, width = 5, 3, 5
    generator = torch.Generator().manual_seed(0)
    table_VV = torch.randn(vocab, vocab, generator=generator).double().log_softmax(-1)
    growth = grow(lambda token: table_VV[token], depth, width, vocab)
    for num_drafts in range(1, 15):
        tree = growth.select(num_drafts)
        # With a wide enough beam the tree holds the best paths of all.
        everything = {}
        for length in (1, 2, 3):
            for path in itertools.product(range(vocab), repeat=length):
                before = (0, *path)
                everything[path] = sum(float(table_VV[a, b]) for a, b in itertools.pairwise(before))
        best = sorted(everything, key=lambda path: -everything[path])[:num_drafts]
        paths = {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(1, len(tree))}
        assert paths == set(best)
        assert len(tree) == num_drafts + 1


def test_growth_expands_only_the_best_of_a_level():
    growth = DynamicGrowth(9)
    assert growth.add_level([[-0.1, -2.0]], [[1, 2]], width=1) == [1]
    assert growth.add_level([[-0.5, -0.6]], [[3, 4]], width=1) == [3]
    tree = growth.select(4)
    assert tree == Tree((9, 1, 2, 3, 4), (-1, 0, 0, 1, 1))


def test_ties_keep_the_shallower_node():
    growth = DynamicGrowth(9)
    growth.add_level([[0.0, -1.0]], [[1, 2]], width=2)
    # Probability one under rounding: the child's score equals its parent's.
    growth.add_level([[1e-9, -1.0], [0.0, -1.0]], [[3, 4], [5, 6]], width=2)
    assert growth.select(1).tokens == (9, 1)
    assert growth.select(2).tokens == (9, 1, 3)
    assert growth.select(3).tokens == (9, 1, 2, 3)


def test_plans_are_read_from_text():
    assert plan_named("chain:3") == ChainPlan(3)
    assert plan_named("tree:5,4,16") == TreePlan(depth=5, width=4, nodes=16)
    for text in ("chain", "chain:", "chain:1,2", "tree:3", "tree:3,-1,4", "bush:3"):
        with pytest.raises(ValueError, match="write chain:LENGTH, such as chain:3, or tree:DEPTH"):
            plan_named(text)
    with pytest.raises(ValueError, match="chain length is 0; draft at least 1"):
        plan_named("chain:0")
    with pytest.raises(ValueError, match="tree nodes is 0; draft at least 1"):
        plan_named("tree:1,1,0")
