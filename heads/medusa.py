"""Medusa-1: one small network a depth, all of them on the target's last state.

The alignment rule: row t holds the target's last state at position t; head i predicts x_{t+2+i}
from it, whatever the tokens x_{t+1} .. x_{t+1+i} are. So drafts of one depth have one law, the
head's, and a tree is the Cartesian product of the heads' likeliest tokens, pruned by the product
of their probabilities (Cai et al. 2024, sections 2.1.1 and 2.1.2).

A head is residual blocks x + silu(Wx + b) and output rows. Blocks start at zero and output rows as
the target's, so a new head says what the target's own head says of the state: x_{t+1}, one token
too early, which training moves on.

Letters: B rows, T positions, N any positions, H hidden size, W draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from typing_extensions import override

from outrider.heads.base import DraftHead
from outrider.heads.cache import HeadCache
from outrider.heads.config import HeadConfig, shared_sizes, text_config
from outrider.heads.plan import RowPlan


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """Everything that fixes the shape and the arithmetic of Medusa heads."""

    KINDS: ClassVar[tuple[str, ...]] = ("medusa",)
    kind: str = "medusa"
    num_draft_heads: int = 4
    """Heads, which is tokens drafted ahead."""
    num_draft_layers: int = 1
    """Residual blocks of each head."""
    shared_output: bool = False
    """Heads use the target's output rows as they are, instead of rows of their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_width()
        self.check_at_least_one("num_draft_heads", "num_draft_layers")

    @property
    @override
    def max_drafts(self) -> int:
        return self.num_draft_heads

    @property
    @override
    def activation_width(self) -> int:
        return (3 * self.num_draft_layers + 2) * self.hidden_size

    @classmethod
    @override
    def from_target(
        cls,
        target: PreTrainedConfig | Mapping[str, Any],
        *,
        kind: str = "medusa",
        num_draft_heads: int = 4,
        num_draft_layers: int = 1,
        shared_output: bool = False,
        **sizes: Any,
    ) -> Self:
        """Geometry for a target; `sizes` are those of `shared_sizes`, the target's if left out."""
        return cls(
            kind=kind,
            num_draft_heads=num_draft_heads,
            num_draft_layers=num_draft_layers,
            shared_output=shared_output,
            **shared_sizes(text_config(target), **sizes),
        )


class MedusaBlock(nn.Module):
    """The residual blocks of one head, under vLLM's names."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        for value in self.parameters():
            nn.init.zeros_(value)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """The last state turned into what the output rows read, in its own dtype."""
        for layer in self.layers:
            weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
            x = x + F.silu(F.linear(x, weight.to(x.dtype), bias.to(x.dtype)))
        return x


class MedusaHead(DraftHead):
    """Medusa heads."""

    config: MedusaConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: MedusaConfig, draft_ids_W: Tensor | None = None) -> None:
        super().__init__(config, draft_ids_W)
        width, num_heads = config.hidden_size, config.num_draft_heads
        self.blocks = nn.ModuleList(
            MedusaBlock(width, config.num_draft_layers) for _ in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, config.draft_vocab_size, bias=False)
            for _ in range(0 if config.shared_output else num_heads)
        )

    @override
    @torch.no_grad()
    def start_from_target(self) -> Self:
        rows_WH = self.lent().output_VH[self.draft_ids_W]
        for weight in self.own_outputs:
            weight.copy_(rows_WH)
        return self

    @property
    @override
    def own_outputs(self) -> list[nn.Parameter]:
        return [output.get_parameter("weight") for output in self.lm_heads]

    @override
    def project(self, aux_BTF: Tensor | None, last_BTH: Tensor | None) -> Tensor:
        assert last_BTH is not None
        return last_BTH.to(self.dtype)

    @override
    def step(
        self,
        feature_BTD: Tensor,
        ids_BT: Tensor,
        position_BT: Tensor,
        cache: HeadCache | None = None,
        mask: Tensor | None = None,
        depth: int = 0,
    ) -> Tensor:
        """Hand the state on: tokens change nothing, and the depth picks the head when it speaks."""
        if cache is not None:
            cache.skip(ids_BT.shape[1])
        return feature_BTD

    @override
    def unroll(
        self, feature_BTD: Tensor, ids_BT: Tensor, position_BT: Tensor, plan: RowPlan
    ) -> list[Tensor]:
        return [feature_BTD.flatten(0, 1).index_select(0, plan.row_N)] * plan.num_steps

    @override
    def output_input(self, hidden: Tensor, depth: int = 0) -> Tensor:
        block = self.blocks[depth]
        return block(hidden)
