"""The teacher from a law's likeliest ids, against the written rule in plain Python."""

import math

import pytest
import torch
from transformers import LlamaConfig

from outrider.heads import CONFIGS, HEADS, Tables
from outrider.heads.fused import score_pairs, teacher_of, teacher_probs
from outrider.heads.losses import OBJECTIVES
from outrider.heads.objective import Objective
from outrider.heads.top_teacher import top_teacher

VOCAB, WIDTH, LAWS = 60, 16, 30
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=24,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture
def head():
    """An EAGLE-3 head that drafts every second id, in float64."""
    torch.manual_seed(2)
    ids_W = torch.arange(0, VOCAB, 2)
    config = CONFIGS["eagle3"].from_target(CONFIG, kind="eagle3", draft_vocab_size=len(ids_W))
    made = HEADS["eagle3"](config, ids_W).double()
    tables = Tables(
        embedding_VH=torch.randn(VOCAB, WIDTH).double(),
        output_VH=torch.randn(VOCAB, WIDTH).double(),
        tokenizer_size=VOCAB,
        num_layers=8,
    )
    return made.attach(tables)


def laws(head, over_W, top_k):
    """States, and their laws over `over_W` by the likeliest ids."""
    state_PH = torch.randn(LAWS, WIDTH, dtype=torch.float64)
    probs_PW = (state_PH @ head.lent().output_VH[over_W].T).softmax(-1)
    top = probs_PW.topk(top_k)
    tail_P = 1 - top.values.sum(-1)
    return state_PH, (over_W[top.indices], top.values.log(), tail_P, len(over_W) - top_k)


def by_the_rule(ids, log_probs, tail, num_rest, over, draft_ids, temperature=1.0):
    """Listed ids keep their probability, others share the tail evenly; then renormalise."""
    listed = {int(i): math.exp(float(x)) for i, x in zip(ids, log_probs, strict=True)}
    rest = float(tail) / num_rest if num_rest else 0.0
    found = [listed.get(w, rest if w in over else 0.0) ** (1 / temperature) for w in draft_ids]
    return [x / sum(found) for x in found]


@pytest.mark.parametrize("top_k", [1, 7, 30])
def test_laws_over_the_draft_vocabulary_keep_listed_probabilities(head, top_k):
    over_W = head.draft_ids_W
    _, law = laws(head, over_W, top_k)
    teacher = top_teacher(head, *law)
    probs_PW = teacher.probs()
    over = set(over_W.tolist())
    for p in range(LAWS):
        expected = by_the_rule(law[0][p], law[1][p], law[2][p], law[3], over, over_W.tolist())
        torch.testing.assert_close(probs_PW[p], torch.tensor(expected).double())
    places = (law[0][:, :, None] == over_W).int().argmax(-1)
    torch.testing.assert_close(probs_PW.gather(1, places), law[1].exp())
    torch.testing.assert_close(teacher_probs(teacher, slice(3, 9)), probs_PW[3:9])


@pytest.mark.parametrize("top_k", [5, 60])
def test_laws_over_all_ids_are_renormalised_on_the_draft_vocabulary(head, top_k):
    state_PH, law = laws(head, torch.arange(VOCAB), top_k)
    probs_PW = top_teacher(head, *law).probs()
    over = set(range(VOCAB))
    for p in range(LAWS):
        expected = by_the_rule(
            law[0][p], law[1][p], law[2][p], law[3], over, head.draft_ids_W.tolist()
        )
        torch.testing.assert_close(probs_PW[p], torch.tensor(expected).double())
    if top_k == VOCAB:
        exact = teacher_probs(teacher_of(head, state_PH, torch.float64))
        torch.testing.assert_close(probs_PW, exact)


def losses_of(head, kept, loss, top_k=None, temperature=1.0):
    """Loss, acceptances and gradients from states, and from `kept` ids of their laws."""
    state_PH, law = laws(head, head.draft_ids_W, kept)
    found = []
    for teacher in (teacher_of(head, state_PH, torch.float64), top_teacher(head, *law)):
        torch.manual_seed(4)
        hidden = torch.randn(LAWS, 2, WIDTH, dtype=torch.float64, requires_grad=True)
        weights = torch.rand(LAWS, 2, dtype=torch.float64)
        objective = Objective(terms=((loss, 1.0),), top_k=top_k, temperature=temperature)
        scored = score_pairs(hidden, head.output_weights(), teacher, weights, objective)
        scored.loss.backward()
        output = head.own_outputs[0]
        found.append((scored.loss.detach(), hidden.grad, output.grad.clone(), scored.accept_PK))
        output.grad = None
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("loss", sorted(OBJECTIVES))
def test_with_all_ids_listed_losses_and_gradients_are_those_of_the_state(head, loss, temperature):
    for ours, theirs in zip(*losses_of(head, 30, loss, temperature=temperature), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("top_k", [3, 8])
@pytest.mark.parametrize("loss", sorted(OBJECTIVES))
def test_losses_over_no_more_tokens_than_are_listed_are_exact(head, loss, top_k):
    """The objective's own cut reads the listed tokens and the tail's mass, which are all known."""
    ours, theirs = losses_of(head, 8, loss, top_k)
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(one, other)


def test_losses_over_more_tokens_than_are_listed_are_not(head):
    ours, theirs = losses_of(head, 8, "kl", 12)
    assert not torch.allclose(ours[0], theirs[0], rtol=1e-3)


def test_a_law_that_lists_no_draft_id_and_has_no_tail_is_even(head):
    ids = torch.tensor([[1, 3, 5]])
    probs = torch.tensor([[0.5, 0.3, 0.2]]).double().log()
    teacher = top_teacher(head, ids, probs, torch.zeros(1).double(), VOCAB - 3)
    torch.testing.assert_close(teacher.probs(), torch.full((1, 30), 1 / 30).double())


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_at_another_temperature_with_all_ids_listed_laws_are_exact(head, temperature):
    state_PH, law = laws(head, head.draft_ids_W, 30)
    logits_PW = state_PH @ head.lent().output_VH[head.draft_ids_W].T
    found = top_teacher(head, *law).probs(slice(2, 8), temperature)
    torch.testing.assert_close(found, (logits_PW[2:8] / temperature).softmax(-1))


@pytest.mark.parametrize("over_all", [False, True])
@pytest.mark.parametrize("temperature", [0.3, 0.8, 2.0])
def test_at_another_temperature_the_tail_is_raised_by_id(head, temperature, over_all):
    over_W = torch.arange(VOCAB) if over_all else head.draft_ids_W
    _, law = laws(head, over_W, 7)
    found = teacher_probs(top_teacher(head, *law), slice(3, 9), temperature)
    over, draft_ids = set(over_W.tolist()), head.draft_ids_W.tolist()
    for p in range(3, 9):
        listed = (law[0][p], law[1][p], law[2][p], law[3])
        expected = by_the_rule(*listed, over, draft_ids, temperature)
        torch.testing.assert_close(found[p - 3], torch.tensor(expected).double())


def test_a_law_far_from_the_draft_vocabulary_stays_a_law_at_low_temperature(head):
    """In single precision no power of so small probabilities is left, but their ratio is."""
    ids = torch.tensor([[1, 3, 2]])
    log_probs = torch.tensor([[-0.1, -2.3, -60.0]])
    teacher = top_teacher(head, ids, log_probs, torch.zeros(1), VOCAB - 3)
    expected = torch.zeros(1, 30)
    expected[0, 1] = 1
    torch.testing.assert_close(teacher.probs(temperature=0.1), expected)
