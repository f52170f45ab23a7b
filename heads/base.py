"""What every draft head is: a vocabulary, tables on loan from the target, and five ways to run it.

One alignment rule holds for all kinds: row t knows the target's state at position t and the token
x_{t+1}; its first draft (depth 0) is x_{t+2}, the draft of depth k is x_{t+2+k}, drawn with
x_{t+2} .. x_{t+1+k} known. What a kind does with them, its file says.

Letters: B rows, T positions, N any positions, P predicted tokens, K steps, F fused feature inputs,
H target hidden size, D draft hidden size, V target vocabulary, W draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.heads.cache import HeadCache
from outrider.heads.config import HeadConfig
from outrider.heads.plan import RowPlan
from outrider.heads.tables import Tables, bend, to_device
from outrider.heads.vocab import check_draft_ids, offsets, selected


class States(NamedTuple):
    """Packed text and the target's states on it."""

    aux_BTF: Tensor
    last_BTH: Tensor
    ids_BT: Tensor
    position_BT: Tensor


class Predicted(NamedTuple):
    """What a head makes of the loss pairs of a plan; entries that are no pair are arbitrary."""

    columns: Sequence[Tensor]
    """For every step, what the head carries from draft to draft, [P, D] or wider."""
    output_PKD: Tensor
    """What the output head multiplies."""


class DraftHead(nn.Module, ABC):
    """A draft head. Parameters bear the published names; `attach` lends it the target's tables."""

    config: HeadConfig
    """Never set again, so that kinds may narrow its type."""

    def __init__(self, config: HeadConfig, draft_ids_W: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.tables: Tables | None = None
        self._cast: dict[torch.dtype, Tensor] = {}
        self._add_vocabulary(draft_ids_W)

    def _add_vocabulary(self, draft_ids_W: Tensor | None) -> None:
        config = self.config
        if not config.is_reduced:
            if draft_ids_W is not None:
                raise ValueError("draft ids given for a full draft vocabulary; leave them out")
            self._all_ids = nn.Buffer(torch.arange(config.vocab_size), persistent=False)
            return
        if draft_ids_W is None:
            raise ValueError(
                f"draft_vocab_size is {config.draft_vocab_size} of {config.vocab_size} and no "
                "draft ids are given; choose them with outrider.heads.vocab.choose"
            )
        check_draft_ids(draft_ids_W, config)
        self.d2t = nn.Buffer(offsets(draft_ids_W))
        self.t2d = nn.Buffer(selected(draft_ids_W, config.vocab_size))

    @property
    def device(self) -> torch.device:
        """Where the head is."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of its parameters."""
        return next(self.parameters()).dtype

    def start_from_target(self) -> Self:
        """Begin a new head near its target, where the kind knows how."""
        return self

    def follow(self, old: "DraftHead") -> None:
        """Take over what a head of the same kind has besides its weights and its vocabulary."""

    # Tables of the target

    def attach(self, tables: Tables) -> Self:
        """Lend the target's tables. They are not parameters and never in the state dict."""
        rows, width = tables.output_VH.shape
        wanted = (self.config.vocab_size, self.config.target_hidden_size)
        if (rows, width) != wanted:
            raise ValueError(
                f"the target's output head is {rows} x {width} but this head was made for "
                f"{wanted[0]} x {wanted[1]}; pair it with its own target"
            )
        self.tables = to_device(tables, self.device)
        self._cast = {}
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.tables is not None:
            self.attach(self.tables)
        return self

    def lent(self) -> Tables:
        """The tables, or an error that says how to lend them."""
        if self.tables is None:
            raise ValueError("the head has no target tables; call head.attach(tables) first")
        return self.tables

    def teacher_rows(self, dtype: torch.dtype) -> Tensor:
        """Rows of the target's output head for every proposable draft id, in this dtype; cached."""
        if dtype not in self._cast:
            ids_W = self.draft_ids_W[: self.config.num_proposable]
            table_VH = self.lent().output_VH
            whole = ids_W.shape[0] == table_VH.shape[0]
            self._cast[dtype] = (table_VH if whole else table_VH[ids_W]).to(dtype)
        return self._cast[dtype]

    def embed(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The target's embedding rows, unscaled."""
        return F.embedding(ids, self.lent().embedding_VH).to(dtype)

    # Running it

    @abstractmethod
    def project(self, aux_BTF: Tensor | None, last_BTH: Tensor | None) -> Tensor:
        """What `step` and `unroll` take as feature, from the target's states; [B, T, D]."""

    @abstractmethod
    def step(
        self,
        feature_BTD: Tensor,
        ids_BT: Tensor,
        position_BT: Tensor,
        cache: HeadCache | None = None,
        mask: Tensor | None = None,
        depth: int = 0,
    ) -> Tensor:
        """Run T new rows over the cache and themselves; returns what they carry, hidden_BTD.

        At depth 0 the features are the target's (`project`), at depth k what the step of depth
        k - 1 returned. ids are the tokens that FOLLOW the features, positions those of the
        features. mask is bool [B, 1, T, S] with S cached plus new entries; None is causal.
        """

    @abstractmethod
    def unroll(
        self, feature_BTD: Tensor, ids_BT: Tensor, position_BT: Tensor, plan: RowPlan
    ) -> list[Tensor]:
        """What `step` returns at every depth for the rows of the plan, teacher-forced: K of [N, D].

        feature is what `project` returned; position restarts in every document.
        """

    def predict(self, states: States, plan: RowPlan, dtype: torch.dtype | None = None) -> Predicted:
        """The loss pairs of a plan, differentiable; dtype is that of computation."""
        feature_BTD = self.project(states.aux_BTF, states.last_BTH).to(dtype or self.dtype)
        columns = plan.columns(self.unroll(feature_BTD, states.ids_BT, states.position_BT, plan))
        outputs = [self.output_input(column, depth) for depth, column in enumerate(columns)]
        return Predicted(columns, torch.stack(outputs, dim=1))

    # Output

    @property
    def draft_ids_W(self) -> Tensor:  # noqa: N802 - a dimension suffix
        """Target id of every draft id; the identity when the vocabulary is full."""
        if not self.config.is_reduced:
            return self._all_ids
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    @property
    def own_outputs(self) -> list[nn.Parameter]:
        """Output heads of its own [W, D]: none, one for all depths, or one for each depth."""
        return []

    @property
    def is_bent(self) -> bool:
        """Whether its logits get the target's own scale and cap."""
        return False

    @abstractmethod
    def output_input(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """What the output head multiplies, from what `step` returned at this depth."""

    def output_weights(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Rows of the output head for proposable draft ids: one for all depths, or one for each.

        Views of its own parameters, or the target's frozen rows in this dtype.
        """
        if not self.own_outputs:
            return [self.teacher_rows(dtype or self.dtype)]
        size = self.config.num_proposable
        return [weight if size == weight.shape[0] else weight[:size] for weight in self.own_outputs]

    def matrices(self) -> list[Tensor]:
        """All that it may multiply by as it drafts, rows of the target's output head among them."""
        own = [one for one in self.parameters() if one.ndim == 2]
        return [*own, *self.output_weights()]

    def output_weight(self, dtype: torch.dtype | None = None, depth: int = 0) -> Tensor:
        """The rows that drafts of this depth are made with."""
        weights = self.output_weights(dtype)
        return weights[depth] if len(weights) > 1 else weights[0]

    def draft_logits(self, hidden_ND: Tensor, depth: int = 0) -> Tensor:
        """Logits over the draft vocabulary, fp32 or better; ids that do not exist get -inf."""
        weight_WD = self.output_weight(hidden_ND.dtype, depth)
        logits = F.linear(self.output_input(hidden_ND, depth), weight_WD)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.is_bent:
            logits = bend(logits, self.lent())
        missing = self.config.draft_vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits

    def draft_probs(self, hidden_ND: Tensor, temperature: float = 1.0, depth: int = 0) -> Tensor:
        """The draft's law over the draft vocabulary; a point mass at temperature 0."""
        logits_NW = self.draft_logits(hidden_ND, depth)
        if temperature == 0:
            return F.one_hot(logits_NW.argmax(-1), logits_NW.shape[-1]).to(logits_NW.dtype)
        return (logits_NW / temperature).softmax(-1)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Target ids of draft ids."""
        return self.draft_ids_W[draft_ids]

    def scatter(self, probs_NW: Tensor) -> Tensor:
        """Probabilities over the target vocabulary, zero outside the draft's."""
        if not self.config.is_reduced:
            return probs_NW
        probs_NV = probs_NW.new_zeros((*probs_NW.shape[:-1], self.config.vocab_size))
        probs_NV[..., self.draft_ids_W] = probs_NW
        return probs_NV
