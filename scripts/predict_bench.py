"""Measures how well `outrider tune` predicts wall-clock speed-up on this machine.

    python -m outrider.scripts.predict_bench --head runs/demo/best --work runs/predict

Acceptance is scored offline on the target's own text, costs are measured on made-up rows, and the
speed-up that follows is compared with decoding real prompts in full batches: slots are refilled as
rows end, plain decoding takes turns with every draft, prefills are not timed. Stages are kept in
the work folder, and a stopped run goes on; timings want a quiet machine. Exit status 1 when the
mean absolute error is above 10% or the best predicted draft is over 3% slower than the best one.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from tqdm import tqdm

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoding
from outrider.eval.link import judged_head
from outrider.eval.offline.evaluate import evaluate
from outrider.eval.offline.texts import Text, read_texts
from outrider.eval.offline.traces import build_trace
from outrider.eval.packing import packed
from outrider.eval.report.page import write_report
from outrider.eval.rows.head import HeadRows
from outrider.eval.rows.loop import decode_rows
from outrider.eval.rows.row import Prefill
from outrider.eval.trees.plans import plan_named
from outrider.eval.tune.acceptance import read_acceptances
from outrider.eval.tune.costs import PLAIN, merged, read_costs
from outrider.eval.tune.measure import MeasureSettings, measure
from outrider.heads import DraftHead
from outrider.scripts.predict_table import compare, show

CHAINS = tuple(f"chain:{length}" for length in range(1, 9))
TREES = ("tree:2,2,4", "tree:3,3,8", "tree:4,4,16")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Predict speeds, measure them, compare."""

    head: str
    """Folder of an exported head."""
    work: Path
    """Folder that keeps acceptance, costs and timings."""
    target: str = "smollm2-demo"
    """Its target."""
    drafts: tuple[str, ...] = CHAINS + TREES
    """Draft plans to decode with."""
    cost_drafts: tuple[str, ...] = CHAINS + TREES
    """Draft plans whose costs are measured. All of them: costs of matrix products are jagged in the
    number of tokens, and a line between two lengths misses that."""
    batches: tuple[int, ...] = (1, 2, 4, 8)
    """Rows in a batch."""
    stages: tuple[Literal["acceptance", "costs", "speeds", "report"], ...] = (
        "acceptance", "costs", "speeds", "report",
    )  # fmt: skip
    """What to do; the report compares whatever is there."""
    prompts: int = 10
    """Prompts of the demo's held-out text."""
    tokens: int = 40
    """Tokens to write for each, at most."""
    rounds: int = 25
    """Rounds of each kind that the costs are the median of."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of target and head. In float32 every draft decodes the very text that acceptance
    was scored on; in bfloat16 near ties fall otherwise by the shape of a pass."""
    threads: int = 1
    """CPU threads."""

    def __post_init__(self) -> None:
        for name in ("prompts", "tokens", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batches is {self.batches}; give at least one, of 1 row or more")
        for draft in (*self.drafts, *self.cost_drafts):
            plan_named(draft)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the stages and print the comparison."""
    settings = tyro.cli(Settings, args=argv, prog="predict_bench", description=__doc__)
    torch.set_num_threads(settings.threads)
    settings.work.mkdir(parents=True, exist_ok=True)
    if set(settings.stages) - {"report"}:
        dtype = getattr(torch, settings.dtype)
        target = Target.load(settings.target, dtype=dtype)
        head = judged_head(settings.head, target, dtype=dtype)
        with packed(target, head):
            texts = _texts(settings, target)
            if "acceptance" in settings.stages:
                _score(settings, target, head, texts)
            for batch in settings.batches:
                if "costs" in settings.stages:
                    _measure_costs(settings, target, head, texts, batch)
                if "speeds" in settings.stages:
                    _measure_speeds(settings, target, head, texts, batch)
    if "report" in settings.stages:
        paths = sorted(settings.work.glob("costs-*.json"))
        if not paths:
            raise ValueError(f"{settings.work} has no costs; run the stage costs first")
        costs = merged([read_costs(path) for path in paths])
        costs.save(settings.work / "costs.json")  # for outrider tune --costs
        found = compare(
            costs, read_acceptances(settings.work / "acceptance.json"), _speeds(settings)
        )
        (settings.work / "compared.json").write_text(json.dumps(found.record(), indent=1) + "\n")
        print(show(found))
        sys.exit(0 if found.holds else 1)


def _texts(settings: Settings, target: Target) -> list[Text]:
    """Prompts, and what the target itself writes after each in this very precision."""
    path = settings.work / "texts.json"
    if path.exists():
        return [Text(*one) for one in json.loads(path.read_text(encoding="utf-8"))]
    every = read_texts("demo:heldout", Sampling(), per_kind=-(-settings.prompts // 4))
    step = max(1, len(every) // settings.prompts)
    chosen = every[::step][: settings.prompts]
    decoding = Decoding(max_new_tokens=settings.tokens)
    prompts = [text.prompt_ids for text in chosen]
    run = decode_rows(target, prompts, None, decoding, batch_size=8)
    pairs = zip(chosen, run.done, strict=True)
    texts = [text._replace(answer_ids=row.new_ids) for text, row in pairs]
    path.write_text(json.dumps([list(text) for text in texts]), encoding="utf-8")
    return texts


def _score(settings: Settings, target: Target, head: DraftHead, texts: Sequence[Text]) -> None:
    """The offline acceptance of every draft, as `outrider eval --out` writes it."""
    if (settings.work / "acceptance.json").exists():
        return
    trace = build_trace(
        target, texts, settings.work / "trace", sampling=Sampling(), layers=head.config.aux_layers
    )
    found = evaluate(target, {"head": head}, {"demo": trace}, settings.drafts)
    write_report(
        settings.work / "acceptance.json", {"evaluation": found}, notes=None, title="Acceptance"
    )


def _context(texts: Sequence[Text]) -> int:
    """Mean positions of a row over its decoding."""
    ends = [2 * len(text.prompt_ids) + len(text.answer_ids) for text in texts]
    return round(sum(ends) / (2 * len(ends)))


def _measure_costs(
    settings: Settings, target: Target, head: DraftHead, texts: Sequence[Text], batch: int
) -> None:
    wanted = MeasureSettings(
        drafts=settings.cost_drafts,
        batches=(batch,),
        contexts=(_context(texts),),
        repeats=settings.rounds,
    )
    names = (settings.head, {})
    journal = settings.work / f"costs-{batch}.jsonl"
    costs = measure(target, head, wanted, journal=journal, names=names)
    costs.save(settings.work / f"costs-{batch}.json")


def _measure_speeds(
    settings: Settings, target: Target, head: DraftHead, texts: Sequence[Text], batch: int
) -> None:
    path = settings.work / "speeds.jsonl"
    done = {(one["batch"], one["draft"], one["turn"]) for one in _speeds(settings)}
    prompts = [text.prompt_ids for text in texts]
    if batch > len(prompts) // 3:  # enough that slots are refilled
        prompts = prompts * -(-2 * batch // len(prompts))
    # Plain decoding before, between and after the drafts.
    order = [(PLAIN, 0), *((draft, 0) for draft in settings.drafts)]
    order.insert(len(order) // 2, (PLAIN, 1))
    order.append((PLAIN, 2))
    prefills: dict[str, dict[tuple[int, ...], Prefill]] = {PLAIN: {}, "drafted": {}}
    warm = decode_rows(target, prompts[:batch], None, Decoding(max_new_tokens=4), batch_size=batch)
    assert warm.times
    for draft, turn in tqdm(order, desc=f"batch {batch}", leave=False, disable=None):
        if (batch, draft, turn) in done:
            continue
        drafter = None if draft == PLAIN else HeadRows(head, plan_named(draft), batch)
        decoding = Decoding(max_new_tokens=settings.tokens)
        run = decode_rows(
            target,
            prompts,
            drafter,
            decoding,
            batch_size=batch,
            until_idle=batch > 1,
            prefills=prefills[PLAIN if draft == PLAIN else "drafted"],
        )
        record: dict[str, Any] = {
            "batch": batch,
            "draft": draft,
            "turn": turn,
            "tokens": sum(one.emitted for one in run.times),
            "row_rounds": sum(one.rows for one in run.times),
            "draft_s": sum(one.draft for one in run.times),
            "verify_s": sum(one.verify for one in run.times),
            "other_s": sum(one.other for one in run.times),
        }
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _speeds(settings: Settings) -> list[dict[str, Any]]:
    path = settings.work / "speeds.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
