"""Padded prompts, as tokenizers return them, to rows of ids and back.

Dimensions: B rows, T positions of the padded prompts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.data.sampling import row_key


class Prompts(NamedTuple):
    """The rows of a call."""

    ids_BT: Tensor
    """As they came, padding included."""
    rows: list[list[int]]
    """Without the padding."""

    @property
    def keys(self) -> list[int]:
        """What stands for each row in the noise: its tokens and how many of the same came before.

        So what a row is given does not depend on its neighbours or its place among them, and equal
        prompts get unlike samples.
        """
        seen: dict[tuple[int, ...], int] = {}
        found: list[int] = []
        for row in map(tuple, self.rows):
            seen[row] = seen.get(row, -1) + 1
            found.append(row_key(f"{seen[row]}:{','.join(map(str, row))}"))
        return found


def take_ids(inputs: object, more: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """input_ids and attention_mask [B, T] from `inputs`, or from `more`, which loses them.

    Raises ValueError for other inputs than text.
    """
    fields = dict(inputs) if isinstance(inputs, Mapping) else {}
    if isinstance(inputs, Tensor):
        fields["input_ids"] = inputs
    elif inputs is not None and not isinstance(inputs, Mapping):
        raise ValueError(
            f"inputs is a {type(inputs).__name__}; give what a tokenizer returns with "
            "return_tensors='pt', or its input_ids"
        )
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        given = more.pop(name, None)
        if given is not None and name in fields:
            raise ValueError(f"{name} is given twice; give it in inputs or as a keyword")
        fields.setdefault(name, given)
    ids_BT, mask_BT = fields.pop("input_ids"), fields.pop("attention_mask")
    other = sorted(name for name, value in fields.items() if not _says_nothing(name, value))
    if other:
        raise ValueError(
            f"inputs holds {', '.join(other)}; only texts are decoded here: give input_ids and "
            "attention_mask alone"
        )
    if not isinstance(ids_BT, Tensor) or ids_BT.ndim != 2 or ids_BT.is_floating_point():
        raise ValueError(
            "inputs has no input_ids of shape [rows, tokens]; tokenize with return_tensors='pt' "
            "and padding=True"
        )
    return ids_BT, mask_BT


def rows_of(ids_BT: Tensor, mask_BT: Tensor | None, hidden_id: int | None) -> list[list[int]]:
    """The prompts without their padding; without a mask, `hidden_id` is padding where it is set.

    Raises ValueError for masks with holes, and for rows that are all padding.
    """
    if mask_BT is None:
        mask_BT = torch.ones_like(ids_BT) if hidden_id is None else ids_BT.ne(hidden_id)
    if mask_BT.shape != ids_BT.shape:
        raise ValueError(
            f"attention_mask is of shape {list(mask_BT.shape)} and input_ids of "
            f"{list(ids_BT.shape)}; give one number for each token"
        )
    found: list[list[int]] = []
    for number, (ids, mask) in enumerate(zip(ids_BT.tolist(), mask_BT.tolist(), strict=True)):
        shown = [place for place, one in enumerate(mask) if one]
        if not shown:
            raise ValueError(f"row {number} is all padding; give each prompt at least 1 token")
        if shown[-1] - shown[0] + 1 != len(shown):
            raise ValueError(
                f"row {number} of attention_mask has a hole; hide padding at the ends alone"
            )
        found.append(ids[shown[0] : shown[-1] + 1])
    return found


def padded(ids_BT: Tensor, answers: Sequence[Sequence[int]], pad_id: int | None) -> Tensor:
    """The prompts as they came and the answers behind them [B, T + longest], on their device.

    Raises ValueError where answers of unlike lengths have nothing to be filled up with.
    """
    longest = max(map(len, answers))
    if pad_id is None and any(len(one) < longest for one in answers):
        raise ValueError(
            "answers are of unlike lengths and pad_token_id is None; give a pad_token_id"
        )
    filled = [[*one, *[pad_id or 0] * (longest - len(one))] for one in answers]
    new = torch.tensor(filled, dtype=ids_BT.dtype, device=ids_BT.device)
    return torch.cat([ids_BT, new], dim=1)


def _says_nothing(name: str, value: object) -> bool:
    """Some tokenizers return segment ids, all of them zero for a plain text."""
    is_zero = isinstance(value, Tensor) and not bool(value.any())
    return value is None or (name == "token_type_ids" and is_zero)
