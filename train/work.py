"""Operations of a run, counted before it: the real code on tensors that hold nothing.

Letters: T positions, H hidden size of the target, L layers whose states are features.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import init_empty_weights
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig

from outrider.data.batches import Batches, StoredRow
from outrider.data.laws import TopLaw
from outrider.data.layout import Layout, Packed
from outrider.data.packing import passes
from outrider.data.rows import Row
from outrider.data.store import PASS_TOKENS
from outrider.data.target import Target
from outrider.heads import HEADS, DraftHead, HeadConfig, Tables
from outrider.train import muon
from outrider.train.objectives import DraftWork, task_of
from outrider.train.optim import by_split, inner_matrices
from outrider.train.settings import Settings
from outrider.train.start import settle

COUNTED_PACKS = 4
"""Packs whose step is counted; the mean stands for all."""
META = torch.device("meta")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""What configs call the number of experts, and of those that each token passes."""
TAKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts")


@dataclass(frozen=True)
class BlankRows:
    """Rows with features that have shapes and no values."""

    rows_: Sequence[Row]
    layout: Layout

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row) for row in self.rows_]

    @property
    def row_ids(self) -> list[str]:
        """Name of each row."""
        return [row.row_id for row in self.rows_]

    def __len__(self) -> int:
        return len(self.rows_)

    def rows(self, indices: Sequence[int]) -> list[StoredRow]:
        """The named rows."""
        return [self._blank(self.rows_[index]) for index in indices]

    def _blank(self, row: Row) -> StoredRow:
        shape, width = (len(row),), self.layout.width
        aux = torch.empty(
            *shape, len(self.layout.layers) * width, dtype=torch.bfloat16, device=META
        )
        last = torch.empty(*shape, width, dtype=torch.bfloat16, device=META)
        if not isinstance(self.layout, Packed):
            return StoredRow(row.ids, row.mask, aux, last)
        size = self.layout.top_k
        law = TopLaw(
            torch.empty(*shape, size, dtype=torch.int32, device=META),
            torch.empty(*shape, size, device=META),
            torch.empty(shape, device=META),
            torch.empty(shape, device=META),
            len(self.layout.vocabulary) - size,
        )
        nothing = aux[:, :0]
        pair = (aux, nothing) if self.layout.layers else (nothing, last)
        return StoredRow(row.ids, row.mask, *pair, law)


def blank_head(
    config: HeadConfig, draft_ids_W: Tensor | None, settings: Settings, target: Target
) -> DraftHead:
    """A head of this geometry without weights, frozen where the settings freeze it."""
    with init_empty_weights(include_buffers=False):
        head = HEADS[config.kind](config, draft_ids_W)
    settle(head, settings.head)
    return head.attach(
        Tables(
            embedding_VH=target.embedding_VH,
            output_VH=target.output_VH,
            tokenizer_size=target.tokenizer_size,
            num_layers=target.num_layers,
            softcap=target.softcap,
        )
    )


def block_parameters(target: Target) -> float:
    """Weights of the decoder layers that one token passes, those of experts by their share."""
    config = target.config
    experts, taken = (_first(config, names) for names in (EXPERTS, TAKEN))
    share = taken / experts if experts and taken else 1.0
    return sum(
        value.numel() * (share if "experts" in name and "shared" not in name else 1.0)
        for name, value in target.blocks.named_parameters()
        if value.ndim > 1
    )


def _first(config: PretrainedConfig, names: Sequence[str]) -> int | None:
    """The first of some settings that a config has."""
    found = (getattr(config, name, None) for name in names)
    return next((x for x in found if isinstance(x, int) and x > 0), None)


def pass_ops(target: Target, lengths: Sequence[int]) -> float:
    """Operations of the target's layers over rows of these lengths, padded to the longest.

    Two for each weight and token, and attention over the whole square of positions, which is what
    dense kernels compute; layers with windows or without attention take less.
    """
    longest, positions = max(lengths), max(lengths) * len(lengths)
    config = target.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 4 * target.num_layers * config.num_attention_heads * size * longest
    return positions * (2 * block_parameters(target) + attention)


def forward_ops(target: Target, rows: Sequence[Row]) -> float:
    """Operations of the target's passes over all rows, as a store is built."""
    lengths = [len(row) for row in rows]
    groups = passes(lengths, PASS_TOKENS)
    weights = 2 * block_parameters(target)
    positions, squares = 0, 0
    for places in groups:
        longest = lengths[places[0]]
        positions += longest * len(places)
        squares += longest * longest * len(places)
    single = pass_ops(target, [1]) - weights
    return positions * weights + squares * single


def law_ops(rows: Sequence[Row], layout: Layout) -> float:
    """Operations of the laws that a packed store keeps."""
    if not isinstance(layout, Packed):
        return 0.0
    return 2.0 * layout.width * len(layout.vocabulary) * sum(layout.count(r, "law") for r in rows)


def step_ops(head: DraftHead, settings: Settings, rows: Sequence[Row], layout: Layout) -> float:
    """Operations of the forward and backward pass of an average micro-batch."""
    dtype = torch.bfloat16 if settings.run.precision == "bf16" else None
    head = copy.deepcopy(head)  # its draft ids become blanks, too
    task = task_of(head, settings.objective, num_steps=settings.num_steps, dtype=dtype)
    run = settings.run
    batches = Batches(
        BlankRows(rows, layout), size=settings.data.max_length, batch_size=run.batch_size,
        seed=run.seed,
    )  # fmt: skip
    number = batches.epoch_length()
    chosen = sorted({index * number // COUNTED_PACKS for index in range(COUNTED_PACKS)})
    works = [task.prepare(batches.batch(0, index)) for index in chosen]
    task.to(META)
    with FlopCounterMode(display=False) as counter:
        for work in works:
            task(blank(work)).loss.backward()
    return counter.get_total_flops() / len(chosen)


def blank(work: DraftWork) -> DraftWork:
    """The same work without values, but for the blocks of a deep head, which follow from them."""
    moved = work.to(META)
    blocks = [one._replace(hidden=one.hidden.to(META)) for one in work.plan.everywhere]
    vars(moved.plan)["everywhere"] = tuple(blocks)  # what the cached property would compute
    return moved


def muon_ops(head: DraftHead, settings: Settings) -> float:
    """Operations of Muon's products in one optimiser step."""
    inner = inner_matrices(head, settings.optim)
    return float(
        sum(muon.flop(v, split) for split, values in by_split(head, inner) for v in values)
    )


def moment_bytes(head: DraftHead, settings: Settings) -> float:
    """Bytes that an optimiser step moves beside Muon's products.

    AdamW reads weight, gradient and two moments and writes all but the gradient; clipping reads the
    gradient; the average reads itself and the weight, and writes itself.
    """
    trained = sum(value.numel() for value in head.parameters() if value.requires_grad)
    inner = sum(value.numel() for value in inner_matrices(head, settings.optim))
    average = 3 * trained if settings.optim.ema is not None else 0
    return 4.0 * (7 * (trained - inner) + trained + average)
