"""Attention of unrolled steps: gradients, the FlexAttention form, and memory."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from outrider.heads import RowPlan, unroll
from outrider.heads.attention import chain_attention, narrow, own_in_window
from outrider.heads.flex import Reach, flex_chain_attention

NO_COMPILE = "ignore:flex_attention called without torch.compile"


def inputs(plan: RowPlan, steps: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    rows, positions = plan.row_N.shape[0], plan.document_M.shape[0]
    shapes = [(rows, 6, 16), (positions, 2, 16), (positions, 2, 16), *[(rows, 2, 16)] * 2 * steps]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def run(
    plan: RowPlan, tensors: list[Tensor], flex: bool = False, window: int | None = None
) -> Tensor:
    q, key, value, *own = tensors
    step = len(own) // 2
    keys, values = own_in_window(own[:step], window, step), own_in_window(own[step:], window, step)
    if flex:
        reach = Reach.of(plan.row_N, plan.document_M, window, step)
        return flex_chain_attention(q, key, value, keys, values, reach)
    blocks = narrow(plan.blocks, plan.row_N, window, step)
    return chain_attention(q, key, value, keys, values, blocks)


def dense(plan: RowPlan, tensors: list[Tensor], window: int | None = None) -> Tensor:
    """The same attention with one whole mask and autograd."""
    q, key, value, *own = tensors
    step, rows = len(own) // 2, q.shape[0]
    keys, values = torch.cat([key, *own[:step]]), torch.cat([value, *own[step:]])
    # Positions of everything: step-0 keys at their own, a row's key of step j at j after it.
    place, row = torch.arange(key.shape[0]), plan.row_N[:, None]
    same = plan.document_M[place][None] == plan.document_M[plan.row_N][:, None]
    seen = [same & (place[None] <= row)]
    ahead = [row + step - place[None]]
    for own_step in range(1, step + 1):
        seen.append(torch.eye(rows).bool())
        ahead.append(torch.full((rows, rows), step - own_step))
    mask = torch.cat(seen, dim=1) & (torch.cat(ahead, dim=1) < (window or 1000))
    keys, values = keys.repeat_interleave(3, 1), values.repeat_interleave(3, 1)
    scores = torch.einsum("nae,sae->ans", q, keys) / 4
    probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("ans,sae->nae", probs, values).flatten(1)


@pytest.fixture(params=[1, 2, 256], ids=lambda size: f"blocks_of_{size}")
def plan(
    request: pytest.FixtureRequest, ref: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> RowPlan:
    monkeypatch.setattr("outrider.heads.plan.BLOCK_ROWS", request.param)
    data = ref.Packed()
    return RowPlan.from_mask(data.mask, data.document, 3)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 40])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_values_and_gradients_equal_dense_attention(plan: RowPlan, steps: int, window: int | None):
    tensors = inputs(plan, steps)
    ours, theirs = run(plan, tensors, window=window), dense(plan, tensors, window)
    assert torch.allclose(ours, theirs, atol=1e-12)
    weight = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * weight).sum(), tensors, materialize_grads=True)
    wanted = torch.autograd.grad((theirs * weight).sum(), tensors)
    for a, b in zip(mine, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.filterwarnings(NO_COMPILE)
@pytest.mark.parametrize("window", [None, 1, 2, 5])
@pytest.mark.parametrize("steps", [0, 2])
def test_flex_equals_blocks(ref: ModuleType, steps: int, window: int | None):
    data = ref.Packed()
    plan = RowPlan.from_mask(data.mask, data.document, 3)
    tensors = [tensor.detach() for tensor in inputs(plan, steps, torch.float32)]
    ours, theirs = run(plan, tensors, True, window), run(plan, tensors, window=window)
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.filterwarnings(NO_COMPILE)
@pytest.mark.parametrize("name", ["eagle3", "window_2", "mixed_window"])
def test_unroll_takes_either_attention(name: str, ref: ModuleType):
    head, data = ref.make_head(**ref.FLAGS[name]), ref.Packed()
    plan = RowPlan.from_mask(data.mask, data.document, 3)
    with torch.no_grad():
        feature = head.project(data.aux, data.last)
        args = (head, feature, data.ids, data.position, plan)
        for a, b in zip(unroll(*args), unroll(*args, attention="flex"), strict=True):
            assert torch.allclose(a, b, atol=1e-9)
        with pytest.raises(ValueError, match="attention is 'flash'; choose blocks or flex"):
            unroll(*args, attention="flash")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_equals_blocks_on_a_gpu(dtype: torch.dtype):
    """Values and gradients of the compiled kernel, at sizes that are no multiples of its blocks."""
    document = torch.ones(1, 700, dtype=torch.int64)
    document[:, 300:] = 2
    mask = torch.zeros_like(document, dtype=torch.bool)
    mask[:, 100:290] = mask[:, 350:] = True
    plan = RowPlan.from_mask(mask, document, 3)
    shapes = [(plan.row_N.shape[0], 6, 64), (700, 2, 64), (700, 2, 64)]
    shapes += [(plan.row_N.shape[0], 2, 64)] * 4
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]
    plan = plan.to("cuda")
    ours, theirs = run(plan, tensors, flex=True), run(plan, tensors)
    room = 2e-2 if dtype == torch.bfloat16 else 2e-3
    assert torch.allclose(ours, theirs, atol=room)
    weight = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * weight).sum(), tensors)
    wanted = torch.autograd.grad((theirs * weight).sum(), tensors)
    for a, b in zip(mine, wanted, strict=True):
        assert float((a - b).norm() / b.norm()) < room


def test_plan_keeps_equal_document_numbers_of_two_rows_apart():
    document = torch.ones(2, 4, dtype=torch.int64)
    plan = RowPlan.from_mask(torch.ones(2, 4, dtype=torch.bool), document, 2)
    assert plan.row_N.tolist() == [0, 1, 4, 5]
    assert plan.predicted_P.tolist() == [2, 3, 6, 7]
    assert plan.valid_PK.tolist() == [[True, False], [True, True]] * 2
    assert [block[:4] for block in plan.blocks] == [(0, 2, 0, 2), (2, 4, 4, 6)]


def test_c05_one_token_first_position_and_last_position():
    """Answers of one token, from position 0, and to the end: only tokens a row can predict."""
    document = torch.arange(1, 4).repeat_interleave(6).view(1, -1)
    mask = torch.zeros(1, 18, dtype=torch.bool)
    mask[0, 4] = True  # one token
    mask[0, 6:9] = True  # from position 0 of the second document
    mask[0, 16:18] = True  # to the last position of the third
    plan = RowPlan.from_mask(mask, document, 3)
    assert plan.predicted_P.tolist() == [4, 8, 16, 17]
    rows = plan.row_N[plan.pair_PK].where(plan.valid_PK, -1)
    assert rows.tolist() == [[2, 1, 0], [6, -1, -1], [14, 13, 12], [15, 14, 13]]
    assert bool((plan.token_KN <= 17).all())


@pytest.mark.parametrize("name", ["eagle3", "deep_window"])
def test_a_batch_without_supervised_tokens_runs(name: str, ref: ModuleType):
    head, data = ref.make_head(**ref.FLAGS[name]), ref.Packed()
    plan = RowPlan.from_mask(data.mask & False, data.document, 3)
    hidden = unroll(head, head.project(data.aux, data.last), data.ids, data.position, plan)
    assert [x.shape for x in hidden] == [(0, 32)] * 3
    assert plan.pairs(hidden).shape == (0, 3, 32)


@pytest.mark.parametrize(
    ("rows", "steps", "message"),
    [
        ([2, 1], 1, "rows must rise strictly"),
        ([5], 1, "lie in documents"),
        ([1], 0, "num_steps is 0"),
    ],
)
def test_bad_rows_are_refused(rows: list[int], steps: int, message: str):
    document = torch.tensor([[1, 1, 1, 1, 0, 0]])
    with pytest.raises(ValueError, match=message):
        RowPlan.from_rows(torch.tensor(rows), document, steps)


def test_rows_can_be_given_for_evaluation(ref: ModuleType):
    head, data = ref.make_head(), ref.Packed()
    with torch.no_grad():
        feature = head.project(data.aux, data.last)
        every = RowPlan.from_rows(
            (data.document.flatten() > 0).nonzero().flatten(), data.document, 3
        )
        few = RowPlan.from_rows(torch.tensor([3, 7, 20]), data.document, 3)
        args = (head, feature, data.ids, data.position)
        whole, part = unroll(*args, every), unroll(*args, few)
    index = torch.searchsorted(every.row_N, few.row_N)
    for a, b in zip(whole, part, strict=True):
        assert torch.allclose(a[index], b, atol=1e-12)
    assert bool(few.inside_KN[0].all())


@pytest.mark.slow
def test_memory_grows_with_the_length_and_not_with_its_square():
    """Saved for the backward pass: two lengths, about twice the bytes."""
    sizes = []
    for length in (1024, 2048):
        document = torch.ones(1, length, dtype=torch.int64)
        plan = RowPlan.from_mask(document.bool(), document, 2)
        tensors = inputs(plan, 1, torch.float32)
        saved = [0]

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved[0] += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(plan, tensors)
        sizes.append(saved[0])
    assert sizes[1] < 2.1 * sizes[0]
