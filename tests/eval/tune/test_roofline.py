"""The roofline against a table made elsewhere, experts against simulated routers."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from outrider.data.target import Target
from outrider.eval.tune.costs import PLAIN
from outrider.eval.tune.gpus import SHEETS
from outrider.eval.tune.models import (
    DraftSizes,
    TargetSizes,
    draft_sizes,
    target_sizes,
    touched_experts,
)
from outrider.eval.tune.roofline import Hardware, RooflineCosts, hardware_named
from outrider.heads import EagleHead

# An 8B target with grouped heads, without attention's own operations.
LLAMA = TargetSizes(
    name="8B", parameters=8e9, dense=8e9, kv_numbers=2 * 32 * 8 * 128, num_layers=32,
    hidden_size=4096,
)  # fmt: skip
BOUND = {"bandwidth_share": 1.0, "flops_share": 1.0, "step_overhead": 0.0, "draft_overhead": 0.0}


# Ratios t(n)/t(1) of a pass: max((W + B ctx kv)/BW, 2 N B n/FLOPs), worked out apart.
@pytest.mark.parametrize(
    ("gpu", "context", "ratios"),
    [
        ("h100", 1000, (1.00, 1.63, 1.37, 1.14, 1.69)),
        ("h100", 16000, (1.00, 1.00, 1.00, 1.00, 1.00)),
        ("h200", 1000, (1.00, 2.33, 1.97, 1.63, 2.43)),
        ("h200", 16000, (1.00, 1.21, 1.00, 1.00, 1.00)),
    ],
)
def test_verification_costs_are_those_of_the_known_table(
    gpu: str, context: int, ratios: tuple[float, ...]
) -> None:
    costs = RooflineCosts(hardware=hardware_named(gpu, **BOUND), target=LLAMA)
    for (batch, tokens), ratio in zip(
        [(1, 64), (8, 64), (32, 16), (64, 8), (128, 8)], ratios, strict=True
    ):
        found = costs.verify(tokens, batch, context) / costs.verify(1, batch, context)
        assert found == pytest.approx(ratio, abs=0.006)


def test_the_critical_number_of_tokens_is_flops_over_bandwidth() -> None:
    costs = RooflineCosts(hardware=hardware_named("h100", **BOUND), target=LLAMA)
    few, many = costs.verify(294, 1, 0), costs.verify(297, 1, 0)
    assert few == costs.verify(1, 1, 0)
    assert many > few


@pytest.mark.parametrize(("experts", "per_token"), [(8, 2), (64, 6), (4, 4)])
@pytest.mark.parametrize("tokens", [1, 3, 16, 100])
def test_touched_experts_are_those_of_simulated_routers(
    experts: int, per_token: int, tokens: int
) -> None:
    generator = np.random.default_rng(tokens)
    runs = 2000
    order = generator.random((runs, tokens, experts)).argsort(-1)[..., :per_token]
    counts = np.array([len(np.unique(run)) for run in order])
    error = counts.std() / runs**0.5
    found = touched_experts(experts, per_token, tokens)
    assert abs(found - counts.mean()) <= 4 * error + 1e-9
    if tokens == 1:
        assert found == pytest.approx(per_token)


def test_a_target_of_experts_verifies_dearer_the_more_of_them_its_tokens_touch() -> None:
    mixed = TargetSizes(
        name="moe", parameters=47e9, dense=1.6e9, expert=176e6, experts=8, experts_per_token=2,
        expert_layers=32, kv_numbers=2 * 32 * 8 * 128,
    )  # fmt: skip
    hardware = hardware_named("h200", **BOUND)
    moe = RooflineCosts(hardware=hardware, target=mixed)
    dense = RooflineCosts(hardware=hardware, target=LLAMA)
    ratios = [moe.verify(n, 1, 100) / moe.verify(1, 1, 100) for n in (2, 4, 8, 64)]
    assert ratios == sorted(ratios)
    assert ratios[2] > 2.5
    assert dense.verify(8, 1, 100) == dense.verify(1, 1, 100)
    # Once nearly all experts are read anyway, more tokens cost as on a dense target.
    assert moe.verify(4, 32, 100) / moe.verify(1, 32, 100) == pytest.approx(1, abs=0.01)
    assert mixed.active == pytest.approx(1.6e9 + 32 * 2 * 176e6)


def test_sizes_are_counted_from_the_model() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    found = target_sizes(Target.from_model(LlamaForCausalLM(config)))
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16
    assert found.parameters == 3 * layer + 16 + 2 * 50 * 16
    assert found.dense == 3 * layer + 16 + 50 * 16
    assert found.kept(10) == pytest.approx(10 * 3 * 2 * 2 * 4)
    assert found.experts == 0


def test_experts_are_counted_apart() -> None:
    config = MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=2,
        tie_word_embeddings=True, sliding_window=None,
    )  # fmt: skip
    found = target_sizes(Target.from_model(MixtralForCausalLM(config)))
    assert (found.experts, found.experts_per_token, found.expert_layers) == (6, 2, 2)
    assert found.expert == 3 * 16 * 24
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 2 * 16 + 6 * 16
    assert found.dense == 2 * layer + 16 + 50 * 16
    assert found.parameters == found.dense + 2 * 6 * found.expert
    assert found.read(1) == pytest.approx(found.active)
    assert found.read(10_000) == pytest.approx(found.parameters)


def test_windows_keep_no_more_than_they_see() -> None:
    sizes = TargetSizes(
        name="w", parameters=1e9, dense=1e9, kv_numbers=100, window=50, window_numbers=300
    )
    assert sizes.kept(20) == 20 * 400
    assert sizes.kept(80) == 80 * 100 + 50 * 300


def test_a_head_s_sizes_are_counted(tiny_head: EagleHead) -> None:
    found = draft_sizes(tiny_head, "tiny")
    assert found.parameters == sum(value.numel() for value in tiny_head.parameters())
    assert found.step == found.parameters
    assert found.kv_numbers == 2 * tiny_head.config.num_kv_heads * tiny_head.config.head_dim


def test_longer_chains_take_more_steps_and_parallel_heads_one() -> None:
    hardware = hardware_named("h100")
    serial = DraftSizes(name="s", parameters=2e8, step=2e8, kv_numbers=2048)
    parallel = DraftSizes(name="p", parameters=2e8, step=2e8, is_parallel=True)

    def drafting(draft: DraftSizes, plan: str) -> float:
        costs = RooflineCosts(hardware=hardware, target=LLAMA, draft=draft)
        return costs.round(plan, 9, 4, 500).draft

    assert drafting(serial, "chain:6") == pytest.approx(6 * drafting(serial, "chain:1"), rel=0.01)
    assert drafting(parallel, "chain:6") == drafting(parallel, "chain:1")
    assert drafting(serial, "tree:3,4,8") >= drafting(serial, "chain:3")
    costs = RooflineCosts(hardware=hardware, target=LLAMA, draft=serial)
    assert costs.round(PLAIN, 1, 4, 500).draft == 0
    assert costs.round("lookup:5", 6, 4, 500).draft == 0


def test_tensor_parallelism_shares_reading_and_pays_for_sums() -> None:
    one = RooflineCosts(hardware=hardware_named("h100", **BOUND), target=LLAMA)
    four = RooflineCosts(
        hardware=hardware_named("h100", **BOUND, tensor_parallel=4, sum_latency=1e-5),
        target=LLAMA,
    )
    sums = 2 * 32 * 1e-5
    assert four.verify(1, 1, 0) == pytest.approx(one.verify(1, 1, 0) / 4 + sums)
    # Four times the room, but the weights are held once.
    assert four.largest_batch(4096, 1).plain > 4 * one.largest_batch(4096, 1).plain


def test_quantised_weights_and_caches_read_less() -> None:
    hardware = hardware_named("h100", **BOUND)
    whole = RooflineCosts(hardware=hardware, target=LLAMA)
    small = RooflineCosts(hardware=hardware, target=LLAMA, weight_bytes=0.5, kv_bytes=1)
    assert small.verify(1, 1, 0) == pytest.approx(whole.verify(1, 1, 0) / 4)
    assert small.largest_batch(8192, 1).plain > 2 * whole.largest_batch(8192, 1).plain


def test_every_gpu_has_a_source_and_sane_figures() -> None:
    for sheet in SHEETS.values():
        assert sheet.source
        assert 50 < sheet.bf16 / sheet.bandwidth < 500
        assert sheet.bf16 > sheet.fp32


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gpu is 'h9000'; known are a100.*--bandwidth"):
        hardware_named("h9000")
    with pytest.raises(ValueError, match="bandwidth_share is 2"):
        hardware_named("h100", bandwidth_share=2)
    with pytest.raises(ValueError, match="flops of mine is 0"):
        Hardware(name="mine", bandwidth=1, flops=0, memory=1, source="")
    with pytest.raises(ValueError, match="tensor_parallel is 0"):
        hardware_named("h100", tensor_parallel=0)
    with pytest.raises(ValueError, match="parameters is 0"):
        TargetSizes(name="", parameters=0, dense=1, kv_numbers=1)
    with pytest.raises(ValueError, match="experts_per_token is 9 of 8"):
        TargetSizes(name="", parameters=1, dense=1, kv_numbers=1, experts=8, experts_per_token=9)
    costs = RooflineCosts(hardware=hardware_named("h100"), target=LLAMA)
    with pytest.raises(ValueError, match="batch is 0"):
        costs.round(PLAIN, 1, 0, 10)
    for name in ("step_overhead", "draft_overhead", "sum_latency"):
        with pytest.raises(ValueError, match=f"{name} is inf"):
            hardware_named("h100", **{name: float("inf")})
    with pytest.raises(ValueError, match="weight_bytes is inf"):
        RooflineCosts(hardware=hardware_named("h100"), target=LLAMA, weight_bytes=float("inf"))
    with pytest.raises(ValueError, match="parameters is inf"):
        DraftSizes(name="mine", parameters=float("inf"), step=1)
    with pytest.raises(ValueError, match="weight_bytes is -1"):
        RooflineCosts(hardware=hardware_named("h100"), target=LLAMA, weight_bytes=-1)


def test_counting_needs_no_weights() -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    real = target_sizes(Target.from_model(LlamaForCausalLM(config)))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    assert sum(value.numel() for value in model.parameters()) == real.parameters
