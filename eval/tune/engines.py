"""Settings for serving engines that follow from the best draft of every batch.

Names as read in vLLM 0.32.0 (vllm/config/speculative.py, v1/spec_decode/dynamic/utils.py) and in
SGLang's documentation (advanced features, speculative decoding): the schedule's entries are
[first batch, last batch, tokens], both ends included, the first at 1, and the last entry's tokens
hold for larger batches too; SGLang counts the root among its draft tokens.
"""

from collections.abc import Sequence
from typing import Any

from outrider.eval.trees.plans import (
    ChainPlan,
    DrawnPlan,
    LookupPlan,
    SuffixPlan,
    TreePlan,
    plan_named,
)
from outrider.eval.tune.costs import PLAIN
from outrider.eval.tune.speed import Range

VLLM_METHODS = {"eagle3": "eagle3", "eagle1": "eagle", "medusa": "medusa", "mtp": "mtp"}
"""vLLM's method by kind of head."""
SGLANG_ALGORITHMS = {"eagle3": "EAGLE3", "eagle1": "EAGLE", "mtp": "NEXTN"}
"""SGLang's algorithm by kind of head."""


def vllm_config(kind: str, head: str, ranges: Sequence[Range]) -> dict[str, Any] | None:
    """The `speculative_config` for ranges of chains and plain decoding; None where none pays.

    Raises ValueError for a kind that vLLM does not serve, and for trees, which it does not draft.
    """
    if kind not in VLLM_METHODS:
        raise ValueError(
            f"kind is {kind!r}; vLLM serves {', '.join(VLLM_METHODS)}, so leave --kind out or "
            "export another head"
        )
    lengths = [_length(one.draft) for one in ranges]
    if not ranges or ranges[0].first != 1:
        raise ValueError(f"ranges are {list(ranges)}; the first must start at batch 1")
    longest = max(lengths)
    if longest == 0:
        return None
    config: dict[str, Any] = {
        "method": VLLM_METHODS[kind],
        "model": head,
        "num_speculative_tokens": longest,
    }
    if len(set(lengths)) > 1:
        config["num_speculative_tokens_per_batch_size"] = _merged(ranges, lengths)
    return config


def _length(draft: str) -> int:
    if draft == PLAIN:
        return 0
    plan = plan_named(draft)
    if not isinstance(plan, ChainPlan):
        raise ValueError(f"draft is {draft!r}; vLLM drafts one chain a request: give chains only")
    return plan.length


def _merged(ranges: Sequence[Range], lengths: Sequence[int]) -> list[list[int]]:
    entries: list[list[int]] = []
    for one, length in zip(ranges, lengths, strict=True):
        if entries and entries[-1][2] == length:
            entries[-1][1] = one.last
        else:
            entries.append([one.first, one.last, length])
    return entries


def sglang_flags(kind: str, head: str, draft: str) -> list[str] | None:
    """Flags of `python -m sglang.launch_server` for one draft; None for plain decoding.

    SGLang's steps are a chain's length or a tree's depth, its top-k a tree's width. Raises
    ValueError for a kind or a draft that it does not serve.
    """
    if draft == PLAIN:
        return None
    if kind not in SGLANG_ALGORITHMS:
        raise ValueError(
            f"kind is {kind!r}; SGLang serves {', '.join(SGLANG_ALGORITHMS)}, so export another "
            "head, or serve this one with vLLM"
        )
    plan = plan_named(draft)
    if isinstance(plan, ChainPlan):
        steps, width, tokens = plan.length, 1, plan.length + 1
    elif isinstance(plan, TreePlan):
        steps, width, tokens = plan.depth, plan.width, plan.nodes + 1
    else:
        what = "drawn" if isinstance(plan, DrawnPlan) else "look-up"
        what = what if isinstance(plan, DrawnPlan | LookupPlan | SuffixPlan) else "static"
        raise ValueError(
            f"draft is {draft!r}; SGLang has no {what} drafts of a head: give a chain or a tree"
        )
    return [
        "--speculative-algorithm", SGLANG_ALGORITHMS[kind],
        "--speculative-draft-model-path", head,
        "--speculative-num-steps", str(steps),
        "--speculative-eagle-topk", str(width),
        "--speculative-num-draft-tokens", str(tokens),
    ]  # fmt: skip
