"""Bytes of memory that a run holds at its peak, phase by phase.

Letters: N positions of a sample, H hidden size of the target, D of the head, F fused layers times
H, V target vocabulary, W draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import nn

from outrider.data.layout import Layout
from outrider.data.store import PASS_TOKENS, SHARD_TOKENS
from outrider.data.target import Target
from outrider.heads import DraftHead, HeadConfig
from outrider.heads.config import DecoderConfig
from outrider.heads.fitted import SAMPLE
from outrider.heads.fused import CHUNK_ELEMENTS
from outrider.train.joint_plan import JointNeeds
from outrider.train.kinds import EagleHeadSettings
from outrider.train.optim import inner_matrices, state_bytes
from outrider.train.settings import Settings
from outrider.train.start import sample_size

PROCESS_BYTES = 420 * 2**20
"""What Python with torch and transformers holds before any model (Linux, CPU; 380 to 450 MiB)."""
SCORED_POSITIONS, SCORED_ROWS = 4096, 128
"""Positions of a batch of held-out text, and logits rows made at a time (eval/offline)."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "fp32": 4, "bf16": 2}


class Memory(NamedTuple):
    """Bytes by what holds them, then by phase."""

    process: float
    target: float
    """The target's weights, all through the run."""
    state: float
    """The head's weights, gradients and moments, its average and what is frozen."""
    activations: float
    """A micro-batch, its features among it."""
    features: float
    """Computing features: a pass of the target, and two shards."""
    start: float
    """The sample that a new head starts from, and the fit on it."""
    heldout: float
    """Judging a head: a second one, and a batch of held-out text."""

    @property
    def peak(self) -> float:
        """The largest phase."""
        head = self.state
        held = max(self.features, head + self.start, head + self.activations, head + self.heldout)
        return self.process + self.target + held


def memory_of(
    head: DraftHead,
    target: Target,
    layout: Layout | None,
    settings: Settings,
    joint: JointNeeds,
    num_tokens: int,
) -> Memory:
    """The needs of a run; `layout` is None where nothing is stored."""
    trained = count(head, is_trained=True)
    frozen = count(head, is_trained=False)
    has_average = settings.optim.ema is not None
    inner = sum(value.numel() for value in inner_matrices(head, settings.optim))
    parameters = trained + joint.parameters
    state = state_bytes(parameters, num_inner=inner, has_average=has_average) + 4 * frozen
    positions = settings.run.batch_size * settings.data.max_length
    kept = (len(head.config.aux_layers) + 1) * target.hidden_size
    dtype = torch.bfloat16 if settings.run.precision == "bf16" else torch.float32
    step = step_bytes(head.config, positions, settings.num_steps, dtype)
    step += max(0, joint.logits - chunk_bytes(head.config, positions, settings.num_steps))
    start, choice = 0.0, settings.head
    if choice.starts_from_states and isinstance(head.config, DecoderConfig):
        is_fitted = isinstance(choice, EagleHeadSettings) and choice.start == "fitted"
        needs = fitted_bytes if is_fitted else induction_bytes
        start = needs(head.config, num_tokens, settings.data.max_length)
    return Memory(
        process=PROCESS_BYTES,
        target=target_bytes(target),
        state=state,
        activations=step + teacher_bytes(head, settings) + 2 * positions * kept + joint.activations,
        features=feature_memory(target, layout, num_tokens),
        start=start,
        heldout=heldout_bytes(head, target, kept) if settings.data.heldout is not None else 0.0,
    )


def count(module: nn.Module, *, is_trained: bool) -> int:
    """Parameters that learn, or that do not."""
    return sum(value.numel() for value in module.parameters() if value.requires_grad == is_trained)


def target_bytes(target: Target) -> int:
    """Bytes of the frozen target's weights, or of the original's beside a tuned one."""
    frozen = (value for value in target.model.parameters() if not value.requires_grad)
    return sum(value.numel() * value.element_size() for value in frozen)


def step_bytes(config: HeadConfig, positions: int, num_steps: int, dtype: torch.dtype) -> int:
    """Bytes of a training step over so many supervised positions, by the widths of what is kept.

    The logits are a chunk's, with what is made of them. scripts/memory_bench.py measures the same.
    """
    kept = positions * num_steps * config.activation_width * dtype.itemsize
    return kept + chunk_bytes(config, positions, num_steps)


def chunk_bytes(config: HeadConfig, positions: int, num_steps: int) -> int:
    """Bytes of a chunk of logits, with what is made of them."""
    return 3 * 4 * min(CHUNK_ELEMENTS, positions * num_steps * config.draft_vocab_size)


def teacher_bytes(head: DraftHead, settings: Settings) -> int:
    """The target's output rows of the draft vocabulary, kept in the precision of the step."""
    config = head.config
    return config.num_proposable * config.target_hidden_size * DTYPE_BYTES[settings.run.precision]


def feature_memory(target: Target, layout: Layout | None, num_tokens: int) -> float:
    """A pass of the target, whose widest layer is its MLP, and two shards of the store.

    A shard is there in parts, joined, and as the bytes of its file, while the next one grows.
    """
    config, width = target.config, target.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * width
    a_pass = PASS_TOKENS * target.dtype.itemsize * (6 * width + 3 * inner)
    if layout is None:
        return a_pass
    shard = sum(part.field.num_bytes for part in layout.parts.values())
    return a_pass + 4 * shard * min(SHARD_TOKENS, num_tokens)


def induction_bytes(config: HeadConfig, num_tokens: int, max_length: int) -> float:
    """What the induction start holds (heads/induction.py), most of it for each sampled position.

    The sample's states, twice; then the fused ones in float32, first whole and where they are
    counted, later once beside the embeddings, three times, and the first layer's states on their
    way to float64 and to unit spread; and the output rows in float32, twice, with Gram matrices.
    """
    sample = min(sample_size(config.target_hidden_size) + max_length, num_tokens)
    width, wide = config.target_hidden_size, config.hidden_size
    fused = len(config.aux_layers) * width
    solving = 4 * fused + 3 * 4 * wide + (4 + 8 + 8) * width
    a_position = 2 * 2 * fused + max(2 * 4 * fused, solving)
    rows = config.draft_vocab_size * wide * 4
    return sample * a_position + 2 * rows + 3 * 8 * (width * width + wide * wide)


def fitted_bytes(config: DecoderConfig, num_tokens: int, max_length: int) -> float:
    """What the fitted start holds (heads/fitted.py).

    The sample's states and those of a pack, in float32, in parts and joined; normal equations in
    float64, four times while they are solved; the output rows in float64, twice.
    """
    fused = len(config.aux_layers) * config.target_hidden_size
    wide, inner = config.hidden_size, config.intermediate_size
    attended = config.num_heads * config.head_dim
    positions = 2 * min(SAMPLE, num_tokens) + 4 * max_length
    regressors = max(fused + wide, attended + inner)
    rows = 2 * 8 * config.draft_vocab_size * wide
    return positions * 4 * (fused + 4 * wide) + 4 * 8 * regressors**2 + rows


def heldout_bytes(head: DraftHead, target: Target, kept: int) -> float:
    """A head read from its exported files, states of a batch of text, and logits of some rows."""
    config = head.config
    weights = 4 * (count(head, is_trained=True) + count(head, is_trained=False))
    states = SCORED_POSITIONS * (4 * kept + 8 * 4 * config.hidden_size)
    logits = SCORED_ROWS * 4 * (4 * target.vocab_size + 4 * config.draft_vocab_size)
    rows = config.num_proposable * config.target_hidden_size * 4
    return 2 * weights + states + logits + rows
