"""From settings to the parts of a run: target, rows, vocabulary, head, features, batches."""

import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from outrider.data.batches import Batches, Features
from outrider.data.hidden_files import FileStates
from outrider.data.layout import Layout, layout_of
from outrider.data.prefetch import Prefetched
from outrider.data.rows import Counts, Reading, Row, read_rows
from outrider.data.states import OnlineFeatures
from outrider.data.store import FeatureStore
from outrider.data.target import Target
from outrider.eval.link import tables
from outrider.heads import CONFIGS, HEADS, DraftHead
from outrider.heads.formats import load_head, save_head
from outrider.train import preflight
from outrider.train.objectives import task_of
from outrider.train.parts import Parts, Score
from outrider.train.settings import Settings, identity
from outrider.train.validate import heldout_trace, judge
from outrider.train.vocabulary import Vocabulary, draft_vocabulary, supervised, vocabulary_of

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
    def store_folder(self) -> str:
        """Where features are kept: a folder or a URL."""
        return self.settings.data.store or str(self.beside / "features")

    @property
    def trace_folder(self) -> Path:
        """Where the held-out trace is kept: with the features, unless those are in a cloud."""
        is_remote = "://" in self.store_folder
        return self.beside / "features" if is_remote else Path(self.store_folder)

    @property
    def beside(self) -> Path:
        """The folder that holds the output folder."""
        return Path(self.settings.run.output).parent


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
    choice = settings.head
    torch.manual_seed(settings.run.seed)
    old = load_head(Path(choice.init), tables(target)) if choice.init else None
    if old is not None and not choice.rebuild_vocab:
        preflight.check_warm_start(old.config, choice)
        kept = vocabulary_of(old.draft_ids_W, supervised(rows), target.vocab_size)
        return kept if old.config.is_reduced else None, old
    vocabulary = None
    if choice.draft_vocab is not None and choice.draft_vocab != target.vocab_size:
        vocabulary = draft_vocabulary(target, rows, choice.draft_vocab)
    sizes = {"tokenizer_size": target.tokenizer_size, **choice.geometry()}
    config = CONFIGS[choice.head].from_target(target.config, **sizes)
    if old is not None:
        preflight.check_rebuild(old.config, config, choice.init)
    head = HEADS[choice.head](config, vocabulary.draft_ids_W if vocabulary else None)
    head.attach(tables(target))
    head.start_from_target()
    if old is not None:
        adopt(head, old)
    return vocabulary, head


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
    states = None
    if data.hidden_states is not None:
        states = FileStates(data.hidden_states, ground.target, ground.layers, ground.rows)
    return FeatureStore.build_or_open(
        ground.target,
        ground.rows,
        layout=layout(ground),
        root=ground.store_folder,
        states=states,
    )


def layout(ground: Ground) -> Layout:
    """How features are stored."""
    data, config = ground.settings.data, ground.head.config
    draft_ids_W = None
    if config.is_reduced and data.teacher_over == "draft":
        draft_ids_W = ground.head.draft_ids_W[: config.num_proposable].cpu()
    return layout_of(
        ground.target,
        ground.layers,
        data.feature_dtype,
        top_k=data.top_k,
        draft_ids_W=draft_ids_W,
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
        trace = heldout_trace(settings.data, ground.target, ground.layers, ground.trace_folder)
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
        batches=batches if settings.data.online else Prefetched(batches, run.accumulation + 1),
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
    return {"rows": digest.hexdigest()[:16], "target_weights": ground.target.fingerprint()[:16]}


@contextmanager
def one_first(accelerator: Accelerator) -> Generator[None]:
    """The block runs in the main process, then in the others, which find its files."""
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
    yield
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()
