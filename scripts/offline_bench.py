"""Measures what scoring text offline costs against decoding it with the same head and draft.

    python -m outrider.scripts.offline_bench --head runs/demo/best

Text is the target's own held-out text. Scoring is timed on all of it, with and without the trace
that it reads; decoding on whole answers of a few prompts of each kind, prefill included, between
the scorings. Both in float32, with the same threads.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from tqdm import tqdm

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.link import judged_head
from outrider.eval.offline.evaluate import evaluate
from outrider.eval.offline.texts import Text, read_texts
from outrider.eval.offline.traces import Trace, build_trace
from outrider.eval.packing import packed
from outrider.eval.trees.plans import plan_named
from outrider.heads import DraftHead

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time offline scoring against decoding."""

    head: Path
    """Folder of an exported head."""
    target: str = "smollm2-demo"
    """Its target."""
    text: str = "demo:heldout"
    """Answered rows of the target's own."""
    drafts: tuple[str, ...] = ("chain:3", "chain:5", "tree:4,4,16")
    """Draft plans, scored and decoded."""
    temperature: float = 0.0
    """Of the text and of decoding."""
    tokens: int = 10_000
    """Answer tokens to score."""
    decoded_per_kind: int = 1
    """Prompts of each kind that are decoded as well."""
    threads: int = 2
    """CPU threads."""
    json: Path | None = None
    """Write the figures here too."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Milliseconds an answer token."""

    draft: str
    score_ms: float
    trace_ms: float
    decode_ms: float

    @property
    def ratio(self) -> float:
        """Decoding over scoring a trace that is there."""
        return self.decode_ms / self.score_ms

    @property
    def ratio_with_trace(self) -> float:
        """Decoding over building the trace and scoring it once."""
        return self.decode_ms / (self.score_ms + self.trace_ms)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the ratios."""
    settings = tyro.cli(Settings, args=argv, prog="offline_bench")
    torch.set_num_threads(settings.threads)
    target = Target.load(settings.target)
    head = judged_head(settings.head, target)
    with packed(target, head):
        run(settings, target, head)


def run(settings: Settings, target: Target, head: DraftHead) -> None:
    """Measure and print."""
    texts = list(some(settings))
    tokens = sum(len(text.answer_ids) for text in texts)
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        trace = build_trace(
            target,
            texts,
            Path(folder) / "trace",
            sampling=Sampling(temperature=settings.temperature),
            layers=sorted(head.config.aux_layers),
        )
        trace_ms = 1e3 * (time.perf_counter() - begun) / tokens
        found = [
            Measured(
                draft=draft,
                score_ms=scored(target, head, trace, draft) / tokens,
                trace_ms=trace_ms,
                decode_ms=decoded(target, head, texts, draft, settings),
            )
            for draft in settings.drafts
        ]
    plain_ms = decoded(target, head, texts, PLAIN, settings)
    print(f"{len(texts)} answers, {tokens} tokens, T={settings.temperature:g}; ms a token")
    print(
        f"trace {trace_ms:.1f}, plain decoding {plain_ms:.1f}, threads {settings.threads}: text "
        f"and its trace take {1 + trace_ms / plain_ms:.2f} of plain generation at batch 1"
    )
    print(f"{'draft':<14}{'decode':<9}{'score':<9}{'ratio':<9}ratio with the trace's making")
    for one in found:
        print(
            f"{one.draft:<14}{one.decode_ms:<9.1f}{one.score_ms:<9.2f}{one.ratio:<9.1f}"
            f"{one.ratio_with_trace:.1f}"
        )
    if settings.json is not None:
        settings.json.write_text(json.dumps([asdict(one) for one in found], indent=1), "utf-8")


def some(settings: Settings) -> Iterator[Text]:
    """Answers, kinds in turn, until there are enough tokens."""
    texts = read_texts(settings.text, Sampling(temperature=settings.temperature))
    kinds: dict[str, list[Text]] = {}
    for text in texts:
        kinds.setdefault(text.kind, []).append(text)
    rounds = [
        rows[index]
        for index in range(max(map(len, kinds.values())))
        for rows in kinds.values()
        if index < len(rows)
    ]
    total = 0
    for text in rounds:
        if total >= settings.tokens:
            return
        total += len(text.answer_ids)
        yield text


def scored(target: Target, head: DraftHead, trace: Trace, draft: str) -> float:
    """Milliseconds of scoring the whole trace, the better of two."""
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        evaluate(target, {"head": head}, {"trace": trace}, [draft])
        seconds.append(time.perf_counter() - begun)
    return 1e3 * min(seconds)


def decoded(
    target: Target, head: DraftHead, texts: Sequence[Text], draft: str, settings: Settings
) -> float:
    """Milliseconds a token over all prompts, prefill included."""
    taken: dict[str, int] = {}
    seconds, tokens = 0.0, 0
    for text in tqdm(texts, desc=f"decode {draft}", unit="prompt", leave=False, disable=None):
        taken[text.kind] = taken.get(text.kind, 0) + 1
        if taken[text.kind] > settings.decoded_per_kind:
            continue
        drafter = None
        if draft != PLAIN:
            drafter = HeadDrafter(head, plan_named(draft), temperature=settings.temperature)
        decoding = Decoding(
            max_new_tokens=len(text.answer_ids), sampling=Sampling(temperature=settings.temperature)
        )
        begun = time.perf_counter()
        ids = decode(target, text.prompt_ids, drafter, decoding).ids
        seconds += time.perf_counter() - begun
        tokens += len(ids)
    return 1e3 * seconds / tokens


if __name__ == "__main__":
    main()
