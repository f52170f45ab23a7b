"""`outrider eval`: exact acceptance of drafters on the target's text, without decoding."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from outrider.data.files import cache_root, write_whole
from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.drafters.model import DraftModel, draft_model
from outrider.eval.link import check_mode, judged_head
from outrider.eval.metrics import DEFINITIONS
from outrider.eval.offline.drafted import is_text_draft, scored_plan
from outrider.eval.offline.evaluate import evaluate
from outrider.eval.offline.texts import hash_texts, read_texts
from outrider.eval.offline.trace_info import FORMAT
from outrider.eval.offline.traces import Trace, build_trace
from outrider.eval.report.page import write_report
from outrider.eval.report.provenance import file_hashes
from outrider.eval.report.tables import losses, markdown, signed, table
from outrider.eval.trees.plans import expand
from outrider.heads import DraftHead
from outrider.scripts.drift_command import LogSettings, hold

_DEMO = "demo:heldout"


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """Which drafters, on which text, with which drafts."""

    target: str
    """smollm2-demo, a Hub id, or a local folder."""

    head: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Folder of an exported head of any kind, or in speculators' layout; repeat to compare."""

    model: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Draft model with the target's tokenizer: a folder, a Hub id, or layers:N for the target's own
    first N layers; repeat to compare. It drafts the chains of --draft."""

    trace: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Folder of a trace, or demo:heldout (what is used when left out); repeat for several."""

    draft: tuple[str, ...] = ("chain:1", "chain:2", "chain:3", "chain:4", "chain:5", "tree:4,4,16")
    """Draft plans: chain:LENGTH, tree:DEPTH,WIDTH,NODES, static:FILE, lookup:LENGTH,NGRAM,
    suffix:LENGTH,MATCH; chain:1-8 is every length up to 8, in one pass."""

    tree_texts: int | None = None
    """Score trees on so many whole texts of each trace, drawn at random with --seed."""

    off_policy: bool = False
    """Score text that is not the target's own, too; the figures are then not those of decoding."""

    temperature: tuple[float, ...] = (0.0, 1.0)
    """For demo:heldout: temperatures whose text is used, of 0 and 1."""

    per_kind: int | None = None
    """For demo:heldout: use the first so many prompts of each kind."""

    rule: str | None = None
    """For sampled text: rejection or block (chains), match or point_mass; by default rejection for
    chains and match for trees. Greedy text has one rule."""

    out: Path | None = None
    """Write this .json file, and a page with plots beside it."""

    markdown: Path | None = None
    """Write the tables in Markdown to this file."""

    engine_log: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Hold what an engine said (its metrics' address or text, or its log; repeat) against these
    figures, as outrider drift does with a file of them; exit status 1 where it has drifted."""

    seed: int = 0
    """Of the intervals' bootstrap, and of the choice of --tree-texts."""

    def __post_init__(self) -> None:
        is_text = [is_text_draft(draft) for draft in self.drafts if scored_plan(draft)]
        if not self.head and not self.model and not any(is_text):
            raise ValueError(
                "no head given; name the folder of an exported head with --head, a draft model "
                "with --model, or a draft of the text alone: lookup:LENGTH or suffix:LENGTH"
            )
        if self.tree_texts is not None and self.tree_texts < 1:
            raise ValueError(f"tree_texts is {self.tree_texts}; score 1 or more")
        if self.out is not None and self.out.suffix != ".json":
            raise ValueError(f"out is {self.out}; name a file that ends in .json")

    @property
    def drafts(self) -> tuple[str, ...]:
        """The draft plans with ranges of lengths written out."""
        return expand(self.draft)


def main(argv: Sequence[str] | None = None) -> None:
    """Score drafters and print the tables."""
    settings = tyro.cli(
        EvalSettings, args=argv, prog="outrider eval", config=(tyro.conf.FlagCreatePairsOff,)
    )
    target = Target.load(settings.target)
    heads = load_heads(settings.head, target)
    traces = open_traces(
        settings.trace,
        target,
        heads.values(),
        settings.temperature,
        settings.per_kind,
        off_policy=settings.off_policy,
    )
    for folder in settings.head:
        for name, trace in traces.items():
            check_mode(folder, trace.template_options, name)
    models = {name: draft_model(name, target) for name in settings.model}
    result = evaluate(
        target,
        heads | named_models(models),
        traces,
        settings.drafts,
        rule=settings.rule,
        seed=settings.seed,
        tree_texts=settings.tree_texts,
    )
    print(table(result))
    print(f"\nof judged drafts, accepted and lost; a row adds up to 1\n{losses(result)}\n")
    for one in result["differences"]:
        print(
            f"{one['head']} less {one['against']}, {one['trace']}, {one['draft']}: tau "
            f"{signed(one['tau'])}"
        )
    if settings.markdown is not None:
        write_whole(settings.markdown, markdown(result))
    for name in ("tau", "alpha", "alpha_star", "survival"):
        print(f"{name}: {DEFINITIONS[name]}")
    if settings.out is not None:
        title = f"Acceptance on {settings.target}"
        notes = _notes(settings, target, models)
        paths = write_report(settings.out, {"evaluation": result}, notes=notes, title=title)
        print(f"{paths.json} and {paths.html}")
    if settings.engine_log:
        verdicts = hold(LogSettings(log=settings.engine_log), result["results"])
        if any(one.is_drift for one in verdicts):
            raise SystemExit(1)


def load_heads(folders: Sequence[str], target: Target) -> dict[str, DraftHead]:
    """Heads by a short name that tells them apart."""
    names = short_names(folders, parts=2)
    return {names[folder]: judged_head(folder, target) for folder in folders}


def short_names(folders: Sequence[str], *, parts: int) -> dict[str, str]:
    """The last parts of each folder's path; the whole path where those would be alike."""
    short = {folder: "/".join(Path(folder).parts[-parts:]) for folder in folders}
    return short if len(set(short.values())) == len(short) else {one: one for one in folders}


def named_models(models: Mapping[str, DraftModel]) -> dict[str, DraftHead | DraftModel]:
    """Draft models by a short name."""
    names = short_names(list(models), parts=2)
    return {names[name]: model for name, model in models.items()}


def open_traces(
    names: Sequence[str],
    target: Target,
    heads: Iterable[DraftHead],
    temperatures: Sequence[float],
    per_kind: int | None,
    *,
    off_policy: bool = False,
) -> dict[str, Trace]:
    """Traces by a short name: folders, and the demo's at each temperature, which is the default.

    Text that is not the target's own is refused where off_policy is not set.
    """
    heads, traces = list(heads), dict[str, Trace]()
    short = short_names([name for name in names if name != _DEMO], parts=1)
    for name in names or (_DEMO,):
        if name == _DEMO:
            for temperature in temperatures:
                found = demo_trace(target, heads, temperature, per_kind)
                traces[f"{name}, T={temperature:g}"] = found
        else:
            traces[short[name]] = Trace(Path(name), allow_off_policy=off_policy)
    return traces


def demo_trace(
    target: Target, heads: Iterable[DraftHead], temperature: float, per_kind: int | None
) -> Trace:
    """The demo's held-out answers with the states these heads read, kept in the user's cache."""
    sampling = Sampling(temperature=temperature)
    texts = read_texts(_DEMO, sampling, per_kind=per_kind)
    layers = sorted({layer for head in heads for layer in head.config.aux_layers})
    made_from = f"{target.fingerprint()} {layers} {hash_texts(texts)} format {FORMAT}"
    key = hashlib.sha256(made_from.encode())
    folder = cache_root() / "traces" / f"demo-heldout-t{temperature:g}-{key.hexdigest()[:12]}"
    return build_trace(target, texts, folder, sampling=sampling, layers=layers)


def _notes(
    settings: EvalSettings, target: Target, models: Mapping[str, DraftModel]
) -> dict[str, Any]:
    shown = asdict(settings)
    return {
        "target": {"name": target.name, "hash": target.fingerprint()},
        "heads": {folder: file_hashes(Path(folder)) for folder in settings.head},
        "models": {name: one.model.fingerprint() for name, one in models.items()},
        "settings": {key: str(value) for key, value in shown.items() if key != "out"},
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
