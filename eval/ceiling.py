"""What a draft vocabulary costs: tokens it lacks, and the acceptance that no draft in it passes.

At a context with the target's law p, rejection accepts a draft of law q with chance sum min(p, q).
Where q lives on the vocabulary W that is at most p(W), and p restricted to W and renormalised
reaches it: p(W) is the ceiling at temperature 1. At temperature 0 a draft is accepted when it is
the target's likeliest token, so the ceiling is how often W holds that one.

Letters: R rows, P supervised positions, H hidden size, V target vocabulary, W draft vocabulary,
S draft vocabularies.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from outrider.data.batches import Features
from outrider.data.packing import passes
from outrider.data.rows import FIRST_LABEL
from outrider.data.target import Target
from outrider.eval.stats import Interval, ratio
from outrider.heads.vocab import selected

PASS_TOKENS = 2048
"""Padded positions that the target runs at a time."""
CHUNK_ELEMENTS = 1 << 24
"""Logits held at a time."""
MEASURES = ("covered", "mass", "best")


class Tally(NamedTuple):
    """Sums over the supervised positions of every row."""

    count_R: np.ndarray
    """Supervised positions."""
    covered_RS: np.ndarray
    """Their tokens inside the vocabulary."""
    mass_RS: np.ndarray
    """Probability of the target inside it, at temperature 1."""
    best_RS: np.ndarray
    """Their likeliest tokens inside it."""


class Cost(NamedTuple):
    """Shares of supervised positions, with intervals over rows."""

    kind: str
    """Kind of the rows, or `all`."""
    rows: int
    positions: int
    covered: Interval
    """Tokens of the text inside the vocabulary."""
    mass: Interval
    """Ceiling on acceptance at temperature 1."""
    best: Interval
    """Ceiling on acceptance at temperature 0."""


def law_sums(target: Target, source: Features, temperature: float, *, title: str = "") -> Tensor:
    """Sum of the target's laws over all supervised positions, [V], float64.

    At temperature 0 the law is a point mass on the likeliest token.
    """
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; give a number from 0 up")
    sums_V = torch.zeros(target.vocab_size, dtype=torch.float64, device=target.device)
    for _, _, logits_PV in _positions(target, source, title or "target's laws"):
        if temperature == 0:
            sums_V += torch.bincount(logits_PV.argmax(-1), minlength=target.vocab_size)
        else:
            sums_V += (logits_PV / temperature).softmax(-1).sum(0, dtype=torch.float64)
    return sums_V.cpu()


def tally(target: Target, source: Features, choices: Sequence[Tensor], *, title: str = "") -> Tally:
    """What every row has inside each vocabulary [W] of `choices`, in one pass over the rows."""
    if not choices:
        raise ValueError("no draft vocabulary is given; choose at least one")
    inside_VS = torch.stack([selected(ids_W, target.vocab_size) for ids_W in choices], dim=1)
    inside_VS = inside_VS.to(target.device)
    shape = (len(source), len(choices))
    count_R, sums = np.zeros(shape[0]), {name: np.zeros(shape) for name in MEASURES}
    for index, labels_P, logits_PV in _positions(target, source, title or "ceilings"):
        found = {
            "covered": inside_VS[labels_P.to(target.device)],
            "mass": logits_PV.softmax(-1) @ inside_VS.to(logits_PV.dtype),
            "best": inside_VS[logits_PV.argmax(-1)],
        }
        count_R[index] += len(labels_P)
        for name, found_PS in found.items():
            sums[name][index] += found_PS.sum(0, dtype=torch.float64).cpu().numpy()
    return Tally(count_R, *(sums[name] for name in MEASURES))


def costs(found: Tally, kinds: Sequence[str], choice: int, *, seed: int = 0) -> list[Cost]:
    """The cost of one of the vocabularies on all rows, then on the rows of each kind.

    kinds names the kind of every row. Intervals are 95% bootstrap intervals over rows.
    """
    if len(kinds) != len(found.count_R):
        raise ValueError(
            f"{len(kinds)} kinds are given for {len(found.count_R)} rows; give one each"
        )
    label_R = np.asarray(kinds)
    several = sorted(set(kinds)) if len(set(kinds)) > 1 else []
    made: list[Cost] = []
    for kind in ("all", *several):
        in_R = np.ones(len(label_R), dtype=bool) if kind == "all" else label_R == kind
        count_R = found.count_R[in_R]
        shares = {
            name: ratio(getattr(found, f"{name}_RS")[in_R, choice], count_R, seed=seed)
            for name in MEASURES
        }
        made.append(Cost(kind, int(in_R.sum()), int(count_R.sum()), **shares))
    return made


def _positions(
    target: Target, source: Features, title: str
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Row, supervised tokens [P] and the logits [P, V] they were judged by, a chunk at a time.

    The first tokens of a row count as little as in training: no draft can be of them.
    """
    size = max(1, CHUNK_ELEMENTS // target.vocab_size)
    with tqdm(total=sum(source.lengths), desc=title, unit="tok", unit_scale=True) as bar:
        for indices in passes(source.lengths, PASS_TOKENS):
            for index, row in zip(indices, source.rows(indices), strict=True):
                label_P = row.mask_T[FIRST_LABEL:].nonzero().flatten() + FIRST_LABEL
                for part_P in label_P.split(size):
                    state_PH = row.last_TH[part_P - 1].to(target.device)
                    logits_PV = target.logits(state_PH)
                    exact = torch.promote_types(logits_PV.dtype, torch.float32)
                    yield index, row.ids_T[part_P], logits_PV.to(exact)
                bar.update(source.lengths[index])
