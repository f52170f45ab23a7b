"""`outrider toy`: small languages, their exact figures beside simulation and estimates."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import tyro

from outrider.eval.certificate import toy, toy_tables
from outrider.eval.certificate.languages import cases
from outrider.eval.offline.estimators import ESTIMATORS, compare
from outrider.eval.offline.longrun import long_run
from outrider.eval.trees.plans import ChainPlan, TreePlan


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which toy to draw and how much to simulate."""

    seed: int = 2
    """Seed of the two tables."""
    texts: int = 400_000
    """Texts of four tokens to simulate; their distance to the target falls as 1/sqrt(texts)."""

    estimators: bool = False
    """Instead: how far offline estimators of tokens per call are from the exact law, text by text
    on enumerated languages of three tokens, and in the long run on larger ones."""

    def __post_init__(self) -> None:
        if self.texts < 1:
            raise ValueError(f"texts is {self.texts}; simulate at least 1")


def main(argv: Sequence[str] | None = None) -> None:
    """Print acceptance per context, tokens per call, and the distance to the target's law."""
    settings = tyro.cli(Settings, args=argv, prog="outrider toy", description=__doc__)
    if settings.estimators:
        show_estimators()
        return
    made = toy.make_toy(settings.seed)
    print(f"four tokens, seed {settings.seed}; a context is the last token")
    print(_row("alpha = sum min(p, q), per context", toy.alpha(made)))
    print(_row("sum of p q, per context", toy.agreement(made)))
    print(_row("drafts per call", toy.LENGTHS, "{:5d}"))
    print(_row("tokens per call, exact", [toy.tokens_per_call(made, k) for k in toy.LENGTHS]))
    exact = toy.rejection_round(made, 3)
    faulty = toy.faulty_round(made, 3)
    print("total variation to the target's law, texts of 4 tokens after token 0, 3 drafts a call")
    print(f"  rejection rule, enumerated           {_exact(toy.exact_distance(made, exact))}")
    simulated = toy.simulated_distance(made, exact, num_texts=settings.texts)
    print(f"  rejection rule, {settings.texts:>7,} texts        {simulated:.6f}")
    print(f"  planted fault (p, not the residual)  {_exact(toy.exact_distance(made, faulty))}")
    show_counts(made, settings.texts)
    show_speed(made)


LANGUAGES = ("random", "zeros", "holes in q", "penalty")
CHAINS = tuple((ChainPlan(k), rule) for k in (1, 3) for rule in ("rejection", "block", "match"))
TREES = ((TreePlan(2, 2, 3), "match"), (TreePlan(3, 2, 5), "point_mass"))


def show_estimators() -> None:
    """The recursion's error text by text, and what its shortcuts miss by."""
    print("texts of up to 5 tokens, all of them; exact: expected tokens over expected calls")
    print("largest error of a text's tokens per call by the recursion, then each estimator's error")
    names = [name for name in ESTIMATORS if name != "recursion"]
    columns = ("language", "draft", "rule", "texts", "exact", "worst text", "recursion", *names)
    print(_columns(columns))
    languages = {case.name: case.language for case in cases(3)}
    for name in LANGUAGES:
        for plan, rule in (*CHAINS, *TREES):
            found = compare(name, languages[name], plan, rule)
            errors = [
                f"{found.estimates[one] - found.exact:+.4f}" if one in found.estimates else "-"
                for one in names
            ]
            recursion = f"{found.estimates['recursion'] - found.exact:+.0e}"
            cells = (found.draft, rule, str(found.texts), f"{found.exact:.4f}")
            print(_columns((name, *cells, f"{found.worst_text:.0e}", recursion, *errors)))
    print("in the long run: 12 tokens, chains of 6, rejection; the recursion reads sampled text")
    names = ["recursion", "uniform", "1 - TV", "one alpha"]
    print(_columns(("seed", "exact", *names)))
    for seed in range(4):
        run = long_run(seed)
        errors = [f"{run.estimates[one] - run.exact:+.4f}" for one in names]
        print(_columns((str(seed), f"{run.exact:.4f}", *errors)))
    for name, text in ESTIMATORS.items():
        print(f"{name}: {text}")
    print("1 - TV: products of 1 - TV(p, q) along the text, every place a start")


def _columns(cells: Sequence[str]) -> str:
    return "  " + "  ".join(f"{cell:<11}" for cell in cells).rstrip()


def show_counts(made: toy.Toy, texts: int) -> None:
    """The samplers judged by counting, as one would without enumeration."""
    counts = [count for count in toy_tables.COUNTS if count < texts] + [texts]
    print("counted: total variation and chi-square per degree of freedom (1 for an exact sampler)")
    print(_row("texts", counts, "{:>14,d}"))
    rows: dict[str, list[str]] = {}
    for one in toy_tables.counted(made, counts):
        rows.setdefault(one.sampler, []).append(f"{one.distance:.4f} {one.chi_square:8.2f}")
    for name, cells in rows.items():
        print(_row(name, cells, "{:>14}"))


def show_speed(made: toy.Toy) -> None:
    """Tokens and speed by draft length, exact and by the formula of one alpha."""
    rows = [toy_tables.speed(made, length) for length in toy.LENGTHS]
    print("rejection in the long run, by drafts per call")
    print(_row("drafts per call", toy.LENGTHS, "{:5d}"))
    print(_row("judged alpha", [one.judged_alpha for one in rows]))
    print(_row("tokens per call by the formula", [one.formula for one in rows]))
    print(_row("tokens per call, exact", [one.tokens for one in rows]))
    for index, cost in enumerate(toy_tables.COSTS):
        print(_row(f"speed-up, a draft costing {cost}", [one.speedups[index] for one in rows]))


def _row(name: str, values: Sequence[float | str] | np.ndarray, form: str = "{:5.3f}") -> str:
    return f"  {name:<35}  " + "  ".join(form.format(value) for value in values)


def _exact(distance: Fraction) -> str:
    return f"{float(distance):.6f}" if distance else "0, exactly"
