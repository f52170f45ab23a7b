"""Wall clock against plain decoding: the same loop, dtype and threads, in turn on the same prompts.

A pair is one prompt and one repeat: its speed-up is the seconds a token of plain decoding over
those of a draft, timed within seconds of each other, prefill left out.
"""

import gc
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median as middle
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.cost import cost
from outrider.eval.decode import Decoded, Decoding, decode
from outrider.eval.drafters.by_plan import drafter_by
from outrider.eval.metrics import count
from outrider.eval.packing import packed
from outrider.eval.stats import median
from outrider.eval.trees.plans import is_drawn, plan_named
from outrider.heads import DraftHead

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is timed."""

    drafts: tuple[str, ...] = ("chain:1", "chain:2", "chain:3", "chain:4", "chain:5", "tree:4,4,16")
    """Draft plans, each timed against plain decoding."""
    repeats: int = 3
    """Times every prompt is decoded with every draft; the median of them counts."""
    max_new_tokens: int = 64
    """Tokens to write for each prompt."""
    ignore_eos: bool = False
    """Write on after an end token, so that every run has the same length."""
    seed: int = 0
    """Keys the noise of decoding and of the bootstrap."""
    sampling: Sampling = field(default_factory=Sampling)
    """The law that tokens follow."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats is {self.repeats}; time every prompt at least once")
        if not self.drafts:
            raise ValueError("drafts is empty; name at least one, such as chain:3")
        for draft in self.drafts:
            plan_named(draft)


class Prompt(NamedTuple):
    """A prompt to time, as token ids."""

    kind: str
    ids: list[int]


class Timing(NamedTuple):
    """One timed run."""

    prompt: int
    repeat: int
    draft: str
    decoded: Decoded

    @property
    def per_token(self) -> float:
        """Seconds per token after the prefill's."""
        return self.decoded.seconds.decode / max(1, len(self.decoded.ids) - 1)


def bench(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Prompt],
    settings: BenchSettings | None = None,
    *,
    with_cost: bool = True,
) -> dict[str, Any]:
    """Time every draft on every prompt; ready for JSON and for the report.

    `rows` holds one entry a draft and kind (and `all`), the slower ones too; `cost` the time of a
    draft step and of a verify pass by the number of its tokens, against a plain step.
    """
    settings = settings or BenchSettings()
    if not prompts:
        raise ValueError("no prompts to time; give at least one")
    with packed(target, head), _no_collection():
        timings = _run_all(target, head, prompts, settings)
        costs = cost(target, head) if with_cost else None
    kinds = ["all", *sorted({prompt.kind for prompt in prompts})]
    rows = [
        _row(timings, prompts, draft, kind, settings) for draft in settings.drafts for kind in kinds
    ]
    return {
        "settings": {
            **asdict(settings),
            "dtype": str(target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "prompts": len(prompts),
        },
        "rows": [row for row in rows if row is not None],
        "plain_ms_per_token": 1000 * middle(t.per_token for t in timings if t.draft == PLAIN),
        "cost": costs,
    }


def table(result: dict[str, Any]) -> str:
    """The rows as lines of text, slower drafts included."""
    lines = [
        f"{'draft':<14}{'prompts':<14}{'speed-up [95%]':<24}{'tokens/call':<13}tokens/s (plain)"
    ]
    for row in result["rows"]:
        speed = row["speedup"]
        interval = f"{speed['value']:.2f}x"
        if not math.isnan(speed["low"]):  # a lone prompt has no spread
            interval += f" [{speed['low']:.2f}, {speed['high']:.2f}]"
        lines.append(
            f"{row['draft']:<14}{row['kind']:<14}{interval:<24}{row['tau']:<13.2f}"
            f"{row['tokens_per_s']:.1f} ({row['plain_tokens_per_s']:.1f})"
        )
    return "\n".join(lines)


@contextmanager
def _no_collection() -> Generator[None]:
    """Keep the garbage collector from walking the models' objects in the middle of a run."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _run_all(
    target: Target, head: DraftHead, prompts: Sequence[Prompt], settings: BenchSettings
) -> list[Timing]:
    drafts = [PLAIN, *settings.drafts]
    for draft in drafts:  # memory is mapped and kernels are chosen in the first run of each
        _decode(target, head, prompts[0], draft, settings, 0, warm=True)
    timings: list[Timing] = []
    total = settings.repeats * len(prompts) * len(drafts)
    with tqdm(total=total, unit="run", desc="bench", leave=False, disable=None) as bar:
        for repeat in range(settings.repeats):
            for index, prompt in enumerate(prompts):
                # Another draft goes first each time, so that none always runs on a warm cache.
                turn = (repeat * len(prompts) + index) % len(drafts)
                for draft in drafts[turn:] + drafts[:turn]:
                    decoded = _decode(target, head, prompt, draft, settings, index)
                    timings.append(Timing(index, repeat, draft, decoded))
                    bar.update()
    return timings


def _decode(
    target: Target,
    head: DraftHead,
    prompt: Prompt,
    draft: str,
    settings: BenchSettings,
    row: int,
    *,
    warm: bool = False,
) -> Decoded:
    drafter = None
    if draft != PLAIN:
        plan = plan_named(draft)
        temperature = settings.sampling.temperature if is_drawn(plan) else 0.0
        drafter = drafter_by(plan, head, temperature=temperature)
    decoding = Decoding(
        max_new_tokens=min(8, settings.max_new_tokens) if warm else settings.max_new_tokens,
        sampling=settings.sampling,
        seed=settings.seed,
        ignore_eos=settings.ignore_eos,
    )
    return decode(target, prompt.ids, drafter, decoding, row=row)


def _row(
    timings: Sequence[Timing],
    prompts: Sequence[Prompt],
    draft: str,
    kind: str,
    settings: BenchSettings,
) -> dict[str, Any] | None:
    """Figures of a draft on the prompts of a kind; None where no prompt wrote two tokens."""
    chosen = [i for i, prompt in enumerate(prompts) if kind in ("all", prompt.kind)]
    ratios: list[float] = []
    mine: list[float] = []
    plain: list[float] = []
    requests: list[Decoded] = []
    for index in chosen:
        runs = {(t.repeat, t.draft): t for t in timings if t.prompt == index}
        pairs = [(runs[repeat, PLAIN], runs[repeat, draft]) for repeat in range(settings.repeats)]
        pairs = [pair for pair in pairs if min(len(run.decoded.ids) for run in pair) > 1]
        if pairs:
            ratios.append(middle(base.per_token / run.per_token for base, run in pairs))
            mine += [run.per_token for _, run in pairs]
            plain += [base.per_token for base, _ in pairs]
            requests.append(pairs[0][1].decoded)
    if not ratios:
        return None
    counts = count([one.rounds for one in requests])
    seconds = [one.seconds for one in requests]
    busy = sum(one.decode for one in seconds)
    return {
        "draft": draft,
        "kind": kind,
        "prompts": len(ratios),
        "speedup": median(ratios, seed=settings.seed)._asdict(),
        "pairs": [round(ratio, 4) for ratio in ratios],
        "tau": counts.tau,
        "tokens": counts.emitted,
        "tokens_per_s": 1 / middle(mine),
        "plain_tokens_per_s": 1 / middle(plain),
        "share": {
            name: sum(getattr(one, name) for one in seconds) / busy
            for name in ("draft", "verify", "other")
        },
    }
