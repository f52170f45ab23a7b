"""Settings that runs of all heads share: frozen dataclasses, whose field docstrings are the help.

Every field name is a flag (`max_tokens` is `--max-tokens`) and a key of a recipe file, so names are
unique over all groups. Checks happen on construction, before anything is loaded.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, get_type_hints

from outrider.data.choices import PACKED, TOP_K
from outrider.data.options import parse_options
from outrider.train.joint import JointSettings
from outrider.train.objective_settings import ObjectiveSettings
from outrider.train.optim import OptimSettings
from outrider.train.schedule import ScheduleSettings, check_range

FeatureDtype = Literal["bfloat16", "float32", "int8", "fp8", "int4"]
SHIPPED = "target"
"""What --init says for the module that the target's checkpoint ships."""


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """The frozen model that the head will draft for."""

    target: str
    """smollm2-demo, a Hub id, or a local folder."""

    target_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the target computes its features."""


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What the head learns from, and where the target's features are kept."""

    data: str
    """demo, a .jsonl, .json or .parquet file, a folder of those or saved by datasets, a Hub data
    set, or several mixed by weight: a.jsonl=0.7,b.parquet=0.3."""

    template_options: tuple[str, ...] = ()
    """Mode of the chat template, as enable_thinking=false: saved with the head, and compared when
    it is evaluated."""

    workers: int = 1
    """Processes that render and tokenise rows; any number gives the same rows."""

    row_report: str | None = None
    """Write what became of every row, with the reason, to this file of JSON lines."""

    heldout: str | None = None
    """Greedy answers of the target that never train and that pick the best head: demo:heldout, a
    file of answered rows, or a trace folder."""

    heldout_rows: int | None = None
    """Use only so many held-out rows, evenly spaced over the file."""

    max_tokens: int | None = None
    """Stop reading rows once their tokens reach this number; the row that crosses it is kept."""

    max_length: int = 2048
    """Longest row, and the length that rows are packed to."""

    on_long: Literal["cut", "drop"] = "cut"
    """What happens to a longer row; the counts are printed."""

    max_unsupervised: float = 0.1
    """Refuse data of which a larger share of rows has nothing to train on."""

    store: str | None = None
    """Folder of stored features; by default a folder `features` beside the output folder."""

    feature_dtype: FeatureDtype = "bfloat16"
    """How features are stored: bfloat16 and float32 keep the last state; int8, fp8 and int4 take at
    most 0.42, 0.42 and 0.25 times the bytes, and keep the target's likeliest tokens instead."""

    top_k: int = TOP_K
    """int8, fp8, int4: likeliest tokens kept of the target's law before a supervised token."""

    teacher_over: Literal["draft", "target"] = "draft"
    """int8, fp8, int4: the laws are over the draft vocabulary, or over all of the target's tokens,
    so that one store serves any draft vocabulary and keeps fewer of each one's tokens."""

    hidden_states: str | None = None
    """Folder of hidden states that vLLM extracted, or speculators' hs_*.safetensors: these are
    stored instead of states that the target computes here."""

    online: bool = False
    """Run the target in every step and store nothing."""

    def __post_init__(self) -> None:
        check_range("max_length", self.max_length, low=4)
        check_range("workers", self.workers, low=1)
        parse_options(self.template_options)
        check_range("top_k", self.top_k, low=1)
        check_range("max_unsupervised", self.max_unsupervised, low=0, high=1)
        for name in ("max_tokens", "heldout_rows"):
            value = getattr(self, name)
            if value is not None:
                check_range(name, value, low=1)
        if self.online and self.hidden_states is not None:
            raise ValueError(
                "online is set and hidden_states too; leave one of them out: online runs the "
                "target in every step"
            )

    @property
    def keeps_laws(self) -> bool:
        """Whether the store keeps laws in place of the last state."""
        return self.feature_dtype in PACKED and not self.online


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """The head's kind and geometry; everything left out follows the target's config."""

    GEOMETRY: ClassVar[Mapping[str, str]] = {
        "head": "kind",
        "draft_vocab": "draft_vocab_size",
        "max_positions": "max_position_embeddings",
    }
    """The settings that the head's config holds, and their names there."""

    head: str
    """Kind of head."""

    draft_vocab: int | str | None = None
    """Size of the draft vocabulary, whose tokens are then chosen by draft_vocab_by, or a file
    written by outrider vocab; all of the target's tokens when left out."""

    draft_vocab_by: Literal["frequency", "mass"] = "frequency"
    """How a draft vocabulary of a given size is chosen: the most frequent supervised tokens, or
    those that hold most of the target's probability there, for which it reads some of the rows."""

    max_positions: int | None = None
    """Position limit written into the exported config; the target's by default."""

    init: str | None = None
    """Folder of an exported head to start from; its draft vocabulary is kept."""

    rebuild_vocab: bool = False
    """With --init: choose the draft vocabulary again from this run's rows."""

    def __post_init__(self) -> None:
        for name in ("draft_vocab", "max_positions"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                check_range(name, value, low=1)
        if self.draft_vocab_by == "mass" and self.draft_vocab is None:
            raise ValueError(
                "draft_vocab_by is 'mass' without draft_vocab, so that all tokens are in; give "
                "draft_vocab a size, or set draft_vocab_by to frequency"
            )
        if self.rebuild_vocab and self.init is None:
            raise ValueError("rebuild_vocab is set without init; name the head to start from")
        if self.rebuild_vocab and self.init == SHIPPED:
            raise ValueError(
                f"rebuild_vocab is set with init {SHIPPED}, whose module has no draft vocabulary; "
                "leave it out, as draft_vocab is followed anyway"
            )
        if self.init == SHIPPED and self.head != "mtp":
            raise ValueError(
                f"init is {SHIPPED!r} with head {self.head}, and only MTP modules are shipped: use "
                f"train/mtp.py, or name a folder (./{SHIPPED} for one of that name)"
            )

    @property
    def freezes_output(self) -> bool:
        """Whether output heads of its own stay as they start."""
        return False

    @property
    def starts_from_states(self) -> bool:
        """Whether a new head begins from a sample of the target's states, too."""
        return False

    def geometry(self) -> dict[str, Any]:
        """Keywords for `from_target` of the head's config."""
        return {name: getattr(self, field) for field, name in self.GEOMETRY.items()}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The run itself: batches, precision, where results go and how often."""

    output: str
    """Folder of the run: settings, metrics.jsonl, checkpoints/, best/, last/."""

    epochs: int = 1
    """Passes over the rows."""

    batch_size: int = 1
    """Packed rows in one micro-batch; several processes share them, so results stay the same."""

    accumulation: int = 1
    """Micro-batches in one optimiser step; every supervised token weighs the same."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """Compute precision of the head."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes the GPU when there is one."""

    threads: int | None = None
    """CPU threads of each process; torch's own choice by default."""

    seed: int = 0
    """Seeds the head's first weights, the order of rows and the feature noise."""

    log_every: int = 10
    """Optimiser steps between lines of metrics.jsonl."""

    eval_every: int | None = None
    """Optimiser steps between held-out evaluations; once an epoch by default."""

    eval_depth: int = 5
    """Longest draft chain scored on held-out rows; chains of this length pick the best head."""

    save_every: int | None = None
    """Optimiser steps between checkpoints; once an epoch by default."""

    keep_last: int = 2
    """Checkpoints kept; older ones are removed."""

    track: Literal["none", "wandb", "tensorboard"] = "none"
    """Also log to this tracker, through accelerate."""

    waive: tuple[str, ...] = ()
    """Pieces that a checkpoint may lack on resume, by name (optimizer, schedule)."""

    stop_after_steps: int | None = None
    """Save and stop after this optimiser step; the same command without it continues."""

    plan: bool = False
    """Print settings, counts, steps, parameters, memory and disk, and stop."""

    recipe: str | None = None
    """A YAML file of these flags, or the name of a shipped one; flags given beside it win."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulation", "log_every", "eval_depth"):
            check_range(name, getattr(self, name), low=1)
        check_range("keep_last", self.keep_last, low=1)
        check_range("seed", self.seed, low=0)
        for name in ("threads", "eval_every", "save_every", "stop_after_steps"):
            value = getattr(self, name)
            if value is not None:
                check_range(name, value, low=1)
        unknown = set(self.waive) - {"optimizer", "schedule"}
        if unknown:
            raise ValueError(f"waive is {sorted(unknown)[0]!r}; allowed: optimizer, schedule")


@dataclass(frozen=True, kw_only=True)
class Settings(ABC):
    """Everything that a run follows; train/kinds.py has one for each entry point."""

    target: TargetSettings
    data: DataSettings
    head: HeadSettings
    objective: ObjectiveSettings
    optim: OptimSettings
    schedule: ScheduleSettings
    run: RunSettings

    def __post_init__(self) -> None:
        self.objective.weights(self.num_steps)
        data, wanted = self.data, self.objective.teacher_top_k
        if self.tuning is not None:
            if data.hidden_states is not None:
                raise ValueError(
                    "hidden_states is set with joint, where the target changes and its states too; "
                    "leave it out"
                )
        elif data.keeps_laws and wanted is not None:
            if wanted > data.top_k:
                raise ValueError(
                    f"teacher_top_k is {wanted} and feature_dtype {data.feature_dtype} keeps top_k "
                    f"{data.top_k} tokens of a law; give at most that, or raise top_k"
                )
            if data.teacher_over != "draft" or self.objective.loss_temperature != 1.0:
                raise ValueError(
                    f"teacher_top_k is {wanted} with teacher_over {data.teacher_over} and "
                    f"loss_temperature {self.objective.loss_temperature:g}, where feature_dtype "
                    f"{data.feature_dtype} knows a law's tail only roughly; use teacher_over draft "
                    "and loss_temperature 1, or a raw feature_dtype"
                )

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Draft steps trained in a row, after defaults."""

    @property
    def tuning(self) -> JointSettings | None:
        """How the target learns beside the head; None where it is frozen."""
        return None

    def flat(self) -> dict[str, Any]:
        """Every field by its flag's name."""
        return {key: value for group in asdict(self).values() for key, value in group.items()}


# Fields that may differ between a run and its continuation: they change no weight.
FREE_FIELDS = frozenset(
    {
        *(
            "store",
            "workers",
            "row_report",
            "output",
            "device",
            "threads",
            "recipe",
            "plan",
            "track",
            "waive",
        ),
        *("log_every", "eval_every", "save_every", "keep_last", "stop_after_steps"),
    }
)


def identity(settings: Settings) -> dict[str, Any]:
    """The fields that decide the trained weights, with the unroll default filled in."""
    flat = settings.flat() | {"unroll_steps": settings.num_steps}
    return {key: value for key, value in flat.items() if key not in FREE_FIELDS}


def field_names(settings: type[Settings]) -> list[str]:
    """Names of all flags, in order."""
    groups = get_type_hints(settings)
    return [inner.name for group in fields(settings) for inner in fields(groups[group.name])]
