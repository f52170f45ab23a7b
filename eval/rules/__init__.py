"""The exact verification rules by name, each with what must hold for it to be exact.

Every rule is pure and leaves the emitted text distributed as the target alone would write it;
`outrider.eval.certificate.law` enumerates these very functions in rational arithmetic.
"""

from dataclasses import dataclass

from outrider.data.sampling import Sampling
from outrider.eval.rules.path import block, traversal
from outrider.eval.rules.verdict import Laws, Randomness, Siblings, Verdict, Verify, Weights
from outrider.eval.rules.walk import (
    greedy,
    k_sequential,
    match,
    one_coin,
    point_mass,
    recursive,
    rejection,
)

__all__ = [
    "RULES",
    "Laws",
    "Randomness",
    "Rule",
    "Siblings",
    "Verdict",
    "Verify",
    "Weights",
    "block",
    "fitting_rule",
    "greedy",
    "k_sequential",
    "match",
    "one_coin",
    "point_mass",
    "recursive",
    "rejection",
    "rule_named",
    "traversal",
]

_ANY = frozenset(Siblings)
_CHAIN = frozenset({Siblings.NONE, Siblings.SINGLE})


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule, what must hold for it to be exact, and how exact it then is."""

    verify: Verify
    drafts: frozenset[Siblings] = _ANY
    """How the children that it judges may have come about."""
    is_greedy: bool = False
    """Whether p must be one-hot."""
    keeps_text: bool = False
    """Whether noise keyed by position gives plain decoding's very text, not only its law."""

    @property
    def draws_drafts(self) -> bool:
        """Whether drafted tokens must be drawn from q; if not, any tree fixed before will do."""
        return Siblings.CHOSEN not in self.drafts

    @property
    def is_chain_only(self) -> bool:
        """Whether it judges chains only."""
        return self.drafts <= _CHAIN


RULES = {
    "greedy": Rule(verify=greedy, is_greedy=True, keeps_text=True),
    "rejection": Rule(verify=rejection, drafts=_CHAIN),
    "match": Rule(verify=match, keeps_text=True),
    "point_mass": Rule(verify=point_mass),
    "one_coin": Rule(verify=one_coin),
    "iid": Rule(verify=recursive, drafts=_CHAIN | {Siblings.IID}),
    "without": Rule(verify=recursive, drafts=_CHAIN | {Siblings.WITHOUT}),
    "k_sequential": Rule(verify=k_sequential, drafts=_CHAIN | {Siblings.IID}),
    "hybrid": Rule(verify=recursive, drafts=_CHAIN | {Siblings.HYBRID}),
    "block": Rule(verify=block, drafts=_CHAIN),
    "traversal": Rule(verify=traversal, drafts=_CHAIN | {Siblings.IID, Siblings.WITHOUT}),
}

_DEFAULTS = {
    Siblings.NONE: "match",
    Siblings.CHOSEN: "match",
    Siblings.SINGLE: "rejection",
    Siblings.IID: "iid",
    Siblings.WITHOUT: "without",
    Siblings.HYBRID: "hybrid",
}


_PLANS = {
    Siblings.NONE: "no drafts",
    Siblings.CHOSEN: "tree:, static: and lookup: take likely tokens",
    Siblings.SINGLE: "chain: draws a token a step",
    Siblings.IID: "no draft plan makes them",
    Siblings.WITHOUT: "drawn: draws a tree",
    Siblings.HYBRID: "no draft plan makes them",
}
"""Which draft plans make drafts of a kind above temperature 0."""


def rule_named(name: str) -> Rule:
    """Look a rule up. Raises ValueError for an unknown name."""
    if name not in RULES:
        raise ValueError(f"no verification rule called {name!r}; choose one of {', '.join(RULES)}")
    return RULES[name]


def fitting_rule(name: str | None, siblings: Siblings, temperature: float) -> Rule:
    """The rule of this name, or the default one for such drafts.

    Raises ValueError for an unknown name, and for a rule that would not be exact here.
    """
    is_greedy = Sampling(temperature=temperature).is_greedy
    rule = rule_named(name or ("greedy" if is_greedy else _DEFAULTS[siblings]))
    if rule.is_greedy != is_greedy:
        raise ValueError(
            f"rule is {name!r} at temperature {temperature}; use greedy at 0, and above it match "
            "or point_mass for any drafts, rejection or block for drawn chains"
        )
    if siblings not in rule.drafts:
        wanted = [f"{one} ({_PLANS[one]})" for one in sorted(rule.drafts - {Siblings.NONE})]
        fits = [key for key, one in RULES.items() if siblings in one.drafts and not one.is_greedy]
        raise ValueError(
            f"rule {name!r} judges drafts of kind {' or '.join(wanted)}, these are {siblings} "
            f"({_PLANS[siblings]}); draft that way (at the text's temperature), or judge these by "
            f"{' or '.join(fits)}"
        )
    return rule
