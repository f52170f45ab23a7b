"""Targets of many makes write with drafts what transformers' generate writes without.

And those whose state cannot be rolled back are refused before any token, each with the reason.
"""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RwkvConfig,
)

from outrider.data.rollback import check_rolls_back, probe_roll_back
from outrider.data.target import Target
from outrider.eval import generate
from outrider.eval.decode import Decoding, decode
from outrider.eval.generation import models as models_module
from outrider.eval.rows.loop import RowsRun, decode_rows

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "query_pre_attn_scalar": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=6),
    "gemma2": Gemma2Config(**SIZES, **WINDOWS, final_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOWS),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=24),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "olmoe": OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
}
PROMPTS = [[5, 9, 14, 22, 8, 31, 40, 17, 3], [11, 50, 4], [6], [9, 9, 30, 12, 9, 9, 30]]


def built(config):
    torch.manual_seed(0)
    # Gemma 2 caps its attention, which exists in the eager form only.
    kinds = (Gemma2Config, MambaConfig, Mamba2Config, RwkvConfig)
    attention = "eager" if isinstance(config, kinds) else "sdpa"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return built(CONFIGS[request.param])


def batch(prompts, side):
    longest = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        gap = longest - len(prompt)
        pads, hidden = [0] * gap, [0] * gap
        shown = [1] * len(prompt)
        ids.append(pads + prompt if side == "left" else prompt + pads)
        mask.append(hidden + shown if side == "left" else shown + hidden)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def test_greedy_text_is_that_of_transformers(model, known):
    """Float32, ragged batch, chains and trees, drafts that stand and drafts that fall."""
    inputs = batch(PROMPTS, "left")
    wanted = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert torch.equal(generate(model, inputs, max_new_tokens=24), wanted)
    found = generate(
        model, inputs, draft="lookup:4,2", max_new_tokens=24, return_dict_in_generate=True
    )
    assert torch.equal(found.sequences, wanted)
    target = Target.from_model(model)
    answers = [_until_end(row) for row in wanted[:, inputs["input_ids"].shape[1] :].tolist()]
    rows = [[*prompt, *answer, *range(9)] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    for shape in ("chain", "mixed", "uneven", "forks"):
        drafter = known(rows, 4, shape)
        run = decode_rows(target, PROMPTS, drafter, Decoding(max_new_tokens=24), batch_size=4)
        assert [row.new_ids for row in run.done] == answers
        assert any(one.accepted > 1 for row in run.done for one in row.rounds)


def _until_end(ids):
    return ids[: ids.index(2) + 1] if 2 in ids else ids


TINY = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
RECURRENT = {
    "mamba": MambaConfig(**TINY),
    "mamba2": Mamba2Config(**TINY, num_heads=8, head_dim=8),
    "rwkv": RwkvConfig(**TINY),
    "jamba": JambaConfig(
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        use_mamba_kernels=False,
    ),
    "falcon-h1": FalconH1Config(
        **SIZES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8
    ),
    "qwen3-next": Qwen3NextConfig(
        **SIZES,
        **EXPERTS,
        shared_expert_intermediate_size=24,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 2),
    "minimax": MiniMaxConfig(
        **SIZES,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_that_cannot_be_rolled_back_is_refused(name, monkeypatch):
    model = built(RECURRENT[name])

    def run(self, *args, **settings):
        raise AssertionError("a token was run")

    monkeypatch.setattr(Target, "run", run)
    heard = []
    with pytest.raises(ValueError, match=r"cannot be decoded here: .*running state"):
        generate(model, torch.tensor([[5, 6]]), on_tokens=lambda *one: heard.append(one))
    assert not heard
    monkeypatch.setattr(models_module, "check_rolls_back", lambda target: None)
    target = Target.outlined(model, None, name="recurrent")
    for attempt in (lambda: decode(target, [5, 6]), lambda: RowsRun(target, 1)):
        with pytest.raises(ValueError, match="use a target of attention layers alone"):
            attempt()


def test_chunked_attention_is_refused_for_another_reason():
    config = Llama4TextConfig(
        **SIZES, num_local_experts=2, attention_chunk_size=8, intermediate_size_mlp=48
    )
    model = built(config)
    with pytest.raises(ValueError, match="layer_types holds chunked_attention"):
        generate(model, torch.tensor([[5, 6]]))


def test_an_attention_that_takes_no_mask_is_refused():
    model = built(CONFIGS["llama"])
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="load the target with 'sdpa' or 'eager'"):
        check_rolls_back(Target.outlined(model, None, name="flex"))


def test_the_probe_sees_a_state_that_no_config_tells_of(monkeypatch):
    """A layer that adds up what it has seen, in a model that calls itself Llama."""
    model = built(CONFIGS["llama"])
    target = Target.from_model(model)
    probe_roll_back(target)
    seen = torch.zeros(32)

    def remember(module, args, output):
        nonlocal seen
        seen = seen + output.detach().sum((0, 1))
        return output + 0.1 * seen

    handle = model.model.layers[1].mlp.register_forward_hook(remember)
    with pytest.raises(ValueError, match="drafts that are rejected would leave a trace"):
        probe_roll_back(target)
    handle.remove()
    probe_roll_back(target)
