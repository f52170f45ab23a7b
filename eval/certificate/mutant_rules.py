"""Planted faults in the rules themselves, each shipped by a published verifier or easily made."""

from typing import Any

from outrider.eval.rules.path import Traversal
from outrider.eval.rules.verdict import (
    Laws,
    Randomness,
    Site,
    Step,
    Verdict,
    Verify,
    Weights,
    lesser,
    positive,
    walk,
)
from outrider.eval.trees.tree import Tree


def forgets_the_first_refusal(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Every sibling judged against p, as if none had been refused before it."""

    def settle(site: Site) -> Step:
        p = rest = site.target()
        for slot, child in enumerate(site.children):
            law, token = site.drawn(child), site.tree.tokens[child]
            assert law is not None
            if site.random.coin(site.depth, slot, min(1, p[token] / law[token])):
                return Step(child)
            rest = positive(p - law)
        return Step(None, site.random.draw_rest(site.depth, rest if rest.sum() else p))

    return walk(tree, laws, random, settle)


def subtracts_the_token_only(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """After a refusal only the refused token leaves R, not the whole of D."""

    def settle(site: Site) -> Step:
        rest = site.target()
        for slot, child in enumerate(site.children):
            law, token = site.drawn(child), site.tree.tokens[child]
            assert law is not None
            if site.random.coin(site.depth, slot, min(1, rest[token] / law[token])):
                return Step(child)
            left = rest + 0
            left[token] = 0
            rest = left / left.sum() if left.sum() else rest
        return Step(None, site.random.draw_rest(site.depth, rest))

    return walk(tree, laws, random, settle)


def does_not_renormalise(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Point mass: later children tried with p, not with their share of what is left."""

    def settle(site: Site) -> Step:
        rest = site.target() + 0
        for slot, child in enumerate(site.children):
            token = site.tree.tokens[child]
            if site.random.coin(site.depth, slot, rest[token]):
                return Step(child)
            rest[token] = 0
        return Step(None, site.random.draw_rest(site.depth, rest if rest.sum() else site.target()))

    return walk(tree, laws, random, settle)


def one_coin_with_duplicates(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """One coin a node where a second sibling with the same token gets a share of its own."""

    def settle(site: Site) -> Step:
        p = site.target()
        rest, left = p + 0, 1
        shares: list[Any] = []
        for child in site.children:
            token = site.tree.tokens[child]
            shares.append(min(left, p[token]))
            left = left - shares[-1]
            rest[token] = 0
        outcome = site.random.pick(site.depth, [*shares, left])
        if outcome < len(shares):
            return Step(site.children[outcome])
        return Step(None, site.random.draw_rest(site.depth, rest if rest.sum() else p))

    return walk(tree, laws, random, settle)


def divisor_too_small(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """K-SEQ with rho = 1, below the root of its equation."""
    return walk(tree, laws, random, lambda site: _k_sequential(site, 1, is_scaled=True))


def k_sequential_without_scale(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """K-SEQ with rho = K and the residual of one draft, p - min(p/rho, q)."""
    return walk(
        tree, laws, random, lambda site: _k_sequential(site, len(site.children), is_scaled=False)
    )


def _k_sequential(site: Site, rho: int, *, is_scaled: bool) -> Step:
    p = site.target()
    if not site.children:
        return Step(None, site.random.draw(site.depth, p))
    kept = 0 * p
    for slot, child in enumerate(site.children):
        law, token = site.drawn(child), site.tree.tokens[child]
        assert law is not None
        kept = lesser(p / rho, law)
        if site.random.coin(site.depth, slot, min(1, p[token] / (rho * law[token]))):
            return Step(child)
    beta = kept.sum()
    scale = (1 - (1 - beta) ** len(site.children)) / beta if is_scaled and beta else 1
    rest = positive(p - kept * scale)
    return Step(None, site.random.draw_rest(site.depth, rest if rest.sum() else p))


def hybrid_forgets_the_refusal(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Hybrid node whose last draw is from p although the drawn child was refused."""

    def settle(site: Site) -> Step:
        p = site.target()
        chosen = [child for child in site.children if site.drawn(child) is None]
        for child in site.children:
            law, token = site.drawn(child), site.tree.tokens[child]
            if law is not None and site.random.coin(site.depth, 0, min(1, p[token] / law[token])):
                return Step(child)
        return site.follow(site.random.draw(site.depth, p), chosen)

    return walk(tree, laws, random, settle)


def first_failure_ends(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Block verification that stops at the first failed test instead of testing on."""
    reaches: list[Any] = [1]
    rests = []
    for node in range(len(tree) - 1):
        p, q, token = laws.target(node), laws.draft(node + 1), tree.tokens[node + 1]
        assert q is not None
        rests.append(positive(reaches[-1] * p - q))
        reaches.append(min(1, reaches[-1] * p[token] / q[token]))
    rests.append(laws.target(len(tree) - 1))
    for node in range(1, len(tree)):
        mass, reach = rests[node].sum(), reaches[node]
        chance = reach if node == len(tree) - 1 else mass / (mass + 1 - reach) if mass else 0
        if not random.coin(node - 1, node, chance):
            rest = rests[node - 1]
            rest = rest if rest.sum() else laws.target(node - 1)
            return Verdict(path=tuple(range(1, node)), token=random.draw_rest(node - 1, rest))
    last = len(tree) - 1
    return Verdict(path=tuple(range(1, last + 1)), token=random.draw(last, rests[last]))


class _UnscaledResidual(Traversal):
    """w = [p - D]+ instead of [r p - D]+."""

    def refuse(self, reach: Any, p: Weights, law: Weights) -> tuple[Any, Weights] | None:  # noqa: ANN401
        rest, mass = positive(p - law), positive(reach * p - law).sum()
        return (mass / (mass + 1 - reach), rest / rest.sum()) if mass > 0 else None


class _NoVocabularySum(Traversal):
    """r is left as it was: the sum over the vocabulary is skipped."""

    def refuse(self, reach: Any, p: Weights, law: Weights) -> tuple[Any, Weights] | None:  # noqa: ANN401
        rest = positive(reach * p - law)
        return (reach, rest / rest.sum()) if rest.sum() > 0 else None


class _SumAfterUpdate(Traversal):
    """S is taken from w after it was normalised."""

    def refuse(self, reach: Any, p: Weights, law: Weights) -> tuple[Any, Weights] | None:  # noqa: ANN401
        rest = positive(reach * p - law)
        return (1 / (2 - reach), rest / rest.sum()) if rest.sum() > 0 else None


class _ForgivesEmptySums(Traversal):
    """A node with S = 0 stands with r instead of being refused outright."""

    def refuse(self, reach: Any, p: Weights, law: Weights) -> tuple[Any, Weights] | None:  # noqa: ANN401
        return super().refuse(reach, p, law) or (reach, p)


def _walks(kind: type[Traversal]) -> Verify:
    def verify(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
        verdict = kind(tree, laws, random).visit(0, 1, 0)
        assert verdict is not None
        return verdict

    verify.__doc__ = kind.__doc__
    return verify


unscaled_residual = _walks(_UnscaledResidual)
no_vocabulary_sum = _walks(_NoVocabularySum)
sum_after_update = _walks(_SumAfterUpdate)
forgives_empty_sums = _walks(_ForgivesEmptySums)


def typical(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Medusa's typical acceptance at a threshold of 0.3, and the likeliest token where it ends."""

    def settle(site: Site) -> Step:
        p = site.target()
        kept = [child for child in site.children if 10 * p[site.tree.tokens[child]] > 3]
        return Step(kept[0]) if kept else Step(None, int(p.argmax()))

    return walk(tree, laws, random, settle)


def accepts_all_above(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """SGLang's threshold_single: a child of p 0.5 or more always stands."""

    def settle(site: Site) -> Step:
        p = site.target()
        kept = [child for child in site.children if 2 * p[site.tree.tokens[child]] >= 1]
        if kept:
            return Step(kept[0])
        return site.follow(site.random.draw(site.depth, p), site.children)

    return walk(tree, laws, random, settle)
