"""Planted faults in drafting: laws that the drafts were not drawn from, choices that look at them.

Every rule that judges these is the production one.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from outrider.eval.certificate.law import Branching, Language, Proposal, Propose, Text
from outrider.eval.rules.verdict import Weights
from outrider.eval.trees.tree import Tree

_UNLIKELY = Fraction(1, 3)


class Entry(NamedTuple):
    """A drafted token: its path, the law it was drawn from, and its share of the whole q there."""

    path: Text
    law: Weights
    share: Any


def as_proposal(entries: list[Entry]) -> Proposal:
    """Entries in draw order as a tree; those whose parent is missing are left out."""
    number: dict[Text, int] = {(): 0}
    tokens, parents, laws = [0], [-1], [None]
    for entry in entries:
        if entry.path[:-1] in number:
            number[entry.path] = len(tokens)
            tokens.append(entry.path[-1])
            parents.append(number[entry.path[:-1]])
            laws.append(entry.law)
    return Proposal(tree=Tree(tuple(tokens), tuple(parents)), laws=tuple(laws))


def pool(language: Language, text: Text, random: Branching, widths: tuple[int, ...]) -> list[Entry]:
    """A whole tree drawn without replacement, breadth first."""
    found: list[Entry] = []
    waiting: list[Text] = [()]
    for width in widths:
        level: list[Entry] = []
        for path in waiting:
            q = law = language.draft(text + path)
            for _ in range(min(width, int((q > 0).sum()))):
                law = law / law.sum()
                token = random.draw(0, law)
                level.append(Entry((*path, token), law, q[token]))
                law = law + 0
                law[token] = 0
        found += level
        waiting = [entry.path for entry in level]
    return found


Keep: TypeAlias = Callable[[list[Entry], Language, Text], list[Entry]]
"""A planner's choice among drafted entries, and what it may look at."""


def pruned(keep: Keep, *widths: int) -> Callable[[Language], Propose]:
    """A planner that drafts everything and then keeps some of it."""

    def on(language: Language) -> Propose:
        def propose(text: Text, random: Branching) -> Proposal:
            return as_proposal(keep(pool(language, text, random, widths), language, text))

        return propose

    return on


def keep_all(entries: list[Entry], language: Language, text: Text) -> list[Entry]:  # noqa: ARG001
    """No fault: what the others are compared with."""
    return entries


def keep_likeliest_drawn(entries: list[Entry], language: Language, text: Text) -> list[Entry]:  # noqa: ARG001
    """A dynamic tree scored by the drawn tokens' own q, its two best nodes kept."""
    share = {entry.path: entry.share for entry in entries}

    def score(entry: Entry) -> Any:  # noqa: ANN401 (a number)
        found = Fraction(1)
        for length in range(len(entry.path)):
            found = found * share[entry.path[: length + 1]]
        return found

    best = sorted(entries, key=lambda entry: -score(entry))[:2]
    return [entry for entry in entries if entry in best]


def keep_by_later_sibling(entries: list[Entry], language: Language, text: Text) -> list[Entry]:  # noqa: ARG001
    """The first child is kept only if the second one is likely."""
    return entries if len(entries) < 2 or entries[1].share >= _UNLIKELY else []


def keep_by_continuation(entries: list[Entry], language: Language, text: Text) -> list[Entry]:
    """A schedule that looks at how sure q is after a draft before keeping it (DSpark, App. A)."""
    return [e for e in entries if language.draft(text + e.path).max() >= Fraction(1, 2)]


def keep_second_as_first(entries: list[Entry], language: Language, text: Text) -> list[Entry]:
    """The first sibling is dropped, and the second judged as if it had been drawn from q."""
    return [entry._replace(law=language.draft(text)) for entry in entries[1:]]


def keep_better_of_two(entries: list[Entry], language: Language, text: Text) -> list[Entry]:  # noqa: ARG001
    """Two drawn, the likelier one verified."""
    return [max(entries, key=lambda entry: entry.share)] if entries else []


def keep_above_threshold(entries: list[Entry], language: Language, text: Text) -> list[Entry]:  # noqa: ARG001
    """An early stop that drops the unlikely draft that triggered it."""
    for index, entry in enumerate(entries):
        if entry.share < _UNLIKELY:
            return entries[:index]
    return entries


def in_reverse(entries: list[Entry], language: Language, text: Text) -> list[Entry]:  # noqa: ARG001
    """EAGLE before 2024-03: siblings visited in reverse of the draw order."""
    backwards = entries[::-1]
    return sorted(backwards, key=lambda entry: len(entry.path))


def padded(entries: list[Entry], language: Language, text: Text) -> list[Entry]:
    """Medusa, EAGLE: a row that stopped early is padded with token 0, which can be accepted."""
    found = keep_above_threshold(entries, language, text)
    if len(found) == len(entries):
        return entries
    path = (*(found[-1].path if found else ()), 0)
    pad = language.draft(text + path[:-1])
    return [*found, Entry(path, pad if pad[0] > 0 else pad + (np.arange(len(pad)) == 0), 1)]


def argmax_with_soft_law(language: Language) -> Propose:
    """Transformers #32867, #47932: the likeliest token, judged as if drawn from q."""

    def propose(text: Text, random: Branching) -> Proposal:  # noqa: ARG001
        entries: list[Entry] = []
        path: Text = ()
        for _ in range(2):
            q = language.draft(text + path)
            path = (*path, int(np.argmax(q)))
            entries.append(Entry(path, q, q[path[-1]]))
        return as_proposal(entries)

    return propose


def top_as_if_drawn(language: Language) -> Propose:
    """The two likeliest tokens judged as if drawn without replacement."""

    def propose(text: Text, random: Branching) -> Proposal:  # noqa: ARG001
        q = law = language.draft(text)
        entries: list[Entry] = []
        for token in np.argsort([-float(share) for share in q], kind="stable")[:2]:
            if law.sum() == 0 or law[token] == 0:
                break
            law = law / law.sum()
            entries.append(Entry((int(token),), law, q[token]))
            law = law + 0
            law[token] = 0
        return as_proposal(entries)

    return propose


def filtered_after_drawing(language: Language) -> Propose:
    """Q reported after a top-1-out filter that the draw did not have (vLLM #9834's mirror)."""

    def propose(text: Text, random: Branching) -> Proposal:
        q = language.draft(text)
        token = random.draw(0, q)
        kept = q * (q == q.max())
        law = kept / kept.sum() if kept[token] > 0 else q
        return as_proposal([Entry((token,), law, q[token])])

    return propose
