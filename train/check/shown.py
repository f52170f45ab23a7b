"""Sample rows token by token: supervised or not, special or not."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from outrider.data.collect import Collector
from outrider.data.rows import Row

AROUND = 24
"""Tokens shown on each side of a change of the mask; what lies between is left out."""
MOST = 240


class Piece(NamedTuple):
    """A token as text."""

    text: str
    is_supervised: bool
    is_special: bool


class Shown(NamedTuple):
    """A row for people."""

    row_id: str
    tokens: int
    pieces: list[Piece]
    """None of the tokens left out; three dots stand for these."""


def show(collector: Collector, number: int) -> list[Shown]:
    """So many rows, evenly spaced over those that train."""
    rows, tokenizer = collector.rows, collector.reader.tokenizer
    number = min(number, len(rows))
    chosen = [rows[len(rows) * place // number] for place in range(number)]
    special = {*collector.reader.eos_ids}
    if tokenizer is not None:
        special |= {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return [_shown(row, tokenizer, special) for row in chosen]


def _shown(row: Row, tokenizer: PreTrainedTokenizerBase | None, special: set[int]) -> Shown:
    ids: list[int] = row.ids.tolist()
    mask: list[bool] = row.mask.tolist()
    pieces, last = list[Piece](), -1
    for place in near(mask)[:MOST]:
        if place != last + 1:
            pieces.append(Piece(" ... ", mask[place], is_special=False))
        text = f"[{ids[place]}]" if tokenizer is None else _text(ids[place], tokenizer)
        pieces.append(Piece(text, mask[place], ids[place] in special))
        last = place
    if last < len(ids) - 1:
        pieces.append(Piece(" ... ", mask[-1], is_special=False))
    return Shown(row.row_id, len(ids), pieces)


def near(mask: Sequence[bool]) -> list[int]:
    """Places at the row's ends and near every change of the mask."""
    edges = [0, len(mask) - 1]
    edges += [place for place in range(1, len(mask)) if mask[place] != mask[place - 1]]
    kept = {place for edge in edges for place in range(edge - AROUND, edge + AROUND)}
    return [place for place in range(len(mask)) if place in kept]


def _text(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """A token as text; bytes that are no whole character as the tokenizer writes them."""
    text = str(tokenizer.decode([token]))
    if "\ufffd" in text or not text:
        text = str(tokenizer.convert_ids_to_tokens(token))
    return text
