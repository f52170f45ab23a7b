"""What acceptance is lost to, exactly: parts that add up, per judged context and per round.

At a judged context with the target's law p, one is divided into what was accepted and four losses:

    alpha       accepted
    rule        alpha* - alpha: the best exact rule would accept that of these very drafts
    shape       alpha* of drafts as wide as the plan has anywhere, less alpha* of these: children
                that the tree left out
    head        p inside the draft vocabulary, less alpha* of the widest drafts
    vocabulary  p outside the draft vocabulary

so head and vocabulary together are 1 - alpha* where nothing was left out. alpha* is that of one
node and of the draft law in use: chosen drafts are a point mass, whose alpha* is their mass, and
the rule of one drawn chain loses nothing at a node.

A round ends once, for one reason: refused at a judged context (the four losses again), `undrafted`
before its plan's depth (a leaf of the tree, no match, the head's last position), cut by the end of
the text, or complete with all drafts accepted. Losses are expectations over the text's token, so
`complete` is the rest of the rounds; shares add up to one for every set of prompts. The tree's
shape costs a round `shape` and `undrafted`.
"""

import itertools
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LOSSES = ("vocabulary", "head", "shape", "rule")
"""Losses at a judged context."""
ENDS = (*LOSSES, "undrafted", "text", "complete")
"""Reasons for which rounds end."""


def losses(sums: Mapping[str, Floats]) -> dict[str, Floats]:
    """Sums of each loss from sums over judged contexts: judged, inside, wide, best and kept."""
    steps = ("judged", "inside", "wide", "best", "kept")
    pairs = itertools.pairwise(steps)
    return {
        name: sums[upper] - sums[lower] for name, (upper, lower) in zip(LOSSES, pairs, strict=True)
    }


def ends(
    lost: Mapping[str, Floats], rounds: Floats, undrafted: Floats, cut: Floats
) -> dict[str, Floats]:
    """Sums of each reason for which rounds end."""
    known = {**lost, "undrafted": undrafted, "text": cut}
    return {**known, "complete": rounds - sum(known.values())}
