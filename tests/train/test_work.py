"""Operations of a plan against what the same code does on real numbers, and against arithmetic."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from outrider.data.batches import Batches
from outrider.data.layout import layout_of
from outrider.data.packing import passes
from outrider.data.rows import Reading, read_rows
from outrider.data.states import OnlineFeatures, TargetStates
from outrider.data.store import PASS_TOKENS
from outrider.data.target import Target
from outrider.eval.link import tables
from outrider.eval.tune.gpus import SHEETS
from outrider.heads import HEADS
from outrider.train import muon, work
from outrider.train.kinds import EagleRun, HydraRun, MedusaRun, MtpRun
from outrider.train.machine import Machine, machine_named
from outrider.train.objectives import task_of
from outrider.train.optim import build
from outrider.train.recipe import parse
from outrider.train.start import make_head, settle

KINDS: list[tuple[type, tuple[str, ...]]] = [
    (EagleRun, ("--head", "eagle3", "--unroll-steps", "3", "--draft-vocab", "40")),
    (
        EagleRun,
        ("--head", "eagle3", "--draft-vocab", "40", "--freeze-output", "--head-layers", "2"),
    ),
    (EagleRun, ("--head", "eagle1")),
    (MedusaRun, ("--draft-vocab", "40")),
    (HydraRun, ("--draft-vocab", "40")),
    (MtpRun, ("--draft-vocab", "40")),
]


@pytest.fixture
def target(target_folder: Path) -> Target:
    return Target.load(str(target_folder))


def settings_of(kind: Any, flags: tuple[str, ...], target: Target, rows_file: Path) -> Any:
    given = ["--target", target.name, "--data", str(rows_file), "--output", "unused"]
    return parse([*given, "--max-length", "64", *flags], kind)


@pytest.mark.parametrize(("kind", "flags"), KINDS)
def test_a_step_takes_what_a_real_one_takes(
    kind: Any, flags: tuple[str, ...], target: Target, rows_file: Path
) -> None:
    settings = settings_of(kind, flags, target, rows_file)
    rows = read_rows(str(rows_file), target, Reading(max_length=64)).rows
    torch.manual_seed(0)
    vocabulary, head = make_head(settings, target, rows)
    settle(head, settings.head)
    ids_W = vocabulary.draft_ids_W if vocabulary else None
    layout = layout_of(target, head.config.aux_layers, "bfloat16")
    blank = work.blank_head(head.config, ids_W, settings, target)
    planned = work.step_ops(blank, settings, rows, layout)
    source = OnlineFeatures(target, rows, layers=head.config.aux_layers)
    batches = Batches(source, size=64, batch_size=1, seed=0)
    number = batches.epoch_length()
    places = [index * number // work.COUNTED_PACKS for index in range(work.COUNTED_PACKS)]
    task = task_of(head, settings.objective, num_steps=settings.num_steps)
    works = [task.prepare(batches.batch(0, place)) for place in places]
    with FlopCounterMode(display=False) as counter:
        for one in works:
            task(one).loss.backward()
    assert planned == counter.get_total_flops() / len(places) > 0
    assert {value.device.type for value in blank.parameters()} == {"meta"}
    assert torch.equal(blank.draft_ids_W, head.draft_ids_W)


def test_medusas_step_is_its_products(target: Target, rows_file: Path) -> None:
    """By hand: blocks and output rows, three products of each for weights that learn."""
    settings = settings_of(MedusaRun, ("--draft-vocab", "40"), target, rows_file)
    rows = read_rows(str(rows_file), target, Reading(max_length=64)).rows
    vocabulary, head = make_head(settings, target, rows)
    assert vocabulary is not None
    blank = work.blank_head(head.config, vocabulary.draft_ids_W, settings, target)
    layout = layout_of(target, (), "bfloat16")
    packed = Batches(work.BlankRows(rows, layout), size=64, batch_size=1, seed=0)
    number = packed.epoch_length()
    task = task_of(head, settings.objective, num_steps=4)
    plans = [task.prepare(packed.batch(0, index * number // 4)).plan for index in range(4)]
    pairs = sum(plan.predicted_P.shape[0] for plan in plans)
    width, size = target.hidden_size, 40
    teacher = 2 * pairs * width * size
    outputs = 3 * 2 * pairs * 4 * width * size
    # No gradient of the features: two products of the blocks, not three.
    blocks = 2 * 2 * pairs * 4 * width * width
    divergence = 2 * pairs * 4 * size  # one dot product of each pair's laws
    counted = 4 * work.step_ops(blank, settings, rows, layout)
    assert counted == teacher + outputs + blocks + divergence


@pytest.mark.parametrize("lengths", [[16, 12, 20, 9] * 7, [30], [300] * 9])
def test_passes_take_what_real_ones_take(target: Target, lengths: list[int]) -> None:
    rows = [type("R", (), {"__len__": lambda _, n=n: n, "ids": torch.zeros(n).long()})()
            for n in lengths]  # fmt: skip
    states = TargetStates(target, (2, 4))
    with FlopCounterMode(display=False) as counter:
        for places in passes(lengths, PASS_TOKENS):
            states.of([rows[place] for place in places])
    counted = counter.get_total_flops()
    # The counter leaves out the fused attention of a CPU.
    planned = work.forward_ops(target, rows)
    attention = sum(
        8 * 4 * 32 * len(places) * lengths[places[0]] ** 2
        for places in passes(lengths, PASS_TOKENS)
    )
    assert planned - attention <= counted <= planned
    assert counted in (planned, planned - attention)


def test_experts_count_by_the_share_that_a_token_passes(target: Target) -> None:
    whole = work.block_parameters(target)
    blocks = torch.nn.ModuleList(target.blocks)
    blocks[0].experts = torch.nn.ParameterList([torch.zeros(10, 10) for _ in range(8)])
    for names in (
        ("num_local_experts", "num_experts_per_tok"),
        ("n_routed_experts", "num_experts_per_tok"),  # DeepSeek
        ("moe_num_experts", "moe_k"),  # Ernie
        ("num_experts", "top_k_experts"),  # Gemma
    ):
        config = type(target.config)(**target.config.to_dict())
        for name, value in zip(names, (8, 2), strict=True):
            setattr(config, name, value)
        mixed = dataclasses.replace(target, blocks=blocks, config=config)
        assert work.block_parameters(mixed) == whole + 200, names


def test_the_optimisers_work_is_counted(target: Target, rows_file: Path) -> None:
    flags = ("--head", "eagle3", "--draft-vocab", "40", "--optimizer", "muon", "--ema", "0.9")
    settings = settings_of(EagleRun, flags, target, rows_file)
    rows = read_rows(str(rows_file), target, Reading(max_length=64)).rows
    vocabulary, head = make_head(settings, target, rows)
    assert vocabulary is not None
    blank = work.blank_head(head.config, vocabulary.draft_ids_W, settings, target)
    groups = build(head, settings.optim)[-1].param_groups
    made = sum(muon.flop(x, group["split"]) for group in groups for x in group["params"])
    assert work.muon_ops(blank, settings) == made > 0
    inner = sum(x.numel() for group in groups for x in group["params"])
    all_ = sum(x.numel() for x in head.parameters())
    assert work.moment_bytes(blank, settings) == 4 * (7 * (all_ - inner) + all_ + 3 * all_)
    plain = dataclasses.replace(settings, optim=dataclasses.replace(settings.optim, ema=None))
    assert work.moment_bytes(blank, plain) == 4 * (7 * (all_ - inner) + all_)


def test_heads_of_every_kind_can_be_blank(target: Target) -> None:
    assert {kind for run, _ in KINDS for kind in [run]} == {EagleRun, MedusaRun, HydraRun, MtpRun}
    assert set(HEADS) == {"eagle1", "eagle3", "medusa", "hydra", "mtp"}
    assert tables(target).output_VH.device.type == "cpu"


MACHINE: dict[str, Any] = {
    "name": "box", "source": "measured", "is_measured": True, "device": "cpu",
    "forward": {"float32": 1e9}, "step": {"fp32": 1e9}, "optimiser": {"adamw": 1e9},
    "write": 1e8, "read": 1e9,
}  # fmt: skip


def test_a_machine_comes_back_from_its_file(tmp_path: Path) -> None:
    machine = Machine(**MACHINE)
    machine.save(tmp_path / "box.json")
    assert machine_named(str(tmp_path / "box.json")) == machine


def test_a_gpu_is_an_estimate_from_its_data_sheet() -> None:
    machine = machine_named("h100")
    assert not machine.is_measured
    assert machine.rate("forward", "bfloat16") == pytest.approx(0.4 * 989e12)
    assert machine_named("h100", 0.5).rate("step", "bf16") == pytest.approx(0.5 * 989e12)
    assert all(sheet.source for sheet in SHEETS.values())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not a file that outrider plan --measure wrote"),
        ("[1]", "not a file that outrider plan --measure wrote"),
        (json.dumps({**MACHINE, "wheels": 4}), "unknown keys wheels"),
        (json.dumps({**MACHINE, "write": 0}), "write is 0; allowed: above 0"),
        (json.dumps({**MACHINE, "step": {"fp32": -1.0}}), "allowed: above 0"),
        (json.dumps({**MACHINE, "start": -5}), "start is -5; allowed: at least 0"),
        (json.dumps({**MACHINE, "start": float("nan")}), "start is nan"),
        (json.dumps({**MACHINE, "memory": 0}), "memory is 0; allowed: above 0"),
        (json.dumps({**MACHINE, "memory": "64GB"}), "not a file that outrider plan"),
    ],
)
def test_other_files_are_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "box.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        machine_named(str(tmp_path / "box.json"))


def test_what_a_machine_was_not_measured_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'box' has no rate of step for bf16 \(it has fp32\)"):
        Machine(**MACHINE).rate("step", "bf16")
    with pytest.raises(ValueError, match="known are a100, h100"):
        machine_named("abacus")
