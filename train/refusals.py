"""Refusals before anything is spent: each names the field or row, its value; and the remedy."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from outrider.data.anatomy import non_finite
from outrider.data.batches import Batch, Batches
from outrider.data.rows import Row
from outrider.data.target import Target
from outrider.eval.offline.traces import Trace
from outrider.heads import DraftHead, EagleConfig, HeadConfig, Tables
from outrider.heads.formats import load_head, read_notes, save_head
from outrider.train.kinds import EagleHeadSettings
from outrider.train.recipe import ENTRIES, kinds_of
from outrider.train.settings import HeadSettings
from outrider.train.vocabulary import Vocabulary, tokens_hash

LEAST_COVERED = 0.05


def check_head(head: DraftHead, target: Target) -> None:
    """Sizes of head and target that must agree, ids that must exist, weights that are numbers."""
    config = head.config
    if broken := non_finite(head):
        raise ValueError(
            f"the head's {broken[0]} holds NaN or infinity; start from another head, or leave init "
            "out"
        )
    for name, ours, theirs in (
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    ):
        if ours != theirs:
            raise ValueError(
                f"the head's {name} is {ours} and the target's is {theirs}; start from a head made "
                "for this target, or leave init out"
            )
    top = int(head.draft_ids_W[: config.num_proposable].max())
    if top >= target.tokenizer_size:
        raise ValueError(
            f"the draft vocabulary holds id {top}, but the target's tokenizer ends at "
            f"{target.tokenizer_size - 1}; choose it again with --rebuild-vocab"
        )


def check_warm_start(config: HeadConfig, choice: HeadSettings) -> None:
    """A head to start from keeps its geometry; settings that say otherwise are refused."""
    for name, there in choice.GEOMETRY.items():
        asked, has = getattr(choice, name), getattr(config, there)
        if asked not in (None, False) and asked != has:
            raise ValueError(
                f"{name} is {asked} but the head in init {choice.init!r} has {has}; "
                f"{_to_keep(name, has, choice)}"
                + (", or add --rebuild-vocab" if name == "draft_vocab" else "")
            )


def _to_keep(name: str, has: object, choice: HeadSettings) -> str:
    """How to keep what the head in init has: a setting with a default of its own must be given."""
    if name == "head":
        runs = [run for run in ENTRIES if has in kinds_of(run)]
        if choice.head not in kinds_of(runs[0]):
            return f"{ENTRIES[runs[0]]} goes on with it"
    default = next(field.default for field in fields(choice) if field.name == name)
    if getattr(choice, name) == default:
        return f"give --{name.replace('_', '-')} {has}"
    return "leave it out to keep the head's own"


def check_embedding(config: EagleConfig, choice: EagleHeadSettings) -> None:
    """An embedding of its own is part of a head to start from."""
    if config.own_embedding != (choice.embedding != "target"):
        has = "an embedding of its own" if config.own_embedding else "the target's embedding"
        raise ValueError(
            f"embedding is {choice.embedding} but the head in init {choice.init!r} has {has}; "
            "leave it out to keep that"
        )


def check_kept(kept_W: Tensor, given_W: Tensor | None) -> None:
    """A head to start from keeps its draft vocabulary; a file of another one is refused."""
    if given_W is not None and not torch.equal(kept_W.cpu(), given_W):
        raise ValueError(
            f"draft_vocab names {len(given_W)} tokens other than those of the head in init; leave "
            "it out to keep the head's own, or add --rebuild-vocab"
        )


def check_tokens(old: DraftHead, target: Target, init: str) -> None:
    """The ids that a head to start from drafts must be the tokens that its notes say they were."""
    if (old.config.is_reduced or old.own_outputs) and has_other_tokens(old, target, init):
        raise ValueError(
            f"the draft vocabulary of the head in init {init!r} was chosen with another tokenizer "
            f"than that of {target.name}: its ids are other tokens here; start from a head of this "
            "target, or add --rebuild-vocab"
        )


def has_other_tokens(old: DraftHead, target: Target, init: str) -> bool:
    """Whether ids that a head drafts were other tokens where it was trained, as far as noted."""
    noted, ours = read_notes(init).get("draft_tokens"), tokens_hash(target, old.draft_ids_W)
    return noted is not None and ours is not None and noted != ours


def check_coverage(vocabulary: Vocabulary | None) -> None:
    """A draft vocabulary that leaves nearly nothing to learn, at a loss of zero, is refused."""
    if vocabulary is not None and vocabulary.covered < LEAST_COVERED:
        raise ValueError(
            f"the draft vocabulary's {len(vocabulary.draft_ids_W)} tokens cover "
            f"{vocabulary.covered:.2%} of the supervised tokens (at least {LEAST_COVERED:.0%} is "
            "needed); choose it from this data with --rebuild-vocab, or give a larger --draft-vocab"
        )


def check_rebuild(old: HeadConfig, config: HeadConfig, init: str | None) -> None:
    """A rebuilt vocabulary changes the vocabulary only: all else must be the old head's."""
    free = ("draft_vocab_size", "max_position_embeddings", "embed_gain", "extra")
    ours, theirs = config.to_dict(), old.to_dict()
    for name in [name for name in ours if name not in free]:
        if ours[name] != theirs.get(name):
            raise ValueError(
                f"{name} is {ours[name]} but the head in init {init!r} has {theirs.get(name)}; "
                "rebuild_vocab changes the draft vocabulary only, so give the settings that the "
                "head was made with"
            )


def check_disjoint(rows: Sequence[Row], heldout: Iterable[tuple[str, Tensor]]) -> None:
    """Held-out rows, each a name and its ids [T], must not be among the training rows."""
    known = {row.ids.numpy().tobytes(): row.row_id for row in rows}
    for name, ids_T in heldout:
        found = known.get(ids_T.numpy().tobytes())
        if found is not None:
            raise ValueError(
                f"held-out row {name} is also training row {found}; remove it from one of the two, "
                "or the held-out figures measure memory"
            )


def traced(trace: Trace | None) -> Iterator[tuple[str, Tensor]]:
    """Names and ids of a trace's rows."""
    for index in range(0 if trace is None else len(trace)):
        assert trace is not None
        yield trace.row_ids[index], trace.row(index, ()).ids_T


def check_batches(batches: Batches, world: int) -> None:
    """Enough packs for every process, and features that are numbers."""
    if batches.batch_size < world:
        raise ValueError(
            f"batch_size is {batches.batch_size} with {world} processes, which share each batch; "
            f"give at least {world}"
        )
    check_features(batches.batch(0, 0))


def check_features(batch: Batch) -> None:
    """Non-finite features of a batch, by row."""
    kinds = [("layers", batch.aux_BTF), ("last state", batch.last_BTH)]
    if batch.law is not None:
        kinds.append(("laws", batch.law.log_probs))
    for pack, names in enumerate(batch.row_ids):
        for number, name in enumerate(names, start=1):
            inside_T = batch.document_BT[pack] == number
            for what, state_BTF in kinds:
                if not bool(torch.isfinite(state_BTF[pack][inside_T]).all()):
                    raise ValueError(
                        f"row {name} has non-finite features (the target's {what}); compute them "
                        "with --target-dtype float32, or remove the row"
                    )


@torch.no_grad()
def check_export(head: DraftHead, tables: Tables) -> DraftHead:
    """Save and reload once: the exported files must give the same tensors. The reloaded head."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "head"
        save_head(head, folder)
        again = load_head(folder, tables)
    ours, theirs = head.state_dict(), again.state_dict()
    for key in sorted(ours.keys() | theirs.keys()):
        same = key in ours and key in theirs and torch.equal(ours[key].cpu(), theirs[key].cpu())
        if not same:
            raise ValueError(
                f"tensor {key} changed on its way through the exported files; this head cannot be "
                "published: report it with the output of --plan"
            )
    return again
