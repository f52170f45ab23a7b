"""Does the decode loop do what offline scores say? One drafter, draft and trace at a time.

The strongest test of positions, captured layers and caches: the loop feeds the drafter round by
round, the offline score feeds it the whole text at once, and both must accept the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoded, Decoding, decode
from outrider.eval.drafters.by_plan import drafter_by
from outrider.eval.drafters.model import DraftModel
from outrider.eval.offline.drafted import score_drafts
from outrider.eval.offline.texts import Text
from outrider.eval.offline.traces import Trace
from outrider.eval.packing import packed
from outrider.eval.stats import ratio
from outrider.eval.trees.plans import is_drawn, plan_named
from outrider.heads import DraftHead

TEXT_SEED = 0
"""Of the noise that the texts were drawn with."""


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
    equal: int
    """Prompts whose text and rounds are the same in both."""
    is_same_noise: bool
    """Whether they must be."""
    least_equal: float
    """Share of the prompts for which they then must."""

    @property
    def agrees(self) -> bool:
        """Whether the offline figure is in the loop's interval, and equal rounds are equal."""
        _, low, high = self.loop
        is_inside = low - 1e-9 <= self.offline <= high + 1e-9
        return is_inside and (
            not self.is_same_noise or self.equal >= self.least_equal * self.prompts
        )


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
    plan, sampling = plan_named(wanted.draft), trace.sampling
    draws = is_drawn(plan) and not sampling.is_greedy
    emitted: list[float] = []
    rounds: list[float] = []
    equal = 0
    for index in range(len(trace)):
        row = trace.row(index, ())
        ids = row.ids_T.tolist()
        seeds = range(wanted.seed, wanted.seed + wanted.repeats) if draws else [TEXT_SEED]
        runs: list[Decoded] = []
        for seed in seeds:
            decoding = Decoding(
                # Longer than the text where an end token closed it.
                max_new_tokens=max(row.num_tokens, max_tokens(trace)),
                sampling=sampling,
                rule=score.rule,
                seed=seed,
            )
            made = drafter_by(plan, drafter, temperature=sampling.temperature if draws else 0.0)
            runs.append(decode(target, ids[: row.prompt_length], made, decoding, row=index))
        emitted.append(float(sum(one.emitted for run in runs for one in run.rounds)))
        rounds.append(float(sum(len(run.rounds) for run in runs)))
        is_same = runs[0].ids == ids[row.prompt_length :]
        equal += int(is_same and abs(rounds[-1] - float(score.rounds_R[index])) < 0.5)
    interval = ratio(emitted, rounds)
    return Agreement(
        name=wanted.name,
        draft=wanted.draft,
        rule=score.rule,
        prompts=len(trace),
        loop=(interval.value, interval.low, interval.high),
        offline=score.tau,
        equal=equal,
        is_same_noise=not draws,
        least_equal=wanted.least_equal,
    )


def max_tokens(trace: Trace) -> int:
    """The longest answer of a trace: the limit that its texts were drawn with, or all ended."""
    prompts = (trace.row(index, ()) for index in range(len(trace)))
    return max(row.num_tokens for row in prompts)
