"""Measures batched verification of large trees against one pass over the rows of p.

    python -m outrider.scripts.verify_bench
    python -m outrider.scripts.verify_bench --rules iid traversal --batch 8 --json out.json

p and q are given; a round is everything from them to the accepted path and the next token. The
floor is the sum of every row of p, timed in turn with the rounds. Both forms are timed: the rule
itself, round after round, as `outrider.eval.decode` runs it, reading rows only where its walk goes,
and the batched code; the limit holds the faster. Exit status 1 when a rule is over its limit.
Dimensions: B rounds, N nodes, R rows of q, V vocabulary.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

from outrider.eval.batched import BATCHED, verify_batch
from outrider.eval.batched.drafts import Drafts, noise_for
from outrider.eval.batched.shapes import shapes_of
from outrider.eval.certificate.children import children
from outrider.eval.noise import KeyedNoise
from outrider.eval.rules import RULES
from outrider.eval.rules.verdict import Siblings, Weights
from outrider.eval.trees.tree import Tree, shape_from_counts

LIMITS = {"block": 8.0, "traversal": 8.0}
_LIMIT = 3.0
_DRAFTS = {
    "greedy": Siblings.CHOSEN,
    "match": Siblings.CHOSEN,
    "point_mass": Siblings.CHOSEN,
    "one_coin": Siblings.CHOSEN,
    "rejection": Siblings.SINGLE,
    "iid": Siblings.IID,
    "without": Siblings.WITHOUT,
    "k_sequential": Siblings.IID,
    "hybrid": Siblings.HYBRID,
    "block": Siblings.SINGLE,
    "traversal": Siblings.WITHOUT,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure."""

    rules: tuple[str, ...] = tuple(BATCHED)
    """Names of rules."""
    trees: tuple[str, ...] = ("4-ary", "dynamic", "chain")
    """4-ary: four children a node, breadth first. dynamic: of the shape of EAGLE-2's trees, ten
    children at the root and six levels. chain: one child a node, the only one for chain rules."""
    nodes: int = 64
    """Drafted nodes, the root not counted."""
    vocab: int = 128_000
    batch: tuple[int, ...] = (1, 8)
    """Rounds verified at once."""
    threads: tuple[int, ...] = (1, 2)
    """CPU threads; with more the floor, one large sum, gains most."""
    repeats: int = 15
    """Timed calls of the round and of the floor, in turn; three more warm up."""
    device: str = "cpu"
    compiled: bool = False
    """Time `torch.compile`'s form of each rule instead."""
    json: Path | None = None
    """Write the results to this file, too."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.rules if name not in BATCHED]
        if unknown:
            raise ValueError(f"rules has {unknown[0]!r}; choose of {', '.join(BATCHED)}")
        missing = [name for name in self.trees if name not in TREES]
        if missing:
            raise ValueError(f"trees has {missing[0]!r}; choose of {', '.join(TREES)}")
        for name in ("nodes", "vocab", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; use 1 or more")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One line of the table; times in milliseconds: median, least and most."""

    rule: str
    tree: str
    batch: int
    threads: int
    rule_ms: tuple[float, float, float] | None
    """The rule itself, round after round; None for a GPU or where compiled code is timed."""
    round_ms: tuple[float, float, float]
    """The batched code."""
    floor_ms: tuple[float, float, float]
    ratio: float
    """Of the medians, of the faster form."""
    limit: float
    is_met: bool


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    settings = tyro.cli(Settings, args=argv, prog="verify_bench")
    print(f"{settings.nodes} nodes, V = {settings.vocab}, float32; times in ms: median (range)")
    columns = f"{'the rule itself':<24}{'batched':<24}{'one pass over p':<24}"
    print(f"{'rule':<13}{'tree':<9}{'B':>2} thr  {columns}ratio limit")
    found = []
    for batch in settings.batch:
        for tree in settings.trees:
            for one in measure(settings, tree, batch):
                found.append(one)
                print(line(one), flush=True)
    num_met = sum(one.is_met for one in found)
    print(f"{num_met} of {len(found)} within their limit")
    if settings.json is not None:
        settings.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if num_met < len(found):
        sys.exit(1)


def measure(settings: Settings, tree: str, batch: int) -> list[Measured]:
    """All rules on one kind of tree; laws are made once for all of them."""
    parents = TREES[tree](settings.nodes)
    rules = [name for name in settings.rules if tree == "chain" or not RULES[name].is_chain_only]
    p_BNV, q_BRV = random_laws(settings, parents, batch)
    found: list[Measured] = []
    for siblings in dict.fromkeys(_DRAFTS[name] for name in rules):
        kind = Siblings.SINGLE if tree == "chain" and siblings != Siblings.CHOSEN else siblings
        drafts = drafted(parents, kind, p_BNV, q_BRV)
        for name in (name for name in rules if _DRAFTS[name] is siblings):
            found += [timed(settings, name, tree, drafts, count) for count in settings.threads]
    return found


def timed(settings: Settings, name: str, tree: str, drafts: Drafts, num_threads: int) -> Measured:
    """The rule's rounds and the floor in turn, each round with fresh noise."""
    torch.set_num_threads(num_threads)
    generator = torch.Generator(settings.device).manual_seed(0)
    # Only the rule itself is compiled: what `verify_batch` checks is known before.
    verify = torch.compile(BATCHED[name]) if settings.compiled else None
    has_rule = settings.device == "cpu" and not settings.compiled
    rounds = [RowLaws(drafts, number) for number in range(len(drafts.p_BNV))]
    times: dict[str, list[float]] = {"round": [], "floor": [], "rule": []}
    for number in range(settings.repeats + 3):
        noise = noise_for(drafts.shapes, generator)
        calls: dict[str, Callable[[], object]] = {
            "round": lambda noise=noise: (
                verify(drafts, noise) if verify else verify_batch(name, drafts, noise)
            ),
            "floor": lambda: drafts.p_BNV.sum(-1),
        }
        if has_rule:
            calls["rule"] = lambda number=number: [
                RULES[name].verify(laws.tree, laws, KeyedNoise(number, row, 0))
                for row, laws in enumerate(rounds)
            ]
        for key, call in calls.items():
            seconds = _seconds(call, settings.device)
            if number >= 3:
                times[key].append(1e3 * seconds)
    round_ms, floor_ms = _summary(times["round"]), _summary(times["floor"])
    rule_ms = _summary(times["rule"]) if has_rule else None
    limit = LIMITS.get(name, _LIMIT)
    ratio = min(round_ms[0], rule_ms[0] if rule_ms else round_ms[0]) / floor_ms[0]
    return Measured(
        rule=name,
        tree=tree,
        batch=len(drafts.p_BNV),
        threads=num_threads,
        rule_ms=rule_ms,
        round_ms=round_ms,
        floor_ms=floor_ms,
        ratio=round(ratio, 2),
        limit=limit,
        is_met=ratio <= limit,
    )


class RowLaws:
    """A round's laws as the rules ask for them, made beforehand as a drafter does."""

    def __init__(self, drafts: Drafts, number: int) -> None:
        parents = drafts.shapes.parents_BN[number].tolist()
        self.tree = Tree(tuple(drafts.tokens_BN[number].tolist()), (-1, *parents[1:]))
        self._p_NV, self._number = drafts.p_BNV[number], number
        self._laws = [None, *(self._law(drafts, node) for node in range(1, len(self.tree)))]

    def _law(self, drafts: Drafts, node: int) -> Tensor | None:
        is_drawn_BN = drafts.is_drawn_BN
        if drafts.q_BRV is None or (
            is_drawn_BN is not None and not bool(is_drawn_BN[self._number, node])
        ):
            return None
        parent = self.tree.parents[node]
        law_V = drafts.q_BRV[self._number, parent]
        before = [child for child in self.tree.children[parent] if child < node]
        if not drafts.is_judged_without or not before:
            return law_V
        law_V = law_V.clone()
        law_V[[self.tree.tokens[child] for child in before]] = 0
        return law_V / law_V.sum()

    def target(self, node: int) -> Tensor:
        """P after a node."""
        return self._p_NV[node]

    def draft(self, node: int) -> Tensor | None:
        """The law that a node's token was drawn from."""
        return self._laws[node]


def _seconds(call: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _summary(times: list[float]) -> tuple[float, float, float]:
    median, least, most = statistics.median(times), min(times), max(times)
    return (round(median, 3), round(least, 3), round(most, 3))


def line(one: Measured) -> str:
    """One measurement in a line of the table."""

    def shown(ms: tuple[float, float, float] | None) -> str:
        return "-" if ms is None else f"{ms[0]:.2f} ({ms[1]:.2f}-{ms[2]:.2f})"

    return (
        f"{one.rule:<13}{one.tree:<9}{one.batch:>2} {one.threads:>3}  {shown(one.rule_ms):<24}"
        f"{shown(one.round_ms):<24}"
        f"{shown(one.floor_ms):<24}{one.ratio:>5.2f} {one.limit:>5.0f}"
        f"{'' if one.is_met else '  OVER'}"
    )


def random_laws(settings: Settings, parents: Sequence[int], batch: int) -> tuple[Tensor, Tensor]:
    """Peaked laws p at every node, and q near p at every node that has children."""
    generator = torch.Generator().manual_seed(0)
    num_inner = max(parents) + 1
    p_BNV = torch.empty(batch, len(parents), settings.vocab)
    q_BRV = torch.empty(batch, max(num_inner, 1), settings.vocab)
    for number in range(batch):
        for node in range(len(parents)):
            logits_V = 3 * torch.randn(settings.vocab, generator=generator)
            p_BNV[number, node] = logits_V.softmax(-1)
            if node < num_inner:
                error_V = 0.5 * torch.randn(settings.vocab, generator=generator)
                q_BRV[number, node] = (logits_V + error_V).softmax(-1)
    return p_BNV.to(settings.device), q_BRV.to(settings.device)


def drafted(parents: Sequence[int], siblings: Siblings, p_BNV: Tensor, q_BRV: Tensor) -> Drafts:
    """Draft trees of this shape from q."""
    generator = torch.Generator().manual_seed(1)

    def draw(_: int, law: Weights) -> int:
        return int(torch.multinomial(law, 1, generator=generator))

    families = [[n for n, up in enumerate(parents) if up == node] for node in range(len(parents))]
    tokens_BN = torch.zeros(p_BNV.shape[:2], dtype=torch.int64)
    is_drawn_BN = torch.zeros(p_BNV.shape[:2], dtype=torch.bool)
    for number in range(len(p_BNV)):
        for node, family in enumerate(families):
            if family:
                found = children(q_BRV[number, node].cpu(), len(family), siblings, draw)
                for child, one in zip(family, found, strict=True):
                    tokens_BN[number, child] = one.token
                    is_drawn_BN[number, child] = one.law is not None
    is_chosen, is_hybrid = siblings is Siblings.CHOSEN, siblings is Siblings.HYBRID
    device = p_BNV.device
    return Drafts(
        shapes=shapes_of([parents] * len(p_BNV), device),
        siblings=siblings,
        tokens_BN=tokens_BN.to(device),
        p_BNV=p_BNV,
        q_BRV=None if is_chosen else q_BRV,
        is_drawn_BN=is_drawn_BN.to(device) if is_hybrid else None,
    )


def _many(num_nodes: int) -> tuple[int, ...]:
    return shape_from_counts([4] * num_nodes)[: num_nodes + 1]


def _dynamic(num_nodes: int) -> tuple[int, ...]:
    """Ten children at the root, then levels of 18, 14, 10, 7 and 5, most under the first nodes."""
    parents, level = [-1], [0]
    for size, widest in ((10, 10), (18, 6), (14, 5), (10, 4), (7, 3), (num_nodes, 3)):
        first = len(parents)
        for number in range(size):
            # The first nodes get more children: widest, widest, widest - 1, widest - 1, ...
            place, left = 0, number
            while left >= max(widest - place // 2, 1) and place + 1 < len(level):
                left -= max(widest - place // 2, 1)
                place += 1
            parents.append(level[place])
        level = list(range(first, len(parents)))
    return tuple(parents[: num_nodes + 1])


def _chain(num_nodes: int) -> tuple[int, ...]:
    return tuple(range(-1, num_nodes))


TREES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "4-ary": _many,
    "dynamic": _dynamic,
    "chain": _chain,
}


if __name__ == "__main__":
    main()
