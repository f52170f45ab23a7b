"""`outrider certify`: the exact law of every rule, and the planted faults that must not pass.

Each rule runs unchanged on a small language with every coin and draw made a branch of rational
weight; the table holds the largest total variation to the target's own law, 0 meaning exact. Exit
status 1 when a law differs or a fault passes.
"""

import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from outrider.eval.batched import BATCHED
from outrider.eval.batched.tie import Tie, tie
from outrider.eval.certificate import contest, grid
from outrider.eval.certificate.keyed import Keyed, KeyedByPosition, judge_keys
from outrider.eval.certificate.mutants import MUTANTS, Killed, judge_all
from outrider.eval.rules import RULES, Rule
from outrider.eval.rules.verdict import Siblings
from outrider.scripts import toy_command

_TIED_ROUNDS = 300


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to certify."""

    rule: tuple[str, ...] = ()
    """Only these rules: names, or MODULE:FUNCTION for a rule of your own, called as
    verify(tree, laws, random)."""

    tree: tuple[str, ...] = ()
    """Only trees whose name contains one of these, such as "chain 3" or "[2,1]"."""

    drafts: Literal["single", "chosen", "iid", "without", "hybrid"] = "iid"
    """How the drafts of a rule of your own come about."""

    quick: bool = False
    """Leave out the largest trees; under a minute."""

    json: Path | None = None
    """Write the results to this file, too."""

    toy: bool = False
    """Print the four-token language instead: exact laws, simulation, acceptance, speed."""

    processes: Annotated[int, tyro.conf.arg(help_behavior_hint="(default: 2)")] = 2
    """Worker processes."""

    def __post_init__(self) -> None:
        if self.json is not None and not self.json.parent.is_dir():
            raise ValueError(f"json is {self.json}, and there is no folder {self.json.parent}")
        if self.processes < 1:
            raise ValueError(f"processes is {self.processes}; use 1 or more")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables; exit status 1 when something is not as it must be."""
    settings = tyro.cli(
        Settings, args=argv, prog="outrider certify", config=(tyro.conf.FlagCreatePairsOff,)
    )
    if settings.toy:
        toy_command.main([])
        return
    start = time.perf_counter()
    rules = chosen_rules(settings)
    cells = chosen_cells(settings, rules)
    results = show_results(grid.certify_all(cells, rules, processes=settings.processes))
    names = [name for name, one in MUTANTS.items() if not settings.rule or one.rule in rules]
    is_whole = not settings.rule and not settings.tree
    contests = show_contests(settings) if is_whole else []
    keys = show_keys() if is_whole else []
    killed = [] if settings.tree else show_mutants(judge_all(names, processes=settings.processes))
    tied = [] if settings.tree else show_ties([name for name in rules if name in BATCHED])
    is_sound = not any(one.distance for one in results) and not any(one.is_alive for one in killed)
    is_sound = is_sound and not any(one.differences for one in tied)
    is_sound = is_sound and are_keys_sound(keys)
    is_sound = is_sound and not any(one.num_lost for one in contests if one.is_theorem)
    seconds = time.perf_counter() - start
    print(f"{'all exact' if is_sound else 'NOT EXACT'}, {seconds:.0f} s")
    if any(one.distance and ":" in one.cell.rule for one in results):
        print(
            f"your rule was judged on {settings.drafts} drafts; for one that is made for others "
            f"give --drafts {grid.other_drafts(Siblings(settings.drafts))}"
        )
    if settings.json is not None:
        record = {
            "verdict": "all exact" if is_sound else "NOT EXACT",
            "is_sound": is_sound,
            "seconds": seconds,
            **as_record(results, killed, tied),
            "contests": [vars(one) for one in contests],
            "keys": [key_record(sound, fault) for sound, fault in keys],
        }
        settings.json.write_text(json.dumps(record, indent=1) + "\n")
    if not is_sound:
        sys.exit(1)


def chosen_rules(settings: Settings) -> dict[str, Rule]:
    """The rules asked for, a user's own among them. Raises ValueError for one not found."""
    if not settings.rule:
        return RULES
    return {name: _rule(name, Siblings(settings.drafts)) for name in settings.rule}


def _rule(name: str, siblings: Siblings) -> Rule:
    module, colon, function = name.partition(":")
    if not colon:
        if name not in RULES:
            raise ValueError(
                f"rule is {name!r}; choose one of {', '.join(RULES)}, or MODULE:FUNCTION"
            )
        return RULES[name]
    sys.path.insert(0, str(Path.cwd()))  # for the worker processes, too
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"rule is {name!r}, but {error}; give MODULE:FUNCTION that Python can import from here"
        ) from error
    return found if isinstance(found, Rule) else Rule(verify=found, drafts=frozenset({siblings}))


def chosen_cells(settings: Settings, rules: dict[str, Rule]) -> list[grid.Cell]:
    """The cells asked for. Raises ValueError when there are none."""
    cells = grid.grid(rules, quick=settings.quick)
    if settings.tree:
        names = sorted({cell.tree for cell in cells})
        cells = [cell for cell in cells if any(part in cell.tree for part in settings.tree)]
        if not cells:
            raise ValueError(
                f"tree is {' '.join(settings.tree)!r}, which none of these trees contains: "
                f"{'; '.join(names)}"
            )
    return cells


def show_results(results: Any) -> list[grid.Result]:  # noqa: ANN401 (an iterator of results)
    """Print a line for each certificate as it comes."""
    print(f"{'rule':<14}{'drafts':<9}{'tree':<37}{'laws':>5}  distance")
    found = []
    for one in results:
        found.append(one)
        cell = one.cell
        line = f"{cell.rule:<14}{cell.siblings:<9}{cell.tree:<37}{one.num_laws:>5}  "
        print(line + _distance(one.distance) + (f"  {one.where}" if one.where else ""), flush=True)
    laws = sum(one.num_laws for one in found)
    print(f"{sum(not one.distance for one in found)} of {len(found)} exact, {laws} laws compared\n")
    return found


def show_contests(settings: Settings) -> list[contest.Contest]:
    """Print tokens per call of the path rules beside the walks."""
    chains, trees = (50, 10) if settings.quick else (1000, 100)
    print(f"{'tokens a call on random languages':<36}{'old':>7}{'new':>7}  lost")
    contests = [contest.block_against_rejection(chains)]
    contests += [
        contest.traversal_against_recursive(widths, trees) for widths in ((2, 1), (2, 2), (1, 2))
    ]
    for one in contests:
        lost = f"{one.num_lost} of {one.num_pairs}"
        if one.where:
            lost += f", most by {one.largest_loss:.4f} ({one.where})"
        print(f"{one.name:<36}{one.mean_old:7.4f}{one.mean_new:7.4f}  {lost}", flush=True)
    print()
    return contests


def show_keys() -> list[tuple[Keyed, Keyed]]:
    """Print whether whole texts keep the law under the decoder's keys, and that a fault is seen.

    Returns each setting with the decoder's keys, and with the planted fault's.
    """
    print(
        f"{'noise keys over rounds':<23}{'plan':<13}{'tokens':>6}  distance, and by position alone"
    )
    found: list[tuple[Keyed, Keyed]] = []
    for one, fault in zip(judge_keys(), judge_keys(KeyedByPosition), strict=True):
        found.append((one, fault))
        line = f"{one.rule:<23}{one.plan:<13}{one.num_tokens:>6}  {_distance(one.distance):<9} "
        print(line + _distance(fault.distance), flush=True)
    print()
    return found


def are_keys_sound(found: Sequence[tuple[Keyed, Keyed]]) -> bool:
    """Whether every text keeps the law, and some fault was seen where faults were planted."""
    is_seen = not found or any(fault.distance for _, fault in found)
    return is_seen and not any(one.distance for one, _ in found)


def key_record(one: Keyed, fault: Keyed) -> dict[str, Any]:
    """For JSON: one setting under the decoder's keys, and under those of position alone."""
    return {
        "rule": one.rule,
        "plan": one.plan,
        "tokens": one.num_tokens,
        "distance": float(one.distance),
        "exact_distance": str(one.distance),
        "distance_by_position_alone": float(fault.distance),
    }


def show_ties(names: Sequence[str]) -> list[Tie]:
    """Compare the batched code with the rules on random trees; print a line, and what differs."""
    found = [tie(name, _TIED_ROUNDS) for name in names]
    if found:
        count, num_differences = sum(f.num_decisions for f in found), 0
        for one in found:
            num_differences += len(one.differences)
            for text in one.differences[:1]:
                print(f"batched {one.rule} DIFFERS {len(one.differences)} times: {text}")
        print(
            f"batched code tied to the rules: {len(found)} rules, {count} decisions, "
            f"{num_differences} differences\n"
        )
    return found


def show_mutants(results: Any) -> list[Killed]:  # noqa: ANN401 (an iterator of them)
    """Print a line for each planted fault as it is judged."""
    print(f"{'planted fault':<33}{'of rule':<14}distance  first seen in")
    found = []
    for one in results:
        found.append(one)
        where = one.where or "ALIVE: no law differs"
        print(f"{one.name:<33}{one.rule:<14}{float(one.distance):8.4f}  {where}", flush=True)
    score = sum(not one.is_alive for one in found)
    print(f"mutation score {score} of {len(found)}\n")
    return found


def _distance(distance: Fraction) -> str:
    return f"{float(distance):.6f}" if distance else "0"


def as_record(
    results: Sequence[grid.Result], killed: Sequence[Killed], tied: Sequence[Tie]
) -> dict[str, Any]:
    """The results as JSON: distances as fractions and as floats."""
    return {
        "cells": [
            {
                "rule": one.cell.rule,
                "drafts": str(one.cell.siblings),
                "tree": one.cell.tree,
                "laws": one.num_laws,
                "distance": float(one.distance),
                "exact_distance": str(one.distance),
                "where": one.where,
                "seconds": one.seconds,
            }
            for one in results
        ],
        "mutants": [
            {
                "name": one.name,
                "what": MUTANTS[one.name].what,
                "rule": one.rule,
                "killed": not one.is_alive,
                "distance": float(one.distance),
                "where": one.where,
            }
            for one in killed
        ],
        "batched": [
            {
                "rule": one.rule,
                "decisions": one.num_decisions,
                "differences": list(one.differences),
            }
            for one in tied
        ],
    }
