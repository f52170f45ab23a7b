"""The fused pass: chunked and compiled forms against the whole laws by autograd, in float64."""

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.heads import fused, losses
from outrider.heads.losses import OBJECTIVES
from outrider.heads.objective import Objective
from outrider.heads.tables import bend

ALL = tuple((name, 0.1 + 0.2 * place) for place, name in enumerate(OBJECTIVES))
CASES = {
    **{name: Objective(terms=((name, 1.0),)) for name in OBJECTIVES},
    **{f"{name} of top 4": Objective(terms=((name, 1.0),), top_k=4) for name in OBJECTIVES},
    **{f"{name}, warm": Objective(terms=((name, 1.0),), temperature=1.7) for name in OBJECTIVES},
    "one top token": Objective(terms=(("tv", 1.0),), top_k=1),
    "more top tokens than there are": Objective(terms=(("kl", 1.0),), top_k=1000),
    "another decay": Objective(terms=(("lk_lambda", 1.0),), lk_decay=0.5),
    "mixture": Objective(terms=(("tv", 0.9), ("soft_ce", 0.1))),
    "heavy": Objective(terms=(("soft_ce", 2.5),)),
    "all cut": Objective(terms=ALL, lk_decay=2.0, top_k=6, temperature=0.8),
    "all whole": Objective(terms=ALL),
}


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-10, atol=1e-12)


PREDICTED, STEPS = 7, 3


def grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def fused_inputs(ref: ModuleType, name: str) -> tuple[Tensor, Tensor, fused.Teacher, Tensor]:
    head = ref.make_head(**ref.FLAGS[name])
    torch.manual_seed(2)
    hidden = torch.randn(PREDICTED, STEPS, 32, dtype=torch.float64) * 0.3
    state = torch.randn(PREDICTED, 32, dtype=torch.float64) * 0.3
    weight = torch.rand(PREDICTED, STEPS, dtype=torch.float64)
    weight[2] = 0
    weight[4, 1] = 0
    output = head.output_weights()[0].detach().clone()
    return hidden, output, fused.teacher_of(head, state, torch.float64), weight


def full_logits(hidden: Tensor, table: Tensor, teacher: fused.Teacher) -> Tensor:
    """The draft's logits of all pairs at once, as drafting makes them."""
    logits = hidden @ table.T
    return bend(logits, teacher.tables) if teacher.bends_draft else logits


def full_teacher(teacher: fused.Teacher, objective: Objective) -> Tensor:
    """The target's law of all pairs at once."""
    scores = bend(teacher.state_PH @ teacher.table_WH.T, teacher.tables)
    return (scores / objective.temperature).softmax(-1).unsqueeze(1)


BENDS = {
    "plain": {},
    "scaled": {"logit_scale": 2.5},
    "capped": {"logit_scale": 2.0, "softcap": 1.5},
}


@pytest.mark.parametrize("setting", ["eagle1", "eagle3", "reduced"])
@pytest.mark.parametrize("bent", sorted(BENDS))
@pytest.mark.parametrize("name", sorted(CASES))
def test_fused_equals_autograd_in_any_chunks(
    name: str, bent: str, setting: str, ref: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    hidden, output, teacher, weight = fused_inputs(ref, setting)
    objective = CASES[name]
    assert teacher.bends_draft == (setting == "eagle1")
    teacher = teacher._replace(tables=teacher.tables._replace(**BENDS[bent]))
    probs = full_teacher(teacher, objective)
    results = []
    for chunk, part in ((1 << 20, 1 << 20), (300, 100), (1, 1)):
        monkeypatch.setattr(fused, "CHUNK_ELEMENTS", chunk)
        monkeypatch.setattr(fused, "SLICE_ELEMENTS", part)
        mine, table = hidden.clone().requires_grad_(), output.clone().requires_grad_()
        scored = fused.score_pairs(mine, [table], teacher, weight, objective)
        (scored.loss * 0.7).backward()
        results.append((scored, grad(mine), grad(table)))
    mine, table = hidden.clone().requires_grad_(), output.clone().requires_grad_()
    logits = full_logits(mine, table, teacher)
    each = objective.each(logits, probs.expand_as(logits))
    loss = objective.loss(logits, probs.expand_as(logits))
    ((loss * weight).sum() * 0.7).backward()
    for scored, grad_hidden, grad_output in results:
        close(scored.loss, (loss * weight).sum())
        close(scored.loss_PK, loss)
        close(scored.each_PKM, each)
        close(scored.accept_PK, losses.acceptance(logits / objective.temperature, probs))
        close(grad_hidden, grad(mine))
        close(grad_output, grad(table))


@pytest.mark.parametrize("name", sorted(CASES))
def test_an_output_head_for_each_step_equals_autograd_in_any_chunks(
    name: str, ref: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    hidden, first, teacher, weight = fused_inputs(ref, "reduced")
    outputs = [first, first.flip(0) * 0.5, torch.randn_like(first)]
    objective = CASES[name]
    probs = full_teacher(teacher, objective)
    mine = hidden.clone().requires_grad_()
    tables = [output.clone().requires_grad_() for output in outputs]
    logits = torch.stack([mine[:, k] @ table.T for k, table in enumerate(tables)], 1)
    loss = objective.loss(logits, probs.expand_as(logits))
    ((loss * weight).sum() * 0.7).backward()
    for chunk, part in ((1 << 20, 1 << 20), (50, 30), (1, 1)):
        monkeypatch.setattr(fused, "CHUNK_ELEMENTS", chunk)
        monkeypatch.setattr(fused, "SLICE_ELEMENTS", part)
        again = hidden.clone().requires_grad_()
        copies = [output.clone().requires_grad_() for output in outputs]
        scored = fused.score_pairs(again, copies, teacher, weight, objective)
        (scored.loss * 0.7).backward()
        torch.testing.assert_close(scored.loss_PK, loss.detach(), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grad(again), grad(mine), rtol=1e-10, atol=1e-12)
        for copy, table in zip(copies, tables, strict=True):
            torch.testing.assert_close(grad(copy), grad(table), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_tv_with_an_aim_is_the_gradient_of_calls_per_token(
    length: int, ref: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    """Against autograd through 1 / (1 + a_1 + a_1 a_2 + ...), where a step not valid ends it."""
    hidden, output, teacher, _ = fused_inputs(ref, "reduced")
    objective = Objective(terms=(("tv", 1.0),), aim=length)
    weight = torch.ones(PREDICTED, STEPS, dtype=torch.float64)
    weight[4, 1:], weight[2, 2] = 0, 0
    mine, table = hidden.clone().requires_grad_(), output.clone().requires_grad_()
    logits = full_logits(mine, table, teacher)
    accept = losses.acceptance(logits, full_teacher(teacher, objective)) * weight
    calls = 1 / (1 + accept[:, :length].cumprod(1).sum(1))
    calls.sum().backward()
    for chunk in (1 << 20, 300, 1):
        monkeypatch.setattr(fused, "CHUNK_ELEMENTS", chunk)
        again, copy = hidden.clone().requires_grad_(), output.clone().requires_grad_()
        given = weight.clone()
        fused.score_pairs(again, [copy], teacher, given, objective).loss.backward()
        close(grad(again), grad(mine))
        close(grad(copy), grad(table))
        assert torch.equal(given, weight)


def test_an_aim_needs_one_output_head(ref: ModuleType):
    hidden, output, teacher, weight = fused_inputs(ref, "reduced")
    with pytest.raises(ValueError, match="each draft step has an output head of its own"):
        fused.score_pairs(hidden, [output] * STEPS, teacher, weight, Objective(aim=3))


def test_output_heads_for_some_steps_only_are_refused(ref: ModuleType):
    hidden, output, teacher, weight = fused_inputs(ref, "eagle3")
    with pytest.raises(ValueError, match="2 output heads are given for 3 steps"):
        fused.score_pairs(hidden, [output, output], teacher, weight)


def test_fused_honours_scale_and_cap_of_the_target(ref: ModuleType):
    hidden, output, teacher, weight = fused_inputs(ref, "eagle3")
    bent = teacher._replace(tables=teacher.tables._replace(logit_scale=2.0, softcap=1.5))
    scores = 1.5 * torch.tanh(2.0 * (teacher.state_PH @ teacher.table_WH.T) / 1.5)
    scored = fused.score_pairs(hidden, [output], bent, weight)
    wanted = losses.soft_ce(hidden @ output.T, scores.softmax(-1).unsqueeze(1))
    assert torch.allclose(scored.loss_PK, wanted)


def test_fused_without_rows_is_zero(ref: ModuleType):
    hidden, output, teacher, weight = fused_inputs(ref, "eagle3")
    empty = teacher._replace(state_PH=teacher.state_PH[:0])
    mine = hidden[:0].requires_grad_()
    scored = fused.score_pairs(mine, [output.requires_grad_()], empty, weight[:0])
    scored.loss.backward()
    assert float(scored.loss.detach()) == 0
    assert not grad(output).any()


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor that any operation made had."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, Tensor):
                self.found = max(self.found, one.numel())
        return made


@pytest.mark.parametrize("name", sorted(CASES))
def test_no_tensor_spans_rows_and_vocabulary(
    name: str, ref: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    hidden, output, teacher, weight = fused_inputs(ref, "eagle3")
    many = 40
    hidden = hidden.repeat(many, 1, 1).requires_grad_()
    weight = weight.repeat(many, 1)
    teacher = teacher._replace(state_PH=teacher.state_PH.repeat(many, 1))
    monkeypatch.setattr(fused, "CHUNK_ELEMENTS", 600)
    monkeypatch.setattr(fused, "SLICE_ELEMENTS", 300)
    largest = Largest()
    with largest:
        scored = fused.score_pairs(hidden, [output.requires_grad_()], teacher, weight, CASES[name])
        scored.loss.backward()
    width = teacher.table_WH.shape[0]
    assert largest.found == max(hidden.numel(), teacher.state_PH.numel())
    whole = Largest()
    with whole:
        logits = hidden @ output.T
        probs = full_teacher(teacher, CASES[name]).expand_as(logits)
        CASES[name].loss(logits, probs)
    assert whole.found == weight.numel() * width


def smooth(name: str) -> bool:
    """lk_lambda holds a part of itself constant in its gradient, which differences cannot."""
    return "lk_lambda" not in CASES[name].names


@pytest.mark.parametrize("name", [name for name in sorted(CASES) if smooth(name)])
def test_fused_gradients_equal_differences(name: str, ref: ModuleType):
    hidden, output, teacher, weight = fused_inputs(ref, "eagle1")
    teacher = teacher._replace(tables=teacher.tables._replace(**BENDS["capped"]))

    def loss(mine: Tensor, table: Tensor) -> Tensor:
        return fused.score_pairs(mine, [table], teacher, weight, CASES[name]).loss

    inputs = (hidden.requires_grad_(), output.requires_grad_())
    loss(*inputs).backward()
    with torch.no_grad():
        for _ in range(5):
            ways = [torch.randn_like(value) * 1e-6 for value in inputs]
            ahead = loss(*(value + way for value, way in zip(inputs, ways, strict=True)))
            behind = loss(*(value - way for value, way in zip(inputs, ways, strict=True)))
            wanted = sum(float((grad(v) * way).sum()) for v, way in zip(inputs, ways, strict=True))
            assert float(ahead - behind) / 2 == pytest.approx(wanted, rel=1e-5, abs=1e-13)


def test_a_head_that_drafts_with_bent_logits_is_trained_on_them(ref: ModuleType):
    """The planted fault: the target's cap left out of the draft's logits."""
    hidden, output, teacher, weight = fused_inputs(ref, "eagle1")
    bent = teacher._replace(tables=teacher.tables._replace(**BENDS["capped"]))
    right = fused.score_pairs(hidden, [output], bent, weight)
    wrong = fused.score_pairs(hidden, [output], bent._replace(bends_draft=False), weight)
    wanted = losses.soft_ce(full_logits(hidden, output, bent), full_teacher(bent, Objective()))
    close(right.loss_PK, wanted)
    assert not torch.allclose(wrong.loss_PK, wanted, atol=1e-3)


# Inductor itself imports a deprecated part of torch (torch/utils/mkldnn.py).
COMPILES = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@COMPILES
@pytest.mark.slow
@pytest.mark.parametrize("name", ["soft_ce", "all cut", "all whole"])
def test_the_compiled_form_equals_the_plain_one(name: str, ref: ModuleType):
    """What runs on a GPU, compiled for this CPU; sizes change, which must not matter."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    hidden, output, teacher, _ = fused_inputs(ref, "eagle1")
    teacher = teacher._replace(tables=teacher.tables._replace(**BENDS["capped"]))
    probs = full_teacher(teacher, CASES[name])
    raw = hidden @ output.T
    compiled = fused.scorer_of(teacher, CASES[name], is_compiled=True)
    plain = fused.scorer_of(teacher, CASES[name], is_compiled=False)
    for size in (7, 5, 2):
        ours, theirs = compiled(raw[:size], probs[:size]), plain(raw[:size], probs[:size])
        for one, other in zip(ours, theirs, strict=True):
            close(one, other)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] < 3
    assert not torch._dynamo.utils.counters["graph_break"]


@COMPILES
@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_gpu_scores_as_the_cpu_does(name: str, ref: ModuleType):
    found = []
    for device in ("cpu", "cuda"):
        hidden, output, teacher, weight = fused_inputs(ref, "eagle1")
        tables = teacher.tables._replace(**BENDS["capped"])
        state, rows = teacher.state_PH.to(device), teacher.table_WH.to(device)
        moved = fused.Teacher(state, rows, tables, bends_draft=True)
        mine = hidden.to(device).requires_grad_()
        table = output.to(device).requires_grad_()
        scored = fused.score_pairs(mine, [table], moved, weight.to(device), CASES[name])
        scored.loss.backward()
        found.append((scored.loss_PK.cpu(), grad(mine).cpu(), grad(table).cpu()))
    for one, other in zip(*found, strict=True):
        close(one, other)


def test_bf16_products_stay_near_fp32(ref: ModuleType):
    hidden, output, teacher, weight = fused_inputs(ref, "eagle3")
    exact = fused.score_pairs(hidden, [output], teacher, weight)
    low = teacher._replace(table_WH=teacher.table_WH.bfloat16())
    rough = fused.score_pairs(hidden.bfloat16(), [output.float()], low, weight.float())
    assert rough.loss.dtype == torch.float32
    assert abs(float(rough.loss) - float(exact.loss)) < 0.02 * float(exact.loss)


def test_best_is_inside_looks_at_the_whole_vocabulary(ref: ModuleType):
    head = ref.make_head(draft_vocab_size=20)
    table = head.lent().output_VH
    state = table[torch.arange(50)]
    best = (state @ table.T).argmax(-1)
    wanted = torch.isin(best, head.draft_ids_W)
    assert torch.equal(fused.best_is_inside(head, state, chunk=7), wanted)
    assert wanted.any()
    assert not wanted.all()
