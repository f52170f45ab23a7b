"""Is an engine's acceptance the predicted one? A test that knows how unlike prompts are.

Engines tell counts, not which request they came from, and acceptance differs from prompt to prompt
far more than coins do, so a binomial test of thousands of rounds cries wolf. The prediction knows
both: `spread` of an offline score has, per depth, how far each prompt's accepted drafts are from
the pooled rate. Per position, of n judged drafts in m requests (those accepted at the position
before, judged at this one: conditional rates, since unconditional ones repeat each other), the
accepted number has variance n a (1 - a) + t S, where a is the predicted rate, t the variance of a
prompt's rate and S the sum of squares of judged drafts by request, n^2 / m times the prediction's
unevenness of lengths. For greedy text there are no coins and the first term is left out. The
prediction's own error is added (its prompts are a sample, too), and the ratio is read from
Student's t with prompts - 1 degrees of freedom. The mean accepted length is tested the same way.

Engines count past the end of an answer (vLLM) or take the last draft for the round's own token
(SGLang), which the prediction does not: what that can move, at most, is not called drift. Inside a
window the positions' p-values are corrected by Bonferroni, over windows by Holm: the chance of any
false alarm is the level.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

from scipy.stats import t as student

from outrider.eval.production.window import Window


class Rate(NamedTuple):
    """A rate as predicted, and what it takes to test counts against it."""

    value: float
    low: float
    """The least an engine of this kind could report of it, ends of answers counted its way."""
    high: float
    coin: float
    """Variance of one trial: of its coin given the rate; 0 for greedy text."""
    between: float
    """Variance of a prompt's own rate."""
    trials: float
    uneven: float
    """Sum of squares of trials by prompt, times prompts, over the square of their sum."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What an offline score says of a chain of this length."""

    label: str
    prompts: int
    rounds: float
    depths: tuple[Rate, ...]
    """Conditional acceptance by position."""
    length: Rate
    """Accepted drafts a round."""

    @classmethod
    def of(cls, result: Mapping[str, Any], engine: str, *, label: str) -> "Prediction":
        """From a result of `outrider eval`. ValueError when it was made before it held `spread`."""
        spread = result.get("spread")
        if spread is None:
            raise ValueError(
                f"the prediction {label} does not say how prompts differ; make it again with this "
                "version of outrider eval"
            )
        if spread["prompts"] < 2:
            raise ValueError(f"the prediction {label} is of one prompt; a test needs 2 or more")
        if not result["rounds"] > 0:
            raise ValueError(f"the prediction {label} has no target call; score longer answers")
        is_greedy = result["rule"] == "greedy"
        rounds, depths = result["rounds"], spread["depths"]
        ends = _ends(rounds, spread)
        rates = tuple(
            _depth_rate(one, spread["prompts"], _engine_band(engine, depths, ends, i), is_greedy)
            for i, one in enumerate(depths)
        )
        return cls(
            label=label,
            prompts=spread["prompts"],
            rounds=rounds,
            depths=rates,
            length=_length_rate(spread, rounds, rates, ends, engine, is_greedy=is_greedy),
        )


def _ends(rounds: float, spread: Mapping[str, Any]) -> list[float]:
    """Rounds of which i drafts were the answer's last tokens, i from 0 to all."""
    reach = [rounds, *(one["hit"] for one in spread["depths"])]
    ends = [
        max(0.0, before - one["judged"])
        for before, one in zip(reach, spread["depths"], strict=False)
    ]
    # Those that end with the very last draft are not told, but no answer ends twice.
    return [*ends, max(0.0, min(reach[-1], spread["prompts"] - sum(ends)))]


def _engine_band(
    engine: str, depths: Sequence[Mapping[str, float]], ends: Sequence[float], i: int
) -> tuple[float, float]:
    one = depths[i]
    judged, kept = one["judged"], one["kept"]
    if engine == "vllm":  # judges drafts behind the end too, any number of which it may accept
        past = sum(ends[: i + 1])
        return kept / (judged + past), (kept + past) / (judged + past)
    return max(0.0, kept - ends[i + 1]) / judged, kept / judged


def _depth_rate(
    one: Mapping[str, float], prompts: int, band: tuple[float, float], is_greedy: bool
) -> Rate:
    judged = one["judged"]
    if judged <= 0:
        return Rate(0.0, 0.0, 1.0, 0.25, 0.0, 0.0, 1.0)
    value = one["kept"] / judged
    # Prompts that all have the same rate, 1 say, do not prove that no other has another.
    smooth = (one["kept"] + 1) / (judged + 2)
    return Rate(
        value=value,
        low=band[0],
        high=band[1],
        coin=0.0 if is_greedy and one["off_squares"] > 0 else smooth * (1 - smooth),
        between=one["off_squares"] / one["squares"] * prompts / (prompts - 1),
        trials=judged,
        uneven=prompts * one["squares"] / judged**2,
    )


def _length_rate(
    spread: Mapping[str, Any],
    rounds: float,
    rates: Sequence[Rate],
    ends: Sequence[float],
    engine: str,
    *,
    is_greedy: bool,
) -> Rate:
    prompts, calls = spread["prompts"], spread["calls"]
    value = calls["kept"] / rounds
    survival, square = 1.0, 0.0
    for i, rate in enumerate(rates, start=1):
        survival *= rate.value
        square += (2 * i - 1) * survival
    past = sum(end * (len(rates) - i) for i, end in enumerate(ends[:-1])) / rounds
    low, high = (value, value + past) if engine == "vllm" else (value - sum(ends) / rounds, value)
    return Rate(
        value=value,
        low=low,
        high=high,
        coin=0.0 if is_greedy and calls["off_squares"] > 0 else max(1 / rounds, square - value**2),
        between=calls["off_squares"] / calls["squares"] * prompts / (prompts - 1),
        trials=rounds,
        uneven=prompts * calls["squares"] / rounds**2,
    )


class Compared(NamedTuple):
    """One figure of a window beside its prediction."""

    what: str
    found: float
    predicted: float
    p: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the test says of a window."""

    window: Window
    prediction: Prediction
    compared: tuple[Compared, ...]
    """Empty where there are no counts to test."""
    p: float
    """Of any of the window's figures, corrected for their number."""
    p_holm: float = 1.0
    """Corrected for the number of windows as well."""
    is_drift: bool = False

    @property
    def worst(self) -> Compared:
        """The figure of the smallest p-value."""
        return min(self.compared, key=lambda one: one.p)


def judge(windows: Sequence[tuple[Window, Prediction]], *, level: float = 0.05) -> list[Verdict]:
    """Test windows against their predictions; at most `level` chance of any false alarm."""
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; give a chance between 0 and 1")
    verdicts = [_verdict(window, prediction) for window, prediction in windows]
    tested = sorted(
        (i for i, one in enumerate(verdicts) if one.compared), key=lambda i: verdicts[i].p
    )
    p_holm = 0.0
    for rank, i in enumerate(tested):
        one = verdicts[i]
        p_holm = min(1.0, max(p_holm, one.p * (len(tested) - rank)))
        verdicts[i] = Verdict(
            window=one.window,
            prediction=one.prediction,
            compared=one.compared,
            p=one.p,
            p_holm=p_holm,
            is_drift=p_holm <= level,
        )
    return verdicts


def _verdict(window: Window, prediction: Prediction) -> Verdict:
    compared: list[Compared] = []
    if window.rounds > 0:
        # Where the engine does not say, answers are taken to be as long as the prediction's.
        per_prompt = prediction.rounds / prediction.prompts
        requests = window.requests or max(1.0, window.rounds / per_prompt)
        df = prediction.prompts - 1
        judged = [window.rounds, *window.accepted_at]
        # Of unlike drafts only the first is sure to be judged in every round.
        told = window.accepted_at if window.has_one_length else window.accepted_at[:1]
        for i, (trials, accepted) in enumerate(zip(judged, told, strict=False)):
            if trials > 0 and i < len(prediction.depths):
                rate = prediction.depths[i]
                p = _p_value(accepted / trials, trials, requests, rate, df)
                compared.append(Compared(f"position {i + 1}", accepted / trials, rate.value, p))
        mean = window.accepted / window.rounds
        if window.has_one_length:
            p = _p_value(mean, window.rounds, requests, prediction.length, df)
            compared.append(Compared("length", 1 + mean, 1 + prediction.length.value, p))
    smallest = min((one.p for one in compared), default=1.0)
    return Verdict(
        window=window,
        prediction=prediction,
        compared=tuple(compared),
        p=min(1.0, len(compared) * smallest),
    )


def _p_value(found: float, trials: float, requests: float, rate: Rate, df: int) -> float:
    """Two-sided chance of a rate this far from the predicted band."""
    off = max(rate.low - found, found - rate.high, 0.0)
    if off == 0:
        return 1.0
    here = rate.coin / trials + rate.between * rate.uneven / max(1.0, requests)
    # The prediction's rate is the law's own, so only its choice of prompts errs.
    there = rate.between * rate.uneven / (df + 1)
    error = sqrt(here + there)
    return float(2 * student.sf(off / error, df)) if error > 0 else 0.0
