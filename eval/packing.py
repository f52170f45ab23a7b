"""Packed weights for a target and its drafters, for as long as text is decoded or judged."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor

from outrider.data.packed_linears import packed_weights, weights_of
from outrider.data.target import Target
from outrider.eval.drafters.by_plan import Network
from outrider.eval.drafters.model import DraftModel
from outrider.eval.drafters.universal import TextModel


@contextmanager
def packed(target: Target, *drafters: Network | None) -> Generator[bool]:
    """Within, both multiply by weights packed for the CPU; see `outrider.data.packed_linears`.

    Yields whether any can be packed: on other devices nothing changes. Contexts may be nested; the
    inner one uses what the outer has packed.
    """
    weights: list[Tensor] = weights_of(target)
    for drafter in drafters:
        if isinstance(drafter, DraftModel | TextModel):
            weights += weights_of(drafter.model)
        elif drafter is not None and not isinstance(drafter, Target):
            weights += drafter.matrices()
    with packed_weights(weights) as can:
        yield can
