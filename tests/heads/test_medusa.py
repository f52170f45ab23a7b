"""Medusa heads: where they start, what they refuse, and both published layouts."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.heads import DraftHead, load_head, save_head
from outrider.heads.medusa import MedusaConfig

SETTINGS = ["medusa", "medusa_shared", "medusa_reduced"]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_new_head_says_what_the_target_says_of_the_state(name: str, ref: ModuleType):
    given = ref.make_head(**ref.FLAGS[name])
    fresh = type(given)(given.config, given.draft_ids_W if given.config.is_reduced else None)
    fresh = fresh.double().attach(given.lent()).start_from_target()
    state = torch.randn(5, ref.WIDTH, dtype=torch.float64)
    wanted = state @ given.lent().output_VH[given.draft_ids_W].T
    for depth in range(given.config.max_drafts):
        torch.testing.assert_close(fresh.draft_logits(state, depth), wanted)


def test_tokens_change_nothing_and_rows_are_counted(ref: ModuleType):
    from outrider.heads import HeadCache

    head, cache = ref.make_head(**ref.FLAGS["medusa"]), HeadCache()
    feature = torch.randn(1, 4, ref.WIDTH, dtype=torch.float64)
    position = torch.arange(4)[None]
    one = head.step(feature, torch.zeros(1, 4, dtype=torch.int64), position, cache)
    two = head.step(feature, torch.ones(1, 4, dtype=torch.int64), position, cache, depth=1)
    assert torch.equal(one, two)
    assert cache.length == 8
    cache.truncate(3)
    assert cache.length == 3


def same_head(ours: DraftHead, again: DraftHead) -> None:
    assert again.config == ours.config
    theirs = again.state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    for name, value in ours.state_dict().items():
        assert torch.equal(theirs[name], value.to(theirs[name].dtype)), name


@pytest.mark.parametrize("name", SETTINGS)
def test_an_exported_head_comes_back_and_bears_vllms_names(
    name: str, ref: ModuleType, tmp_path: Path
):
    head = ref.make_head(**ref.FLAGS[name]).float()
    save_head(head, tmp_path / "head", provenance={"target": "t"})
    same_head(head, load_head(tmp_path / "head", head.lent()))
    config = json.loads((tmp_path / "head" / "config.json").read_text(encoding="utf-8"))
    found = load_file(tmp_path / "head" / "model.safetensors")
    heads, layers = head.config.max_drafts, config["num_hidden_layers"]
    # vllm/model_executor/models/medusa.py: parameters, and the token map that it reads by name.
    wanted = {
        f"blocks.{i}.layers.{j}.{part}"
        for i in range(heads)
        for j in range(layers)
        for part in ("weight", "bias")
    }
    if config["original_lm_head"]:
        wanted |= {"lm_head.weight"}
    else:
        wanted |= {f"lm_heads.{i}.weight" for i in range(heads)}
    wanted |= {"token_map"} if config["truncated_vocab_size"] < config["vocab_size"] else set()
    assert found.keys() == wanted
    assert config["num_heads"] == config["medusa_num_heads"] == heads
    assert config["medusa_fc_bias"] is True
    if "token_map" in found:
        assert torch.equal(found["token_map"], head.draft_ids_W)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_originals_names_are_read(version: str, ref: ModuleType, tmp_path: Path):
    settings: dict[str, Any] = dict(ref.FLAGS["medusa"], shared_output=version == "v2")
    head = ref.make_head(**settings).float()
    named = {}
    for name, value in head.state_dict().items():
        part = name.split(".")
        if part[0] == "blocks":
            named[f"{part[1]}.{part[3]}.linear.{part[4]}"] = value
        else:
            named[f"{part[1]}.1.weight"] = value
    folder = tmp_path / "theirs"
    folder.mkdir()
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    config["max_position_embeddings"] = head.config.max_position_embeddings
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(named, folder / "medusa_lm_head.safetensors")
    same_head(head, load_head(folder, head.lent()))


def test_a_missing_or_strange_tensor_is_refused(ref: ModuleType, tmp_path: Path):
    head = ref.make_head(**ref.FLAGS["medusa_reduced"]).float()
    folder = save_head(head, tmp_path / "head")
    whole = load_file(folder / "model.safetensors")
    for name in whole:
        less = {key: value for key, value in whole.items() if key != name}
        save_file(less, folder / "model.safetensors")
        with pytest.raises(ValueError, match=r"d2t is absent|missing"):
            load_head(folder, head.lent())
        save_file({**less, f"{name}.strange": whole[name]}, folder / "model.safetensors")
        with pytest.raises(ValueError, match=r"d2t is absent|unexpected"):
            load_head(folder, head.lent())


def test_shared_rows_of_another_target_are_refused(ref: ModuleType, tmp_path: Path):
    head = ref.make_head(**ref.FLAGS["medusa_shared"]).float()
    folder = save_head(head, tmp_path / "head")
    other = head.lent()._replace(output_VH=head.lent().output_VH * 1.01)
    with pytest.raises(ValueError, match=r"lm_head\.weight is not the target's output head"):
        load_head(folder, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shared_rows_may_come_from_the_target_in_half_precision(
    dtype: torch.dtype, ref: ModuleType, tmp_path: Path
):
    head = ref.make_head(**ref.FLAGS["medusa_shared"]).float()
    exact = head.lent()._replace(output_VH=head.lent().output_VH.float())
    rough = exact._replace(output_VH=exact.output_VH.to(dtype))
    folder = save_head(head.attach(rough), tmp_path / "rough")
    same_head(head, load_head(folder, exact))
    folder = save_head(head.attach(exact), tmp_path / "exact")
    same_head(head, load_head(folder, rough))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_draft_heads": 0}, "num_draft_heads is 0; it must be at least 1"),
        ({"num_draft_layers": 0}, "num_draft_layers is 0"),
        ({"kind": "eagle3"}, "kind is 'eagle3'; choose one of medusa"),
        ({"hidden_size": 16}, "hidden_size is 16; a medusa head continues the target's last"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str, ref: ModuleType):
    with pytest.raises(ValueError, match=message):
        MedusaConfig.from_target(ref.TARGET, **changes)
