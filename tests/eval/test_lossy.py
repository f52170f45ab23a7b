"""Lossy rules: their stated laws against enumeration, their bias, and the fence around them."""

import shutil
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from outrider.data.sampling import Sampling
from outrider.eval import lossy
from outrider.eval.bias import Step, _agreed, bias, decode_lossy
from outrider.eval.certificate.law import outcomes
from outrider.eval.decode import Decoding, decode, decode_by
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.metrics import LossyRound, Round, count
from outrider.eval.report.tables import table
from outrider.eval.rules import RULES, point_mass
from outrider.eval.trees.plans import plan_named
from outrider.eval.trees.tree import Tree, chain

ROOT = Path(__file__).parents[2]
SHAPES = {
    "one": chain(0, [1]),
    "chain": chain(0, [1, 2, 0]),
    "siblings": Tree((0, 1, 2), (-1, 0, 0)),
    "tree": Tree((0, 1, 2, 0, 1, 2), (-1, 0, 0, 1, 1, 2)),
}
EXACT_HALF = Fraction(1, 2)


def fractions(weights):
    weights = [Fraction(int(weight)) for weight in weights]
    return np.array([weight / sum(weights) for weight in weights], dtype=object)


class Laws:
    """Random p and q at every node."""

    def __init__(self, tree, seed):
        rng = np.random.default_rng(seed)
        self._p = [fractions(rng.integers(1, 9, size=4)) for _ in range(len(tree))]
        self._q = [fractions(rng.integers(1, 9, size=4)) for _ in range(len(tree))]

    def target(self, node):
        return self._p[node]

    def draft(self, node):
        return self._q[node]


def next_tokens(rule, tree, laws, node):
    """Law of the token after a node, of the walks that came to it, by enumeration."""
    found, total = [Fraction(0)] * 4, Fraction(0)
    here = tree.path(node)
    for weight, verdict in outcomes(lambda random: rule.verify(tree, laws, random)):
        if verdict.path[: len(here)] != here:
            continue
        further = verdict.path[len(here) :]
        found[tree.tokens[further[0]] if further else verdict.token] += weight
        total += weight
    return [share / total for share in found] if total else None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "rule",
    [
        lossy.nucleus(),
        lossy.typical(0.3, 0.09),
        lossy.typical(0.2, 0.5),
        lossy.threshold(EXACT_HALF, 1),
        lossy.threshold(Fraction(9, 10), Fraction(1, 3)),
    ],
)
def test_the_stated_law_is_the_enumerated_one_at_every_node(rule, shape):
    tree, checked = SHAPES[shape], 0
    for seed in range(4):
        laws = Laws(tree, seed)
        for node in range(len(tree)):
            wanted = next_tokens(rule, tree, laws, node)
            if wanted is not None:
                assert list(rule.law(tree, laws, node)) == wanted
                checked += 1
    assert checked >= 4


def test_the_ensembles_law_is_the_mixture_once_drafts_are_drawn():
    laws, rule = Laws(SHAPES["one"], 0), lossy.ensemble(Fraction(3, 4))

    def run(random):
        tree = chain(0, [random.draw(0, laws.draft(1))])
        verdict = rule.verify(tree, laws, random)
        return tree.tokens[1] if verdict.path else verdict.token

    found = [Fraction(0)] * 4
    for weight, token in outcomes(run):
        found[token] += weight
    assert found == list(rule.law(SHAPES["one"], laws, 0))
    bias_of_it = lossy.distance(laws.target(0), rule.law(SHAPES["one"], laws, 0))
    assert rule.closed_form(SHAPES["one"], laws, 0) == bias_of_it
    assert bias_of_it == lossy.distance(laws.target(0), laws.draft(1)) / 4 > 0


def test_a_nucleus_draft_is_tried_twice():
    tree = SHAPES["one"]
    for seed in range(3):
        laws = Laws(tree, seed)
        p = laws.target(0)[1]
        law = lossy.nucleus().law(tree, laws, 0)
        assert law[1] == 1 - (1 - p) ** 2
        assert lossy.distance(law, laws.target(0)) == p * (1 - p)


@pytest.mark.parametrize("shape", SHAPES)
def test_thresholds_of_one_are_the_exact_rule_and_lower_ones_are_not(shape):
    tree = SHAPES[shape]
    for seed in range(3):
        laws = Laws(tree, seed)
        exact, loose = lossy.threshold(1, 1), lossy.threshold(EXACT_HALF, 1)
        for node in range(len(tree)):
            assert list(exact.law(tree, laws, node)) == list(laws.target(node))
            mass = sum(laws.target(node)[tree.tokens[child]] for child in tree.children[node])
            found = lossy.distance(loose.law(tree, laws, node), laws.target(node))
            assert found >= loose.closed_form(tree, laws, node) == min(1, 2 * mass) - mass
            assert (found > 0) == bool(tree.children[node])
        accepted = [
            {v.path for _, v in outcomes(partial(verify, tree, laws))}
            for verify in (exact.verify, point_mass)
        ]
        assert accepted[0] == accepted[1]


def test_typical_text_is_deterministic():
    tree = SHAPES["tree"]
    for seed in range(4):
        process = partial(lossy.typical().verify, tree, Laws(tree, seed))
        assert len(list(outcomes(process))) == 1


def test_agreement_is_that_of_the_best_coupling_step_by_step():
    # Two steps by hand: v = (1, 0) and p = (1/2, 1/2), then equal laws.
    steps = [Step(0.5, 0.5, None), Step(0.0, 1.0, None)]
    assert _agreed(steps) == 0.5 + 0.5


def sampled(tiny_target, tiny_head, rule, draft, temperature=0.0):
    drafter = HeadDrafter(tiny_head, plan_named(draft), temperature=temperature)
    decoding = Decoding(max_new_tokens=20, sampling=Sampling(temperature=1.0), ignore_eos=True)
    prompts = ([5, 9, 14, 22], [41, 7, 30, 12])
    return [
        decode_lossy(rule, tiny_target, ids, drafter, decoding, row=row)
        for row, ids in enumerate(prompts)
    ]


def test_biases_are_measured_in_decoding(tiny_target, tiny_head):
    found = {}
    for name, rule in {
        "exact": lossy.threshold(1.0, 1.0),
        "loose": lossy.threshold(0.5, 1.0),
        "typical": lossy.typical(),
        "nucleus": lossy.nucleus(),
    }.items():
        texts = sampled(tiny_target, tiny_head, rule, "tree:3,3,8")
        assert all(len(text.steps) == len(text.new_ids) == 20 for text in texts)
        found[name] = bias(name, rule, texts)
    assert found["exact"].tv_per_step < 1e-6
    assert found["exact"].divergence_length == pytest.approx(20, abs=1e-3)
    assert found["typical"].tv_per_step > found["loose"].tv_per_step > 0.001
    assert found["nucleus"].tv_per_step > 0.001
    assert all(one.divergence_length < 19 for name, one in found.items() if name != "exact")
    assert found["loose"].closed_form_tv <= found["loose"].tv_per_step + 1e-6
    drawn = lossy.ensemble(0.6)
    mixed = bias("ensemble", drawn, sampled(tiny_target, tiny_head, drawn, "chain:3", 1.0))
    assert mixed.closed_form_tv == pytest.approx(mixed.tv_per_step, abs=1e-5)
    assert mixed.row()["exact"] is False


def test_what_any_rule_wrote_cannot_be_counted(tiny_target, tiny_head):
    """Not even an exact rule's: the loop cannot know that it is one."""
    drafter = HeadDrafter(tiny_head, plan_named("chain:3"))
    decoding = Decoding(max_new_tokens=12, ignore_eos=True)
    free = decode_by(RULES["greedy"].verify, tiny_target, [5, 9, 14], drafter, decoding)
    exact = decode(tiny_target, [5, 9, 14], drafter, decoding)
    assert free.new_ids == exact.ids
    rounds = [(one.proposed, one.taken, one.written) for one in free.lossy_rounds]
    assert rounds == [one[:3] for one in exact.rounds]
    assert not hasattr(free, "rounds")
    with pytest.raises(ValueError, match="a lossy result cannot enter a table of exact figures"):
        count([free.lossy_rounds])


# The fence.


def test_no_lossy_rule_is_among_the_exact_ones():
    assert not set(lossy.LOSSY_RULES) & set(RULES)


def test_lossy_results_are_refused_where_exact_ones_are_counted():
    with pytest.raises(ValueError, match="a lossy result cannot enter a table of exact figures"):
        count([[Round(3, 1, 2)], [LossyRound(3, 1, 2)]])
    with pytest.raises(ValueError, match="outrider lossy reports it"):
        table({"results": [{"exact": False, "rule": "typical"}]})


SNIPPET = """
from outrider.eval.bias import LossyText
from outrider.eval.decode import Decoded, DecodedBy
from outrider.eval.metrics import LossyRound, Round, count
from outrider.eval.offline.scores import Score, summary

def right(round: Round, score: Score, text: Decoded) -> None:
    count([[round], text.rounds])
    summary(score)

def wrong(round: LossyRound, text: LossyText, free: DecodedBy) -> None:
    count([[round]])  # refused
    count([free.lossy_rounds])  # refused
    count([free.rounds])  # refused
    summary(text)  # refused
"""


@pytest.mark.slow
def test_the_type_checker_refuses_them_too(tmp_path):
    pyrefly = shutil.which("pyrefly", path=Path(sys.executable).parent) or shutil.which("pyrefly")
    assert pyrefly, "install the dev extra: pyrefly is not here"
    links = tmp_path / "types" / "outrider"
    links.mkdir(parents=True)
    for room in ("heads", "data", "eval"):
        (links / room).symlink_to(ROOT / room)
    (tmp_path / "snippet.py").write_text(SNIPPET)
    (tmp_path / "pyrefly.toml").write_text(
        'preset = "strict"\nsearch-path = ["types"]\n'
        f'python-interpreter-path = "{sys.executable}"\n'
    )
    command = [pyrefly, "check", "-c", "pyrefly.toml", "--output-format", "min-text", "snippet.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    refused = {n for n, line in enumerate(SNIPPET.splitlines(), 1) if line.endswith("# refused")}
    shown = {line for line in done.stdout.splitlines() if "snippet.py:" in line}
    lines = {int(line.split("snippet.py:")[1].split(":")[0]) for line in shown}
    assert lines == refused, done.stdout + done.stderr
