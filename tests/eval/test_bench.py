"""The bench: same texts, interleaved, every setting reported; no test asserts a speed."""

from dataclasses import replace

import pytest

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval import bench as module
from outrider.eval.bench import BenchSettings, Prompt, bench, table
from outrider.eval.cost import cost
from outrider.eval.decode import Decoded, Seconds
from outrider.eval.metrics import Round
from outrider.heads import EagleHead

PROMPTS = [Prompt("chat", [5, 9, 20, 33]), Prompt("code", [7, 8, 12, 41, 6])]


def test_every_draft_and_kind_has_a_row(tiny_target: Target, tiny_head: EagleHead) -> None:
    settings = BenchSettings(drafts=("chain:2", "tree:2,2,4"), repeats=1, max_new_tokens=6)
    result = bench(tiny_target, tiny_head, PROMPTS, settings, with_cost=False)
    found = [(row["draft"], row["kind"], row["prompts"]) for row in result["rows"]]
    assert found == [
        (draft, kind, count)
        for draft in ("chain:2", "tree:2,2,4")
        for kind, count in (("all", 2), ("chat", 1), ("code", 1))
    ]
    for row in result["rows"]:
        assert row["speedup"]["value"] > 0
        assert 1 <= row["tau"] <= 3
        assert sum(row["share"].values()) == pytest.approx(1)
    assert result["settings"]["dtype"] == "float32"
    assert len(table(result).splitlines()) == 7


def fake(seconds_per_token: float, num_tokens: int = 11) -> Decoded:
    return Decoded(
        ids=list(range(num_tokens)),
        is_drafted=[False] * num_tokens,
        rounds=[Round(0, 0, 1)] * (num_tokens - 1),
        finish="length",
        seconds=Seconds(prefill=99.0, verify=seconds_per_token * (num_tokens - 1)),
        num_degenerate=0,
    )


def test_speed_is_a_quotient_of_neighbours_without_the_prefill(
    tiny_target: Target, tiny_head: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def decoded(
        target: object, head: object, prompt: Prompt, draft: str, *rest: object, warm: bool = False
    ) -> Decoded:
        if warm:
            return fake(1.0)
        order.append(draft)
        # The machine slows down with every round of runs; neighbours suffer alike.
        slow = 1 + (len(order) - 1) // 2
        return fake(slow * (0.5 if draft == "chain:1" else 1.0))

    monkeypatch.setattr(module, "_decode", decoded)
    settings = BenchSettings(drafts=("chain:1",), repeats=3)
    result = bench(tiny_target, tiny_head, PROMPTS, settings, with_cost=False)
    assert result["rows"][0]["speedup"]["value"] == pytest.approx(2.0)
    assert result["rows"][0]["pairs"] == [2.0, 2.0]
    # Neighbours in turn, each going first half of the time.
    assert order[:4] == ["plain", "chain:1", "chain:1", "plain"]


def test_a_text_of_one_token_is_not_timed(
    tiny_target: Target, tiny_head: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoded(
        target: object, head: object, prompt: Prompt, *rest: object, **_: object
    ) -> Decoded:
        return fake(1.0, 1 if prompt.kind == "chat" else 11)

    monkeypatch.setattr(module, "_decode", decoded)
    result = bench(tiny_target, tiny_head, PROMPTS, BenchSettings(repeats=1), with_cost=False)
    assert {row["kind"] for row in result["rows"]} == {"all", "code"}
    assert result["rows"][0]["prompts"] == 1


def test_sampled_text_is_timed_too(tiny_target: Target, tiny_head: EagleHead) -> None:
    settings = BenchSettings(
        drafts=("chain:2", "tree:2,2,3"),
        repeats=1,
        max_new_tokens=6,
        sampling=Sampling(temperature=1.0),
    )
    assert bench(tiny_target, tiny_head, PROMPTS, settings, with_cost=False)["rows"]


def test_cost_is_relative_to_a_plain_step(tiny_target: Target, tiny_head: EagleHead) -> None:
    found = cost(tiny_target, tiny_head, sizes=(1, 4), context=16, repeats=3)
    assert found["c"] > 0
    assert [one["tokens"] for one in found["verify"]] == [1, 4]
    assert found["verify"][0]["ratio"] == 1


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats is 0"):
        BenchSettings(repeats=0)
    with pytest.raises(ValueError, match="drafts is empty"):
        BenchSettings(drafts=())
    with pytest.raises(ValueError, match="write chain:LENGTH"):
        replace(BenchSettings(), drafts=("chain",))


def test_no_prompts_are_refused(tiny_target: Target, tiny_head: EagleHead) -> None:
    with pytest.raises(ValueError, match="no prompts to time"):
        bench(tiny_target, tiny_head, [])
