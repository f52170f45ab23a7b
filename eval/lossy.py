"""The inexact rules, fenced off: what they emit is not the target's text, and by how much is told.

None of them is in `outrider.eval.rules`; what they make is `Lossy` and enters no table of exact
figures. Each has a `law`: the law of the next token at a node, given that the walk came there and
given the drafts, to set beside p. V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.eval.rules import Laws, Randomness, Verdict, Weights
from outrider.eval.trees.tree import Tree


@dataclass(frozen=True, kw_only=True)
class LossyRule:
    """An inexact rule and the law that it emits."""

    verify: Callable[[Tree, Laws, Randomness], Verdict]
    law: Callable[[Tree, Laws, int], Weights]
    """Law of the token after a node that the walk came to."""
    bias: str
    """What is known of the bias in closed form."""
    closed_form: Callable[[Tree, Laws, int], Any] | None = None
    """That figure at a node; None where there is none."""
    draws_drafts: bool = False
    """Whether drafts must be a drawn chain."""


def typical(epsilon: float = 0.3, delta: float = 0.09) -> LossyRule:
    """Medusa's typical acceptance, fast form (Cai et al. 2024, section 2.3.1; its code's defaults).

    A draft stands if p exceeds min(epsilon, delta * exp(-entropy)); the longest path, then the
    likeliest, is taken, and argmax p after it: deterministic at any temperature.
    """
    _check_share("epsilon", epsilon)
    _check_share("delta", delta)

    def walk(tree: Tree, laws: Laws) -> tuple[int, ...]:
        best: tuple[tuple[int, float], tuple[int, ...]] = ((0, 0.0), ())
        reached: list[tuple[int, float, tuple[int, ...]]] = [(0, 1.0, ())]
        while reached:
            node, likelihood, path = reached.pop()
            if len(path) and (len(path), likelihood) > best[0]:
                best = ((len(path), likelihood), path)
            children = tree.children[node]
            if not children:
                continue
            p = laws.target(node)
            threshold = min(epsilon, delta * _perplexity_inverse(p))
            for child in children:
                share = float(p[tree.tokens[child]])
                if share > threshold:
                    reached.append((child, likelihood * share, (*path, child)))
        return best[1]

    def verify(tree: Tree, laws: Laws, random: Randomness) -> Verdict:  # noqa: ARG001
        path = walk(tree, laws)
        return Verdict(path=path, token=int(laws.target(path[-1] if path else 0).argmax()))

    def law(tree: Tree, laws: Laws, node: int) -> Weights:
        path = (0, *walk(tree, laws))
        p = laws.target(node)
        place = path.index(node)
        is_last = place == len(path) - 1
        token = int(p.argmax()) if is_last else tree.tokens[path[place + 1]]
        return _one_hot(p, token)

    return LossyRule(verify=verify, law=law, bias="none; the text is deterministic")


def nucleus() -> LossyRule:
    """Medusa's nucleus acceptance: every path of the tree draws its own tokens from p and must hit.

    The longest path is taken, the first among equals, and a token from plain p after it, where an
    exact rule would draw from what the misses left.
    """

    def rows(tree: Tree) -> list[tuple[int, ...]]:
        return [tree.path(node) for node in range(1, len(tree)) if not tree.children[node]]

    def verify(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
        best: tuple[int, ...] = ()
        for number, path in enumerate(rows(tree)):
            hits = 0
            for node in path:
                share = _share(laws.target(tree.parents[node]), tree.tokens[node])
                if not random.coin(hits, number, share):
                    break
                hits += 1
            if hits > len(best):
                best = path[:hits]
        last = best[-1] if best else 0
        return Verdict(path=best, token=random.draw(len(best), laws.target(last)))

    def law(tree: Tree, laws: Laws, node: int) -> Weights:
        chances = _nucleus_chances(tree, laws, rows(tree))
        here = tree.path(node)
        p = laws.target(node)
        mixed = p * chances.get(here, 0)
        total = chances.get(here, 0)
        for path, chance in chances.items():
            if len(path) > len(here) and path[: len(here)] == here:
                mixed = mixed + _one_hot(p, tree.tokens[path[len(here)]]) * chance
                total = total + chance
        return mixed / total

    return LossyRule(
        verify=verify, law=law, bias="p(a) (1 - p(a)) where one draft a is tried, none for trees"
    )


def threshold(accept: float = 1.0, single: float = 1.0) -> LossyRule:
    """SGLang's tree rule with thresholds: one coin u a node over likeliest children in order.

    A child stands when u is at most the summed p so far over `accept`, or when its own p is at
    least `single`; else the token is drawn from p without the children. Exact at 1 and 1.
    """
    _check_share("accept", accept)
    _check_share("single", single)

    def bounds(tree: Tree, laws: Laws, node: int) -> list[Any]:
        """Upper ends of the children's shares of the coin."""
        p, summed = laws.target(node), 0
        found: list[Any] = []
        for child in tree.children[node]:
            share = _share(p, tree.tokens[child])
            summed = summed + share
            is_sure = single < 1 and share >= single
            found.append(1 if is_sure else min(1, max([summed / accept, *found])))
        return found

    def verify(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
        path: list[int] = []
        node = 0
        while children := tree.children[node]:
            low, taken = 0, None
            ends = bounds(tree, laws, node)
            for slot, (child, high) in enumerate(zip(children, ends, strict=True)):
                if low < 1 and random.coin(len(path), slot, (high - low) / (1 - low)):
                    taken = child
                    break
                low = high
            if taken is None:
                rest = _without(laws.target(node), tree, children)
                return Verdict(path=tuple(path), token=random.draw_rest(len(path), rest))
            node = taken
            path.append(taken)
        return Verdict(path=tuple(path), token=random.draw(len(path), laws.target(node)))

    def law(tree: Tree, laws: Laws, node: int) -> Weights:
        p, children = laws.target(node), tree.children[node]
        if not children:
            return p
        found, low = p * 0, 0
        for child, high in zip(children, bounds(tree, laws, node), strict=True):
            found[tree.tokens[child]] += high - low
            low = high
        rest = _without(p, tree, children)
        return found + rest / rest.sum() * (1 - low) if low < 1 else found

    def at_least(tree: Tree, laws: Laws, node: int) -> Any:  # noqa: ANN401 (any number)
        p = laws.target(node)
        mass = sum(_share(p, tree.tokens[child]) for child in tree.children[node])
        return min(1, mass / accept) - mass

    return LossyRule(
        verify=verify,
        law=law,
        bias="at least min(1, m / accept) - m, m the children's mass",
        closed_form=at_least,
    )


def ensemble(weight: float = 0.5) -> LossyRule:
    """A drawn chain judged by v = weight p + (1 - weight) q (transformers' ensemble weight).

    Emits exactly v at every judged place: a bias of (1 - weight) TV(p, q), an acceptance of
    1 - weight TV(p, q).
    """
    _check_share("weight", weight)

    def drawn(laws: Laws, node: int) -> Weights:
        q = laws.draft(node)
        assert q is not None, "the drafts of this rule are drawn"
        return q

    def mixture(laws: Laws, node: int) -> Weights:
        return laws.target(node - 1) * weight + drawn(laws, node) * (1 - weight)

    def verify(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
        _check_chain(tree)
        for node in range(1, len(tree)):
            v, q, token = mixture(laws, node), drawn(laws, node), tree.tokens[node]
            if not random.coin(node - 1, 0, min(1, v[token] / q[token])):
                rest = laws.target(node - 1) - q
                rest = rest * (rest > 0)
                path = tuple(range(1, node))
                if rest.sum() == 0:
                    return Verdict(path=path, token=random.draw_rest(node - 1, v))
                return Verdict(path=path, token=random.draw_rest(node - 1, rest))
        last = len(tree) - 1
        return Verdict(path=tuple(range(1, last + 1)), token=random.draw(last, laws.target(last)))

    def law(tree: Tree, laws: Laws, node: int) -> Weights:
        return mixture(laws, node + 1) if node < len(tree) - 1 else laws.target(node)

    def exactly(tree: Tree, laws: Laws, node: int) -> Any:  # noqa: ANN401 (any number)
        if node == len(tree) - 1:
            return 0
        return (1 - weight) * distance(laws.target(node), drawn(laws, node + 1))

    return LossyRule(
        verify=verify,
        law=law,
        bias="(1 - weight) TV(p, q), exactly",
        closed_form=exactly,
        draws_drafts=True,
    )


LOSSY_RULES: Mapping[str, Callable[..., LossyRule]] = {
    "typical": typical,
    "nucleus": nucleus,
    "threshold": threshold,
    "ensemble": ensemble,
}


def distance(one: Weights, other: Weights) -> Any:  # noqa: ANN401 (any number)
    """Total variation of two laws."""
    return abs(one - other).sum() / 2


def _nucleus_chances(
    tree: Tree, laws: Laws, rows: list[tuple[int, ...]]
) -> dict[tuple[int, ...], Any]:
    """Chance of each accepted path: rows draw independently, the first of the longest wins."""
    lengths: list[list[Any]] = []
    for path in rows:
        reach: Any = 1
        found: list[Any] = []
        for node in path:
            share = _share(laws.target(tree.parents[node]), tree.tokens[node])
            found.append(reach * (1 - share))
            reach = reach * share
        lengths.append([*found, reach])
    chances: dict[tuple[int, ...], Any] = {}
    for i, path in enumerate(rows):
        for hits in range(len(path) + 1):
            chance = lengths[i][hits]
            for j, other in enumerate(lengths):
                if j != i:
                    chance = chance * sum(other[: hits if j < i else hits + 1])
            chances[path[:hits]] = chances.get(path[:hits], 0) + chance
    return chances or {(): 1}


def _share(p: Weights, token: int) -> Any:  # noqa: ANN401 (any number)
    return p[token] / p.sum()


def _without(p: Weights, tree: Tree, children: tuple[int, ...]) -> Weights:
    rest = p + 0  # a copy, whatever the array type
    for child in children:
        rest[tree.tokens[child]] = 0
    return rest


def _one_hot(like: Weights, token: int) -> Weights:
    hot = like * 0
    hot[token] = 1
    return hot


def _perplexity_inverse(p: Weights) -> float:
    """exp(-entropy)."""
    product = 1.0
    positive = p[p > 0]
    if hasattr(positive, "log"):
        return float((positive * positive.log()).sum().exp())
    for share in positive:
        product *= float(share) ** float(share)
    return product


def _check_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} is {value}; pick a value in (0, 1]")


def _check_chain(tree: Tree) -> None:
    if not tree.is_chain:
        raise ValueError("the ensemble rule judges drawn chains; draft a chain, such as chain:3")
