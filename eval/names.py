"""One run in everybody's words: what each tool would call and count of the same rounds.

Read in their sources: vLLM 0.32.0 `v1/spec_decode/metrics.py`; SGLang `tokenizer_manager.py`,
`scheduler_metrics_mixin.py` and the EAGLE worker's verify; EAGLE `evaluation/alpha.py`; Spec-Bench
`evaluation/speed.py`; Medusa `llm_judge/gen_model_answer_medusa.py`; SpecForge
`benchmarks/benchmarker/utils.py`, `specforge/eval/evaluator.py`; gpt-fast `generate.py`; DeepSpec
`deepspec/eval/base_evaluator.py`. All for one chain a round; the loops of EAGLE, Medusa and
Spec-Bench write a round's own token in the next step, so that an answer which ends with such a
token costs them one step more than is counted here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.eval.metrics import Round, RoundCounts, count
from outrider.eval.report.lines import aligned

LEGEND = (
    "R rounds (target calls after the prefill), D drafted, A accepted with nothing cut, K accepted "
    "and emitted, E emitted, P prompts (each has one token of the prefill, not in E); "
    "A_i rounds that accepted at least i, nothing cut; K_i the same of those emitted; "
    "R_d rounds that drafted anything"
)


class Run(NamedTuple):
    """The rounds of one prompt and how it ended."""

    rounds: Sequence[RoundCounts]
    finish: str
    """`stop` at an end token, `length` at a limit."""


@dataclass(frozen=True)
class Name:
    """One figure as one tool prints it."""

    tool: str
    name: str
    formula: str
    values: tuple[float, ...]
    """One, or one per position; empty where these counts do not decide it."""


C16 = (
    Run([Round(4, 4, 5), Round(4, 0, 1), Round(4, 2, 3), Round(4, 4, 3)], "stop"),
    Run([Round(4, 1, 2), Round(4, 3, 2)], "length"),
)
"""Four drafts a round. First prompt: 4, 0, 2 accepted, then all four match but the third is an end
token. Second: 1 accepted, then three match with two tokens of the limit left."""


def reconcile(requests: Sequence[Run]) -> list[Name]:
    """What every tool would print of these requests. ValueError when there is no round."""
    counts = count([one.rounds for one in requests])
    if not counts.rounds:
        raise ValueError("no round to name; give at least one prompt that called the target")
    rounds, drafted, emitted = counts.rounds, counts.drafted, counts.emitted
    accepted = counts.accepted
    flat = [each for one in requests for each in one.rounds]
    depth = len(counts.kept_at)
    accepted_R = np.array([each.accepted for each in flat])
    at_least = _at_least(accepted_R, depth)
    correct = emitted - rounds
    mean = 1 + accepted / rounds
    # vLLM observes a draft only where one was scheduled.
    scheduled = sum(each.drafted > 0 for each in flat)
    by_vllm = [_over(number, scheduled) for number in (accepted, *at_least)]
    return [
        Name("Outrider", "tau", "E / R", (counts.tau,)),
        Name("Outrider", "tau_macro", "mean over prompts of E / R", (counts.tau_macro,)),
        Name("Outrider", "survival", "K_i / R", counts.survival),
        Name("Outrider", "conditional", "K_i / K_(i-1)", counts.conditional),
        Name("Outrider", "judged_alpha", "K / judged drafts", (counts.judged_alpha,)),
        Name("Outrider", "drafted_rate", "K / D", (counts.drafted_rate,)),
        Name("vLLM", "Mean acceptance length", "1 + A / R_d", (1 + by_vllm[0],)),
        Name("vLLM", "Per-position acceptance rate", "A_i / R_d", tuple(by_vllm[1:])),
        Name("vLLM", "Avg Draft acceptance rate", "A / D", (_over(accepted, drafted),)),
        Name(
            "SGLang",
            "spec_accept_length (request)",
            "(E + P) / R",
            ((emitted + _some(requests)) / rounds,),
        ),
        Name("SGLang", "spec_accept_rate (request)", "(E - R) / D", (_over(correct, drafted),)),
        Name("SGLang", "accept len (log, gauge)", "E / R", (emitted / rounds,)),
        Name(
            "SGLang",
            "accept rate (log, gauge)",
            "E / (D + R) in older, (E - R) / D in newer versions",
            (emitted / (drafted + rounds), _over(correct, drafted)),
        ),
        Name("EAGLE", "average acceptance length (tau)", "1 + A / R", (mean,)),
        Name("EAGLE", "n-alpha", "A_i / A_(i-1)", tuple(_conditional(at_least, rounds))),
        Name("Spec-Bench", "#Mean accepted tokens", "1 + A / R", (mean,)),
        Name("Medusa", "acceleration rate", "1 + A / R", (mean,)),
        Name(
            "SpecForge",
            "accept_length (benchmark)",
            "(E + P) / R",
            ((emitted + _some(requests)) / rounds,),
        ),
        Name(
            "SpecForge",
            "simulated_acc_len",
            "a_1 + a_1 a_2 + ..., a_i accuracies of training, at all places",
            (),
        ),
        Name("gpt-fast", "Mean Accepted", "A / R", (accepted / rounds,)),
        Name(
            "gpt-fast",
            "Acceptance probs",
            "share of rounds that accept 0, 1, ...",
            _shares(accepted_R, depth),
        ),
        *_deepspec(requests, depth),
    ]


def _some(requests: Sequence[Run]) -> int:
    """Prompts that had a round; an answer of one token has none, and no engine counts it."""
    return sum(1 for one in requests if one.rounds)


def _deepspec(requests: Sequence[Run], depth: int) -> list[Name]:
    """A drafted end token ends acceptance and proposal; a length limit ends neither."""
    lengths: list[int] = []
    proposed: list[int] = []
    accepted: list[int] = []
    for one in requests:
        for number, each in enumerate(one.rounds, start=1):
            is_last = number == len(one.rounds)
            has_end = is_last and one.finish == "stop" and each.emitted <= each.accepted
            lengths.append(each.emitted if has_end else each.accepted + 1)
            proposed.append(each.emitted if has_end else each.drafted)
            accepted.append(each.emitted if has_end else each.accepted)
    total, rounds = sum(lengths), len(lengths)
    rates = _at_least(np.array(accepted), depth) / _at_least(np.array(proposed), depth)
    return [
        Name(
            "DeepSpec",
            "accept_len",
            "mean of A + 1, or A where it ends with EOS",
            (total / rounds,),
        ),
        Name("DeepSpec", "accept_rate@i", "A_i / rounds that proposed i, up to EOS", tuple(rates)),
        Name(
            "DeepSpec",
            "verify_rate",
            "accept_len R / (D + R), up to EOS",
            (total / (sum(proposed) + rounds),),
        ),
    ]


def _at_least(values_R: NDArray[np.int64], depth: int) -> NDArray[np.float64]:
    return np.array([(values_R >= i).sum() for i in range(1, depth + 1)], dtype=np.float64)


def _conditional(at_least: NDArray[np.float64], rounds: int) -> list[float]:
    before = [float(rounds), *at_least.tolist()]
    return [_over(now, then) for now, then in zip(at_least.tolist(), before, strict=False)]


def _shares(accepted_R: NDArray[np.int64], depth: int) -> tuple[float, ...]:
    return tuple(float((accepted_R == i).mean()) for i in range(depth + 1))


def _over(top: float, bottom: float) -> float:
    return top / bottom if bottom else float("nan")


def names_table(names: Sequence[Name]) -> str:
    """The names as lines of text, and the legend of their letters."""
    rows = [("tool", "figure", "value", "formula")]
    for one in names:
        shown = " ".join(f"{value:.3f}" for value in one.values) or "not from a run"
        rows.append((one.tool, one.name, shown, one.formula))
    return "\n".join([*aligned(rows), "", LEGEND])
