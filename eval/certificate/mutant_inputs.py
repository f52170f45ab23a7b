"""Planted faults in what a rule is given: its noise, its draft laws, its target laws.

The rules themselves are the production ones; each fault is one that a published verifier has
shipped, or is easily made.
"""

from collections.abc import Sequence
from typing import Any

from outrider.eval.rules.verdict import Laws, Randomness, Verdict, Weights, positive
from outrider.eval.rules.walk import match, point_mass, recursive
from outrider.eval.trees.tree import Tree


class Noise:
    """Randomness passed on; a fault overrides what it spoils."""

    def __init__(self, random: Randomness, laws: Laws, tree: Tree) -> None:
        self.random, self.laws, self.tree = random, laws, tree

    def coin(self, depth: int, slot: int, probability: Any) -> bool:  # noqa: ANN401
        """Passed on."""
        return self.random.coin(depth, slot, probability)

    def pick(self, depth: int, shares: Sequence[Any]) -> int:
        """Passed on."""
        return self.random.pick(depth, shares)

    def draw(self, depth: int, weights: Weights) -> int:
        """Passed on."""
        return self.random.draw(depth, weights)

    def draw_rest(self, depth: int, weights: Weights) -> int:
        """Passed on."""
        return self.random.draw_rest(depth, weights)


class SeenLaws:
    """Laws passed on; `last` is p at the node where the walk is."""

    def __init__(self, laws: Laws) -> None:
        self._laws = laws
        self.last: Weights = None

    def target(self, node: int) -> Weights:
        """Passed on and kept."""
        self.last = self._laws.target(node)
        return self.last

    def draft(self, node: int) -> Weights | None:
        """Passed on."""
        return self._laws.draft(node)


def draws_from_p_after_refusal(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """The seed article's bug: after a refusal the token comes from p, not from [p - q]+."""
    seen = SeenLaws(laws)

    class Faulty(Noise):
        def draw_rest(self, depth: int, weights: Weights) -> int:  # noqa: ARG002
            return self.random.draw_rest(depth, seen.last)

    return recursive(tree, seen, Faulty(random, laws, tree))


def keeps_the_refused_mass(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Point mass whose last draw still has the refused children in it."""
    seen = SeenLaws(laws)

    class Faulty(Noise):
        def draw_rest(self, depth: int, weights: Weights) -> int:  # noqa: ARG002
            return self.random.draw_rest(depth, seen.last)

    return point_mass(tree, seen, Faulty(random, laws, tree))


def residual_after_full_acceptance(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """EAGLE #47: the bonus token is drawn from a residual."""

    class Faulty(Noise):
        def draw(self, depth: int, weights: Weights) -> int:
            rest = positive(weights - self.laws.draft(depth))
            return self.random.draw(depth, rest if rest.sum() else weights)

    return recursive(tree, laws, Faulty(random, laws, tree))


def bonus_from_raw_logits(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """EAGLE v1, Spec-Bench: the bonus token ignores temperature and filters."""

    class Faulty(Noise):
        def draw(self, depth: int, weights: Weights) -> int:
            return self.random.draw(depth, weights * weights)

    return recursive(tree, laws, Faulty(random, laws, tree))


def judges_by_raw_logits(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """VLLM #9834: acceptance by target probabilities without the sampling parameters."""
    seen = SeenLaws(laws)

    class Faulty(Noise):
        def coin(self, depth: int, slot: int, probability: Any) -> bool:  # noqa: ANN401, ARG002
            token = self.tree.tokens[depth + 1]
            law = self.laws.draft(depth + 1)
            assert law is not None
            raw = seen.last * seen.last / (seen.last * seen.last).sum()
            return self.random.coin(depth, slot, min(1, raw[token] / law[token]))

    return recursive(tree, seen, Faulty(random, laws, tree))


def accepts_with_p_alone(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """The draft's probability is missing from the ratio but not from the residual."""
    seen = SeenLaws(laws)

    class Faulty(Noise):
        def coin(self, depth: int, slot: int, probability: Any) -> bool:  # noqa: ANN401, ARG002
            return self.random.coin(depth, slot, seen.last[self.tree.tokens[depth + 1]])

    return recursive(tree, seen, Faulty(random, laws, tree))


def loosened(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """A threshold below one in the acceptance test, SGLang's threshold_acc."""

    class Faulty(Noise):
        def coin(self, depth: int, slot: int, probability: Any) -> bool:  # noqa: ANN401
            return self.random.coin(depth, slot, min(1, probability * 4 / 3))

    return recursive(tree, laws, Faulty(random, laws, tree))


def root_laws_everywhere(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """One p for all nodes: SGLang's relaxed penalties, wrong below the root."""

    class Faulty(SeenLaws):
        def target(self, node: int) -> Weights:  # noqa: ARG002
            return self._laws.target(0)

    return recursive(tree, Faulty(laws), random)


def draft_laws_off_by_one(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Transformers #28166: each draft judged with its neighbour's law."""

    class Faulty(SeenLaws):
        def draft(self, node: int) -> Weights | None:
            other = self._laws.draft(max(1, node - 1))
            own = self._laws.draft(node)
            assert other is not None
            return other if other[tree.tokens[node]] > 0 else own

    return recursive(tree, Faulty(laws), random)


def flattened_draft_laws(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Q recorded at another temperature than the drafts were drawn at (transformers #47932)."""

    class Faulty(SeenLaws):
        def draft(self, node: int) -> Weights | None:
            law = self._laws.draft(node)
            assert law is not None
            raw = law + (law > 0)
            return raw / raw.sum()

    return recursive(tree, Faulty(laws), random)


def judges_siblings_alike(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Drafts without replacement judged as if each were drawn from q itself."""

    class Faulty(SeenLaws):
        def draft(self, node: int) -> Weights | None:
            return self._laws.draft(tree.children[tree.parents[node]][0])

    return recursive(tree, Faulty(laws), random)


def one_coin_used_twice(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """One coin a node, its failure settled by the likeliest token that is left."""

    class Faulty(Noise):
        def draw_rest(self, depth: int, weights: Weights) -> int:  # noqa: ARG002
            return int(weights.argmax())

    return point_mass(tree, laws, Faulty(random, laws, tree))


def tries_twice(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """Sample-and-match that draws again, by other coins, when the first token was not drafted."""

    class Again(Noise):
        def draw(self, depth: int, weights: Weights) -> int:
            return self.random.draw_rest(depth, weights)

    first = match(tree, laws, random)
    return first if first.path else match(tree, laws, Again(random, laws, tree))


def siblings_share_a_coin(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """One coin of a depth for all its siblings: the second is judged by what refused the first."""

    class Faulty(Noise):
        def coin(self, depth: int, slot: int, probability: Any) -> bool:  # noqa: ANN401, ARG002
            return self.random.coin(depth, 0, probability)

    return recursive(tree, laws, Faulty(random, laws, tree))


def ends_on_the_deepest_law(tree: Tree, laws: Laws, random: Randomness) -> Verdict:
    """The next token from the law of the tree's last node, wherever the walk stopped."""
    verdict = match(tree, laws, random)
    return Verdict(path=verdict.path, token=random.draw(0, laws.target(len(tree) - 1)))
