"""MTP modules: where they start, what they refuse, and DeepSeek-V3's names."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.heads import load_head, save_head
from outrider.heads.mtp import MtpConfig
from outrider.heads.tables import START_NORM


def test_a_new_module_speaks_of_the_state_in_the_targets_order(ref: ModuleType):
    """Its layer is small at first, so logits are the target's own, flattened."""
    given = ref.make_head(**ref.FLAGS["mtp"])
    norm_H = torch.rand(ref.WIDTH, dtype=torch.float64) + 0.5
    fresh = type(given)(given.config).double()
    fresh.attach(given.lent()._replace(norm_H=norm_H)).start_from_target()
    raw = torch.randn(1, 1, ref.WIDTH, dtype=torch.float64)
    state = raw / raw.square().mean().sqrt() * norm_H
    hidden = fresh.step(state, torch.tensor([[7]]), torch.tensor([[0]]))
    ours = fresh.draft_logits(hidden[0]).detach()
    theirs = state[0] @ given.lent().output_VH.T
    assert float(torch.corrcoef(torch.cat([ours, theirs]))[0, 1]) > 0.98
    assert float(ours.std() / theirs.std()) == pytest.approx(START_NORM, rel=0.1)


@pytest.mark.parametrize("name", ["mtp", "mtp_reduced"])
def test_an_exported_module_comes_back_as_one_more_layer(
    name: str, ref: ModuleType, tmp_path: Path
):
    head = ref.make_head(**ref.FLAGS[name]).float()
    folder = save_head(head, tmp_path / "head", provenance={"target": "t"})
    again = load_head(folder, head.lent())
    assert again.config == head.config
    for key, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    parts = [f"self_attn.{x}_proj" for x in "qkvo"]
    parts += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    parts += ["enorm", "hnorm", "eh_proj", "shared_head.norm"]
    found = load_file(folder / "model.safetensors")
    # The target has 8 layers, 0 to 7.
    assert found.keys() - {"d2t", "t2d"} == {f"model.layers.8.{part}.weight" for part in parts}
    assert found["model.layers.8.eh_proj.weight"].shape == (ref.WIDTH, 2 * ref.WIDTH)


def test_the_embedding_comes_first_in_the_projection(ref: ModuleType):
    """As in DeepSeek-V3's code and vLLM's: eh_proj reads [embedding | state]."""
    head = ref.make_head(**ref.FLAGS["mtp"])
    head.eh_proj.weight.data[:, : ref.WIDTH] = 0
    state, place = torch.randn(1, 1, ref.WIDTH, dtype=torch.float64), torch.tensor([[0]])
    one = head.step(state, torch.tensor([[7]]), place)
    assert torch.equal(one, head.step(state, torch.tensor([[9]]), place))
    head.eh_proj.weight.data[:, : ref.WIDTH] = 0.1
    assert not torch.equal(one, head.step(state, torch.tensor([[9]]), place))


def test_a_missing_or_strange_tensor_is_refused(ref: ModuleType, tmp_path: Path):
    head = ref.make_head(**ref.FLAGS["mtp"]).float()
    folder = save_head(head, tmp_path / "head")
    whole = load_file(folder / "model.safetensors")
    for name in whole:
        less = {key: value for key, value in whole.items() if key != name}
        save_file(less, folder / "model.safetensors")
        with pytest.raises(ValueError, match="missing"):
            load_head(folder, head.lent())
    save_file(
        {**whole, "model.layers.7.strange": whole[name].clone()}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError, match="unexpected"):
        load_head(folder, head.lent())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "hidden_size is 16; a mtp head continues the target's last"),
        ({"kind": "eagle3"}, "kind is 'eagle3'; choose one of mtp"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str, ref: ModuleType):
    with pytest.raises(ValueError, match=message):
        MtpConfig.from_target(ref.TARGET, **changes)
