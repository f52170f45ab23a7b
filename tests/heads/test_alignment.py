"""Teacher-forced unrolling equals real drafting, logit for logit, in float64; faults are seen."""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.heads import DraftHead, EagleHead, HeadCache, RowPlan, States
from outrider.heads import unroll as unroll_module
from outrider.heads.fused import score_pairs, teacher_of

Logits = dict[tuple[int, int, int], Tensor]
NAMES = [
    "eagle1",
    "eagle3",
    "residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "all",
    "narrow",
    "reduced",
    "own_embedding",
    "one_fused",
    "five_fused",
    "own_heads",
    "two_layers",
    "three_layers",
    "window_1",
    "window_2",
    "window_4",
    "deep_window",
    "mixed_window",
    "deep_narrow",
    "medusa",
    "medusa_shared",
    "medusa_reduced",
    "hydra",
    "hydra_reduced",
    "hydra_prefix",
    "mtp",
    "mtp_reduced",
]

KINDS = ["medusa", "hydra", "hydra_prefix", "mtp"]
"""One setting of each kind but EAGLE."""

DEEP = ["two_layers", "window_2", "deep_window", "mixed_window"]
"""EAGLE-3 with several layers or a window."""


def test_every_setting_is_tested(ref: ModuleType):
    assert sorted(ref.FLAGS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_unroll_equals_brute_force(name: str, ref: ModuleType):
    theirs = ref.expected(name)
    assert len(theirs) > 20
    assert {key[2] for key in theirs} == {0, 1, 2}
    with torch.no_grad():
        assert (
            ref.difference(
                ref.teacher_forced(ref.make_head(**ref.FLAGS[name]), ref.packed_for(name)), theirs
            )
            < 1e-9
        )


@pytest.mark.parametrize("name", NAMES)
def test_drafting_with_a_cache_equals_brute_force(name: str, ref: ModuleType):
    """The decoding loop's calls: one root row, then one drafted row at a time, then roll back."""
    head, data = ref.make_head(**ref.FLAGS[name]), ref.packed_for(name)
    found: Logits = {}
    with torch.no_grad():
        feature = head.project(data.aux, data.last)
        for row, first, stop in data.documents():
            cache = HeadCache(capacity=4)
            for root in range(first, stop - 2):
                found |= draft_one(head, data, feature, cache, (row, root, stop))
    assert ref.difference(found, ref.expected(name)) < 1e-9


def draft_one(
    head: DraftHead, data: Any, feature: Tensor, cache: HeadCache, where: tuple[int, int, int]
) -> Logits:
    row, root, stop = where
    ids, position = data.ids[row : row + 1], data.position[row : row + 1]
    here = slice(root, root + 1)
    next_ids = ids[:, root + 1 : root + 2]
    hidden = head.step(feature[row : row + 1, here], next_ids, position[:, here], cache)
    kept = cache.length
    found: Logits = {}
    for step in range(3):
        target = root + step + 2
        if target >= stop:
            break
        if data.mask[row, target]:
            found[row, target, step] = head.draft_logits(hidden[0, 0], step)
        place = position[:, here] + step + 1
        hidden = head.step(hidden, ids[:, target : target + 1], place, cache, depth=step + 1)
    cache.truncate(kept)
    return found


@pytest.mark.parametrize("name", ["eagle3", *DEEP, *KINDS])
def test_packed_documents_equal_documents_alone(name: str, ref: ModuleType):
    head, data = ref.make_head(**ref.FLAGS[name]), ref.Packed()
    alone: Logits = {}
    with torch.no_grad():
        together = ref.teacher_forced(head, data)
        for row, first, stop in data.documents():
            one = ref.Packed()
            one.ids, one.position = (
                data.ids[row : row + 1, first:stop],
                data.position[row : row + 1, first:stop],
            )
            one.aux, one.last = (
                data.aux[row : row + 1, first:stop],
                data.last[row : row + 1, first:stop],
            )
            one.mask = data.mask[row : row + 1, first:stop]
            one.document = torch.ones_like(one.ids)
            found = ref.teacher_forced(head, one)
            alone |= {(row, first + m, k): value for (_, m, k), value in found.items()}
    assert ref.difference(together, alone) < 1e-12


@pytest.mark.parametrize("name", ["eagle3", *DEEP])
def test_tree_rows_equal_their_chains(name: str, ref: ModuleType):
    """Two branches drafted in one call with an ancestor mask equal each branch drafted alone."""
    head, data = ref.make_head(**ref.FLAGS[name]), ref.Packed()
    feature = head.project(data.aux, data.last)[1:, :5]
    ids, position = data.ids[1:, 1:6], data.position[1:, :5]

    def root() -> tuple[HeadCache, Tensor]:
        cache = HeadCache()
        return cache, head.step(feature, ids, position, cache)[:, -1:]

    tokens = torch.tensor([[7, 9]])
    alone = []
    for token in tokens[0]:
        cache, hidden = root()
        first = head.step(hidden, token.view(1, 1), torch.tensor([[5]]), cache)
        alone.append(head.step(first, torch.tensor([[3]]), torch.tensor([[6]]), cache))
    cache, hidden = root()
    mask = torch.ones(1, 1, 2, 7, dtype=torch.bool)
    mask[0, 0, 0, 6] = mask[0, 0, 1, 5] = False
    first = head.step(hidden.expand(1, 2, -1), tokens, torch.tensor([[5, 5]]), cache, mask)
    mask = torch.zeros(1, 1, 2, 9, dtype=torch.bool)
    mask[..., :5] = True
    mask[0, 0, 0, [5, 7]] = mask[0, 0, 1, [6, 8]] = True
    second = head.step(first, torch.tensor([[3, 3]]), torch.tensor([[6, 6]]), cache, mask)
    assert torch.allclose(second, torch.cat(alone, dim=1), atol=1e-12)
    cache.compact(torch.tensor([0, 1, 2, 3, 4, 6, 8]))
    again = head.step(second[:, 1:], torch.tensor([[1]]), torch.tensor([[7]]), cache)
    cache, hidden = root()
    hidden = head.step(hidden, tokens[:, 1:], torch.tensor([[5]]), cache)
    hidden = head.step(hidden, torch.tensor([[3]]), torch.tensor([[6]]), cache)
    chained = head.step(hidden, torch.tensor([[1]]), torch.tensor([[7]]), cache)
    assert torch.allclose(again, chained, atol=1e-12)


@pytest.mark.parametrize("name", ["eagle3", *DEEP])
def test_long_prefill_is_chunked_without_a_change(
    name: str, ref: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    head, data = ref.make_head(**ref.FLAGS[name]), ref.Packed()
    feature = head.project(data.aux, data.last)
    whole = head.step(feature, data.ids, data.position)
    monkeypatch.setattr("outrider.heads.layers.QUERY_CHUNK", 3)
    assert torch.allclose(head.step(feature, data.ids, data.position), whole, atol=1e-12)


@pytest.mark.parametrize("name", ["eagle3", *DEEP])
def test_blocks_of_rows_do_not_change_the_result(
    name: str, ref: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("outrider.heads.plan.BLOCK_ROWS", 2)
    with torch.no_grad():
        found = ref.teacher_forced(ref.make_head(**ref.FLAGS[name]), ref.Packed())
    assert ref.difference(found, ref.expected(name)) < 1e-9


# Planted faults: each changes one alignment decision, and the equality above must break.


def shift_first_token(plan: RowPlan) -> RowPlan:
    return dataclasses.replace(plan, next_M=plan.next_M - 1)


def shift_later_tokens(plan: RowPlan) -> RowPlan:
    return dataclasses.replace(plan, token_KN=plan.token_KN - 1)


def leak_documents(plan: RowPlan) -> RowPlan:
    blocks = tuple(block._replace(key_start=max(0, block.key_start - 2)) for block in plan.blocks)
    return dataclasses.replace(plan, blocks=blocks)


def see_the_future(plan: RowPlan) -> RowPlan:
    blocks = tuple(block._replace(hidden=block.hidden & False) for block in plan.blocks)
    return dataclasses.replace(plan, blocks=blocks)


def swap_steps(plan: RowPlan) -> RowPlan:
    return dataclasses.replace(plan, pair_PK=plan.pair_PK.roll(1, 1), valid_PK=plan.valid_PK)


@pytest.mark.parametrize(
    "fault", [shift_first_token, shift_later_tokens, leak_documents, see_the_future, swap_steps]
)
def test_a_wrong_plan_is_seen(
    fault: Callable[[RowPlan], RowPlan], ref: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    build = RowPlan.from_mask

    def wrong(mask: Tensor, document: Tensor, steps: int) -> RowPlan:
        return fault(build(mask, document, steps))

    monkeypatch.setattr(RowPlan, "from_mask", wrong)
    assert_seen(ref)


def assert_seen(ref: ModuleType, name: str = "eagle3") -> None:
    with torch.no_grad():
        found = ref.teacher_forced(ref.make_head(**ref.FLAGS[name]), ref.Packed())
    assert ref.difference(found, ref.expected(name)) > 1e-4


def shift_rows(plan: RowPlan) -> RowPlan:
    return dataclasses.replace(plan, row_N=(plan.row_N - 1).clamp(min=0))


KIND_FAULTS = {
    "medusa": [shift_rows, swap_steps],
    "hydra": [shift_rows, shift_later_tokens, swap_steps],
    "hydra_prefix": [shift_later_tokens, leak_documents, see_the_future, swap_steps],
    "mtp": [shift_first_token, shift_later_tokens, leak_documents, see_the_future, swap_steps],
}


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name in KINDS for fault in KIND_FAULTS[name]]
)
def test_a_wrong_plan_is_seen_by_every_kind(
    name: str,
    fault: Callable[[RowPlan], RowPlan],
    ref: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
):
    build = RowPlan.from_mask
    monkeypatch.setattr(RowPlan, "from_mask", lambda *args: fault(build(*args)))
    assert_seen(ref, name)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shift", [-1, 1])
def test_states_of_the_next_or_last_position_are_seen(name: str, shift: int, ref: ModuleType):
    data = ref.Packed()
    data.last = data.last.roll(shift, 1)
    with torch.no_grad():
        found = ref.teacher_forced(ref.make_head(**ref.FLAGS[name]), data)
    assert ref.difference(found, ref.expected(name)) > 1e-4


@pytest.mark.parametrize("name", ["eagle3", *KINDS])
def test_a_shifted_mask_is_seen(name: str, ref: ModuleType):
    data = ref.Packed()
    data.mask = data.mask.roll(1, 1)
    with torch.no_grad():
        found = ref.teacher_forced(ref.make_head(**ref.FLAGS[name]), data)
    assert ref.difference(found, ref.expected(name)) > 1e-4


@pytest.mark.parametrize("which", ["queries", "keys_values"])
def test_positions_that_stand_still_are_seen(
    which: str, ref: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    """Later steps rotated as if they were the first."""
    real = getattr(EagleHead, which)
    rows: list[Tensor] = []

    def still(self: EagleHead, x: Tensor, position: Tensor, weights: Any) -> Any:
        rows.append(position)
        mine = [row for row in rows if row.shape == position.shape]
        return real(self, x, mine[0], weights)

    monkeypatch.setattr(EagleHead, which, still)
    assert_seen(ref)


def test_missing_own_keys_are_seen(ref: ModuleType, monkeypatch: pytest.MonkeyPatch):
    real = unroll_module.__globals__["chain_attention"]

    def forgetful(
        q: Tensor, k: Tensor, v: Tensor, own_k: list[Tensor], own_v: list[Tensor], blocks: Any
    ) -> Tensor:
        return real(q, k, v, own_k[-1:], own_v[-1:], blocks)

    monkeypatch.setitem(unroll_module.__globals__, "chain_attention", forgetful)
    assert_seen(ref)


def test_target_features_in_later_steps_are_seen(ref: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """Feeding the target's own feature at every step is what drafting cannot do."""
    real = EagleHead.enter
    first: list[Tensor] = []

    def cheat(self: EagleHead, feature: Tensor, ids: Tensor, weights: Any) -> Any:
        first.append(feature)
        return real(self, first[0][: feature.shape[0]], ids, weights)

    monkeypatch.setattr(EagleHead, "enter", cheat)
    assert_seen(ref)


# The teacher


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "reduced", *KINDS, "medusa_shared"])
@pytest.mark.parametrize("shift", [0, 1, -1])
def test_loss_equals_brute_force_and_a_wrong_teacher_is_seen(
    name: str, shift: int, ref: ModuleType
):
    head, data = ref.make_head(**ref.FLAGS[name]), ref.Packed()
    wanted = torch.zeros((), dtype=torch.float64)
    for (row, m, step), logits in ref.expected(name).items():
        scores = head.lent().output_VH @ data.last[row, m - 1]
        scores = scores[head.draft_ids_W]
        p = torch.exp(scores - scores.max())
        log_q = logits - logits.max() - torch.exp(logits - logits.max()).sum().log()
        wanted -= 0.8**step * (p / p.sum() * log_q).sum()
    plan = RowPlan.from_mask(data.mask, data.document, 3)
    made = head.predict(States(data.aux, data.last, data.ids, data.position), plan)
    state_PH = data.last.flatten(0, 1)[plan.predicted_P - 1 + shift]
    teacher = teacher_of(head, state_PH, torch.float64)
    weight_PK = plan.valid_PK * 0.8 ** torch.arange(3)
    outputs = head.output_weights()[: 3 if len(head.output_weights()) > 1 else 1]
    scored = score_pairs(made.output_PKD, outputs, teacher, weight_PK)
    close = torch.allclose(scored.loss, wanted, atol=1e-9)
    assert close == (shift == 0)
