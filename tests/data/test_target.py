"""Captured states against independent hooks, tables against the model, and the refusals."""

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from outrider.data.anatomy import files_hash, find_folder, non_finite
from outrider.data.capture import check_layers, default_layers
from outrider.data.target import Target

FAMILIES = ["llama", "qwen", "gemma"]
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def independent(model, ids_BT, layers, **settings):
    """States by hooks written here, on the whole model with its output head, all of them kept."""
    entering, before_norm, after_norm = {}, [], []
    body = model.get_decoder()
    hooks = [
        block.register_forward_hook(
            lambda _, args, out, at=at: entering.__setitem__(
                at + 1, (out if torch.is_tensor(out) else out[0]).clone()
            )
        )
        for at, block in enumerate(body.layers)
    ]
    hooks += [
        body.embed_tokens.register_forward_hook(
            lambda _, args, out: entering.__setitem__(0, out.clone())
        ),
        body.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0].clone())),
        body.norm.register_forward_hook(lambda _, args, out: after_norm.append(out.clone())),
    ]
    with torch.no_grad():
        out = model(input_ids=ids_BT, output_hidden_states=True, **settings)
    for hook in hooks:
        hook.remove()
    last = len(body.layers)
    assert torch.equal(entering[last], before_norm[0])
    for layer in layers:  # ids are those of hidden_states, but for the last
        if layer < last:
            assert torch.equal(entering[layer], out.hidden_states[layer])
    return torch.cat([entering[layer] for layer in layers], -1), after_norm[0], out.logits


def shapes():
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1), (1, 13), (3, 9), (2, 20)):
        yield torch.randint(3, 300, shape, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_c06_captured_states_equal_independent_hooks_bit_for_bit(family, dtype, make_model):
    model = make_model(family).to(dtype)
    target = Target.from_model(model)
    for ids_BT in shapes():
        for layers in ((1, 3, 5), (6,), (5, 0, 6)):
            aux_BTF, last_BTH, logits_BTV = independent(model, ids_BT, layers)
            captured = target.run(ids_BT, layers=layers)
            assert captured.aux_BTF.dtype == dtype
            assert torch.equal(captured.aux_BTF, aux_BTF)
            assert torch.equal(captured.last_BTH, last_BTH)
            assert torch.equal(target.logits(captured.last_BTH), logits_BTV)
            assert torch.equal(target.run_inner(ids_BT, layers=layers), aux_BTF)


@pytest.mark.parametrize("family", FAMILIES)
def test_c06_masks_positions_and_caches_reach_the_decoder(family, make_model):
    model = make_model(family)
    target = Target.from_model(model)
    ids_BT = next(ids for ids in shapes() if len(ids) == 3)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :4] = 0
    settings = {"attention_mask": mask_BT, "position_ids": torch.arange(5, 14).repeat(3, 1)}
    captured = target.run(ids_BT, layers=(1, 3, 5), **settings)
    aux_BTF, last_BTH, _ = independent(model, ids_BT, (1, 3, 5), **settings)
    assert torch.equal(captured.aux_BTF, aux_BTF)
    assert torch.equal(captured.last_BTH, last_BTH)

    ours, theirs = (DynamicCache(config=model.config) for _ in range(2))
    for piece in (ids_BT[:, :6], ids_BT[:, 6:]):
        captured = target.run(piece, layers=(1, 6), cache=ours)
        aux_BTF, last_BTH, _ = independent(model, piece, (1, 6), cache=theirs, use_cache=True)
        assert torch.equal(captured.aux_BTF, aux_BTF)
        assert torch.equal(captured.last_BTH, last_BTH)
    assert ours.get_seq_length() == 9


def test_c06_planted_shift_by_one_layer_is_seen(make_model):
    model = make_model()
    target = Target.from_model(model)
    ids_BT = torch.arange(3, 12)[None]
    aux_BTF, _, _ = independent(model, ids_BT, (1, 3, 5))
    assert not torch.equal(target.run(ids_BT, layers=(2, 4, 6)).aux_BTF, aux_BTF)
    assert not torch.equal(target.run(ids_BT, layers=(3, 1, 5)).aux_BTF, aux_BTF)


def test_c06_shallow_targets_refuse_the_defaults_and_take_explicit_layers(make_model):
    shallow = Target.from_model(make_model(num_hidden_layers=4))
    with pytest.raises(ValueError, match=r"num_layers is 4.*name the layers explicitly"):
        default_layers(shallow.num_layers)
    assert shallow.run(torch.tensor([[3, 4]]), layers=(1, 2, 3)).aux_BTF.shape == (1, 2, 96)
    for num_layers in range(1, 7):
        with pytest.raises(ValueError, match="three distinct"):
            default_layers(num_layers)
    assert default_layers(7) == (2, 3, 4)
    assert default_layers(30) == (2, 15, 27)
    assert default_layers(32) == (2, 16, 29)


@pytest.mark.parametrize(
    ("layers", "message"),
    [((7,), r"holds \[7\]"), ((-1, 2), r"holds \[-1\]"), ((1, 3, 1), "name each layer once")],
)
def test_wrong_layers_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        check_layers(layers, 6)


def test_running_inner_layers_stops_there(make_model):
    model = make_model()
    target = Target.from_model(model)
    ran = []
    for at, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda *_, at=at: ran.append(at))
    model.lm_head.register_forward_hook(lambda *_: ran.append("head"))
    target.run_inner(torch.tensor([[3, 4]]), layers=(2, 0))
    assert ran == [0, 1]
    ran.clear()
    target.run(torch.tensor([[3, 4]]), layers=(2,))
    assert ran == [0, 1, 2, 3, 4, 5]  # never the output head
    assert not [block for block in model.model.layers if block._forward_pre_hooks]
    with pytest.raises(ValueError, match="layers is empty"):
        target.run_inner(torch.tensor([[3]]), layers=())


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_rows_times_the_scale_enter_the_first_layer(family, make_target):
    target = make_target(family=family)
    ids_BT = torch.tensor([[5, 9, 2]])
    entering = target.run(ids_BT, layers=(0,)).aux_BTF
    torch.testing.assert_close(entering, target.embedding_VH[ids_BT] * target.embed_scale)
    assert (target.softcap is not None) == (family == "gemma")
    tied = target.output_VH.data_ptr() == target.embedding_VH.data_ptr()
    assert tied == (family != "qwen")


def test_the_target_is_frozen_in_eval_mode(make_target):
    target = make_target()
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.run(torch.tensor([[3, 4]]), layers=(1,)).aux_BTF.requires_grad


@pytest.mark.parametrize(
    ("config_class", "model_class", "more"),
    [
        (Qwen2Config, Qwen2ForCausalLM, {}),
        (MistralConfig, MistralForCausalLM, {"sliding_window": 4, "head_dim": 8}),
    ],
)
def test_other_families_are_found(config_class, model_class, more):
    target = Target.from_model(model_class(config_class(**TINY, **more)))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (6, 32, 64)


def test_a_nested_text_config_is_unwrapped():
    text = {k: v for k, v in TINY.items() if not k.endswith("token_id")} | {"head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 6, "patch_size": 4}
    config = Gemma3Config(
        text_config=text,
        vision_config=vision | {"num_attention_heads": 2, "image_size": 8},
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
    )
    model = Gemma3ForConditionalGeneration(config)
    target = Target.from_model(model)
    assert target.config.num_hidden_layers == 6
    assert target.decoder is model.get_decoder()
    assert target.embed_scale == pytest.approx(32**0.5)
    ids_BT = torch.tensor([[5, 9, 2, 7]])
    captured = target.run(ids_BT, layers=(1, 3, 5))
    aux_BTF, last_BTH, logits_BTV = independent(model, ids_BT, (1, 3, 5))
    assert torch.equal(captured.aux_BTF, aux_BTF)
    assert torch.equal(target.logits(last_BTH), logits_BTV)


def test_models_that_cannot_be_targets_are_refused():
    with pytest.raises(ValueError, match="encoder-decoder"):
        Target.from_model(
            T5ForConditionalGeneration(
                T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=2, num_heads=2, d_kv=8)
            )
        )
    with pytest.raises(ValueError, match="bias on its output head"):
        Target.from_model(PhiForCausalLM(PhiConfig(**TINY | {"num_key_value_heads": 4})))
    with pytest.raises(ValueError, match="logits are not output head"):
        Target.from_model(GraniteForCausalLM(GraniteConfig(**TINY, logits_scaling=8.0)))


def test_a_model_that_looks_ahead_is_refused(make_model):
    model = make_model()
    for block in model.model.layers:
        block.self_attn.is_causal = False
    inner = model.model.forward

    def sees_all(input_ids, **settings):
        length = input_ids.shape[1]
        everything = torch.zeros(len(input_ids), 1, length, length)
        return inner(input_ids=input_ids, **settings | {"attention_mask": everything})

    model.model.forward = sees_all
    with pytest.raises(ValueError, match="is not causal"):
        Target.from_model(model)


def test_a_model_without_a_list_of_layers_is_refused(make_model):
    model = make_model()
    model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match="no list of 5 decoder layers"):
        Target.from_model(model)


def test_c13_a_padded_vocabulary_keeps_both_sizes(make_model, make_tokenizer):
    tokenizer = make_tokenizer()
    size = 1 + max(tokenizer.get_vocab().values())
    target = Target.from_model(make_model(vocab_size=size + 31), tokenizer)
    assert (target.vocab_size, target.tokenizer_size) == (size + 31, size)
    assert target.logits(target.run(torch.tensor([[3]])).last_BTH).shape[-1] == size + 31
    with pytest.raises(ValueError, match=rf"ids to {size - 1}, the output head has 128 rows"):
        Target.from_model(make_model(vocab_size=128), tokenizer)


def test_end_tokens_come_from_where_generation_looks(make_model, make_tokenizer):
    model = make_model()
    model.generation_config.eos_token_id = [2, 9]
    assert Target.from_model(model, make_tokenizer()).eos_ids == (2, 9)
    model.generation_config.eos_token_id = None
    assert Target.from_model(model, make_tokenizer()).eos_ids == (2,)


def test_loading_a_folder_gives_the_same_target(tmp_path, make_model, make_tokenizer):
    model, tokenizer = make_model("gemma"), make_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = Target.load(str(tmp_path))
    built = Target.from_model(model, tokenizer)
    ids_BT = torch.tensor([[3, 5, 8]])
    assert torch.equal(loaded.run(ids_BT).last_BTH, built.run(ids_BT).last_BTH)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.chat_template == tokenizer.chat_template
    assert Target.load(str(tmp_path), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_the_fingerprint_sees_weights_of_the_older_form(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"one")
    first = files_hash(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"two")
    assert files_hash(tmp_path) != first


def test_the_fingerprint_sees_weights_config_and_tokenizer(tmp_path, make_model, make_tokenizer):
    def save(model, tokenizer):
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        return Target.load(str(tmp_path)).fingerprint()

    prints = [save(make_model(), make_tokenizer()), Target.from_model(make_model()).fingerprint()]
    assert save(make_model(), make_tokenizer()) == prints[0]
    assert Target.from_model(make_model()).fingerprint() == prints[1]
    changed = make_model()
    with torch.no_grad():
        changed.model.layers[3].mlp.up_proj.weight[0, 0] += 1e-3
    prints += [save(changed, make_tokenizer()), Target.from_model(changed).fingerprint()]
    prints += [save(make_model(), make_tokenizer("strict"))]
    prints += [save(make_model(rms_norm_eps=1e-4), make_tokenizer())]
    assert len(set(prints)) == len(prints)


def test_names_that_lead_nowhere_are_refused(tmp_path):
    with pytest.raises(ValueError, match="neither 'smollm2-demo'"):
        find_folder("nosuch")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        find_folder(str(tmp_path))
    T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=2, num_heads=2, d_kv=8)
    ).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="does not load as a causal language model"):
        Target.load(str(tmp_path / "t5"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_target_is_named(tmp_path, make_model, name):
    make_model("llama").save_pretrained(tmp_path / "target")
    path = tmp_path / "target" / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"target '.*target' .* does not load .* fetch it again"):
        Target.load(str(tmp_path / "target"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_named_and_large_finite_ones_are_not(
    dtype: torch.dtype,
) -> None:
    module = torch.nn.ParameterDict()
    for name, values in {
        "nan": [1.0, torch.nan, 2.0],
        "inf": [1.0, torch.inf, 2.0],
        "both": [torch.inf, -torch.inf, 0.0],
        "large": [torch.finfo(dtype).max] * 3,  # whose sum is infinite
        "small": [1.0, -1.0, 0.0],
    }.items():
        module[name] = torch.nn.Parameter(torch.tensor(values, dtype=dtype))
    module["ids"] = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    assert non_finite(module) == ["nan", "inf", "both"]
