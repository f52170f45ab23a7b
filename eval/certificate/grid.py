"""The grid of certificates: every rule x tree x adversarial language, each law compared exactly."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing import get_context
from typing import TypeAlias

from outrider.eval.certificate.languages import Case, cases
from outrider.eval.certificate.law import Language, Propose, certify, ended, speculative_round
from outrider.eval.certificate.law import round_distance as distance_of
from outrider.eval.certificate.lazy_tree import (
    Width,
    fixed,
    propose_tree,
    stops_after,
    stops_before,
    uneven,
)
from outrider.eval.certificate.proposals import propose_drawn, propose_grown
from outrider.eval.rules import RULES, Rule
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.plans import DrawnPlan, TreePlan

Plan: TypeAlias = Callable[[Language, Siblings], Propose]
"""How trees of a name are drafted on a language."""


def _shaped(width: Width) -> Plan:
    return lambda language, siblings: propose_tree(language, width, siblings)


_CHAIN_STOPS = Fraction(2, 5)
CHAINS: dict[str, Plan] = {
    **{f"chain {length}": _shaped(fixed(*[1] * length)) for length in (1, 2, 3, 4)},
    "chain 3, stops after an unlikely draft": _shaped(stops_after(fixed(1, 1, 1), _CHAIN_STOPS)),
    "chain 3, stops where q is flat": _shaped(stops_before(fixed(1, 1, 1), _CHAIN_STOPS)),
}
"""Trees with one child a node."""
TREES: dict[str, Plan] = {
    "[2,1]": _shaped(fixed(2, 1)),
    "[2,2]": _shaped(fixed(2, 2)),
    "[3,2]": _shaped(fixed(3, 2)),
    "[1,2]": _shaped(fixed(1, 2)),
    "uneven": _shaped(uneven({(): 2, (0,): 2, (1,): 1, (0, 0): 1})),
    "[2,2], stops after an unlikely draft": _shaped(stops_after(fixed(2, 2), Fraction(1, 3))),
}
"""Trees that branch."""


def _drawn(nodes: int) -> Plan:
    return lambda language, _: propose_drawn(language, DrawnPlan(2, 2, nodes))


def _grown(nodes: int) -> Plan:
    return lambda language, _: propose_grown(language, TreePlan(2, 2, nodes))


PLANNED: dict[Siblings, dict[str, Plan]] = {
    Siblings.WITHOUT: {f"dynamic, {nodes} kept": _drawn(nodes) for nodes in (2, 3, 4, 5)},
    Siblings.CHOSEN: {f"dynamic, {nodes} kept": _grown(nodes) for nodes in (2, 3, 4, 5)},
}
"""Trees of a planner that only drafts siblings of one kind."""

_ENDS = "end token, length limit"
_LARGE = ("chain 3", "chain 4", "[3,2]", "[2,2]", "uneven")


@dataclass(frozen=True, order=True)
class Cell:
    """One line of the table."""

    rule: str
    siblings: Siblings
    tree: str

    @property
    def is_chain(self) -> bool:
        """Whether its trees have one child a node."""
        return self.tree in CHAINS


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a cell's certificate found."""

    cell: Cell
    distance: Fraction
    """The largest total variation of all laws; zero means exact."""
    where: str
    """The language and prefix of that largest one; empty when all are zero."""
    num_laws: int
    seconds: float


def trees(siblings: Siblings) -> Mapping[str, Plan]:
    """The trees that such drafts are tried on."""
    if siblings is Siblings.SINGLE:
        return CHAINS
    return {**TREES, **PLANNED.get(siblings, {})}


def grid(rules: Mapping[str, Rule] | None = None, *, quick: bool = False) -> list[Cell]:
    """All cells: a rule on each kind of drafts it judges; `quick` leaves out the largest trees.

    Drafts that a rule is not made for (drawn ones, for a rule that never asks how they came about;
    chains, for a tree rule) get the small trees only.
    """
    found = []
    for name, rule in (RULES if rules is None else rules).items():
        for siblings in sorted(rule.drafts - {Siblings.NONE}):
            names = [*trees(siblings), _ENDS]
            is_main = rule.is_chain_only or siblings is not Siblings.SINGLE
            if not rule.draws_drafts:
                is_main = siblings is Siblings.CHOSEN
            if quick or not is_main:
                names = [tree for tree in names if tree not in _LARGE]
            if not is_main:
                names = names[:2]
            found += [Cell(name, siblings, tree) for tree in names]
    return found


def certify_cell(cell: Cell, rule: Rule | None = None) -> Result:
    """Compare every law of the cell, in rational arithmetic."""
    start = time.perf_counter()
    worst, where, num_laws = Fraction(0), "", 0
    try:
        for name, distance in distances(cell, rule or RULES[cell.rule]):
            num_laws += 1
            if distance > worst:
                worst, where = distance, name
    except Exception as error:  # whatever a user's rule raises
        raise ValueError(
            f"rule {cell.rule!r} failed on {cell.siblings} drafts, tree {cell.tree}, law "
            f"{num_laws + 1}: {type(error).__name__}: {error}; a rule is called as "
            f"verify(tree, laws, random) and returns a Verdict; if it is made for other drafts "
            f"than {cell.siblings}, give --drafts {other_drafts(cell.siblings)}"
        ) from error
    seconds = time.perf_counter() - start
    return Result(cell=cell, distance=worst, where=where, num_laws=num_laws, seconds=seconds)


def other_drafts(siblings: Siblings) -> str:
    """The other kinds of drafts that a rule of a user's own may be made for, in words."""
    return " or ".join(sorted(set(Siblings) - {Siblings.NONE, siblings}))


def distances(cell: Cell, rule: Rule) -> Iterator[tuple[str, Fraction]]:
    """Each law's name and its distance, one after the other."""
    is_chain = cell.siblings is Siblings.SINGLE
    chosen = cases(4 if is_chain else 3, greedy=rule.is_greedy)
    if cell.tree == _ENDS:
        tree = trees(cell.siblings)["chain 2" if is_chain else "[2,1]"]
        for case in cases(3, greedy=rule.is_greedy):
            yield case.name, _whole_text(case, tree, cell.siblings, rule)
        return
    propose = trees(cell.siblings)[cell.tree]
    for case in chosen:
        run = speculative_round(case.language, propose(case.language, cell.siblings), rule.verify)
        for prefix in case.prefixes:
            yield f"{case.name}, after {list(prefix)}", distance_of(case.language, run, prefix)


def _whole_text(case: Case, tree: Plan, siblings: Siblings, rule: Rule) -> Fraction:
    """Distance of whole texts of at most three tokens, over at an end token."""
    propose = tree(case.language, siblings)
    run = ended(speculative_round(case.language, propose, rule.verify), end=1, limit=3)
    return certify(case.language, run, 3, end=1).distance


def certify_all(
    cells: Sequence[Cell], rules: Mapping[str, Rule] | None = None, *, processes: int = 2
) -> Iterator[Result]:
    """Certify cells in parallel, each result as it comes, in the order of the cells.

    Rules of a user's own must be importable by name: they are sent to other processes.
    """
    known = RULES if rules is None else rules
    if processes == 1:
        yield from (certify_cell(cell, known[cell.rule]) for cell in cells)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(certify_cell, cells, [known[cell.rule] for cell in cells])
