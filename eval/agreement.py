"""Does the decode loop do what offline scores say? One drafter, draft and trace at a time.

The strongest test of positions, captured layers and caches: the loop feeds the drafter round by
round, the offline score feeds it the whole text at once, and both must accept the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoded, Decoding, decode
from outrider.eval.drafters.by_plan import drafter_by
from outrider.eval.drafters.model import DraftModel
from outrider.eval.offline.drafted import score_drafts
from outrider.eval.offline.scores import Score
from outrider.eval.offline.texts import Text
from outrider.eval.offline.traces import Trace, build_trace
from outrider.eval.packing import packed
from outrider.eval.stats import ratio, ratio_difference
from outrider.eval.trees.plans import is_drawn, plan_named
from outrider.heads import DraftHead

TEXT_SEED = 0
"""Of the noise that the texts were drawn with."""
APART_CONFIDENCE = 0.99
"""Of the bounds of the difference: of a hundred drawn checks one lies outside by chance."""
SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class Check:
    """What is compared."""

    draft: str
    """A draft plan as it is written."""
    seed: int = 17
    """Of the loop's noise where drafts are drawn; otherwise the text's own."""
    repeats: int = 1
    """Decodings of each prompt, with noise of their own, where drafts are drawn."""
    name: str = "drafter"
    """For the table."""
    least_equal: float = 1.0
    """Share of prompts that must take equal rounds under equal noise; below 1 where near ties may
    part some, as in half precision."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The loop's tokens per target call beside the offline score's."""

    name: str
    draft: str
    rule: str
    prompts: int
    loop: tuple[float, float, float]
    """Value and 95% bounds by prompt."""
    offline: float
    """Of the texts of the trace, or where drafts are drawn of those that the loop wrote."""
    apart: tuple[float, float, float]
    """The loop's figure less the offline one, prompt by prompt, and its 99% bounds: the texts are
    the same, so only the noise of the drafts is in it."""
    equal: int
    """Prompts whose text and rounds are the same in both."""
    is_same_noise: bool
    """Whether they must be."""
    least_equal: float
    """Share of the prompts for which they then must."""

    @property
    def agrees(self) -> bool:
        """Whether equal rounds are equal, or figures no further apart than the drafts' noise."""
        _, low, high = self.loop
        if not low - SLACK <= self.offline <= high + SLACK:
            return False
        if self.is_same_noise:
            return self.equal >= self.least_equal * self.prompts
        return self.apart[1] - SLACK <= 0 <= self.apart[2] + SLACK


def own_texts(
    target: Target, prompts: Sequence[Text], sampling: Sampling, num_tokens: int
) -> list[Text]:
    """The target's answers by plain decoding, row by row in the order given."""
    decoding = Decoding(max_new_tokens=num_tokens, sampling=sampling, seed=TEXT_SEED)
    with packed(target):
        answers = [
            decode(target, prompt.prompt_ids, None, decoding, row=row).ids
            for row, prompt in enumerate(prompts)
        ]
    pairs = zip(prompts, answers, strict=True)
    return [prompt._replace(answer_ids=ids) for prompt, ids in pairs]


def check(
    drafter: DraftHead | DraftModel | None, target: Target, trace: Trace, wanted: Check
) -> Agreement:
    """Decode every prompt of a trace of `own_texts`, and score the trace.

    Raises ValueError for a draft without an offline score.
    """
    with packed(target, drafter):
        return _compare(drafter, target, trace, wanted)


def _compare(
    drafter: DraftHead | DraftModel | None, target: Target, trace: Trace, wanted: Check
) -> Agreement:
    score = score_drafts(drafter, trace, target, [wanted.draft])[wanted.draft]
    draws = is_drawn(plan_named(wanted.draft)) and not trace.sampling.is_greedy
    seeds = range(wanted.seed, wanted.seed + wanted.repeats) if draws else [TEXT_SEED]
    runs = [_decoded(drafter, target, trace, wanted.draft, score.rule, seed) for seed in seeds]
    known = [trace.row(index, ()) for index in range(len(trace))]
    equal = sum(
        run.ids == row.ids_T.tolist()[row.prompt_length :]
        and abs(len(run.rounds) - float(rounds)) < 0.5
        for run, row, rounds in zip(runs[0], known, score.rounds_R, strict=True)
    )
    pairs = [(score.tokens_R, score.rounds_R)]
    if draws:  # other noise wrote other texts: score those
        scores = [_own_score(drafter, target, trace, wanted.draft, run) for run in runs]
        pairs = [(one.tokens_R, one.rounds_R) for one in scores]
    emitted, rounds = _summed([[_emitted(one) for one in run] for run in runs])
    offline_emitted, offline_rounds = _summed(
        [list(zip(tokens, calls, strict=True)) for tokens, calls in pairs]
    )
    interval = ratio(emitted, rounds)
    apart = ratio_difference(
        (emitted, rounds), (offline_emitted, offline_rounds), confidence=APART_CONFIDENCE
    )
    return Agreement(
        name=wanted.name,
        draft=wanted.draft,
        rule=score.rule,
        prompts=len(trace),
        loop=(interval.value, interval.low, interval.high),
        offline=sum(offline_emitted) / sum(offline_rounds),
        apart=(apart.value, apart.low, apart.high),
        equal=equal,
        is_same_noise=not draws,
        least_equal=wanted.least_equal,
    )


def _decoded(
    drafter: DraftHead | DraftModel | None,
    target: Target,
    trace: Trace,
    draft: str,
    rule: str,
    seed: int,
) -> list[Decoded]:
    """Every prompt of the trace decoded with this noise."""
    plan, sampling = plan_named(draft), trace.sampling
    draws = is_drawn(plan) and not sampling.is_greedy
    found: list[Decoded] = []
    for index in range(len(trace)):
        row = trace.row(index, ())
        decoding = Decoding(
            # Longer than the text where an end token closed it.
            max_new_tokens=max(row.num_tokens, max_tokens(trace)),
            sampling=sampling,
            rule=rule,
            seed=seed,
        )
        made = drafter_by(plan, drafter, temperature=sampling.temperature if draws else 0.0)
        found.append(
            decode(target, row.ids_T.tolist()[: row.prompt_length], made, decoding, row=index)
        )
    return found


def _own_score(
    drafter: DraftHead | DraftModel | None,
    target: Target,
    trace: Trace,
    draft: str,
    run: Sequence[Decoded],
) -> Score:
    """The offline score of the very texts that a loop wrote."""
    rows = [trace.row(index, ()) for index in range(len(trace))]
    texts = [
        Text(f"row {index}", "loop", row.ids_T.tolist()[: row.prompt_length], one.ids)
        for index, (row, one) in enumerate(zip(rows, run, strict=True))
    ]
    with TemporaryDirectory() as folder:
        own = build_trace(
            target,
            texts,
            Path(folder) / "trace",
            sampling=trace.sampling,
            layers=trace.info.layers,
        )
        return score_drafts(drafter, own, target, [draft])[draft]


def _emitted(run: Decoded) -> tuple[float, float]:
    return float(sum(one.emitted for one in run.rounds)), float(len(run.rounds))


def _summed(
    runs: Sequence[Sequence[tuple[float, float]]],
) -> tuple[list[float], list[float]]:
    """Tokens and target calls of every prompt, all runs together."""
    table = np.asarray(runs, dtype=np.float64).sum(0)
    return table[:, 0].tolist(), table[:, 1].tolist()


def max_tokens(trace: Trace) -> int:
    """The longest answer of a trace: the limit that its texts were drawn with, or all ended."""
    prompts = (trace.row(index, ()) for index in range(len(trace)))
    return max(row.num_tokens for row in prompts)
