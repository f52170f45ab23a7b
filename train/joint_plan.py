"""What a joint run needs beyond a frozen target's: for `--plan`.

Letters: T positions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.data.packing import shuffled_packs
from outrider.data.rows import Row
from outrider.train.joint import first_joint_step
from outrider.train.joint_task import CHUNK_LOGITS
from outrider.train.settings import Settings
from outrider.train.tuning import FullTuning, Tuning

MOST_PROBED = 512
"""Positions of the pass that is measured, at most."""
STATES = 8
"""Last states of all positions held beside the pass: the original's and the tuned ones, as rows and
packed, those with a gradient, and the gradients of two."""


class JointNeeds(NamedTuple):
    """Counts and bytes."""

    parameters: int
    """What is trained of the target."""
    activations: int
    """Bytes that the target keeps for the backward pass of one micro-batch."""
    logits: int
    """Bytes of the chunk of logits that hold the target to its original, with what is made of them;
    never there together with the head's own chunk."""
    export: int
    """Bytes of one exported pair besides the head."""

    def lines(self, settings: Settings, num_steps: int) -> list[str]:
        """What the target learns, and when."""
        joint = settings.tuning
        assert joint is not None
        begin = first_joint_step(joint, num_steps)
        return [
            (
                f"  joint {joint.joint}: {self.parameters / 1e6:.2f} M parameters of the target "
                f"learn, in steps {begin + 1} to {num_steps}; heads alone before"
            ),
            "  the target runs twice in every joint step, once with a gradient",
        ]


def joint_needs(tuning: Tuning, settings: Settings, rows: Sequence[Row]) -> JointNeeds:
    """Needs of a joint run; activations are measured on a pass as long as the longest row.

    The documents of a pack run as rows of one length, that of the longest, and so take more
    positions than the pack has.
    """
    named = tuning.parameters
    values = sum(value.numel() for value in named.values())
    model = sum(x.numel() * x.element_size() for x in tuning.target.model.parameters())
    adapters = sum(x.numel() * x.element_size() for x in named.values())
    is_full = isinstance(tuning, FullTuning)
    whole = model if is_full else model - adapters
    lengths = [len(row) for row in rows]
    packs = shuffled_packs(lengths, settings.data.max_length, settings.run.seed)
    padded = sorted(len(pack) * max(lengths[row] for row in pack) for pack in packs)
    positions = sum(padded[-settings.run.batch_size :])
    probe = min(MOST_PROBED, max(lengths))
    width = tuning.target.hidden_size
    logits = min(CHUNK_LOGITS, positions * tuning.target.vocab_size)
    states = STATES * positions * width * tuning.target.dtype.itemsize
    return JointNeeds(
        parameters=values,
        activations=positions * saved_bytes(tuning, probe) // probe + states,
        logits=6 * 4 * logits,
        export=whole + (0 if is_full else adapters),
    )


def saved_bytes(tuning: Tuning, positions: int) -> int:
    """Bytes that autograd keeps of a pass over so many positions, weights not counted."""
    target = tuning.target
    weights = {x.untyped_storage().data_ptr() for x in tuning.decoder.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # a freed storage's address may come again

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(value.detach())
        return value

    ids_DT = torch.arange(positions, device=target.device)[None] % target.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        tuning.states(ids_DT)
    return sum(kept.values())
