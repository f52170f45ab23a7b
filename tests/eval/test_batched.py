"""Batched verification in float32 at vocabulary size, its law by betting, compiled and captured."""

import math
import random
from dataclasses import replace

import pytest
import torch

from outrider.eval.batched import BATCHED, verify_batch
from outrider.eval.batched import residuals as batched_recursive
from outrider.eval.batched.drafts import Drafts, Noise, noise_for
from outrider.eval.batched.k_seq import default_steps, divisor
from outrider.eval.batched.shapes import Shapes, shapes_of
from outrider.eval.batched.tie import random_problem, to_batch
from outrider.eval.certificate.eprocess import EProcess, draws_needed
from outrider.eval.rules import RULES
from outrider.eval.rules.verdict import Siblings

FIELDS = ("paths_BD", "lengths_B", "tokens_B", "num_degenerate_B", "is_defect_B")


def law(*shares):
    return torch.tensor(shares, dtype=torch.float32)


def noise_of(shapes, coins, target=0.5, rest=0.5):
    size = (len(shapes.parents_BN), len(shapes.groups) + 1)
    coins_BN = torch.tensor([[0.0, *coins]], dtype=torch.float64)
    full = torch.full(size, 0.0, dtype=torch.float64)
    return Noise(coins_BN=coins_BN, targets_BE=full + target, rests_BE=full + rest)


def drafts_of(parents, tokens, siblings, p, q=None):
    return Drafts(
        shapes=shapes_of([parents]),
        siblings=siblings,
        tokens_BN=torch.tensor([tokens]),
        p_BNV=p.expand(1, len(tokens), -1).contiguous(),
        q_BRV=None if q is None else q.expand(1, len(tokens), -1).contiguous(),
    )


def test_a_last_child_with_all_remaining_mass_always_stands():
    almost_one = 1 - 2**-53
    p = torch.zeros(2000)
    p[3], p[1500] = 0.3, 0.7
    drafts = drafts_of((-1, 0, 0), [0, 3, 1500], Siblings.CHOSEN, p)
    noise = noise_of(drafts.shapes, [almost_one, almost_one])
    assert verify_batch("point_mass", drafts, noise).paths_BD.tolist() == [[2]]


def test_a_child_that_leaves_a_tail_of_rare_tokens_is_refused_as_often_as_it_should():
    """What is left is 1e-9 of one: a difference from one in float32 would be nothing, or 6e-8."""
    p = torch.full((1000,), 1e-12)
    p[7] = 1.0
    drafts = drafts_of((-1, 0, 0), [0, 7, 500], Siblings.CHOSEN, p)
    after_refusal = 500.5 / 999  # the second child has one part in 999 of what is left
    for coin, path in ((1e-3 * 1.0, [2]), (after_refusal, [-1])):
        noise = noise_of(drafts.shapes, [1 - 1e-10, coin])
        assert verify_batch("point_mass", drafts, noise).paths_BD.tolist() == [path]


def test_what_the_target_cannot_say_is_never_emitted():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(700, generator=generator)
    weights[torch.rand(700, generator=generator) < 0.9] = 0
    weights[-1] = 0
    p = (weights / weights.sum()).float()
    q = torch.full((700,), 1 / 700)
    parents = [(-1, 0, 0, 1)] * 64
    for rule, siblings in (("match", Siblings.CHOSEN), ("iid", Siblings.IID)):
        drafts = Drafts(
            shapes=shapes_of(parents),
            siblings=siblings,
            tokens_BN=torch.randint(700, (64, 4), generator=generator),
            p_BNV=p.expand(64, 4, -1).contiguous(),
            q_BRV=None if siblings is Siblings.CHOSEN else q.expand(64, 4, -1).contiguous(),
        )
        noise = noise_for(drafts.shapes, generator)
        edge = torch.full_like(noise.targets_BE, 1 - 2**-53)
        for one in (noise, replace(noise, targets_BE=edge, rests_BE=edge)):
            for verdict, tokens in zip(
                verify_batch(rule, drafts, one).to_list(), drafts.tokens_BN, strict=True
            ):
                assert p[verdict.token] > 0
                assert all(p[tokens[node]] > 0 for node in verdict.path)


def test_a_residual_of_nothing_falls_back_to_p_and_is_counted():
    p, q = law(0.25, 0.75), law(0.25 + 2**-25, 0.75)
    drafts = drafts_of((-1, 0), [0, 0], Siblings.SINGLE, p, q)
    verdict = verify_batch("rejection", drafts, noise_of(drafts.shapes, [1 - 2**-53]))
    assert verdict.to_list()[0].num_degenerate == 1
    assert verdict.tokens_B.tolist() == [1]


def test_a_token_its_law_cannot_produce_is_a_defect():
    p, q = law(0.5, 0.5), law(0.0, 1.0)
    for rule in ("rejection", "block", "k_sequential"):
        drafts = drafts_of((-1, 0), [0, 0], Siblings.SINGLE, p, q)
        verdict = verify_batch(rule, drafts, noise_of(drafts.shapes, [0.5]))
        with pytest.raises(
            ValueError, match=r"rounds \[0\] have a drafted token with probability 0"
        ):
            verdict.to_list()
    drafts = drafts_of((-1, 0, 0), [0, 1, 1], Siblings.WITHOUT, p, p)
    assert verify_batch("without", drafts, noise_of(drafts.shapes, [0.5, 0.5])).is_defect_B.all()
    drafts = drafts_of((-1,), [0], Siblings.NONE, law(0.0, 0.0))
    assert verify_batch("match", drafts, noise_of(drafts.shapes, [])).is_defect_B.all()


def test_the_divisor_is_enough_and_close_to_the_least():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(20, 5000, generator=generator, dtype=torch.float64)
    error = torch.randn(20, 5000, generator=generator, dtype=torch.float64)
    p, q = logits.softmax(-1), (logits + error).softmax(-1)
    for count in (2, 4, 10):
        rho = divisor(p, q, torch.full((20,), count), default_steps(count))
        beta = torch.minimum(p / rho[:, None], q).sum(-1)
        assert (1 - (1 - beta) ** count <= rho * beta).all()
        least = divisor(p, q, torch.full((20,), count), 40)
        less = least - 2**-15
        beta = torch.minimum(p / less[:, None], q).sum(-1)
        assert ((1 - (1 - beta) ** count > less * beta) | (least == 1)).all()
        assert (rho < 1.001 * least).all()


# The law of the first token, by betting: no enumeration, so it would do for any kernel.

TREE = (-1, 0, 0, 1)
P = law(0.3, 0.25, 0.2, 0.1, 0.1, 0.05)
Q = law(0.1, 0.35, 0.2, 0.2, 0.05, 0.1)


def first_tokens(rule, siblings, count, seed):
    """The first token of each of `count` rounds with fresh drafts and noise."""
    generator = torch.Generator().manual_seed(seed)
    parents = (-1, 0, 1) if siblings is Siblings.SINGLE else TREE
    size = len(parents)
    tokens = torch.multinomial(Q, count * size, replacement=True, generator=generator)
    tokens_BN = tokens.view(count, size)
    if siblings is Siblings.WITHOUT:
        pairs = torch.multinomial(Q.expand(count, -1), 2, generator=generator)
        tokens_BN[:, 1:3] = pairs
    drafts = Drafts(
        shapes=shapes_of([parents] * count),
        siblings=siblings,
        tokens_BN=tokens_BN,
        p_BNV=P.expand(count, size, -1).contiguous(),
        q_BRV=Q.expand(count, size, -1).contiguous(),
    )
    verdicts = verify_batch(rule, drafts, noise_for(drafts.shapes, generator))
    padded = torch.cat([tokens_BN, tokens_BN[:, :1]], 1)
    drafted = padded.gather(1, verdicts.paths_BD[:, :1].clamp(min=0))[:, 0]
    return torch.where(verdicts.lengths_B > 0, drafted, verdicts.tokens_B)


def bet(tokens):
    process = EProcess((P.double() / P.double().sum()).tolist())
    for token in tokens.tolist():
        process.add(token)
        if process.is_rejected:
            break
    return process


@pytest.mark.parametrize(
    ("rule", "siblings"),
    [
        ("match", Siblings.IID),
        ("point_mass", Siblings.IID),
        ("one_coin", Siblings.IID),
        ("rejection", Siblings.SINGLE),
        ("iid", Siblings.IID),
        ("without", Siblings.WITHOUT),
        ("k_sequential", Siblings.IID),
        ("block", Siblings.SINGLE),
        ("traversal", Siblings.WITHOUT),
    ],
)
def test_betting_against_the_batched_code_wins_nothing(rule, siblings):
    assert not bet(first_tokens(rule, siblings, 20_000, seed=0)).is_rejected


def test_betting_against_a_biased_kernel_wins_within_the_stated_draws(monkeypatch):
    """The fault: after a refusal p is drawn from whole."""
    monkeypatch.setattr(batched_recursive, "reduced_factor", lambda factor, mass, left: 0 * mass)
    tokens = first_tokens("without", Siblings.WITHOUT, 20_000, seed=1)
    found = torch.bincount(tokens, minlength=len(P)).double() / len(tokens)
    needed = draws_needed((P.double() / P.double().sum()).tolist(), found.tolist())
    used = [
        bet(first_tokens("without", Siblings.WITHOUT, 3 * needed, seed)) for seed in range(2, 7)
    ]
    assert all(one.is_rejected for one in used)
    assert sorted(one.num_draws for one in used)[2] < 1.5 * needed
    assert 100 < needed < 10_000


# The same code compiled, and captured.


def batch_for(rule, count=24):
    siblings = max(RULES[rule].drafts, key=lambda kind: kind is not Siblings.NONE)
    rng = random.Random(rule)
    problems = [random_problem(rule, siblings, rng) for _ in range(count)]
    return to_batch(problems, rule, (3, 511, 512, 700, 1023, 1300), 1301, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("rule", BATCHED)
def test_compiled_code_decides_as_the_eager_one(rule):
    drafts, noise = batch_for(rule)
    torch.compiler.reset()
    found = torch.compile(BATCHED[rule], fullgraph=True)(drafts, noise)
    wanted = BATCHED[rule](drafts, noise)
    for name in FIELDS:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


def on_cuda(one):
    moved = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in vars(one).items()
    }
    moved |= {name: on_cuda(value) for name, value in moved.items() if isinstance(value, Shapes)}
    return type(one)(**moved)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", BATCHED)
def test_a_gpu_decides_as_a_cpu(rule):
    drafts, noise = batch_for(rule)
    found = BATCHED[rule](on_cuda(drafts), on_cuda(noise))
    wanted = BATCHED[rule](drafts, noise)
    for name in FIELDS:
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name


@pytest.mark.gpu
@pytest.mark.parametrize("rule", BATCHED)
def test_a_captured_round_decides_as_the_eager_one(rule):
    """Capture fails on any wait for the device; the graph is replayed with other noise."""
    drafts, noise = batch_for(rule)
    there, its_noise = on_cuda(drafts), on_cuda(noise)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        BATCHED[rule](there, its_noise)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = BATCHED[rule](there, its_noise)
    fresh = noise_for(drafts.shapes, torch.Generator().manual_seed(1))
    for name, value in vars(fresh).items():
        getattr(its_noise, name).copy_(value)
    graph.replay()
    wanted = BATCHED[rule](drafts, fresh)
    for name in FIELDS:
        assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name


@pytest.mark.parametrize("rule", BATCHED)
def test_no_result_is_waited_for(rule):
    """On the meta device there are no values: whatever looks at one, or branches on one, fails."""
    drafts, noise = batch_for(rule, 6)

    def to_meta(one):
        moved = {
            name: value.to("meta") if isinstance(value, torch.Tensor) else value
            for name, value in vars(one).items()
        }
        moved |= {n: to_meta(value) for n, value in moved.items() if isinstance(value, Shapes)}
        return type(one)(**moved)

    verdicts = BATCHED[rule](to_meta(drafts), to_meta(noise))
    assert verdicts.paths_BD.shape[0] == verdicts.tokens_B.shape[0] == 6


# Refusals.


def good(**changes):
    drafts = drafts_of((-1, 0, 0), [0, 1, 0], Siblings.IID, law(0.5, 0.5), law(0.25, 0.75))
    return replace(drafts, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_BN": torch.zeros(1, 3)}, "tokens_BN is torch.float32"),
        ({"p_BNV": torch.zeros(1, 2, 2)}, r"p_BNV is torch.float32 \[1, 2, 2\]; give a contig"),
        ({"p_BNV": torch.zeros(1, 3, 2).half()}, "p_BNV is torch.float16"),
        ({"q_BRV": None}, "q_BRV is None; give the laws that iid drafts have"),
        ({"q_BRV": torch.zeros(1, 3, 4)}, "laws over the same vocabulary"),
        ({"q_BRV": torch.zeros(1, 0, 2)}, "give a row for each of the first 1 nodes, or rows_BN"),
        ({"rows_BN": torch.zeros(1, 2, dtype=torch.int64)}, "rows_BN is torch.int64"),
        ({"siblings": Siblings.HYBRID}, "is_drawn_BN is None; give one bool a node for hybrid"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        good(**changes)


def test_values_are_checked_on_request():
    good().check()
    with pytest.raises(ValueError, match="tokens_BN has a token outside 0 to 1"):
        good(tokens_BN=torch.tensor([[0, 2, 0]])).check()
    with pytest.raises(ValueError, match="p_BNV has rows that sum to 0 to 0"):
        good(p_BNV=torch.zeros(1, 3, 2)).check()
    with pytest.raises(ValueError, match="q_BRV has rows that sum to 2 to 2"):
        good(q_BRV=torch.ones(1, 3, 2)).check()
    good(rows_BN=torch.tensor([[0, 2, 1]])).check()
    for row in (-1, 3):
        with pytest.raises(ValueError, match="rows_BN has a row outside 0 to 2, those of q_BRV"):
            good(rows_BN=torch.tensor([[0, 0, row]])).check()


@pytest.mark.parametrize("name", ["coins_BN", "targets_BE", "rests_BE"])
@pytest.mark.parametrize("bad", [1.0, -1e-9, float("nan"), float("inf")])
def test_noise_is_checked_on_request(name, bad):
    noise = noise_for(good().shapes)
    noise.check()
    table = getattr(noise, name).clone()
    table[0, -1] = bad
    with pytest.raises(ValueError, match=rf"{name} has a value outside \[0, 1\)"):
        replace(noise, **{name: table}).check()


def test_a_rule_refuses_what_it_is_not_exact_for():
    noise = noise_for(good().shapes)
    with pytest.raises(ValueError, match="rule 'without' judges drafts of kind"):
        verify_batch("without", good(), noise)
    with pytest.raises(ValueError, match="judges chains, these trees branch"):
        verify_batch("rejection", good(siblings=Siblings.SINGLE), noise)
    with pytest.raises(ValueError, match=r"coins_BN is \[1, 2\]; give \[1, 3\]"):
        verify_batch("iid", good(), replace(noise, coins_BN=noise.coins_BN[:, :2]))
    with pytest.raises(ValueError, match=r"targets_BE is torch\.float32; give float64"):
        replace(noise, targets_BE=noise.targets_BE.float())
    with pytest.raises(ValueError, match="parents are empty"):
        shapes_of([])
    with pytest.raises(ValueError, match="no verification rule called 'typical'"):
        verify_batch("typical", good(), noise)


@pytest.mark.parametrize("vocab", [5, 3000])
def test_a_law_that_is_not_a_number_is_a_defect(vocab):
    p_BNV = torch.full((1, 1, vocab), 1 / vocab)
    p_BNV[0, 0, vocab // 2] = math.nan
    drafts = Drafts(
        shapes=shapes_of([(-1,)]),
        siblings=Siblings.NONE,
        tokens_BN=torch.zeros(1, 1, dtype=torch.int64),
        p_BNV=p_BNV,
    )
    for name in ("greedy", "match"):
        assert verify_batch(name, drafts, noise_for(drafts.shapes)).is_defect_B.all(), name
