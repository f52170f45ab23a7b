"""What a joint run needs beyond a frozen target's: for `--plan`.

Letters: T positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.train.joint import first_joint_step
from outrider.train.joint_task import CHUNK_LOGITS
from outrider.train.settings import Settings
from outrider.train.tuning import FullTuning, Tuning

PROBE_POSITIONS = 64


class JointNeeds(NamedTuple):
    """Counts and bytes."""

    parameters: int
    """What is trained of the target."""
    activations: int
    """Bytes that the target keeps for the backward pass of one micro-batch."""
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


def joint_needs(tuning: Tuning, settings: Settings) -> JointNeeds:
    """Needs of a joint run; activations are measured on a short pass."""
    named = tuning.parameters
    values = sum(value.numel() for value in named.values())
    model = sum(x.numel() * x.element_size() for x in tuning.target.model.parameters())
    adapters = sum(x.numel() * x.element_size() for x in named.values())
    is_full = isinstance(tuning, FullTuning)
    whole = model if is_full else model - adapters
    positions = settings.run.batch_size * settings.data.max_length
    return JointNeeds(
        parameters=values,
        activations=positions * saved_bytes(tuning) // PROBE_POSITIONS + 6 * 4 * CHUNK_LOGITS,
        export=whole + (0 if is_full else adapters),
    )


def saved_bytes(tuning: Tuning, positions: int = PROBE_POSITIONS) -> int:
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
