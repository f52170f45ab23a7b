"""Settings for engines keep the rules that the engines check."""

from itertools import pairwise
from typing import Any

import pytest

from outrider.eval.tune.acceptance import from_alpha
from outrider.eval.tune.costs import PLAIN, Pieces
from outrider.eval.tune.engines import sglang_flags, vllm_config
from outrider.eval.tune.result import engines
from outrider.eval.tune.speed import Range, best


def lookup(config: dict[str, Any], largest: int) -> list[int]:
    """Tokens by batch as vLLM 0.32 reads a schedule: gaps and the tail carry the last entry on."""
    entries = config["num_speculative_tokens_per_batch_size"]
    assert entries[0][0] == 1
    assert all(len(one) == 3 and 0 < one[0] <= one[1] and one[2] >= 0 for one in entries)
    assert all(a[1] < b[0] for a, b in pairwise(entries))
    found = [0] * (largest + 1)
    for batch in range(1, largest + 1):
        found[batch] = [one[2] for one in entries if one[0] <= batch][-1]
    return found


class Knee:
    name = "knee"

    def round(self, draft: str, tokens: int, batch: int, context: float) -> Pieces:
        length = 0 if draft == PLAIN else int(draft.removeprefix("chain:"))
        return Pieces(0.1 * length, max(1.0, batch * tokens / 40), 0.0)


def test_vllm_s_schedule_is_the_best_length_of_every_batch() -> None:
    chains = from_alpha(0.8, range(1, 8))
    found = engines(
        Knee(), chains, kind="eagle3", head="org/head", context=0, max_batch=60, batch=1
    )
    config = found["vllm"]
    assert (config["method"], config["model"]) == ("eagle3", "org/head")
    by_batch = lookup(config, 200)
    for batch in range(1, 61):
        draft = best(Knee(), chains, batch, 0).draft
        assert by_batch[batch] == (0 if draft == PLAIN else int(draft.removeprefix("chain:")))
    assert by_batch[200] == by_batch[60]
    assert config["num_speculative_tokens"] == max(by_batch)


def test_one_length_for_all_batches_needs_no_schedule() -> None:
    config = vllm_config("medusa", "h", [Range(1, 64, "chain:3")])
    assert config == {"method": "medusa", "model": "h", "num_speculative_tokens": 3}
    assert vllm_config("medusa", "h", [Range(1, 64, PLAIN)]) is None


def test_sglang_counts_the_root_among_its_draft_tokens() -> None:
    assert sglang_flags("eagle3", "h", "chain:3") == [
        "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", "h",
        "--speculative-num-steps", "3",
        "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", "4",
    ]  # fmt: skip
    flags = sglang_flags("eagle1", "h", "tree:5,8,31") or []
    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    assert pairs["--speculative-algorithm"] == "EAGLE"
    assert pairs["--speculative-num-steps"] == "5"
    assert pairs["--speculative-eagle-topk"] == "8"
    assert pairs["--speculative-num-draft-tokens"] == "32"
    assert sglang_flags("eagle3", "h", PLAIN) is None


def test_what_an_engine_does_not_serve_is_refused_or_left_out() -> None:
    with pytest.raises(ValueError, match="kind is 'hydra'; vLLM serves"):
        vllm_config("hydra", "h", [Range(1, 2, "chain:1")])
    with pytest.raises(ValueError, match="draft is 'tree:2,2,4'; vLLM drafts one chain"):
        vllm_config("eagle3", "h", [Range(1, 2, "tree:2,2,4")])
    with pytest.raises(ValueError, match="must start at batch 1"):
        vllm_config("eagle3", "h", [Range(2, 3, "chain:1")])
    with pytest.raises(ValueError, match="kind is 'medusa'; SGLang serves"):
        sglang_flags("medusa", "h", "chain:3")
    with pytest.raises(ValueError, match="SGLang has no look-up drafts"):
        sglang_flags("eagle3", "h", "lookup:3,2")
    found = engines(
        Knee(), from_alpha(0.8, [2]), kind="hydra", head="h", context=0, max_batch=4, batch=1
    )
    assert found["vllm"] is None
    assert found["sglang"] is None
