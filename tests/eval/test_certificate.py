"""The certificate itself: every rule exact, every planted fault rejected, the shortcuts sound."""

from fractions import Fraction

import numpy as np
import pytest

from outrider.eval import rules
from outrider.eval.certificate.grid import CHAINS, Cell, certify_cell, grid, trees
from outrider.eval.certificate.languages import bigram, cases
from outrider.eval.certificate.law import (
    Language,
    certify,
    emitted_law,
    ended,
    outcomes,
    round_distance,
    speculative_round,
    target_law,
)
from outrider.eval.certificate.lazy_tree import (
    eager,
    fixed,
    propose_chain,
    propose_tree,
    stops_after,
    uneven,
)
from outrider.eval.certificate.mutant_drafts import keep_all, pruned
from outrider.eval.certificate.mutants import MUTANTS, judge
from outrider.eval.rules import RULES, Rule, fitting_rule
from outrider.eval.rules.verdict import Siblings

SMALL = [cell for cell in grid(quick=True) if cell.tree in ("chain 2", "[2,1]", "[1,2]")]
STOPS = [cell for cell in grid(quick=True) if "stops" in cell.tree and cell.rule != "k_sequential"]
ENDS = [cell for cell in grid(quick=True) if "end token" in cell.tree]


@pytest.mark.parametrize("cell", SMALL + STOPS + ENDS, ids=str)
def test_every_rule_is_exact(cell):
    result = certify_cell(cell)
    assert result.distance == 0, result.where
    assert result.num_laws >= 2


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in grid() if cell not in SMALL], ids=str)
def test_every_rule_is_exact_on_every_tree(cell):
    result = certify_cell(cell)
    assert result.distance == 0, result.where


def test_the_grid_has_every_rule_on_every_kind_of_draft_it_judges():
    pairs = {(cell.rule, cell.siblings) for cell in grid()}
    wanted = {(name, kind) for name, rule in RULES.items() for kind in rule.drafts}
    assert pairs == {pair for pair in wanted if pair[1] is not Siblings.NONE}
    main = {cell.tree for cell in grid() if cell.rule == "traversal"}
    assert {"[2,1]", "[2,2]", "[3,2]", "uneven"} < main
    assert set(CHAINS) < {cell.tree for cell in grid() if cell.rule == "block"}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_planted_fault_is_rejected(name):
    killed = judge(name)
    assert killed.distance > 0
    assert killed.where


def test_the_drafts_that_the_faults_are_planted_in_are_sound():
    for case in cases(3):
        propose = pruned(keep_all, 2, 1)(case.language)
        run = speculative_round(case.language, propose, rules.recursive)
        for prefix in case.prefixes[:3]:
            assert round_distance(case.language, run, prefix) == 0, case.name


@pytest.mark.parametrize("name", ["iid", "without", "k_sequential", "hybrid", "traversal", "match"])
def test_drawing_when_looked_at_changes_no_law(name):
    kinds = sorted(RULES[name].drafts & {Siblings.IID, Siblings.WITHOUT, Siblings.HYBRID})
    language = cases(3)[0].language
    for siblings in kinds:
        propose = propose_tree(language, fixed(2, 1), siblings)
        laws = []
        for drafts in (propose, eager(propose)):
            law = {}
            run = speculative_round(language, drafts, RULES[name].verify)
            for weight, tokens in outcomes(lambda random, run=run: run((1,), random)):
                law[tokens] = law.get(tokens, 0) + weight
            laws.append(law)
        assert laws[0] == laws[1], siblings


def test_one_round_and_whole_texts_agree():
    """A fault shows in both, and in no less of either than it must."""
    case = cases(3)[0]
    faulty = MUTANTS["draws from p after a refusal"].run(case.language)
    honest = speculative_round(case.language, propose_chain(case.language, 2), rules.rejection)
    assert certify(case.language, honest, 3, start=(0,), order=1).distance == 0
    assert round_distance(case.language, honest, (0,)) == 0
    one_call = round_distance(case.language, faulty, (0,))
    whole = certify(case.language, faulty, 3, start=(0,), order=1).distance
    assert 0 < one_call <= whole


def test_round_distance_by_hand():
    language = bigram("halves", [[1, 1]], [[1, 1]]).language
    # Always token 0 and then token 1, where the target has four equal texts.
    assert round_distance(language, lambda text, random: (0, 1)) == Fraction(3, 4)
    assert round_distance(language, lambda text, random: (random.draw(0, [1, 1]),)) == 0
    # A text that the target cannot say counts whole.
    sure = bigram("sure", [[1, 0]], [[1, 1]]).language
    assert round_distance(sure, lambda text, random: (1,)) == 1


def test_texts_end_at_the_end_token_and_at_the_limit():
    language = cases(3)[0].language
    run = ended(
        speculative_round(language, propose_chain(language, 3), rules.block), end=1, limit=2
    )
    law, _ = emitted_law(run, 2, end=1)
    assert law == target_law(language, 2, end=1)
    assert (1,) in law
    assert all(len(text) == 2 or text == (1,) for text in law)
    past_the_end = speculative_round(language, propose_chain(language, 3), rules.block)
    assert emitted_law(past_the_end, 2)[0] != law


def test_adversarial_languages_are_what_they_are_called():
    for vocab in (3, 4):
        found = {case.name: case for case in cases(vocab)}
        laws = {
            name: [(case.language.target(p), case.language.draft(p)) for p in case.prefixes]
            for name, case in found.items()
        }
        assert all((p == q).all() for p, q in laws["equal"])
        assert all((p * q).sum() == 0 for p, q in laws["disjoint"])
        assert all(q[-1] == 0 and p[-1] > 0 for p, q in laws["holes in q"])
        assert all(max(p) == 1 for p, _ in laws["one-hot p"])
        assert all(max(q) == 1 for _, q in laws["one-hot q"])
        assert any((p == 0).any() and (q == 0).any() for p, q in laws["zeros"])
        target = found["penalty"].language.target
        assert (target((0, 1)) != target((2, 1))).any()
        assert target((0, 1))[1] == 0
        assert all(sum(p) == 1 and sum(q) == 1 for rows in laws.values() for p, q in rows)
    with pytest.raises(ValueError, match="vocab is 2; the adversarial languages need 3"):
        cases(2)


def test_trees_stop_where_they_are_told():
    language = cases(3)[0].language
    width = stops_after(fixed(2, 1), Fraction(2))  # every chance is below two
    propose = propose_tree(language, width, Siblings.WITHOUT)
    for _, tree in outcomes(lambda random: propose((0,), random).tree):
        assert len(tree) == 3
    shape = uneven({(): 2, (1,): 1})
    tree = next(outcomes(lambda r: propose_tree(language, shape, Siblings.CHOSEN)((0,), r)))[1].tree
    assert len(tree) == 4
    assert [tree.parents[n] for n in range(4)] == [-1, 0, 0, 2]
    assert [tree.depths[n] for n in range(4)] == [0, 1, 1, 2]


def test_drafts_without_replacement_are_no_more_than_q_has():
    language = Language(
        target=lambda text: np.array([Fraction(1, 3)] * 3),
        draft=lambda text: np.array([Fraction(1, 2), Fraction(1, 2), Fraction(0)]),
    )
    for siblings in (Siblings.WITHOUT, Siblings.HYBRID):
        propose = propose_tree(language, fixed(3), siblings)
        for _, tree in outcomes(lambda random, propose=propose: propose((), random).tree):
            assert len(tree) == 3
            assert {tree.tokens[1], tree.tokens[2]} == {0, 1}


def test_a_rule_that_does_not_fit_its_drafts_is_refused():
    assert fitting_rule(None, Siblings.WITHOUT, 1.0) is RULES["without"]
    assert fitting_rule(None, Siblings.CHOSEN, 0.0) is RULES["greedy"]
    with pytest.raises(
        ValueError, match=r"'iid' judges drafts of kind iid .* or single .*, these are w"
    ):
        fitting_rule("iid", Siblings.WITHOUT, 1.0)
    with pytest.raises(ValueError, match=r"'block' judges drafts of kind single \(chain: "):
        fitting_rule("block", Siblings.CHOSEN, 1.0)


def test_a_cell_of_a_faulty_rule_says_where():
    def faulty(tree, laws, random):
        return rules.Verdict(path=(), token=0)

    cell = Cell("mine", Siblings.IID, "[2,1]")
    result = certify_cell(cell, Rule(verify=faulty, drafts=frozenset({Siblings.IID})))
    assert result.distance == 1
    assert result.where
    assert "[2,1]" in trees(Siblings.IID)
