"""Checks that offline scores are what decoding does, drafter by drafter; a stopped run goes on.

    python -m outrider.scripts.agreement --head runs/demo/best --output runs/agreement

For every drafter, draft and temperature: tau of the loop with its 95% interval over prompts, and
tau from a trace. Greedy rounds, and those of drafts that `match` judges with the text's own noise,
must be equal prompt by prompt. Drawn drafts are decoded with other noise and so write other texts:
those are scored, the offline tau must lie in the loop's interval, and the two must not be apart by
more than the drafts' noise. Rows of rows.jsonl are never made again.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.agreement import Check, check, own_texts
from outrider.eval.drafters.model import DraftModel, draft_model
from outrider.eval.link import judged_head
from outrider.eval.offline.drafted import is_text_draft, scored_plan
from outrider.eval.offline.texts import Text, read_texts
from outrider.eval.offline.traces import Trace, build_trace
from outrider.eval.report.provenance import provenance
from outrider.eval.trees.plans import ChainPlan, expand, is_drawn, plan_named
from outrider.heads import DraftHead
from outrider.scripts.eval_command import short_names


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which drafters, on how much text."""

    head: tuple[str, ...] = ()
    """Folders of exported heads."""
    model: tuple[str, ...] = ()
    """Draft models, as for outrider eval."""
    draft: tuple[str, ...] = (
        "chain:1",
        "chain:3",
        "chain:5",
        "chain:8",
        "tree:4,4,16",
        "lookup:4",
        "suffix:4",
    )
    """Drafts; chains for heads and models, trees for heads, the rest for none."""
    target: str = "smollm2-demo"
    """The target of all of them."""
    text: str = "demo:heldout"
    """Rows whose prompts are decoded."""
    temperature: tuple[float, ...] = (0.0, 0.6, 1.0)
    """Of the text and the loop."""
    per_kind: int = 2
    """Prompts of each kind."""
    tokens: int = 48
    """Answer tokens of each prompt."""
    seed: int = 17
    """Of the loop's noise where drafts are drawn; the text's is 0."""
    repeats: int = 1
    """Decodings of each prompt where drafts are drawn; of many checks one in twenty lies outside
    its interval, and more of them tell chance from a fault."""
    least_equal: float = 1.0
    """Share of prompts that must take equal rounds; below 1 allows for near ties."""
    threads: int = 1
    """CPU threads."""
    output: Path = Path("runs/agreement")
    """Receives the traces, rows.jsonl and table.md."""

    def __post_init__(self) -> None:
        for name in ("per_kind", "tokens", "repeats", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")
        for draft in expand(self.draft):
            scored_plan(draft)


def main(argv: Sequence[str] | None = None) -> None:
    """Check what is missing, print the table; status 1 where anything disagrees."""
    settings = tyro.cli(Settings, args=argv, prog="agreement")
    torch.set_num_threads(settings.threads)
    target = Target.load(settings.target)
    drafters = load(settings, target)
    rows = settings.output / "rows.jsonl"
    settings.output.mkdir(parents=True, exist_ok=True)
    known = {one["key"]: one for one in _read(rows)}
    found: list[dict[str, Any]] = []
    for temperature in settings.temperature:
        trace = own_trace(settings, target, drafters, temperature)
        for name, drafter, draft in _asked(settings, drafters):
            key = _key(settings, target, trace, name, draft)
            if key not in known:
                wanted = Check(
                    draft=draft,
                    seed=settings.seed,
                    repeats=settings.repeats,
                    name=name,
                    least_equal=settings.least_equal,
                )
                done = check(drafter, target, trace, wanted)
                known[key] = {"key": key, "temperature": temperature, **asdict(done)}
                known[key] |= {"agrees": done.agrees, "provenance": provenance()}
                with rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[key]) + "\n")
                print(_line(known[key]), flush=True)
            found.append(known[key])
    text = markdown(found)
    (settings.output / "table.md").write_text(text, encoding="utf-8")
    print(text)
    if not all(one["agrees"] for one in found):
        sys.exit(1)


def load(settings: Settings, target: Target) -> dict[str, DraftHead | DraftModel]:
    """Heads and models by name."""
    names = short_names(settings.head, parts=2)
    heads = {names[folder]: judged_head(folder, target) for folder in settings.head}
    return heads | {name: draft_model(name, target) for name in settings.model}


def own_trace(
    settings: Settings,
    target: Target,
    drafters: dict[str, DraftHead | DraftModel],
    temperature: float,
) -> Trace:
    """The target's answers to the prompts at a temperature, by plain decoding with seed 0."""
    prompts: list[Text] = read_texts(settings.text, Sampling(), per_kind=settings.per_kind)
    sampling = Sampling(temperature=temperature)
    layers = sorted(
        {
            layer
            for one in drafters.values()
            if isinstance(one, DraftHead)
            for layer in one.config.aux_layers
        }
    )
    digest = hashlib.sha256(repr((layers, prompts, settings.tokens)).encode()).hexdigest()[:10]
    folder = settings.output / f"trace-t{temperature:g}-{digest}"
    if (folder / "meta.json").exists():
        try:
            return Trace(folder)
        except ValueError:
            pass  # unfinished: build_trace goes on
    texts = own_texts(target, prompts, sampling, settings.tokens)
    return build_trace(target, texts, folder, sampling=sampling, layers=layers, seed=0)


def _asked(
    settings: Settings, drafters: dict[str, DraftHead | DraftModel]
) -> Iterator[tuple[str, DraftHead | DraftModel | None, str]]:
    for draft in expand(settings.draft):
        if is_text_draft(draft):
            yield "text alone", None, draft
            continue
        for name, drafter in drafters.items():
            if isinstance(drafter, DraftHead) or isinstance(scored_plan(draft), ChainPlan):
                yield name, drafter, draft


def _key(settings: Settings, target: Target, trace: Trace, name: str, draft: str) -> str:
    made_from = (target.fingerprint(), trace.info.text, trace.info.sampling, name, draft)
    chosen: tuple[object, ...] = (settings.seed, settings.least_equal)
    if is_drawn(plan_named(draft)) and not trace.sampling.is_greedy:
        chosen += (settings.repeats,)
    return hashlib.sha256(repr((made_from, chosen)).encode()).hexdigest()[:16]


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue  # a line that a kill cut off


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """One line a check."""
    lines = [
        "| drafter | draft | T | rule | prompts | loop [95%] | offline | apart [99%] | equal | |",
        "|---" * 10 + "|",
        *(_line(row) for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    loop, apart = row["loop"], row["apart"]
    cells = (
        row["name"],
        row["draft"],
        f"{row['temperature']:g}",
        row["rule"],
        str(row["prompts"]),
        f"{loop[0]:.3f} [{loop[1]:.3f}, {loop[2]:.3f}]",
        f"{row['offline']:.3f}",
        f"{apart[0]:+.3f} [{apart[1]:+.3f}, {apart[2]:+.3f}]",
        f"{row['equal']} of {row['prompts']}" if row["is_same_noise"] else "",
        "agrees" if row["agrees"] else "DISAGREES",
    )
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
