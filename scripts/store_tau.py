"""What packed feature stores cost in acceptance: heads from each form of store, seed by seed.

    python -m outrider.scripts.store_tau --output runs/store-tau

Trains the recipe once for every form and seed, all on the same rows; a stopped run goes on where it
was, and a finished one is not trained again. Heads of one seed start alike and see the rows in the
same order, so that tau of a packed form is divided by tau of the first form, seed by seed. The mean
quotient has two intervals: over prompts, with the seeds held (bootstrap, paired), and over seeds,
with the prompts held (Student's t of the logarithms). Writes table.md and store-tau.json.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from scipy.stats import t

from outrider.data.files import write_whole
from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.link import judged_head
from outrider.eval.offline.chain import score_chain
from outrider.eval.offline.scores import Score
from outrider.eval.offline.texts import read_texts
from outrider.eval.offline.traces import Trace, build_trace
from outrider.eval.report.provenance import file_hashes, provenance
from outrider.eval.stats import Interval, mean_quotient
from outrider.scripts.trained_runs import SharedSettings, train

Scores = dict[str, dict[int, dict[int, Score]]]
"""By form, seed and length of chain."""


@dataclass(frozen=True, kw_only=True)
class Settings(SharedSettings):
    """Which stores, on how much text."""

    output: Path = Path("runs/store-tau")
    """Receives the stores, a folder a run, the trace, table.md and store-tau.json."""
    forms: tuple[str, ...] = ("bfloat16", "int8", "int4")
    """Settings of --feature-dtype; the first is what the others are divided by."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of training."""
    heldout: str = "demo:heldout"
    """The target's greedy answers that judge all heads."""
    lengths: tuple[int, ...] = (3, 5)
    """Lengths of the chains that judge."""

    def __post_init__(self) -> None:
        for name in ("forms", "seeds", "lengths"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {[*values]}; give at least one, each once")


def main(argv: Sequence[str] | None = None) -> None:
    """Train what is missing, judge all of it, print and write."""
    settings = tyro.cli(Settings, args=argv, prog="store_tau")
    for seed in settings.seeds:
        for form in settings.forms:
            train(settings.output / name_of(form, seed), command_of(settings, form, seed))
    torch.set_num_threads(settings.threads)
    found = scores(settings, Target.load(settings.target))
    compared = comparisons(found)
    text = markdown(found, compared)
    record = {
        "provenance": provenance(),
        "flags": {
            name_of(form, seed): command_of(settings, form, seed)
            for form in settings.forms
            for seed in settings.seeds
        },
        "heads": {
            name_of(form, seed): file_hashes(settings.output / name_of(form, seed) / "last")
            for form in settings.forms
            for seed in settings.seeds
        },
        "tau": {
            form: {
                seed: {length: one.tau for length, one in chains.items()}
                for seed, chains in seeds.items()
            }
            for form, seeds in found.items()
        },
        "quotients": compared,
    }
    write_whole(settings.output / "store-tau.json", json.dumps(record, indent=1) + "\n")
    write_whole(settings.output / "table.md", text)
    print(f"{text}\n{settings.output}/table.md and store-tau.json")


def name_of(form: str, seed: int) -> str:
    """What the run of a form and a seed is called."""
    return f"{form}-{seed}"


def command_of(settings: Settings, form: str, seed: int) -> list[str]:
    """Flags of a run of outrider.train.eagle."""
    return settings.command(
        name_of(form, seed),
        heldout=None,
        device="cpu",
        save_every=200,
        keep_last=1,
        feature_dtype=form,
        seed=seed,
    )


def scores(settings: Settings, target: Target) -> Scores:
    """Scores of every head on one trace."""
    heads = {
        form: {
            seed: judged_head(settings.output / name_of(form, seed) / "last", target)
            for seed in settings.seeds
        }
        for form in settings.forms
    }
    layers = {
        layer
        for seeds in heads.values()
        for head in seeds.values()
        for layer in head.config.aux_layers
    }
    trace = held_trace(settings, target, sorted(layers))
    return {
        form: {
            seed: score_chain(head, trace, target, lengths=settings.lengths)
            for seed, head in seeds.items()
        }
        for form, seeds in heads.items()
    }


def held_trace(settings: Settings, target: Target, layers: Sequence[int]) -> Trace:
    """The target's greedy held-out answers with the states that the heads read."""
    greedy = Sampling(temperature=0.0)
    texts = read_texts(settings.heldout, greedy)
    folder = settings.output / "trace"
    return build_trace(target, texts, folder, sampling=greedy, layers=layers)


def comparisons(found: Scores) -> list[dict[str, Any]]:
    """Every later form over the first, by length of chain."""
    first, *others = found
    base = found[first]
    lengths = next(iter(base.values()))
    result: list[dict[str, Any]] = []
    for form in others:
        for length in lengths:
            pairs = [(found[form][seed][length], base[seed][length]) for seed in base]
            columns = [((a.tokens_R, a.rounds_R), (b.tokens_R, b.rounds_R)) for a, b in pairs]
            quotients = [a.tau / b.tau for a, b in pairs]
            result.append(
                {
                    "form": form,
                    "against": first,
                    "length": length,
                    "by_seed": dict(zip(base, quotients, strict=True)),
                    "over_prompts": mean_quotient(columns)._asdict(),
                    "over_seeds": over_seeds(quotients)._asdict(),
                }
            )
    return result


def over_seeds(quotients: Sequence[float], confidence: float = 0.95) -> Interval:
    """Geometric mean of quotients with Student's interval of their logarithms.

    The bounds are nan for a single seed.
    """
    logs = np.log(quotients)
    middle, count = float(logs.mean()), len(logs)
    if count < 2:
        return Interval(float(np.exp(middle)), np.nan, np.nan)
    half = float(t.ppf((1 + confidence) / 2, count - 1) * logs.std(ddof=1) / np.sqrt(count))
    return Interval(*(float(np.exp(middle + side * half)) for side in (0, -1, 1)))


def markdown(found: Scores, compared: Sequence[Mapping[str, Any]]) -> str:
    """Forms down; tau by seed, and the quotient with its intervals, for each length of chain."""
    first = next(iter(found))
    seeds = [*found[first]]
    head = ["store", "chain", *(f"seed {seed}" for seed in seeds)]
    head += [f"tau over {first}'s", "95% over prompts", "95% over seeds"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    quotients = {(one["form"], one["length"]): one for one in compared}
    for form, by_seed in found.items():
        for length in by_seed[seeds[0]]:
            cells = [form, str(length), *(f"{by_seed[seed][length].tau:.3f}" for seed in seeds)]
            one = quotients.get((form, length))
            cells += ["1", "", ""] if one is None else _cells(one)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _cells(one: Mapping[str, Any]) -> list[str]:
    bounds = (one["over_prompts"], one["over_seeds"])
    return [
        f"{one['over_prompts']['value']:.4f}",
        *(f"[{x['low']:.4f}, {x['high']:.4f}]" if np.isfinite(x["low"]) else "" for x in bounds),
    ]


if __name__ == "__main__":
    main()
