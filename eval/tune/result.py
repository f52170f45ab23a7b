"""Everything that follows from costs and acceptance: one result for terminal, JSON and page."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.eval.trees.plans import ChainPlan
from outrider.eval.tune.acceptance import Acceptance
from outrider.eval.tune.costs import PLAIN, Costs, MeasuredCosts
from outrider.eval.tune.engines import SGLANG_ALGORITHMS, VLLM_METHODS, sglang_flags, vllm_config
from outrider.eval.tune.ragged import closed_batch, plain_batch
from outrider.eval.tune.roofline import RooflineCosts
from outrider.eval.tune.speed import (
    best,
    break_even,
    plain_prediction,
    predict,
    schedule,
    throughput,
)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where speeds are predicted."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    """Batches of the table."""
    contexts: tuple[float, ...] = (1024.0,)
    """Positions of a row before a round."""
    max_batch: int = 256
    """Largest batch of the schedule and of the search for the break-even batch."""
    new_tokens: int | None = None
    """Tokens of a request: also tell the speed-up of a batch whose requests start together."""

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1:
            raise ValueError(f"batch is {self.batches}; give at least one, of 1 row or more")
        if not self.contexts or min(self.contexts) < 0:
            raise ValueError(f"context is {self.contexts}; give at least one, 0 or more")
        for name in ("max_batch", "new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give 1 or more")


def tune(costs: Costs, acceptances: Sequence[Acceptance], grid: Grid) -> dict[str, Any]:
    """Predictions at every batch and context, the best of them, and where speculation ends.

    `contexts` holds one entry a context: predictions, best (a batch each), schedule (ranges of
    batches with one best draft), break_even, and with a roofline throughput.
    """
    if not acceptances:
        raise ValueError("acceptances is empty; give --acceptance FILE or --alpha")
    return {
        "costs": costs.name,
        "is_measured": isinstance(costs, MeasuredCosts),
        "measured_batches": costs.batches if isinstance(costs, MeasuredCosts) else None,
        "measured_contexts": costs.contexts if isinstance(costs, MeasuredCosts) else None,
        "acceptance": [asdict(one) for one in acceptances],
        "grid": asdict(grid),
        "contexts": [_at(costs, acceptances, grid, context) for context in grid.contexts],
    }


def _at(
    costs: Costs, acceptances: Sequence[Acceptance], grid: Grid, context: float
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "context": context,
        "predictions": [
            predict(costs, one, batch, context).record()
            for batch in grid.batches
            for one in acceptances
        ],
        "plain": [plain_prediction(costs, batch, context).record() for batch in grid.batches],
        "c": [_draft_cost(costs, acceptances, batch, context) for batch in grid.batches],
        "best": [best(costs, acceptances, batch, context).record() for batch in grid.batches],
        "schedule": [
            one._asdict() for one in schedule(costs, acceptances, context, grid.max_batch)
        ],
        "break_even": break_even(costs, acceptances, context, grid.max_batch)._asdict(),
        "throughput": None,
        "requests": None,
    }
    if isinstance(costs, RooflineCosts):
        peaks = throughput(costs, acceptances, context)
        found["throughput"] = {
            "plain": peaks.plain and peaks.plain._asdict(),
            "drafted": peaks.drafted and peaks.drafted._asdict(),
            "tensor_parallel": costs.hardware.tensor_parallel,
        }
    if grid.new_tokens is not None:
        found["requests"] = [
            _requests(costs, acceptances, batch, context, grid.new_tokens) for batch in grid.batches
        ]
    return found


def _draft_cost(
    costs: Costs, acceptances: Sequence[Acceptance], batch: int, context: float
) -> float | None:
    """c: a draft step over a plain step, a mean over the longest chain; None without chains."""
    lengths = {one.plan.length: one for one in acceptances if isinstance(one.plan, ChainPlan)}
    if not lengths:
        return None
    longest = lengths[max(lengths)]
    drafting = costs.round(longest.draft, longest.tokens, batch, context).draft
    return drafting / max(lengths) / costs.round(PLAIN, 1, batch, context).total


def _requests(
    costs: Costs, acceptances: Sequence[Acceptance], batch: int, context: float, new_tokens: int
) -> dict[str, Any]:
    """A batch whose requests start together: rows that accept more leave earlier, caches grow."""
    lengths = [new_tokens] * batch
    drafts: list[dict[str, Any]] = []
    plain = plain_batch(
        lengths, lambda rows, at: costs.round(PLAIN, 1, rows, at).total, context=context
    )
    for one in acceptances:

        def seconds(rows: int, at: float, one: Acceptance = one) -> float:
            return costs.round(one.draft, one.tokens, rows, at).total

        drafted = closed_batch(one.emitted, lengths, seconds, context=context)
        drafts.append(
            {
                "draft": one.draft,
                "speedup": plain.seconds / drafted.seconds,
                "seconds": drafted.seconds,
                "mean_rows": drafted.mean_rows,
            }
        )
    fastest = max(drafts, key=lambda found: found["speedup"])
    return {"batch": batch, "plain_seconds": plain.seconds, "drafts": drafts, "best": fastest}


def engines(
    costs: Costs,
    acceptances: Sequence[Acceptance],
    *,
    kind: str,
    head: str,
    context: float,
    max_batch: int,
    batch: int,
) -> dict[str, Any]:
    """Settings for vLLM (chains, by batch) and SGLang (one draft, the best at `batch`).

    None for an engine that does not serve this kind of head, or where nothing pays.
    """
    chains = [one for one in acceptances if isinstance(one.plan, ChainPlan)]
    vllm = None
    if kind in VLLM_METHODS and chains:
        vllm = vllm_config(kind, head, schedule(costs, chains, context, max_batch))
    sglang = None
    served = [one for one in acceptances if one.draft.startswith(("chain:", "tree:"))]
    if kind in SGLANG_ALGORITHMS and served:
        sglang = sglang_flags(kind, head, best(costs, served, batch, context).draft)
    return {"vllm": vllm, "sglang": sglang, "sglang_batch": batch, "context": context}


def table(result: Mapping[str, Any]) -> str:
    """The result as text: a line a batch, the speed-up of every draft, and what is best."""
    lines: list[str] = [f"costs: {result['costs']}"]
    lines += [f"acceptance: {source}" for source in _sources(result)]
    lines += _measured(result)
    for one in result["contexts"]:
        lines += ["", f"context {one['context']:g}: speed-up over plain decoding", *_speeds(one)]
        lines += _where_it_ends(one)
        if one["throughput"] is not None:
            lines += _throughput(one["throughput"])
        if one["requests"] is not None:
            tokens = result["grid"]["new_tokens"]
            lines.append(f"requests of {tokens} tokens that start together, the best draft:")
            for row in one["requests"]:
                fastest = row["best"]
                lines.append(
                    f"  batch {row['batch']}: {fastest['draft']} {fastest['speedup']:.2f}x, "
                    f"{fastest['mean_rows']:.1f} rows at work in a mean round"
                )
    return "\n".join(lines)


def _measured(result: Mapping[str, Any]) -> list[str]:
    if not result["is_measured"]:
        return []
    batches, contexts = result["measured_batches"], result["measured_contexts"]
    text = (
        f"measured at batches {', '.join(map(str, batches))} and contexts "
        f"{', '.join(map(str, contexts))}; between them by straight lines, beyond them by the last "
        "line: an extrapolation"
    )
    return [text]


def _sources(result: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(one["source"] for one in result["acceptance"]))


def _speeds(one: Mapping[str, Any]) -> list[str]:
    drafts = list(dict.fromkeys(row["draft"] for row in one["predictions"]))
    widths = [max(6, len(draft)) for draft in drafts]
    header = "  ".join(draft.rjust(width) for draft, width in zip(drafts, widths, strict=True))
    lines = [f"{'batch':>5}  {header}  {'best':<12}  tokens/s  c     ms/token (plain)"]
    for fastest, plain, c in zip(one["best"], one["plain"], one["c"], strict=True):
        ratio = "-" if c is None else f"{c:.2f}"
        batch = fastest["batch"]
        here = {row["draft"]: row for row in one["predictions"] if row["batch"] == batch}
        cells = "  ".join(
            f"{here[draft]['speedup']['value']:.2f}".rjust(width)
            for draft, width in zip(drafts, widths, strict=True)
        )
        lines.append(
            f"{batch:>5}  {cells}  {fastest['draft']:<12}  {fastest['tokens_per_second']:>8.0f}  "
            f"{ratio:<4}  {fastest['ms']['token']:.2f} ({plain['ms']['token']:.2f})"
        )
    return lines


def _where_it_ends(one: Mapping[str, Any]) -> list[str]:
    ends = one["break_even"]
    if ends["batch"] is None:
        lines = [f"some draft pays at every batch up to {ends['limit']}"]
    else:
        again = "; some draft pays again at larger ones" if ends["returns"] else ""
        lines = [f"break-even: from batch {ends['batch']} on no draft pays{again}"]
    ranges = ", ".join(f"{r['first']} to {r['last']}: {r['draft']}" for r in one["schedule"])
    return [*lines, f"best by batch: {ranges}"]


def _throughput(peaks: Mapping[str, Any]) -> list[str]:
    plain, drafted = peaks["plain"], peaks["drafted"]
    if plain is None:
        return ["throughput: not one row of this context fits beside the weights"]
    text = f"{plain['tokens_per_second']:.0f} tokens/s plain with {plain['batch']} rows"
    if drafted is None:
        return [f"throughput of one GPU at most: {text}; with the head not one row fits"]
    gain = drafted["tokens_per_second"] / plain["tokens_per_second"]
    text = (
        f"throughput of one GPU at most: {text}, {drafted['tokens_per_second']:.0f} with the head "
        f"loaded ({drafted['draft']}, {drafted['batch']} rows fit), {gain:.2f}x"
    )
    return [text]
