"""Held-out rows: there are some, none of them trains, and they are of the run's own mode."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.data.options import mode_difference, parse_options
from outrider.data.rows import Row
from outrider.data.target import Target
from outrider.eval.offline.texts import check_texts, read_texts
from outrider.eval.offline.traces import Trace
from outrider.train.check.finding import Finding, failed, ok, warn
from outrider.train.refusals import check_disjoint, traced
from outrider.train.settings import DataSettings
from outrider.train.validate import GREEDY, spread

NAME = "held-out rows"


class Heldout(NamedTuple):
    """What held-out rows are."""

    named: list[tuple[str, Tensor]]
    """Names, and ids [T]."""
    modes: Sequence[str]
    """Modes of the chat template that they were made in."""


def check_heldout(
    data: DataSettings, target: Target, rows: Sequence[Row], stands_for: float = 1.0
) -> Iterator[Finding]:
    """Held-out rows can be judged on, do not train, and are of the same mode of the template.

    `rows` are all that train where each stands for 1.
    """
    yield from check_some_heldout(data)
    if data.heldout is None:
        return
    try:
        found = read_heldout(data, target)
        check_disjoint(rows, found.named)
    except (ValueError, OSError) as error:
        yield failed(NAME, error)
        return
    ours = "rows that train" if stands_for == 1 else f"{len(rows)} sampled rows"
    yield ok(NAME, f"{len(found.named)} in {data.heldout}, none of them among the {ours}")
    yield from check_modes(data, found.modes)


def check_some_heldout(data: DataSettings) -> Iterator[Finding]:
    """There are some at all."""
    if data.heldout is None:
        yield warn(
            NAME,
            "none, so no acceptance is measured and best/ stays empty",
            "give --heldout rows that outrider generate made at temperature 0",
        )


def read_heldout(data: DataSettings, target: Target) -> Heldout:
    """The held-out rows that a run with these settings judges on."""
    source = str(data.heldout)
    if (Path(source) / "meta.json").is_file():
        trace = Trace(Path(source))
        return Heldout(list(traced(trace)), trace.template_options)
    texts = spread(read_texts(source, GREEDY), data.heldout_rows)
    check_texts(texts, target.vocab_size)
    named = [(one.row_id, torch.tensor(one.prompt_ids + one.answer_ids)) for one in texts]
    return Heldout(named, sorted({one.template_options for one in texts}))


def check_modes(data: DataSettings, modes: Iterable[str]) -> Iterator[Finding]:
    """Held-out text was made in the mode of the chat template that the rows are."""
    ours = {"template_options": parse_options(data.template_options)}
    for stated in modes:
        found = mode_difference(ours, stated, "held-out text")
        if found is not None:
            yield warn(
                NAME,
                f"{found}; its figures will be those of another mode",
                "generate held-out rows with these --template-options",
            )
