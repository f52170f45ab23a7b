"""The target's answers as token ids: text to trace, from a file or from the demo's own rows."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from outrider.data.options import state_options
from outrider.data.sampling import Sampling
from outrider.data.sources import records
from outrider.eval.offline.logs import answered, is_drawn_with


class Text(NamedTuple):
    """A prompt and what the target answered, as token ids."""

    row_id: str
    kind: str
    prompt_ids: list[int]
    answer_ids: list[int]
    template_options: str = ""
    """The mode of the chat template as the row states it, by `state_options`."""


def read_texts(source: str, sampling: Sampling, *, per_kind: int | None = None) -> list[Text]:
    """Answers that were drawn with this sampling; rows that say another one are passed over.

    Args:
        source: demo:heldout, or rows with ids in a form of `outrider.eval.offline.logs`.
        sampling: A row may say its own; one that says none is taken.
        per_kind: Use the first so many prompts of each kind.
    """
    texts: list[Text] = []
    used: Counter[str] = Counter()
    number = 0
    for number, record in enumerate(records(source), start=1):
        if isinstance(record, str):
            raise ValueError(f"{source} row {number} is {record}; mend or remove it")
        for row in answered(record):
            try:
                if not is_drawn_with(row, sampling):
                    continue
            except ValueError as error:
                raise ValueError(f"{source} row {number}: {error}; mend or remove it") from error
            if not row.get("prompt_ids") or not row.get("answer_ids"):
                raise ValueError(
                    f"{source} row {number} has no prompt_ids or no answer_ids; a trace needs the "
                    "very ids that the target drew: let it answer with outrider generate, or log a "
                    'server\'s replies with "return_token_ids": true'
                )
            kind = str(row.get("kind") or "all")
            if per_kind is None or used[kind] < per_kind:
                used[kind] += 1
                name = str(row.get("id", f"row-{number:06d}"))
                ids = [row["prompt_ids"], row["answer_ids"]]
                if not all(isinstance(part, list) and {*map(type, part)} == {int} for part in ids):
                    raise ValueError(
                        f"{source} row {number} has prompt_ids or answer_ids that are not lists of "
                        "whole numbers; log the very ids, or let the target answer with outrider "
                        "generate"
                    )
                mode = state_options(row.get("template_options") or {})
                texts.append(Text(name, kind, *ids, template_options=mode))
    if not texts:
        raise ValueError(
            f"{source} has {number} rows but none drawn with {sampling}; state the sampling of the "
            "text, or let the target answer with outrider generate"
        )
    return texts


def check_texts(texts: Sequence[Text], vocab_size: int) -> None:
    """ValueError for rows that cannot be traced, naming the row."""
    if not texts:
        raise ValueError("no rows to trace; give at least one prompt with an answer")
    name, count = Counter(text.row_id for text in texts).most_common(1)[0]
    if count > 1:
        raise ValueError(f"row id {name!r} appears {count} times; make ids unique")
    for text in texts:
        if len(text.prompt_ids) < 2 or not text.answer_ids:
            raise ValueError(
                f"row {text.row_id!r} has {len(text.prompt_ids)} prompt and "
                f"{len(text.answer_ids)} answer tokens; a draft head needs at least 2 and 1"
            )
        ids = text.prompt_ids + text.answer_ids
        worst = min(ids) if min(ids) < 0 else max(ids)
        if not 0 <= worst < vocab_size:
            raise ValueError(
                f"row {text.row_id!r} holds token {worst}, the target has 0 to {vocab_size - 1}; "
                "use text of this target's own tokenizer"
            )


def hash_texts(texts: Sequence[Text]) -> str:
    """A short hash of names, kinds, prompts and answers."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps(list(text[:4])).encode())
    return digest.hexdigest()[:16]
