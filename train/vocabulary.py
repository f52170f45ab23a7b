"""The draft vocabulary of a run, counted over supervised tokens or read; safe tokens always in.

V is the target's vocabulary, W the draft's.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.data.files import write_whole
from outrider.data.rows import FIRST_LABEL, Row
from outrider.data.states import OnlineFeatures
from outrider.data.target import Target
from outrider.eval.ceiling import law_sums
from outrider.heads.vocab import choose, coverage

FILE_VERSION = 1
MOST_MASS_TOKENS = 1 << 19
"""Tokens that the target reads at most to tell which tokens it gives most probability."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A chosen draft vocabulary and what it covers."""

    draft_ids_W: Tensor
    """Target ids, rising."""
    distinct: int
    """Different supervised tokens seen."""
    covered: float
    """Share of supervised tokens inside: a ceiling on acceptance."""
    stands_in: bool = False
    """Whether it only has the size of one that the target is still to choose."""


def draft_vocabulary(target: Target, rows: Sequence[Row], size: int) -> Vocabulary:
    """The draft vocabulary of this size: the rows' most frequent supervised tokens."""
    return choose_vocabulary(
        supervised(rows),
        size,
        vocab_size=target.vocab_size,
        tokenizer_size=target.tokenizer_size,
        always=safe_ids(target.tokenizer, target.eos_ids),
    )


def likely_vocabulary(
    target: Target, rows: Sequence[Row], size: int, folder: Path | None = None
) -> Vocabulary:
    """The draft vocabulary of this size that holds most of the target's probability.

    The target reads rows evenly spaced over all, MOST_MASS_TOKENS tokens of them: its law knows
    tokens that few rows happen to hold. What was found is kept in `folder` and read again.
    """
    always = safe_ids(target.tokenizer, target.eos_ids)
    found = kept_vocabulary(target, rows, size, folder) if folder is not None else None
    if found is not None:
        return found
    check_size(size, target.tokenizer_size)
    chosen = _read_for_mass(rows)
    source = OnlineFeatures(target, chosen, layers=())
    scores_V = law_sums(target, source, 1.0, title="draft vocabulary")
    ids_W = choose(scores_V, size, always, target.tokenizer_size)
    if folder is not None:
        about = {"by": "mass", "temperature": 1.0, "rows": len(chosen)}
        write_vocabulary(_kept_path(target, rows, size, folder), ids_W, target, about)
    return vocabulary_of(ids_W, supervised(rows), target.vocab_size)


def kept_vocabulary(
    target: Target, rows: Sequence[Row], size: int, folder: Path
) -> Vocabulary | None:
    """What `likely_vocabulary` kept in `folder` for these very rows; None where it did not yet."""
    check_size(size, target.tokenizer_size)
    kept = _kept_path(target, rows, size, folder)
    if not kept.exists():
        return None
    try:
        ids_W = read_vocabulary(kept, target)
    except ValueError:  # a damaged file is made again
        return None
    return vocabulary_of(ids_W, supervised(rows), target.vocab_size)


def _kept_path(target: Target, rows: Sequence[Row], size: int, folder: Path) -> Path:
    digest = hashlib.sha256(f"{target.fingerprint()} {target.dtype} {size}".encode())
    for row in _read_for_mass(rows):
        digest.update(row.ids.numpy().tobytes() + row.mask.numpy().tobytes())
    return folder / f"mass-{digest.hexdigest()[:16]}.json"


def _read_for_mass(rows: Sequence[Row]) -> Sequence[Row]:
    return rows[:: -(-sum(len(row) for row in rows) // MOST_MASS_TOKENS) or 1]


def check_size(size: int, tokenizer_size: int) -> None:
    """ValueError for a size that the target's tokenizer cannot fill."""
    if not 0 < size <= tokenizer_size:
        raise ValueError(
            f"draft_vocab is {size}; the target's tokenizer has {tokenizer_size} tokens: give at "
            "most that many, or leave it out for the full vocabulary"
        )


def supervised(rows: Iterable[Row]) -> Iterator[Tensor]:
    """The tokens that each row is trained to predict: no draft can be of its first ones."""
    return (row.ids[FIRST_LABEL:][row.mask[FIRST_LABEL:]] for row in rows)


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
    check_size(size, tokenizer_size)
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


def write_vocabulary(
    path: Path, draft_ids_W: Tensor, target: Target, about: Mapping[str, Any]
) -> None:
    """Write a draft vocabulary that training takes in place of a size; `about` says how it came."""
    content = {
        "draft_vocabulary": FILE_VERSION,
        **about,
        "size": len(draft_ids_W),
        "target": target.name,
        "tokenizer": tokenizer_hash(target),
        "draft_ids": draft_ids_W.tolist(),
    }
    write_whole(path, json.dumps(content) + "\n")


def read_vocabulary(path: str | Path, target: Target) -> Tensor:
    """The draft ids [W] of a file, checked against the target's tokenizer.

    Raises ValueError when the file is none of `outrider vocab`, was damaged or edited, or is for
    another tokenizer.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"draft_vocab is {str(path)!r}, neither a number nor a readable file ({error}); give "
            "a size, or a file written by outrider vocab"
        ) from error
    if not isinstance(content, dict) or content.get("draft_vocabulary") != FILE_VERSION:
        raise ValueError(
            f"draft_vocab {str(path)!r} is no draft vocabulary of version {FILE_VERSION}; write it "
            "with outrider vocab"
        )
    if content.get("tokenizer") != tokenizer_hash(target):
        raise ValueError(
            f"draft_vocab {str(path)!r} was chosen for {content.get('target')!r}, whose tokenizer "
            f"is not that of {target.name!r}; choose it again with outrider vocab"
        )
    ids = content.get("draft_ids")
    are_ids = isinstance(ids, list) and all(type(token) is int for token in ids)
    if not are_ids or not ids or ids != sorted(set(ids)) or len(ids) != content.get("size"):
        raise ValueError(
            f"draft_vocab {str(path)!r}: draft_ids are not {content.get('size')} rising ids; write "
            "the file again with outrider vocab"
        )
    if ids[0] < 0 or ids[-1] >= target.tokenizer_size:
        raise ValueError(
            f"draft_vocab {str(path)!r}: draft_ids run from {ids[0]} to {ids[-1]}; they must be in "
            f"0..{target.tokenizer_size - 1}"
        )
    lacking = sorted(set(safe_ids(target.tokenizer, target.eos_ids)) - set(ids))
    if lacking:
        raise ValueError(
            f"draft_vocab {str(path)!r} lacks {len(lacking)} of the end, special and byte tokens "
            f"that a draft must hold, the first of them {lacking[0]}; write the file again with "
            "outrider vocab"
        )
    return torch.tensor(ids)


def tokenizer_hash(target: Target) -> str:
    """What a draft vocabulary depends on: the tokens and their ids, or their number alone."""
    tokens = None if target.tokenizer is None else sorted(target.tokenizer.get_vocab().items())
    known = repr((target.vocab_size, target.tokenizer_size, tokens))
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def tokens_hash(target: Target, ids_W: Tensor) -> str | None:
    """What ids stand for, special and added tokens left out: a fine-tune may rename or add those.

    None where the target has no tokenizer.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        return None
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    ids = [token for token in ids_W.tolist() if token < target.tokenizer_size]
    ids = [token for token in ids if token not in added]
    known = repr([*zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True)])
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def ids_hash(draft_ids_W: Tensor) -> str:
    """Names a draft vocabulary by what is in it."""
    return hashlib.sha256(draft_ids_W.cpu().numpy().tobytes()).hexdigest()[:16]


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
