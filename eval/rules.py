"""The exact verification rules: which drafted nodes stand, and which token follows them.

Pure, and blind to the array type: weights are numpy or torch vectors of floats, or of Fractions,
so that `outrider.eval.law` can enumerate these very functions in rational arithmetic. Every rule
leaves the emitted text distributed as the target alone would write it. p: the target's law at a
node; q: the law from which a node's token was drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from outrider.eval.tree import Tree

Weights: TypeAlias = Any
"""A vector over the vocabulary: numpy or torch, floats or Fractions; laws sum to one."""


class Randomness(Protocol):
    """Independent noise. `depth` is that of the node after which a token is decided, root 0."""

    def coin(self, depth: int, slot: int, probability: Any) -> bool:  # noqa: ANN401 (any number)
        """True with this probability: always at 1, never at 0; `slot` numbers a node's coins."""
        ...

    def draw(self, depth: int, weights: Weights) -> int:
        """A token from the target's law: the noise that plain decoding would use here."""
        ...

    def draw_rest(self, depth: int, weights: Weights) -> int:
        """A token from what a rejection left, not normalised; other noise than `draw`'s."""
        ...


class Laws(Protocol):
    """The laws at a tree's nodes, computed when asked for: a walk visits few of them."""

    def target(self, node: int) -> Weights:
        """The law p after this node's path."""
        ...

    def draft(self, node: int) -> Weights:
        """The law q that this node's token was drawn from."""
        ...


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a round emits: the accepted nodes' tokens, then `token`."""

    path: tuple[int, ...]
    token: int
    num_degenerate: int = 0
    """Rejections that left nothing to draw from (rounding: p and q equal), settled by p."""


def greedy(tree: Tree, laws: Laws, random: Randomness) -> Verdict:  # noqa: ARG001 (no noise)
    """Rule R0: follow the likeliest token, the lowest id among equals; p may be unnormalised."""
    return _follow(tree, lambda node: int(laws.target(node).argmax()))


def match(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Rule R2: draw each token from p and continue while it was drafted.

    Exact for any tree that was fixed before the draws. With noise keyed by position the text is
    that of plain sampling, token for token. Of two siblings with one token the first continues.
    """
    depths = tree.depths
    return _follow(tree, lambda node: random.draw(depths[node], laws.target(node)))


def rejection(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Rule R1 on a chain drawn from q: keep with min(1, p/q), else draw from [p - q]+.

    Raises ValueError for a tree with branches, and for a token that its q cannot produce.
    """
    if not tree.is_chain:
        raise ValueError("the rejection rule judges chains; for a tree use match or point_mass")
    last = len(tree) - 1
    for node in range(1, last + 1):
        depth, token = node - 1, tree.tokens[node]
        p, q = laws.target(node - 1), laws.draft(node)
        if q[token] == 0:
            raise ValueError(
                f"drafted token {token} has probability 0 under its own draft law; give the law "
                "it was drawn from"
            )
        if not random.coin(depth, 0, min(1, p[token] / q[token])):
            path = tuple(range(1, node))
            rest = p - q
            rest = rest * (rest > 0)
            if rest.sum() == 0:
                return Verdict(path=path, token=random.draw_rest(depth, p), num_degenerate=1)
            return Verdict(path=path, token=random.draw_rest(depth, rest))
    token = random.draw(last, laws.target(last))
    return Verdict(path=tuple(range(1, last + 1)), token=token)


def point_mass(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Rule R3 on a tree chosen without noise: try the children in order, each with what is left.

    EAGLE-2's rule. A child that is refused loses its mass, so a second sibling with its token
    never stands.
    """
    path: list[int] = []
    node = 0
    while children := tree.children[node]:
        depth = len(path)
        rest = laws.target(node) + 0  # a copy, whatever the array type
        for slot, child in enumerate(children):
            token = tree.tokens[child]
            if random.coin(depth, slot, rest[token] / rest.sum()):
                node = child
                path.append(child)
                break
            rest[token] = 0
        else:
            return Verdict(path=tuple(path), token=random.draw_rest(depth, rest))
    return Verdict(path=tuple(path), token=random.draw(len(path), laws.target(node)))


def _follow(tree: Tree, choose: Callable[[int], int]) -> Verdict:
    path: list[int] = []
    node = 0
    while True:
        token = choose(node)
        hits = [child for child in tree.children[node] if tree.tokens[child] == token]
        if not hits:
            return Verdict(path=tuple(path), token=token)
        node = hits[0]
        path.append(node)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule, what must hold for it to be exact, and how exact it then is."""

    verify: Callable[[Tree, Laws, Randomness], Verdict]
    draws_drafts: bool = False
    """Whether drafted tokens must be drawn from q; without, any tree fixed beforehand will do."""
    is_chain_only: bool = False
    """Whether it judges chains only."""
    is_greedy: bool = False
    """Whether p must be one-hot."""
    keeps_text: bool = False
    """Whether noise keyed by position gives plain decoding's very text, not only its law."""


RULES = {
    "greedy": Rule(verify=greedy, is_greedy=True, keeps_text=True),
    "rejection": Rule(verify=rejection, draws_drafts=True, is_chain_only=True),
    "match": Rule(verify=match, keeps_text=True),
    "point_mass": Rule(verify=point_mass),
}


def rule_named(name: str) -> Rule:
    """Look a rule up. Raises ValueError for an unknown name."""
    if name not in RULES:
        raise ValueError(f"no verification rule called {name!r}; choose one of {', '.join(RULES)}")
    return RULES[name]
