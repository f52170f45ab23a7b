"""`outrider tree`: fit a static tree to a head on a trace, and write it for --draft static:FILE."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from outrider.data.target import Target
from outrider.eval.link import judged_head
from outrider.eval.offline.traces import Trace
from outrider.eval.packing import packed
from outrider.eval.report.provenance import file_hashes
from outrider.eval.trees.calibrate import accept_by_rank, grow_by_hits, grow_by_rank, text_ranks
from outrider.eval.trees.plans import write_static
from outrider.scripts.eval_command import demo_trace


@dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """Which head, on which text, and how large a tree."""

    target: str
    """smollm2-demo, a Hub id, or a local folder."""

    head: str
    """Folder of an exported head."""

    out: Path
    """File of the tree, .json."""

    trace: Path | None = None
    """Folder of a trace; demo:heldout's greedy text when left out. Text that a head is judged on
    should not be the text that its tree was fitted to."""

    per_kind: int | None = None
    """For demo:heldout: use the first so many prompts of each kind."""

    nodes: int = 16
    """Drafted tokens of a round."""

    depth: int = 5
    """Longest path."""

    width: int = 8
    """Likeliest tokens considered under each node."""

    method: Literal["hits", "rank"] = "hits"
    """hits: the paths that the text took most often, counted jointly. rank: Sequoia's dynamic
    programme on acceptance by depth and rank, for little text."""

    def __post_init__(self) -> None:
        if self.out.suffix != ".json":
            raise ValueError(f"out is {self.out}; name a file that ends in .json")
        for name in ("nodes", "depth", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give 1 or more")


def main(argv: Sequence[str] | None = None) -> None:
    """Fit and write a tree."""
    settings = tyro.cli(TreeSettings, args=argv, prog="outrider tree")
    target = Target.load(settings.target)
    head = judged_head(settings.head, target)
    if settings.trace is None:
        trace = demo_trace(target, [head], 0.0, settings.per_kind)
    else:
        trace = Trace(settings.trace)
    with packed(target, head):
        ranks = text_ranks(head, trace, target, depth=settings.depth, width=settings.width)
    if settings.method == "hits":
        tree = grow_by_hits(ranks, settings.nodes)
    else:
        tree = grow_by_rank(accept_by_rank(ranks), settings.nodes)
    notes = {
        "method": settings.method,
        "accepted": tree.accepted,
        "starts": len(ranks.ranks_NK),
        "head": file_hashes(Path(settings.head)),
        "target": trace.info.fingerprint,
        "text": trace.info.text,
    }
    write_static(settings.out, tree.paths, notes)
    print(
        f"{settings.out}: {len(tree.paths)} nodes, depth {max(map(len, tree.paths))}; "
        f"{tree.accepted:.3f} accepted a round over {len(ranks.ranks_NK)} starts"
    )
    print(f"use it with --draft static:{settings.out}")
