"""Modules that targets ship: read without the rest, refused where unfit, exported by name."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.heads import load_head, save_head
from outrider.heads.formats import shipped as shipped_module
from outrider.heads.formats.shipped import read_shipped

NAMES = ["mimo", "qwen3", "qwen3_5", "deepseek"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [None, 20])
def test_the_export_bears_the_published_names_and_weights(
    name: str, size: int | None, folder: Callable[[str], Path], tmp_path: Path, kit: ModuleType
) -> None:
    head = kit.make_head(name, folder(name), draft_vocab_size=size)
    out = save_head(head, tmp_path / "out", dtype=torch.bfloat16)
    found, wanted = load_file(out / "model.safetensors"), kit.module_tensors(name)
    assert found.keys() - {"d2t", "t2d"} == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key].double(), value), key
    again = load_head(out, kit.tables(), dtype=torch.float64)
    assert again.config == head.config
    state, place = torch.randn(1, 3, kit.WIDTH, dtype=torch.float64), torch.arange(3)[None]
    ids = torch.tensor([[4, 7, 1]])
    assert torch.equal(again.step(state, ids, place), head.step(state, ids, place))


def test_only_the_modules_shard_is_opened(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, kit: ModuleType
) -> None:
    opened: list[str] = []
    real = shipped_module.safe_open

    def watched(path: Path, **more: Any) -> Any:
        opened.append(path.name)
        return real(path, **more)

    monkeypatch.setattr(shipped_module, "safe_open", watched)
    kit.make_head("mimo", folder("mimo"))
    assert opened == ["two.safetensors"]


def test_the_first_of_several_modules_is_taken(
    tmp_path: Path, ref: ModuleType, kit: ModuleType
) -> None:
    for name, second in (("mimo", "model.mtp_layers.1."), ("qwen3", "mtp.layers.1.")):
        found, style = kit.module_tensors(name), kit.STYLES[name]
        more = {
            key.replace(style.prefix + style.block, second): value + 1
            for key, value in found.items()
            if key.startswith(style.prefix + style.block)
        }
        head = kit.make_head(name, kit.write_target(tmp_path / name, found | more))
        assert head.config.extra["started_from"].endswith("module 1 of 2")
        with torch.no_grad():
            ours = ref.teacher_forced(head, ref.Packed())
        assert ref.difference(ours, kit.reference(name, found, ref, style)) < 1e-9


def test_the_tables_a_module_bears_must_be_the_targets(tmp_path: Path, kit: ModuleType) -> None:
    found, lent, prefix = (
        kit.module_tensors("deepseek"),
        kit.tables(),
        kit.STYLES["deepseek"].prefix,
    )
    copies = {
        f"{prefix}embed_tokens.weight": lent.embedding_VH,
        f"{prefix}shared_head.head.weight": lent.output_VH,
    }
    kit.make_head("deepseek", kit.write_target(tmp_path / "same", found | copies))
    for key, table in copies.items():
        other = found | copies | {key: table + 1}
        with pytest.raises(ValueError, match="is not the target's own table"):
            kit.make_head("deepseek", kit.write_target(tmp_path / "other", other))


WEIGHT = torch.zeros(4, 4)
P = "model.layers.4."


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({f"{P}mlp.experts.0.gate_proj.weight": WEIGHT}, "is a mixture of experts"),
        ({f"{P}mlp.gate.weight": WEIGHT}, "is a mixture of experts"),
        ({f"{P}self_attn.kv_a_proj_with_mqa.weight": WEIGHT}, "has latent attention"),
        ({f"{P}eh_proj.weight_scale_inv": WEIGHT}, "is quantised"),
        ({f"{P}self_attn.o_proj.bias": WEIGHT}, "has an attention of its own kind"),
        ({f"{P}strange.weight": WEIGHT}, "unexpected"),
        ({f"{P}eh_proj.weight": torch.zeros(32, 32)}, r"eh_proj.weight is \[32, 32\]"),
        ({f"{P}enorm.weight": torch.zeros(32, dtype=torch.int8)}, "is torch.int8"),
        ({f"{P}enorm.weight": torch.zeros(32).to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
    ],
)
def test_blocks_that_the_head_cannot_hold_are_refused(
    more: dict[str, Tensor], message: str, tmp_path: Path, kit: ModuleType
) -> None:
    found = kit.module_tensors("deepseek") | more
    with pytest.raises(ValueError, match=message):
        kit.make_head("deepseek", kit.write_target(tmp_path, found))


def test_a_missing_tensor_is_refused(tmp_path: Path, kit: ModuleType) -> None:
    whole = kit.module_tensors("mimo")
    for name in whole:
        less = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(ValueError, match=r"missing|unexpected|is \["):
            kit.make_head("mimo", kit.write_target(tmp_path, less))


def test_targets_without_a_module_are_refused(tmp_path: Path, kit: ModuleType) -> None:
    save_file({"model.layers.3.eh_proj.weight": WEIGHT}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="ships no MTP module"):
        read_shipped(tmp_path, kit.LAYERS, kit.tables())
    with pytest.raises(ValueError, match="has neither"):
        read_shipped(tmp_path / "none", kit.LAYERS, kit.tables())


def test_another_width_than_the_modules_is_refused(
    folder: Callable[[str], Path], kit: ModuleType
) -> None:
    with pytest.raises(ValueError, match="head_intermediate is 24 but the target's MTP module"):
        kit.make_head("qwen3", folder("qwen3"), intermediate_size=24)


def test_a_shard_without_its_tensor_is_refused(
    folder: Callable[[str], Path], kit: ModuleType
) -> None:
    path = folder("mimo")
    found = load_file(path / "two.safetensors")
    found.pop("model.mtp_layers.0.input_proj.weight")
    save_file(found, path / "two.safetensors")
    with pytest.raises(ValueError, match=r"lacks model\.mtp_layers\.0\.input_proj\.weight"):
        read_shipped(path, kit.LAYERS, kit.tables())
