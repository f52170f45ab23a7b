"""`outrider toy`: the four-token language, its exact figures beside a simulation."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import tyro

from outrider.eval.certificate import toy, toy_tables


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which toy to draw and how much to simulate."""

    seed: int = 2
    """Seed of the two tables."""
    texts: int = 400_000
    """Texts of four tokens to simulate; their distance to the target falls as 1/sqrt(texts)."""

    def __post_init__(self) -> None:
        if self.texts < 1:
            raise ValueError(f"texts is {self.texts}; simulate at least 1")


def main(argv: Sequence[str] | None = None) -> None:
    """Print acceptance per context, tokens per call, and the distance to the target's law."""
    settings = tyro.cli(Settings, args=argv, prog="outrider toy", description=__doc__)
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
