"""From settings to the parts of a run: target, rows, vocabulary, head, features, batches."""

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from outrider.data.batches import Batches, Features
from outrider.data.rows import FIRST_LABEL, Counts, Reading, Row, read_rows
from outrider.data.store import FeatureStore, OnlineFeatures
from outrider.data.target import Target
from outrider.eval.link import norm_offset, tables
from outrider.heads import CONFIGS, HEADS, DraftHead
from outrider.heads.formats import load_head, save_head
from outrider.heads.formats.shipped import read_shipped, shipped_head
from outrider.train import preflight
from outrider.train.objectives import task_of
from outrider.train.parts import Parts, Score
from outrider.train.settings import SHIPPED, HeadSettings, Settings, identity
from outrider.train.validate import heldout_trace, judge
from outrider.train.vocabulary import (
    Vocabulary,
    choose_vocabulary,
    ids_hash,
    read_vocabulary,
    safe_ids,
    vocabulary_of,
)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What is known before any feature is computed."""

    settings: Settings
    target: Target
    rows: list[Row]
    counts: Counts
    vocabulary: Vocabulary | None
    head: DraftHead

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the target whose states are features beside the last one's."""
        return self.head.config.aux_layers

    @property
    def store_folder(self) -> Path:
        """Where features are kept."""
        given = self.settings.data.store
        return Path(given) if given else Path(self.settings.run.output).parent / "features"


def lay_ground(settings: Settings, device: torch.device) -> Ground:
    """Load the target, read the rows, choose the vocabulary and make the head."""
    data = settings.data
    dtype = DTYPES[settings.target.target_dtype]
    target = Target.load(settings.target.target, dtype=dtype, device=device)
    reading = Reading(
        max_length=data.max_length,
        policy=data.on_long,
        limit_tokens=data.max_tokens,
        max_unsupervised=data.max_unsupervised,
    )
    rows, counts = read_rows(data.data, target, reading)
    vocabulary, head = make_head(settings, target, rows)
    for weight in head.own_outputs if settings.head.freezes_output else ():
        weight.requires_grad_(False)
    preflight.check_head(head, target)
    preflight.check_coverage(vocabulary)
    return Ground(
        settings=settings,
        target=target,
        rows=rows,
        counts=counts,
        vocabulary=vocabulary,
        head=head.to(device),
    )


def make_head(
    settings: Settings, target: Target, rows: Sequence[Row]
) -> tuple[Vocabulary | None, DraftHead]:
    """A fresh head, or the one to start from, with its draft vocabulary."""
    choice, given_W = settings.head, None
    if isinstance(choice.draft_vocab, str):
        given_W = read_vocabulary(choice.draft_vocab, target)
        choice = replace(choice, draft_vocab=len(given_W))
    torch.manual_seed(settings.run.seed)
    starts = choice.init is not None and choice.init != SHIPPED
    old = load_head(Path(str(choice.init)), tables(target)) if starts else None
    if old is not None and not choice.rebuild_vocab:
        preflight.check_warm_start(old.config, choice)
        preflight.check_kept(old.draft_ids_W, given_W)
        kept = vocabulary_of(old.draft_ids_W, supervised(rows), target.vocab_size)
        return kept if old.config.is_reduced else None, old
    vocabulary = fresh_vocabulary(choice, given_W, target, rows)
    sizes = {"tokenizer_size": target.tokenizer_size, **choice.geometry()}
    if choice.init == SHIPPED:
        ids_W = vocabulary.draft_ids_W if vocabulary else None
        return vocabulary, module_of(target, ids_W, sizes)
    config = CONFIGS[choice.head].from_target(target.config, **sizes)
    if old is not None:
        preflight.check_rebuild(old.config, config, choice.init)
    head = HEADS[choice.head](config, vocabulary.draft_ids_W if vocabulary else None)
    head.attach(tables(target))
    head.start_from_target()
    if old is not None:
        adopt(head, old)
    return vocabulary, head


def fresh_vocabulary(
    choice: HeadSettings, given_W: Tensor | None, target: Target, rows: Sequence[Row]
) -> Vocabulary | None:
    """The draft vocabulary given or chosen from the rows; None when it is the target's whole."""
    if not isinstance(choice.draft_vocab, int) or choice.draft_vocab == target.vocab_size:
        return None
    if given_W is not None:
        return vocabulary_of(given_W, supervised(rows), target.vocab_size)
    return choose_vocabulary(
        supervised(rows),
        choice.draft_vocab,
        vocab_size=target.vocab_size,
        tokenizer_size=target.tokenizer_size,
        always=safe_ids(target.tokenizer, target.eos_ids),
    )


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


def supervised(rows: Iterable[Row]) -> Iterator[Tensor]:
    """The tokens that each row is trained to predict: no draft can be of its first ones."""
    return (row.ids[FIRST_LABEL:][row.mask[FIRST_LABEL:]] for row in rows)


@torch.no_grad()
def adopt(head: DraftHead, old: DraftHead) -> None:
    """Take over the old head's weights, its output rows by target id where both have the id."""
    head.follow(old)
    outputs = {id(weight) for weight in old.own_outputs}
    named = old.named_parameters(remove_duplicate=False)
    head.load_state_dict({k: v for k, v in named if id(v) not in outputs}, strict=False)
    place_V = torch.full((old.config.vocab_size,), -1)
    place_V[old.draft_ids_W] = torch.arange(len(old.draft_ids_W))
    source_W = place_V[head.draft_ids_W]
    known_W = source_W >= 0
    for ours, theirs in zip(head.own_outputs, old.own_outputs, strict=True):
        ours[known_W] = theirs[source_W[known_W]]


def features(ground: Ground) -> Features:
    """The rows' features: stored (built or reused), or computed in every step."""
    data = ground.settings.data
    if data.online:
        return OnlineFeatures(ground.target, ground.rows, layers=ground.layers)
    return FeatureStore.build_or_open(
        ground.target,
        ground.rows,
        layers=ground.layers,
        dtype=DTYPES[data.feature_dtype],
        root=ground.store_folder,
    )


def build(settings: Settings, accelerator: Accelerator) -> Parts:
    """Everything a run needs, checked; the main process computes features before the others."""
    run = settings.run
    ground = lay_ground(settings, accelerator.device)
    if accelerator.is_main_process:
        print(ground.counts)
        for line in preflight.notes(ground.vocabulary, settings, ground.head.config, ground.target):
            print(line)
    with one_first(accelerator):
        source = features(ground)
        trace = heldout_trace(settings.data, ground.target, ground.layers, ground.store_folder)
    preflight.check_disjoint(ground.rows, trace)
    batches = Batches(
        source, size=settings.data.max_length, batch_size=run.batch_size, seed=run.seed
    )
    preflight.check_batches(batches, accelerator.num_processes)
    dtype = DTYPES[run.precision] if run.precision == "bf16" else None
    task = task_of(ground.head, settings.objective, num_steps=settings.num_steps, dtype=dtype)
    score: Callable[[Path], Score] | None = None
    if trace is not None:
        score = judge(trace, ground.target, run.eval_depth)
    if accelerator.is_main_process:
        preflight.check_export(ground.head, tables(ground.target))
    return Parts(
        task=task,
        batches=batches,
        export=lambda folder: export(ground, folder),
        score=score,
        data_claims=data_claims(ground),
        identity=identity(settings),
    )


def export(ground: Ground, folder: Path) -> None:
    """Write the head as it will be served, with the name and hash of its target."""
    notes = {"target": ground.target.name, "target_fingerprint": ground.target.fingerprint()}
    save_head(ground.head, folder, provenance=notes)


def data_claims(ground: Ground) -> dict[str, str]:
    """Fingerprints of rows and target, so that a continuation cannot train on others."""
    digest = hashlib.sha256()
    for row in ground.rows:
        digest.update(row.row_id.encode() + row.ids.numpy().tobytes() + row.mask.numpy().tobytes())
    claims = {"rows": digest.hexdigest()[:16], "target_weights": ground.target.fingerprint()[:16]}
    if isinstance(ground.settings.head.draft_vocab, str):  # its name says nothing of its content
        claims["draft_vocab"] = ids_hash(ground.head.draft_ids_W)
    return claims


@contextmanager
def one_first(accelerator: Accelerator) -> Generator[None]:
    """The block runs in the main process, then in the others, which find its files."""
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
    yield
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()
