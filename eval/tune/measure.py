"""Measures rounds of drafts on this machine, with the very code that decodes.

Rows are of unlike lengths around the context, their caches hold real keys and values, and rows
accept unlike numbers of drafts. Drafts take turns, so a slow moment of the machine falls on all.
"""

import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from outrider.data.target import Target
from outrider.eval.decode import Decoding, position_limit
from outrider.eval.packing import packed
from outrider.eval.rows import EachRow, RowsDrafter
from outrider.eval.rows.head import HeadRows
from outrider.eval.rows.loop import RowsRun
from outrider.eval.rules import Laws, Randomness, Verdict, Verify
from outrider.eval.trees.plans import Plan, plan_named
from outrider.eval.trees.tree import Tree
from outrider.eval.tune.costs import PLAIN, MeasuredCosts, Pieces, Point, spread
from outrider.heads import DraftHead

_RAGGED = 8
"""Rows differ by up to so many positions from the context."""


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """What is timed."""

    drafts: tuple[str, ...] = ("chain:1", "chain:2", "chain:4", "chain:8", "tree:4,4,16")
    """Draft plans; chains between two that are measured follow from them."""
    batches: tuple[int, ...] = (1, 2, 4, 8)
    """Rows in a batch."""
    contexts: tuple[int, ...] = (128, 512)
    """Positions of a row before the round."""
    repeats: int = 9
    """Rounds of each kind that are timed; their median counts."""
    accepted: tuple[int, ...] = (0, 1)
    """Drafts that rows accept in a timed round, in turn; what the work after a call depends on."""

    def __post_init__(self) -> None:
        for name in ("drafts", "batches", "contexts", "accepted"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one")
        least = {"batches": 1, "contexts": 2, "accepted": 0}
        for name, low in least.items():
            if min(getattr(self, name)) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; give {low} or more")
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}; time every round at least once")
        for draft in self.drafts:
            plan_named(draft)


def measure(
    target: Target,
    head: DraftHead,
    settings: MeasureSettings | None = None,
    *,
    journal: Path | None = None,
    names: tuple[str | None, dict[str, Any]] = (None, {}),
) -> MeasuredCosts:
    """Time rounds of every draft and plain steps, at every batch and context.

    Args:
        target: The target.
        head: A head attached to its tables.
        settings: What is timed.
        journal: Keeps what has been measured, a batch and context a line; a stopped measurement
            goes on from it.
        names: Of the head, and notes for the provenance.
    """
    settings = settings or MeasureSettings()
    device, threads = str(target.device), torch.get_num_threads()
    claim = {
        "target": target.fingerprint(),
        "head": names[0],
        "drafts": list(settings.drafts),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": threads,
        "repeats": settings.repeats,
    }
    done = _read(journal, claim)
    places = [(b, c) for c in settings.contexts for b in settings.batches]
    points: list[Point] = []
    with packed(target, head):
        for batch, context in tqdm(
            places, desc="measuring", unit="batch", leave=False, disable=None
        ):
            found = done.get((batch, context))
            if found is None:
                found = measure_at(target, head, settings, batch, context)
                _note(journal, claim, batch, context, found)
            points += found
    return MeasuredCosts(
        points=points,
        target=target.name,
        head=names[0],
        dtype=claim["dtype"],
        device=device,
        threads=threads if target.device.type == "cpu" else None,
        notes=names[1],
    )


def measure_at(
    target: Target, head: DraftHead, settings: MeasureSettings, batch: int, context: int
) -> list[Point]:
    """Rounds of every draft, and plain steps, at one batch and context."""
    plans = {draft: plan_named(draft) for draft in settings.drafts}
    deepest = max(plan.depth for plan in plans.values())
    limit = min(position_limit(target), head.config.max_position_embeddings)
    room = limit - 3 * (deepest + 1) - _RAGGED
    if context > room:
        raise ValueError(
            f"context is {context}; target and head have room for {room} positions and a round: "
            "measure at fewer"
        )
    runs = _Runs(target, head, next(iter(plans.values())), settings, batch, context)
    seconds: dict[str, list[Pieces]] = {draft: [] for draft in (PLAIN, *plans)}
    tokens: dict[str, int] = {}
    gc.collect()
    for repeat in range(settings.repeats + 1):
        names = list(seconds)
        turn = repeat % len(names)
        for draft in names[turn:] + names[:turn]:
            pieces, size = runs.round(plans.get(draft))
            tokens[draft] = size
            if repeat:  # the first turn warms up
                seconds[draft].append(pieces)
    return [
        Point(
            draft=draft,
            tokens=tokens[draft],
            batch=batch,
            context=context,
            pieces={
                **{k: spread([getattr(p, k) for p in pieces]) for k in Pieces._fields},
                "total": spread([p.total for p in pieces]),
            },
            samples=len(pieces),
        )
        for draft, pieces in seconds.items()
    ]


class _Runs:
    """One batch with drafts and one without, each taken back after every round."""

    def __init__(
        self,
        target: Target,
        head: DraftHead,
        plan: Plan,
        settings: MeasureSettings,
        batch: int,
        context: int,
    ) -> None:
        self._drafter = HeadRows(head, plan, batch)
        self._drafted = _started(target, self._drafter, settings, batch, context)
        self._plain = _started(target, EachRow(), settings, batch, context)
        self._saved = {run: run.save() for run in (self._drafted, self._plain)}

    def round(self, plan: Plan | None) -> tuple[Pieces, int]:
        """A round by this plan, None for a plain step; and the tokens of its call for one row."""
        run = self._drafted if plan is not None else self._plain
        if plan is not None:
            self._drafter.plan = plan
        time = run.round()
        size = max(row.rounds[-1].drafted for row in run.rows if row is not None) + 1
        run.restore(self._saved[run])
        return Pieces(time.draft, time.verify, time.other), size


def _started(
    target: Target, drafter: RowsDrafter, settings: MeasureSettings, batch: int, context: int
) -> RowsRun:
    """Rows of the target's own words at unlike lengths around the context, one round under way.

    After that round drafted entries wait to be run, as they do in every round of decoding.
    """
    decoding = Decoding(max_new_tokens=1 << 30, ignore_eos=True)
    run = RowsRun(target, batch, drafter, decoding, _accepting(settings.accepted))
    usable = target.tokenizer_size
    for row in range(batch):
        shift = (row * 5) % (2 * _RAGGED + 1) - _RAGGED if batch > 1 else 0
        length = max(2, context + shift - 1)
        ids = [(7 * row + 11 * place + 13) % usable for place in range(length)]
        run.admit(row, ids, row)
    run.round()
    return run


def _accepting(accepted: Sequence[int]) -> Verify:
    """Looks at p as the greedy rule does, and accepts a preset number of first children."""
    turn = _cycle(accepted)

    def verify(tree: Tree, laws: Laws, random: Randomness) -> Verdict:  # noqa: ARG001
        path: list[int] = []
        node = 0
        wanted = next(turn)
        while True:
            token = int(laws.target(node).argmax())
            if len(path) == wanted or not tree.children[node]:
                return Verdict(path=tuple(path), token=token)
            node = tree.children[node][0]
            path.append(node)

    return verify


def _cycle(values: Sequence[int]) -> Iterator[int]:
    while True:
        yield from values


def _read(journal: Path | None, claim: dict[str, Any]) -> dict[tuple[int, int], list[Point]]:
    """What an earlier, stopped measurement of the same things found."""
    if journal is None or not journal.exists():
        return {}
    found: dict[tuple[int, int], list[Point]] = {}
    for number, text in enumerate(journal.read_text(encoding="utf-8").splitlines(), start=1):
        record = json.loads(text)
        if record["claim"] != claim:
            raise ValueError(
                f"{journal} line {number} was measured with other settings ({record['claim']}, now "
                f"{claim}); name another file, or remove this one"
            )
        found[record["batch"], record["context"]] = list(map(Point.read, record["points"]))
    return found


def _note(
    journal: Path | None, claim: dict[str, Any], batch: int, context: int, found: Sequence[Point]
) -> None:
    if journal is None:
        return
    points = [point.record() for point in found]
    record = {"claim": claim, "batch": batch, "context": context, "points": points}
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
