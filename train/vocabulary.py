"""The draft vocabulary of a run: counted over supervised tokens, safe tokens always in.

V is the target's vocabulary.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.data.rows import Row
from outrider.data.target import Target
from outrider.heads.vocab import choose, coverage


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A chosen draft vocabulary and what it covers."""

    draft_ids_W: Tensor
    distinct: int
    """Different supervised tokens seen."""
    covered: float
    """Share of supervised tokens inside: a ceiling on acceptance."""


def draft_vocabulary(target: Target, rows: Sequence[Row], size: int) -> Vocabulary:
    """The draft vocabulary of a run over these rows."""
    return choose_vocabulary(
        supervised(rows),
        size,
        vocab_size=target.vocab_size,
        tokenizer_size=target.tokenizer_size,
        always=safe_ids(target.tokenizer, target.eos_ids),
    )


def supervised(rows: Iterable[Row]) -> Iterator[Tensor]:
    """The tokens that each row is trained to predict."""
    return (row.ids[row.mask] for row in rows)


def choose_vocabulary(
    labels: Iterable[Tensor],
    size: int,
    *,
    vocab_size: int,
    tokenizer_size: int,
    always: Iterable[int],
) -> Vocabulary:
    """The most frequent of the supervised tokens `labels`, with `always` in."""
    counts_V = count(labels, vocab_size)
    if not 0 < size <= tokenizer_size:
        raise ValueError(
            f"draft_vocab is {size}; the target's tokenizer has {tokenizer_size} tokens: give at "
            "most that many, or leave it out for the full vocabulary"
        )
    return _covering(choose(counts_V, size, always, tokenizer_size), counts_V)


def vocabulary_of(draft_ids_W: Tensor, labels: Iterable[Tensor], vocab_size: int) -> Vocabulary:
    """A head's own draft vocabulary, and what it covers of these supervised tokens."""
    return _covering(draft_ids_W, count(labels, vocab_size))


def count(labels: Iterable[Tensor], vocab_size: int) -> Tensor:
    """How often each id is supervised, [V]."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in labels:
        counts_V += torch.bincount(ids, minlength=vocab_size)
    return counts_V


def _covering(draft_ids_W: Tensor, counts_V: Tensor) -> Vocabulary:
    return Vocabulary(
        draft_ids_W=draft_ids_W,
        distinct=int((counts_V > 0).sum()),
        covered=coverage(counts_V, draft_ids_W),
    )


def safe_ids(tokenizer: PreTrainedTokenizerBase | None, eos_ids: Iterable[int]) -> list[int]:
    """Ids that a draft vocabulary must hold: end, special and byte-level tokens."""
    if tokenizer is None:
        return sorted(set(eos_ids))
    vocabulary = tokenizer.get_vocab()
    special = chain(tokenizer.all_special_ids, tokenizer.added_tokens_decoder)
    byte_level = (vocabulary[token] for token in byte_tokens(vocabulary))
    return sorted({*eos_ids, *special, *byte_level})


def byte_tokens(vocabulary: Iterable[str]) -> list[str]:
    """Tokens that stand for a single byte: `<0x0A>` forms, else GPT-2's stand-in characters."""
    tokens = list(vocabulary)
    written = [token for token in tokens if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token)]
    stand_ins = byte_characters()
    return written or [token for token in tokens if token in stand_ins]


def byte_characters() -> frozenset[str]:
    """The characters by which byte-level BPE writes bytes: printable Latin-1, the rest moved up."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = range(256, 256 + 256 - len(printable))
    return frozenset(map(chr, chain(printable, moved)))
