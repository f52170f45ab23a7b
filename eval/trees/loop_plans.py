"""Draft plans that only a decoding loop can follow: they need the target, its text or its cache.

`plan_named` reads the plans that can be scored on a trace as well; `draft_named` reads all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from outrider.eval.trees.plans import (
    ChainPlan,
    DrawnPlan,
    LookupPlan,
    Plan,
    StaticPlan,
    SuffixPlan,
    TextPlan,
    TreePlan,
    plan_named,
)

LOOP_FORMS = (
    "hybrid:TEXT+MODEL such as hybrid:lookup:8+chain:3, window:LENGTH,WINDOW,SINKS, "
    "universal:LENGTH, lookahead:WINDOW,NGRAM,POOL, suffix:LENGTH,MATCH,PAST, oracle:LENGTH or "
    "synthetic:LENGTH,ALPHA,..."
)


@dataclass(frozen=True)
class HybridPlan:
    """One tree of a draft of the text and a head's or draft model's."""

    text: TextPlan
    model: ChainPlan | TreePlan | StaticPlan

    @property
    def label(self) -> str:
        """How it is written."""
        model = self.model
        model_label = f"chain:{model.length}" if isinstance(model, ChainPlan) else model.label
        return f"hybrid:{self.text.label}+{model_label}"


@dataclass(frozen=True)
class WindowPlan:
    """Draft `length` tokens by the target itself, with the first and last positions alone."""

    length: int
    window: int
    sinks: int = 4

    def __post_init__(self) -> None:
        _at_least("window length", self.length, 1)
        _at_least("window size", self.window, 1)
        _at_least("window sinks", self.sinks, 0)

    @property
    def label(self) -> str:
        """How it is written."""
        return f"window:{self.length},{self.window},{self.sinks}"


@dataclass(frozen=True)
class UniversalPlan:
    """Draft up to `length` tokens by a model of any tokenizer."""

    length: int

    def __post_init__(self) -> None:
        _at_least("universal length", self.length, 1)

    @property
    def label(self) -> str:
        """How it is written."""
        return f"universal:{self.length}"


@dataclass(frozen=True)
class LookaheadPlan:
    """Guess `window` columns of n-grams in parallel; verify up to `pool` found before."""

    window: int
    ngram: int
    pool: int

    def __post_init__(self) -> None:
        _at_least("lookahead window", self.window, 1)
        _at_least("lookahead ngram", self.ngram, 2)
        _at_least("lookahead pool", self.pool, 1)

    @property
    def label(self) -> str:
        """How it is written."""
        return f"lookahead:{self.window},{self.ngram},{self.pool}"


@dataclass(frozen=True)
class PastPlan:
    """A suffix draft that counts the last `past` tokens of earlier answers, too."""

    suffix: SuffixPlan
    past: int

    def __post_init__(self) -> None:
        _at_least("suffix past", self.past, 1)

    @property
    def label(self) -> str:
        """How it is written."""
        return f"{self.suffix.label},{self.past}"


@dataclass(frozen=True)
class OraclePlan:
    """Draft `length` tokens of the row's own answer; each right with the chance of its depth."""

    length: int
    alphas: tuple[float, ...] = ()
    """Of depths 1, 2 ...; the last one goes for all deeper ones. Empty: always right."""

    def __post_init__(self) -> None:
        _at_least("oracle length", self.length, 1)
        if len(self.alphas) > self.length or not all(0 <= one <= 1 for one in self.alphas):
            raise ValueError(
                f"synthetic alphas are {self.alphas}; give up to {self.length} chances from 0 to 1"
            )

    @property
    def label(self) -> str:
        """How it is written."""
        if not self.alphas:
            return f"oracle:{self.length}"
        return f"synthetic:{self.length},{','.join(map(str, self.alphas))}"

    def alpha(self, depth: int) -> float:
        """The chance at a depth, 1 for the first draft."""
        return self.alphas[min(depth, len(self.alphas)) - 1] if self.alphas else 1.0


TextLoopPlan: TypeAlias = LookaheadPlan | PastPlan | OraclePlan
"""Without any network beside the target."""
LoopPlan: TypeAlias = HybridPlan | WindowPlan | UniversalPlan | TextLoopPlan


def draft_named(text: str) -> Plan | LoopPlan:
    """Read any plan as it is written.

    Raises ValueError for anything else than `outrider.eval.trees.plans.FORMS` and `LOOP_FORMS`.
    """
    kind, _, rest = text.partition(":")
    if kind in _READERS:
        return _READERS[kind](rest, text)
    numbers = rest.split(",")
    if kind == "suffix" and len(numbers) == 3:
        length, match, past = _numbers(rest, text)
        return PastPlan(SuffixPlan(length, match), past)
    try:
        return plan_named(text)
    except ValueError as error:
        raise ValueError(f"{error}; or, where text is decoded, {LOOP_FORMS}") from error


def draws(plan: Plan | LoopPlan) -> bool:
    """Whether a plan's tokens are drawn when the text is sampled."""
    return isinstance(plan, ChainPlan | DrawnPlan | WindowPlan)


def _hybrid(rest: str, text: str) -> HybridPlan:
    first, plus, second = rest.partition("+")
    if not plus:
        raise _misspelt(text)
    copy, model = plan_named(first), plan_named(second)
    if not isinstance(copy, LookupPlan | SuffixPlan):
        raise ValueError(f"draft is {text!r}; before the + goes lookup:... or suffix:...")
    if not isinstance(model, ChainPlan | TreePlan | StaticPlan):
        raise ValueError(f"draft is {text!r}; after the + goes chain:..., tree:... or static:...")
    return HybridPlan(copy, model)


def _window(rest: str, text: str) -> WindowPlan:
    return WindowPlan(*_numbers(rest, text, (2, 3)))


def _universal(rest: str, text: str) -> UniversalPlan:
    return UniversalPlan(*_numbers(rest, text, (1,)))


def _lookahead(rest: str, text: str) -> LookaheadPlan:
    return LookaheadPlan(*_numbers(rest, text, (3,)))


def _oracle(rest: str, text: str) -> OraclePlan:
    return OraclePlan(_numbers(rest, text, (1,))[0])


def _synthetic(rest: str, text: str) -> OraclePlan:
    length, *alphas = rest.split(",")
    try:
        found = tuple(map(float, alphas))
    except ValueError:
        found = ()
    if not found:
        raise _misspelt(text)
    return OraclePlan(_numbers(length, text, (1,))[0], found)


_READERS: Mapping[str, Callable[[str, str], LoopPlan]] = {
    "hybrid": _hybrid,
    "window": _window,
    "universal": _universal,
    "lookahead": _lookahead,
    "oracle": _oracle,
    "synthetic": _synthetic,
}


def _numbers(rest: str, text: str, counts: tuple[int, ...] = (3,)) -> list[int]:
    numbers = rest.split(",")
    if len(numbers) not in counts or not all(one.isdecimal() for one in numbers):
        raise _misspelt(text)
    return [int(one) for one in numbers]


def _misspelt(text: str) -> ValueError:
    return ValueError(f"draft is {text!r}; write {LOOP_FORMS}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} is {value}; give at least {least}")
