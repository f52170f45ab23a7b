"""Keys and values of a frozen target with a length, a roll-back and a refill for every row.

A forward writes its tokens after each row's length; nothing counts until `advance` says how many
of them to keep, so padding and rejected drafts need no clean-up.

Letters: B rows, H key/value heads, C capacity, D head size, n new tokens, S slots shown.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache
from typing_extensions import override

# Capacity grows in steps of this many positions: one copy of the buffers a step.
GROWTH = 128

FULL, SLIDING = "full_attention", "sliding_attention"


class RowCache(Cache):
    """A decoder model's `cache`, for passes with `attention_masks` and `query_positions`.

    Every layer keeps every position: a sliding window is the mask's affair.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__(layers=[])
        self.lengths_B = torch.zeros(num_rows, dtype=torch.long)
        """Positions that count, per row."""
        self.keys: list[Tensor] = []
        """[B, H, C, D] per layer."""
        self.values: list[Tensor] = []
        """[B, H, C, D] per layer."""
        self._max_length = 0

    @override
    def __len__(self) -> int:
        """Layers written so far."""
        return len(self.keys)

    @override
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest row's length."""
        return self._max_length

    @override
    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The longest row's length."""
        return self._max_length

    @override
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Slots shown to a pass of `query_length` tokens, and the first of them."""
        return self._max_length + query_length, 0

    @property
    @override
    def is_sliding(self) -> list[bool]:
        """All false: no layer drops positions."""
        return [False] * len(self)

    @override
    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write n tokens after each row's length; views [B, H, S, D], S = longest length + n."""
        num_new = key_states.shape[2]
        end = self._max_length + num_new
        self._reserve(layer_idx, key_states, value_states, end)
        device = key_states.device
        rows_B1 = torch.arange(len(key_states), device=device)[:, None]
        slots_Bn = self.lengths_B[:, None] + torch.arange(num_new, device=device)
        # Index tensors around a slice put their own axes first, hence [B, n, H, D].
        self.keys[layer_idx][rows_B1, :, slots_Bn] = key_states.transpose(1, 2)
        self.values[layer_idx][rows_B1, :, slots_Bn] = value_states.transpose(1, 2)
        return self.keys[layer_idx][:, :, :end], self.values[layer_idx][:, :, :end]

    def advance(self, num_new: int | Sequence[int] | Tensor) -> None:
        """Count the last pass's first `num_new` tokens, one number or one per row."""
        self._set_lengths(self.lengths_B + torch.as_tensor(num_new, device=self.lengths_B.device))

    def truncate(self, lengths: Sequence[int] | Tensor) -> None:
        """Roll every row back to a length of its own.

        Raises ValueError when a row is shorter than that.
        """
        lengths_B = torch.as_tensor(lengths, device=self.lengths_B.device)
        if bool(((lengths_B > self.lengths_B) | (lengths_B < 0)).any()):
            raise ValueError(
                f"truncate lengths are {lengths_B.tolist()} for rows of {self.lengths_B.tolist()}; "
                "give each row a length from 0 to its own"
            )
        self._set_lengths(lengths_B)

    def compact(self, row: int, start: int, keep: Sequence[int] | Tensor) -> None:
        """Keep `row` up to `start` and, right after it, the slots `start + keep` in that order.

        For a tree written from `start` on, `keep` is the accepted path's nodes. Raises ValueError
        for a slot outside the row.
        """
        keep = torch.as_tensor(keep, dtype=torch.long, device=self.lengths_B.device)
        length = int(self.lengths_B[row])
        if start < 0 or start > length or bool(((keep < 0) | (keep >= length - start)).any()):
            raise ValueError(
                f"compact keeps slots {(keep + start).tolist()} from {start} of row {row}, which "
                f"has {length}; keep slots from start to the row's end"
            )
        end = start + len(keep)
        for buffer_BHCD in (*self.keys, *self.values):
            # Indexing by a tensor copies first: source and destination may overlap.
            buffer_BHCD[row, :, start:end] = buffer_BHCD[row, :, start + keep]
        self._set_length(row, end)

    def reset_row(self, row: int) -> None:
        """Empty a row."""
        self._set_length(row, 0)

    def replace_row(self, row: int, other: "RowCache", other_row: int) -> None:
        """Make `row` a copy of another cache's row: a new request in a finished one's place."""
        length = int(other.lengths_B[other_row])
        for layer, (keys, values) in enumerate(zip(other.keys, other.values, strict=True)):
            self._reserve(layer, keys, values, length)
            self.keys[layer][row, :, :length] = keys[other_row, :, :length]
            self.values[layer][row, :, :length] = values[other_row, :, :length]
        self._set_length(row, length)

    def copy_slots(
        self,
        row: int,
        slots: Sequence[int],
        other: "RowCache",
        other_row: int,
        places: Sequence[int],
    ) -> None:
        """Put another cache's `places` of a row into `slots` of `row`, which grows to hold them.

        Raises ValueError for slots that would leave a gap behind the row.
        """
        end = max(int(self.lengths_B[row]), 1 + max(slots, default=-1))
        if len({*range(int(self.lengths_B[row])), *slots}) < end:
            raise ValueError(
                f"slots are {list(slots)} for a row of {int(self.lengths_B[row])}; fill the slots "
                "after the row without a gap"
            )
        for layer, (keys, values) in enumerate(zip(other.keys, other.values, strict=True)):
            self._reserve(layer, keys, values, end)
            self.keys[layer][row][:, slots] = keys[other_row][:, places]
            self.values[layer][row][:, slots] = values[other_row][:, places]
        self._set_length(row, end)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        chosen = torch.as_tensor(rows, dtype=torch.long, device=self.lengths_B.device)
        self.keys = [buffer_BHCD[chosen] for buffer_BHCD in self.keys]
        self.values = [buffer_BHCD[chosen] for buffer_BHCD in self.values]
        self._set_lengths(self.lengths_B[chosen])

    def _set_length(self, row: int, length: int) -> None:
        lengths_B = self.lengths_B.clone()
        lengths_B[row] = length
        self._set_lengths(lengths_B)

    def _set_lengths(self, lengths_B: Tensor) -> None:
        self.lengths_B = lengths_B
        self._max_length = int(lengths_B.max()) if len(lengths_B) else 0

    def _reserve(self, layer: int, like_keys: Tensor, like_values: Tensor, num_slots: int) -> None:
        """Give a layer buffers of at least `num_slots` positions, of the given kind at first."""
        if layer == len(self.keys):
            self.lengths_B = self.lengths_B.to(like_keys.device)
            for buffers, like in ((self.keys, like_keys), (self.values, like_values)):
                _, num_heads, _, dim = like.shape
                buffers.append(like.new_zeros(len(self.lengths_B), num_heads, 0, dim))
        if self.keys[layer].shape[2] < num_slots:
            capacity = -(-num_slots // GROWTH) * GROWTH
            self.keys[layer] = _grown(self.keys[layer], capacity)
            self.values[layer] = _grown(self.values[layer], capacity)


def query_positions(lengths_B: Tensor, num_new: int, ancestors: Tensor | None = None) -> Tensor:
    """Position ids [B, n] of new tokens: the row's length and how deep each is in its tree.

    `ancestors` is as in `query_mask`; without it the tokens are a chain.
    """
    return lengths_B[:, None] + _all_ancestors(lengths_B, num_new, ancestors).sum(-1) - 1


def query_mask(
    lengths_B: Tensor, num_new: int, ancestors: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Which slots each new token sees: bool [B, 1, n, S], S = longest length + n.

    A token sees its row's past and those new tokens that its row of `ancestors` marks (bool [n, n]
    or [B, n, n], itself included); without it the tokens are a chain. `window` hides whatever lies
    that many positions back or more.
    """
    ancestors_Bnn = _all_ancestors(lengths_B, num_new, ancestors)
    slots_S = torch.arange(int(lengths_B.max()) + num_new, device=lengths_B.device)
    node_BS = slots_S - lengths_B[:, None]
    is_new_BS = (node_BS >= 0) & (node_BS < num_new)
    node_BS = node_BS.clamp(0, num_new - 1)
    sees_node_BnS = ancestors_Bnn.gather(2, node_BS[:, None].expand(-1, num_new, -1))
    is_past_BS = slots_S < lengths_B[:, None]
    mask_BnS = (sees_node_BnS & is_new_BS[:, None]) | is_past_BS[:, None]
    if window is not None:
        query_Bn = query_positions(lengths_B, num_new, ancestors)
        slot_BS = torch.where(is_new_BS, query_Bn.gather(1, node_BS), slots_S)
        mask_BnS = mask_BnS & (query_Bn[:, :, None] - slot_BS[:, None] < window)
    return mask_BnS[:, None]


def attention_masks(
    config: PretrainedConfig,
    lengths_B: Tensor,
    num_new: int,
    dtype: torch.dtype,
    ancestors: Tensor | None = None,
) -> Tensor | dict[str, Tensor]:
    """`query_mask` as this target's `attention_mask`: by layer type where its config names types.

    Bool under `sdpa`, added to the scores in `dtype` under `eager`. Raises ValueError for another
    attention or layer type.
    """
    types = getattr(config, "layer_types", None)
    unknown = set(types or ()) - {FULL, SLIDING}
    if unknown:
        raise ValueError(
            f"layer_types holds {', '.join(sorted(unknown))}; only layers of {FULL} and {SLIDING} "
            "can be rolled back"
        )
    window = getattr(config, "sliding_window", None)
    attention = str(config._attn_implementation)
    if types is None:
        mask = query_mask(lengths_B, num_new, ancestors, window)
        return _in_form(mask, attention, dtype)
    windows = {FULL: None, SLIDING: window}
    return {
        kind: _in_form(query_mask(lengths_B, num_new, ancestors, windows[kind]), attention, dtype)
        for kind in sorted(set(types))
    }


def _all_ancestors(lengths_B: Tensor, num_new: int, ancestors: Tensor | None) -> Tensor:
    if ancestors is None:
        ancestors = torch.ones(num_new, num_new, dtype=torch.bool).tril()
    return ancestors.to(lengths_B.device).expand(len(lengths_B), num_new, num_new)


def _in_form(mask_B1nS: Tensor, attention: str, dtype: torch.dtype) -> Tensor:
    if attention == "sdpa":
        return mask_B1nS
    if attention == "eager":
        hidden = torch.finfo(dtype).min
        return torch.zeros_like(mask_B1nS, dtype=dtype).masked_fill_(~mask_B1nS, hidden)
    raise ValueError(
        f"attn_implementation is {attention!r}; load the target with 'sdpa' or 'eager', which take "
        "any mask"
    )


def _grown(buffer_BHCD: Tensor, capacity: int) -> Tensor:
    num_rows, num_heads, used, dim = buffer_BHCD.shape
    # Zeros: a hidden slot is still multiplied, by a weight of zero, and 0 times NaN is NaN.
    grown_BHCD = buffer_BHCD.new_zeros(num_rows, num_heads, capacity, dim)
    grown_BHCD[:, :, :used] = buffer_BHCD
    return grown_BHCD
