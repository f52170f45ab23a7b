"""Hydra heads: where they start, what they carry, and the original's names."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.heads import HeadCache, load_head, save_head
from outrider.heads.hydra import HydraConfig

SETTINGS = ["hydra", "hydra_reduced", "hydra_prefix"]


@pytest.mark.parametrize("name", ["hydra", "hydra_reduced"])
def test_a_new_head_says_what_the_target_says_of_the_state(name: str, ref: ModuleType):
    given = ref.make_head(**ref.FLAGS[name])
    fresh = type(given)(given.config, given.draft_ids_W if given.config.is_reduced else None)
    fresh = fresh.double().attach(given.lent()).start_from_target()
    carried = torch.randn(1, 1, ref.WIDTH, dtype=torch.float64)
    wanted = carried[0] @ given.lent().output_VH[given.draft_ids_W].T
    for depth in range(given.config.max_drafts):
        token = torch.tensor([[depth + 5]])
        carried = fresh.step(carried, token, torch.tensor([[depth]]), depth=depth)
        torch.testing.assert_close(fresh.draft_logits(carried[0], depth), wanted)


def test_a_new_prefix_layer_starts_from_the_size_of_the_targets_norm(ref: ModuleType):
    head = ref.make_head(**ref.FLAGS["hydra_prefix"])
    head.attach(head.lent()._replace(norm_H=torch.tensor([3.0, 4.0] * (ref.WIDTH // 2))))
    head.start_from_target()
    assert head.prefix_norm.weight.tolist() == pytest.approx([12.5**0.5] * ref.WIDTH)


def test_a_new_head_raises_embeddings_to_the_size_of_states(ref: ModuleType):
    head = ref.make_head(**ref.FLAGS["hydra_reduced"])
    embedding_VH = torch.full_like(head.lent().embedding_VH, 0.1)
    head.attach(head.lent()._replace(embedding_VH=embedding_VH, norm_H=torch.full((32,), 1.5)))
    assert head.start_from_target().config.embed_gain == 16
    other = ref.make_head(**ref.FLAGS["hydra_reduced"])
    other.follow(head)
    assert other.config == head.config


def test_files_hold_what_the_original_code_computes_with_plain_embeddings(
    ref: ModuleType, tmp_path: Path
):
    """hydra/model/hydra_heads/mlp_head.py, by the names in the file."""
    head = ref.make_head(**ref.FLAGS["hydra"]).float()
    found = load_file(save_head(head, tmp_path / "head") / "model.safetensors")
    state, tokens = torch.randn(1, 1, ref.WIDTH), [5, 9, 2]
    carried, row = state, state[0, 0]
    for depth, token in enumerate(tokens):
        carried = head.step(carried, torch.tensor([[token]]), torch.tensor([[0]]), depth=depth)
        row = torch.cat([row, head.lent().embedding_VH[token].float()])
        x = row
        for layer in range(2):
            part = {k: found[f"hydra_mlp.{depth}.{layer}.linear.{k}"] for k in ("weight", "bias")}
            kept = x
            if layer == 0:
                name = f"hydra_mlp.{depth}.0.res_connection"
                kept = found[f"{name}.weight"] @ x + found[f"{name}.bias"]
            x = kept + torch.nn.functional.silu(part["weight"] @ x + part["bias"])
        lm_head = f"hydra_lm_head.{depth}"
        wanted = found[f"{lm_head}.weight"] @ x + found[f"{lm_head}.bias"]
        found_logits = head.draft_logits(carried[0], depth)[0]
        torch.testing.assert_close(found_logits, wanted, rtol=1e-4, atol=1e-3)


def test_only_the_prefix_layer_keeps_keys_and_only_of_the_text(ref: ModuleType):
    for name in ("hydra", "hydra_prefix"):
        head, cache = ref.make_head(**ref.FLAGS[name]), HeadCache()
        feature = torch.randn(1, 4, ref.WIDTH, dtype=torch.float64)
        ids, position = torch.arange(4)[None], torch.arange(4)[None]
        carried = head.step(feature, ids, position, cache)[:, -1:]
        assert carried.shape[-1] == 2 * ref.WIDTH
        kept = cache.length
        longer = head.step(carried, ids[:, :1], position[:, :1] + 4, cache, depth=1)
        assert torch.equal(longer[..., : 2 * ref.WIDTH], carried)
        cache.truncate(kept)
        again = head.step(feature[:, :1], ids[:, :1], position[:, :1] + 4, cache)
        both = torch.cat([feature, feature[:, :1]], 1)
        whole = head.step(both, torch.tensor([[0, 1, 2, 3, 0]]), torch.arange(5)[None])
        torch.testing.assert_close(again[:, 0], whole[:, -1])


@pytest.mark.parametrize("name", SETTINGS)
def test_an_exported_head_comes_back_under_the_originals_names(
    name: str, ref: ModuleType, tmp_path: Path
):
    head = ref.make_head(**ref.FLAGS[name]).float()
    folder = save_head(head, tmp_path / "head", provenance={"target": "t"})
    again = load_head(folder, head.lent())
    assert again.config == head.config
    assert again.state_dict().keys() == head.state_dict().keys()
    for key, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    found = load_file(folder / "model.safetensors")
    config = head.config
    # hydra/model/hydra_heads/{mlp_head,prefix_mlp_head}.py: dropout takes every other place.
    place = (lambda j: 2 * j + 1) if config.prefix_layer else (lambda j: j)
    wanted = {
        f"hydra_mlp.{i}.{place(j)}.{part}.{kind}"
        for i in range(config.max_drafts)
        for j in range(config.num_draft_layers)
        for part in (("linear", "res_connection") if j == 0 else ("linear",))
        for kind in ("weight", "bias")
    }
    if not config.shared_output:
        wanted |= {
            f"hydra_lm_head.{i}.{kind}"
            for i in range(config.max_drafts)
            for kind in ("weight", "bias")
        }
    if config.prefix_layer:
        norms = ("input_layernorm", "post_attention_layernorm")
        parts = [f"self_attn.{x}_proj" for x in "qkvo"] + [
            f"mlp.{x}_proj" for x in ("gate", "up", "down")
        ]
        wanted |= {f"prefix_embeding_layer.layers.0.{part}.weight" for part in (*parts, *norms)}
        wanted |= {"prefix_embeding_layer.norm.weight"}
    assert found.keys() - {"d2t", "t2d"} == wanted
    assert {"d2t", "t2d"} <= found.keys() or not config.is_reduced


def test_a_missing_tensor_or_an_output_bias_is_refused(ref: ModuleType, tmp_path: Path):
    head = ref.make_head(**ref.FLAGS["hydra"]).float()
    folder = save_head(head, tmp_path / "head")
    whole = load_file(folder / "model.safetensors")
    less = {key: value for key, value in whole.items() if key != "hydra_mlp.1.0.linear.bias"}
    save_file(less, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing hydra_mlp\.1\.0\.linear\.bias"):
        load_head(folder, head.lent())
    whole["hydra_lm_head.0.bias"][3] = 1
    save_file(whole, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected hydra_lm_head\.0\.bias"):
        load_head(folder, head.lent())


def test_a_head_of_the_original_code_is_refused_in_words(ref: ModuleType, tmp_path: Path):
    head = ref.make_head(**ref.FLAGS["hydra"]).float()
    folder = save_head(head, tmp_path / "head")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del config["outrider"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="a Hydra head made elsewhere"):
        load_head(folder, head.lent())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_draft_heads": 0}, "num_draft_heads is 0; it must be at least 1"),
        ({"num_draft_layers": 0}, "num_draft_layers is 0"),
        ({"embed_gain": 3.0}, "embed_gain is 3.0; give a power of two"),
        ({"hidden_size": 16}, "hidden_size is 16; a hydra head continues the target's last"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str, ref: ModuleType):
    with pytest.raises(ValueError, match=message):
        HydraConfig.from_target(ref.TARGET, **changes)
