"""From settings to the parts of a run: target, rows, vocabulary, head, features, batches."""

import hashlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from outrider.data.batches import Batches, Features
from outrider.data.hidden_files import FileStates
from outrider.data.layout import Layout, layout_of
from outrider.data.options import chat_notes, parse_options
from outrider.data.prefetch import Prefetched
from outrider.data.rows import Counts, Reading, Row, read_rows
from outrider.data.states import BareRows, OnlineFeatures
from outrider.data.store import FeatureStore, bytes_left
from outrider.data.target import Target
from outrider.data.template import template_hash
from outrider.eval.link import tables
from outrider.eval.offline.traces import Trace
from outrider.heads import DraftHead, EagleHead
from outrider.heads.fitted import Started
from outrider.heads.formats import save_head
from outrider.heads.induction import Induction
from outrider.train import preflight, refusals
from outrider.train.joint_task import JointTask
from outrider.train.kinds import EagleHeadSettings
from outrider.train.objectives import DraftTask, task_of
from outrider.train.parts import Parts, Score, Source
from outrider.train.settings import Settings, identity
from outrider.train.start import fit_to_states, make_head, settle, start_from_states
from outrider.train.tuned_pair import TunedPair, texts_of
from outrider.train.tuning import Tuning, tune
from outrider.train.validate import heldout_trace, judge
from outrider.train.vocabulary import Vocabulary, ids_hash, tokens_hash

Export = Callable[[Path], None]
Judge = Callable[[Path], Score]
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
    tuning: Tuning | None
    """The target where it learns, too."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the target whose states are features beside the last one's."""
        return self.head.config.aux_layers

    @property
    def store_folder(self) -> str:
        """Where features are kept: a folder or a URL."""
        return store_folder(self.settings)


def store_folder(settings: Settings) -> str:
    """Where a run keeps features: a folder or a URL."""
    return settings.data.store or str(_beside(settings))


def local_folder(settings: Settings) -> Path:
    """Where a run keeps the rows it has read and held-out text: with the features, if on disk."""
    store = store_folder(settings)
    return _beside(settings) if "://" in store else Path(store)


def vocabularies(settings: Settings) -> Path:
    """Where a run keeps the draft vocabularies that its target chose."""
    return local_folder(settings) / "vocabularies"


def _beside(settings: Settings) -> Path:
    return Path(settings.run.output).parent / "features"


def reading_of(settings: Settings) -> Reading:
    """How a run reads its rows; a plan and a run without a store keep nothing."""
    data = settings.data
    keeps = not (settings.run.plan or data.online)
    return Reading(
        max_length=data.max_length,
        policy=data.on_long,
        limit_tokens=data.max_tokens,
        max_unsupervised=data.max_unsupervised,
        template_options=parse_options(data.template_options),
        workers=data.workers,
        cache=local_folder(settings) / "rows" if keeps else None,
    )


def lay_ground(settings: Settings, device: torch.device) -> Ground:
    """Load the target, read the rows, choose the vocabulary and make the head."""
    data = settings.data
    dtype = DTYPES[settings.target.target_dtype]
    target = Target.load(settings.target.target, dtype=dtype, device=device)
    rows, counts = read_rows(data.data, target, reading_of(settings))
    if data.row_report is not None:
        counts.write(Path(data.row_report))
    chooses, folder = not settings.run.plan, vocabularies(settings)
    vocabulary, head = make_head(settings, target, rows, folder, chooses=chooses)
    settle(head, settings.head)
    preflight.refuse_unfit(head, vocabulary, target, rows)
    joint = settings.tuning
    return Ground(
        settings=settings,
        target=target,
        rows=rows,
        counts=counts,
        vocabulary=vocabulary,
        head=head.to(device),
        tuning=tune(target, joint, settings.run.seed) if joint is not None else None,
    )


def features(ground: Ground) -> Features:
    """The rows' features: stored (built or reused), or computed in every step."""
    data = ground.settings.data
    if ground.tuning is not None:  # the task runs the target, which changes from step to step
        return BareRows(ground.rows, dtype=ground.target.dtype)
    if data.online:
        return OnlineFeatures(ground.target, ground.rows, layers=ground.layers)
    return FeatureStore.build_or_open(
        ground.target,
        ground.rows,
        layout=layout(ground),
        root=ground.store_folder,
        states=given_states(ground),
    )


def features_left(ground: Ground) -> int:
    """Bytes of the run's store that are not there yet."""
    root = ground.store_folder
    return bytes_left(ground.target, ground.rows, layout(ground), root, given_states(ground))


def given_states(ground: Ground) -> FileStates | None:
    """Hidden states that others extracted; None where the target computes them."""
    folder = ground.settings.data.hidden_states
    return None if folder is None else FileStates(folder, ground.target, ground.layers, ground.rows)


def is_stored(settings: Settings) -> bool:
    """Whether features are read from a store: else the target runs in every step."""
    return not settings.data.online and settings.tuning is None


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
    if settings.head.draft_vocab_by == "mass":
        with one_first(accelerator):  # the others find the vocabulary that it kept
            ground = lay_ground(settings, accelerator.device)
    else:
        ground = lay_ground(settings, accelerator.device)
    if accelerator.is_main_process:
        print(ground.counts)
        for line in preflight.notes(ground.vocabulary, settings, ground.head.config, ground.target):
            print(line)
    with one_first(accelerator):
        source = features(ground)
        trace = heldout_trace(settings.data, ground.target, ground.layers, local_folder(settings))
    refusals.check_disjoint(ground.rows, refusals.traced(trace))
    for line in preflight.mode_notes(settings.data, trace.template_options if trace else ()):
        accelerator.print(line)
    batches = Batches(
        source, size=settings.data.max_length, batch_size=run.batch_size, seed=run.seed
    )
    refusals.check_batches(batches, accelerator.num_processes)
    if settings.head.starts_from_states and isinstance(ground.head, EagleHead):
        started = begin(ground, ground.head, batches)
        if accelerator.is_main_process:
            print(started)
    dtype = DTYPES[run.precision] if run.precision == "bf16" else None
    if accelerator.is_main_process:
        refusals.check_export(ground.head, tables(ground.target))
    write, score = outlet(ground, trace)
    return Parts(
        task=task_for(ground, dtype),
        batches=ahead(batches, settings, accelerator.device),
        export=write,
        score=score if trace is not None else None,
        data_claims=data_claims(ground),
        identity=identity(settings),
    )


def begin(ground: Ground, head: EagleHead, batches: Batches) -> Induction | Started:
    """Start a new head from the target's states, in the way asked for."""
    choice = ground.settings.head
    if isinstance(choice, EagleHeadSettings) and choice.start == "fitted":
        return fit_to_states(head, start_batches(ground, batches), ground.settings.num_steps)
    return start_from_states(head, batches)


def start_batches(ground: Ground, batches: Batches) -> Batches:
    """The same packs with last states, which a packed store leaves out: the target makes them."""
    if not batches.batch(0, 0).last_BTH.shape[-1]:
        source = OnlineFeatures(ground.target, ground.rows, layers=ground.layers)
        return Batches(source, size=batches.size, batch_size=1, seed=batches.seed)
    return batches


def ahead(batches: Batches, settings: Settings, device: torch.device) -> Source:
    """Batches read ahead in a thread; on a CPU that thread would take a core from the step."""
    if device.type == "cpu" or not is_stored(settings):
        return batches
    return Prefetched(batches, settings.run.accumulation + 1)


def task_for(ground: Ground, dtype: torch.dtype | None) -> DraftTask:
    """The task that trains this run's head, and its target where that learns, too."""
    settings = ground.settings
    if ground.tuning is None or settings.tuning is None:
        return task_of(ground.head, settings.objective, num_steps=settings.num_steps, dtype=dtype)
    return JointTask(
        ground.head,
        settings.objective,
        tuning=ground.tuning,
        joint=settings.tuning,
        num_steps=settings.num_steps,
        dtype=dtype,
    )


def outlet(ground: Ground, trace: Trace | None) -> tuple[Export, Judge | None]:
    """What writes the head as it will be served, and what judges the files on held-out rows."""
    depth = ground.settings.run.eval_depth
    if ground.tuning is not None:
        pair = TunedPair(
            head=ground.head,
            tuning=ground.tuning,
            texts=texts_of(trace),
            depth=depth,
            chat=chat_mode(ground),
        )
        return pair.export, pair.score
    score = judge(trace, ground.target, depth) if trace is not None else None
    return (lambda folder: export(ground, folder)), score


def export(ground: Ground, folder: Path) -> None:
    """Write the head as it will be served, with its target's name and hash and the chat's mode."""
    notes = {
        "target": ground.target.name,
        "target_fingerprint": ground.target.fingerprint(),
        "draft_tokens": tokens_hash(ground.target, ground.head.draft_ids_W),
        "chat": chat_mode(ground),
    }
    save_head(ground.head, folder, provenance=notes)


def chat_mode(ground: Ground) -> dict[str, Any]:
    """The chat template's hash and the options that the rows were rendered with."""
    options = parse_options(ground.settings.data.template_options)
    return chat_notes(template_hash(ground.target.tokenizer), options, ground.counts.with_tools)


def data_claims(ground: Ground) -> dict[str, str]:
    """Fingerprints of rows and target, so that a continuation cannot train on others."""
    digest = hashlib.sha256()
    for row in ground.rows:
        digest.update(row.row_id.encode() + row.ids.numpy().tobytes() + row.mask.numpy().tobytes())
    claims = {"rows": digest.hexdigest()[:16], "target_weights": ground.target.fingerprint()[:16]}
    choice = ground.settings.head
    if isinstance(choice.draft_vocab, str) or choice.draft_vocab_by == "mass":
        # A file's name says nothing of its content, and machines may round a law differently.
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
