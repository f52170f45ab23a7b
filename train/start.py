"""The head that a run begins with: fresh near its target, or taken over from another."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.data.batches import Batch, Batches
from outrider.data.rows import Row
from outrider.data.target import Target
from outrider.eval.link import norm_offset, tables
from outrider.heads import CONFIGS, HEADS, DraftHead, EagleHead
from outrider.heads.base import States
from outrider.heads.fitted import Started, start_fitted
from outrider.heads.formats import load_head
from outrider.heads.formats.shipped import read_shipped, shipped_head
from outrider.heads.induction import Induction, start_induction
from outrider.heads.layer_rows import Pack
from outrider.train import refusals
from outrider.train.kinds import EagleHeadSettings
from outrider.train.settings import SHIPPED, HeadSettings, Settings
from outrider.train.vocabulary import (
    Vocabulary,
    draft_vocabulary,
    kept_vocabulary,
    likely_vocabulary,
    read_vocabulary,
    supervised,
    vocabulary_of,
)

START_ROWS = 32
"""Positions of the sample that induction starts from, for each channel of the target's states."""
MOST_START_ROWS = 1 << 15
"""What the sample never exceeds: the states of a wide target would fill the device."""
MOST_START_TOKENS = 1 << 16
"""Supervised tokens that a new head is fitted to at most."""
START_STEPS = 3
"""Draft steps that it is fitted over at most: later ones are like the third."""


def make_head(
    settings: Settings,
    target: Target,
    rows: Sequence[Row],
    folder: Path | None = None,
    *,
    chooses: bool = True,
) -> tuple[Vocabulary | None, DraftHead]:
    """A fresh head, or the one to start from, with its draft vocabulary.

    A vocabulary by mass is kept in `folder`. Without one, and where it is not kept yet and this
    call does not choose (the target does not run then), frequency stands in for it.
    """
    choice, given_W = settings.head, None
    if isinstance(choice.draft_vocab, str):
        given_W = read_vocabulary(choice.draft_vocab, target)
        choice = replace(choice, draft_vocab=len(given_W))
    torch.manual_seed(settings.run.seed)
    starts = choice.init is not None and choice.init != SHIPPED
    old = load_head(Path(str(choice.init)), tables(target)) if starts else None
    if old is not None and not choice.rebuild_vocab:
        refusals.check_warm_start(old.config, choice)
        refusals.check_head(old, target)
        refusals.check_tokens(old, target, str(choice.init))
        refusals.check_kept(old.draft_ids_W, given_W)
        kept = vocabulary_of(old.draft_ids_W, supervised(rows), target.vocab_size)
        return kept if old.config.is_reduced else None, old
    vocabulary = fresh_vocabulary(choice, given_W, target, rows, folder, chooses=chooses)
    sizes = {"tokenizer_size": target.tokenizer_size, **choice.geometry()}
    if choice.init == SHIPPED:
        ids_W = vocabulary.draft_ids_W if vocabulary else None
        return vocabulary, module_of(target, ids_W, sizes)
    config = CONFIGS[choice.head].from_target(target.config, **sizes)
    if old is not None:
        refusals.check_rebuild(old.config, config, choice.init)
    head = HEADS[choice.head](config, vocabulary.draft_ids_W if vocabulary else None)
    head.attach(tables(target))
    head.start_from_target()
    if old is not None:
        adopt(head, old, knows_ids=not refusals.has_other_tokens(old, target, str(choice.init)))
    return vocabulary, head


def fresh_vocabulary(
    choice: HeadSettings,
    given_W: Tensor | None,
    target: Target,
    rows: Sequence[Row],
    folder: Path | None = None,
    *,
    chooses: bool = True,
) -> Vocabulary | None:
    """The draft vocabulary given or chosen from the rows; None when it is the target's whole."""
    if not isinstance(choice.draft_vocab, int) or choice.draft_vocab == target.vocab_size:
        return None
    if given_W is not None:
        return vocabulary_of(given_W, supervised(rows), target.vocab_size)
    if choice.draft_vocab_by == "mass" and folder is not None:
        if chooses:
            return likely_vocabulary(target, rows, choice.draft_vocab, folder)
        kept = kept_vocabulary(target, rows, choice.draft_vocab, folder)
        if kept is not None:
            return kept
    frequent = draft_vocabulary(target, rows, choice.draft_vocab)
    return replace(frequent, stands_in=choice.draft_vocab_by == "mass")


def module_of(target: Target, draft_ids_W: Tensor | None, sizes: dict[str, Any]) -> DraftHead:
    """The MTP module that the target's own checkpoint ships."""
    if target.folder is None:
        raise ValueError(
            f"init is {SHIPPED!r} and target {target.name} has no files to read a module from; "
            "name the target by its folder or Hub id"
        )
    lent, offset = tables(target), norm_offset(target)
    shipped = read_shipped(target.folder, target.num_layers, lent, norm_offset=offset)
    return shipped_head(shipped, target.config, draft_ids_W, **sizes).attach(lent)


def sample_size(width: int) -> int:
    """Positions of the sample that a new head starts from, for a target of this hidden size."""
    return min(START_ROWS * width, MOST_START_ROWS)


def start_from_states(head: EagleHead, batches: Batches) -> Induction:
    """Write induction heads from the first packs, the same whatever the batch size.

    Positions that a packed store keeps no states of read as zeros: they leave the sample. Raises
    ValueError for features that are not finite, by row.
    """
    single = Batches(batches.source, size=batches.size, batch_size=1, seed=batches.seed)
    wanted = sample_size(head.config.target_hidden_size)
    packs: list[Batch] = []
    for index in range(single.epoch_length()):
        pack = single.batch(0, index)
        refusals.check_features(pack)
        packs.append(replace(pack, document_BT=pack.document_BT * pack.kept_BT).to(head.device))
        if sum(pack.num_tokens for pack in packs) >= wanted:
            break
    # The start does not read the last state.
    parts = [States(x.aux_BTF, x.last_BTH[..., :0], x.ids_BT, x.position_BT) for x in packs]
    whole = States(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
    return start_induction(head, whole, torch.cat([pack.document_BT for pack in packs]))


def fit_to_states(head: EagleHead, batches: Batches, num_steps: int) -> Started:
    """Fit a new head to the target's states on the first packs, the same whatever the batch size.

    The source must give last states. Raises ValueError for features that are not finite, by row.
    """
    single = Batches(batches.source, size=batches.size, batch_size=1, seed=batches.seed)

    def packs() -> Iterator[Pack]:
        supervised = 0
        for index in range(single.epoch_length()):
            pack = single.batch(0, index)
            refusals.check_features(pack)
            pack = pack.to(head.device)
            states = States(pack.aux_BTF, pack.last_BTH, pack.ids_BT, pack.position_BT)
            yield Pack(states, pack.mask_BT, pack.document_BT)
            supervised += int(pack.mask_BT.sum())
            if supervised >= MOST_START_TOKENS:
                return

    return start_fitted(head, packs, min(num_steps, START_STEPS))


def settle(head: DraftHead, choice: HeadSettings) -> None:
    """Decide which of the head's weights train."""
    for weight in head.own_outputs if choice.freezes_output else ():
        weight.requires_grad_(False)
    if not isinstance(head, EagleHead) or not isinstance(choice, EagleHeadSettings):
        return
    if choice.embedding is not None:
        refusals.check_embedding(head.config, choice)
        for weight in head.own_tables:
            weight.requires_grad_(choice.embedding == "trained")


@torch.no_grad()
def adopt(head: DraftHead, old: DraftHead, *, knows_ids: bool = True) -> None:
    """Take over the old head's weights, its output rows by target id where both have the id.

    Where the old head's ids were other tokens its output rows are left, and not `knows_ids`.
    """
    head.follow(old)
    outputs = {id(weight) for weight in old.own_outputs}
    named = old.named_parameters(remove_duplicate=False)
    head.load_state_dict({k: v for k, v in named if id(v) not in outputs}, strict=False)
    place_V = torch.full((old.config.vocab_size,), -1)
    place_V[old.draft_ids_W] = torch.arange(len(old.draft_ids_W))
    source_W = place_V[head.draft_ids_W]
    known_W = (source_W >= 0) & knows_ids
    for ours, theirs in zip(head.own_outputs, old.own_outputs, strict=True):
        ours[known_W] = theirs[source_W[known_W]]
