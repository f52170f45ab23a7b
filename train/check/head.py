"""The head that the settings ask for: that it can be made, fits, is served, and survives its files.

Letters: N positions, P predicted tokens, K steps.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.data.batches import Batch
from outrider.data.rows import Row
from outrider.data.target import Target
from outrider.eval.link import tables
from outrider.heads import DraftHead, HeadConfig, RowPlan
from outrider.heads.base import States
from outrider.heads.formats.engines import limits
from outrider.train import refusals
from outrider.train.check.finding import Finding, fail, failed, noted, ok, warn
from outrider.train.settings import Settings
from outrider.train.start import make_head, settle
from outrider.train.vocabulary import Vocabulary, count, safe_ids, supervised

LITTLE = 0.9
"""Coverage of a draft vocabulary below which a larger one is proposed."""
ENOUGH = 0.95


class Made(NamedTuple):
    """A head and its draft vocabulary."""

    vocabulary: Vocabulary | None
    head: DraftHead


def check_head(
    settings: Settings,
    target: Target,
    rows: Sequence[Row],
    keep: Callable[[Made], None],
    vocabularies: Path | None = None,
) -> Iterator[Finding]:
    """The head can be made and fits its target; `keep` is given it.

    `vocabularies` is where a run keeps what its target chose.
    """
    name = "head"
    try:
        vocabulary, head = make_head(settings, target, rows, vocabularies, chooses=False)
        settle(head, settings.head)
        refusals.check_head(head, target)
    except ValueError as error:
        yield failed(name, error, **mended(settings, target, str(error)))
        return
    keep(Made(vocabulary, head))
    trained = sum(value.numel() for value in head.parameters() if value.requires_grad)
    config, start = head.config, settings.head.init
    yield ok(
        name,
        f"{config.kind}{f' from {start}' if start else ''}: {trained / 1e6:.2f} M trained "
        f"parameters, {config.hidden_size} channels, sizes, layers and ids fit the target",
    )


def mended(settings: Settings, target: Target, error: str) -> dict[str, Any]:
    """Settings that mend a head that cannot be made; empty where none is safe."""
    if "aux_layers" in error and getattr(settings.head, "init", None) is None:
        return {"aux_layers": shallow_layers(target.num_layers)}
    if "draft_vocab" in error and "tokenizer has" in error:
        return {"draft_vocab": None}
    return {}


def shallow_layers(num_layers: int) -> tuple[int, ...]:
    """Up to three rising layers of a target that EAGLE-3's defaults do not fit: low, middle, high.

    Layer ids count states: 1 is what enters the second layer, the last one leaves the last layer.
    """
    low, high = min(1, num_layers), max(1, num_layers - 1)
    return tuple(sorted({low, (low + high + 1) // 2, high}))


def check_vocabulary(
    vocabulary: Vocabulary | None,
    target: Target,
    rows: Sequence[Row] = (),
    *,
    stands_for: float = 1.0,
) -> Iterator[Finding]:
    """The supervised tokens that a reduced draft vocabulary covers; `rows` if it may be larger.

    It was counted on all rows where each stands for 1.
    """
    name = "draft vocabulary"
    if vocabulary is None:
        yield ok(name, f"all of the target's {target.tokenizer_size} tokens")
        return
    size = len(vocabulary.draft_ids_W)
    if vocabulary.stands_in:
        yield ok(name, f"{size} tokens, which the target chooses when training starts")
        return
    seen = (
        f"{size} tokens cover {vocabulary.covered:.2%} of supervised tokens "
        f"({vocabulary.distinct} distinct); special, end and byte tokens are in"
    )
    fix = {"draft_vocab": enough(target, rows)} if rows and vocabulary.covered < LITTLE else {}
    try:
        refusals.check_coverage(vocabulary)
    except ValueError as error:
        yield failed(name, error, **fix)
        return
    if vocabulary.covered < LITTLE:
        more = f": --draft-vocab {fix['draft_vocab']} covers {ENOUGH:.0%}" if fix else ""
        yield warn(name, seen, f"no token outside can be drafted{more}", **fix)
    elif stands_for == 1 and size > vocabulary.distinct and vocabulary.covered == 1:
        yield warn(
            name,
            f"{seen}; draft_vocab {size} exceeds the {vocabulary.distinct} distinct supervised "
            "tokens",
            "the rest are the lowest ids, which this data never trains: give a smaller one",
        )
    else:
        yield ok(name, seen)


def enough(target: Target, rows: Sequence[Row]) -> int:
    """The least draft vocabulary, as training chooses it, that covers ENOUGH of the rows."""
    counts_V = count(supervised(rows), target.vocab_size).double()
    always = torch.tensor(safe_ids(target.tokenizer, target.eos_ids), dtype=torch.int64)
    inside = float(counts_V[always].sum())
    counts_V[always] = 0
    sums_V = inside + counts_V.sort(descending=True).values.cumsum(0)
    need = int((sums_V < ENOUGH * (inside + float(counts_V.sum()))).sum()) + 1
    return min(len(always) + need, target.tokenizer_size)


def check_engines(config: HeadConfig) -> Iterator[Finding]:
    """What serving engines cannot do with the head."""
    found = list(limits(config))
    if not found:
        yield ok("engines", "no limit known in vLLM, SGLang or llama.cpp for this geometry")
    for line in found:
        yield noted("engines", line)


@torch.no_grad()
def check_export(head: DraftHead, target: Target, batch: Batch) -> Iterator[Finding]:
    """Saved and reloaded before step 1, the head has the same tensors and gives the same outputs.

    Raises ValueError as training does, for a tensor that changed.
    """
    name, mode = "save and reload", head.training
    again = refusals.check_export(head, tables(target)).to(head.device)
    if not batch.aux_BTF.shape[-1] + batch.last_BTH.shape[-1]:
        yield ok(name, "exported files give equal tensors (joint: the step has the states)")
        return
    ours, theirs = (outputs(one.eval(), batch.to(head.device)) for one in (head, again))
    head.train(mode)
    if not torch.equal(ours.nan_to_num(), theirs.nan_to_num()):
        yield fail(
            name,
            "the reloaded head has the same tensors and gives other outputs",
            "its config lost a setting on its way through the files: report it with --json",
        )
        return
    yield ok(name, f"exported files give equal tensors, and equal logits at {len(ours)} positions")


def outputs(head: DraftHead, batch: Batch) -> Tensor:
    """Logits of the first draft step at every supervised position."""
    plan = RowPlan.from_mask(batch.mask_BT.cpu(), batch.document_BT.cpu(), 1).to(head.device)
    states = States(batch.aux_BTF, batch.last_BTH, batch.ids_BT, batch.position_BT)
    return head.draft_logits(head.predict(states, plan).columns[0])
