"""Drafters that only the loop can follow: whatever they guess, the text is plain decoding's."""

import copy
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.by_plan import drafter_by
from outrider.eval.drafters.model import as_draft_model
from outrider.eval.drafters.oracle import OracleDrafter
from outrider.eval.drafters.universal import as_text_model
from outrider.eval.link import tables
from outrider.eval.rules import Siblings
from outrider.eval.trees.loop_plans import (
    HybridPlan,
    LookaheadPlan,
    OraclePlan,
    PastPlan,
    UniversalPlan,
    WindowPlan,
    draft_named,
)
from outrider.eval.trees.plans import ChainPlan, LookupPlan, SuffixPlan, TreePlan, plan_named

VOCAB = 61
# The second repeats itself, so that copies are drafted; the last is one token.
PROMPTS = ([5, 9, 14, 22], [41, 7, 30, 12, 41, 7, 30, 12, 41, 7], [60])
DRAFTS = [
    "hybrid:lookup:6+chain:3",
    "hybrid:suffix:6+tree:3,3,8",
    "window:4,5,2",
    "window:3,400,0",
    "universal:4",
    "suffix:4,4,60",
    "lookahead:4,3,3",
    "lookahead:1,2,1",
    "oracle:4",
    "synthetic:5,0.7,0.5",
]


def words(order):
    """A tokenizer of the words w0 to w60, numbered in this order."""
    vocab = {f"w{word}": number for number, word in enumerate(order)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w3")


@pytest.fixture(scope="module")
def target(tiny_target):
    """Double precision: no near tie can hide or excuse a difference."""
    model = copy.deepcopy(tiny_target.model).double()
    return Target.from_model(model, words(range(VOCAB)))


@pytest.fixture(scope="module")
def renumbered(target):
    """The same model under a tokenizer that numbers the words otherwise."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4)).tolist()
    model = copy.deepcopy(target.model)
    model.model.embed_tokens.weight.data = target.model.model.embed_tokens.weight[order].clone()
    model.lm_head.weight.data = target.model.lm_head.weight[order].clone()
    model.config.eos_token_id = model.generation_config.eos_token_id = order.index(3)
    return Target.from_model(model, words(order))


@pytest.fixture(scope="module")
def head(tiny_head, target):
    return copy.deepcopy(tiny_head).double().attach(tables(target)).eval()


@pytest.fixture(scope="module")
def make(target, renumbered, head):
    def made(draft, temperature=0.0):
        plan = draft_named(draft)
        network = {
            HybridPlan: head,
            WindowPlan: target,
            UniversalPlan: as_text_model(renumbered, target),
        }.get(type(plan))
        return drafter_by(plan, network, temperature=temperature)

    return made


def both(target, drafter, prompt, decoding, row=0, eos_ids=None):
    """The text with the drafter, and plainly."""
    if eos_ids is not None:
        target = replace(target, eos_ids=eos_ids)
    plain = decode(target, prompt, None, decoding, row=row)
    if isinstance(drafter, OracleDrafter):
        drafter.learn(prompt, plain.ids)
    return decode(target, prompt, drafter, decoding, row=row), plain


SAMPLINGS = [
    Sampling(),
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_k=20, top_p=0.9, presence_penalty=0.5),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_text_is_plain_decodings(target, make, draft, sampling):
    drafter = make(draft)
    rule = "greedy" if sampling.is_greedy else "match"
    for count in (1, 2, 40):
        decoding = Decoding(
            max_new_tokens=count, sampling=sampling, rule=rule, seed=5, ignore_eos=True
        )
        for row, prompt in enumerate(PROMPTS):
            found, plain = both(target, drafter, prompt, decoding, row)
            assert found.ids == plain.ids
            assert len(found.ids) == count
            assert found.finish == "length"
            assert len(found.ids) == 1 + sum(one.emitted for one in found.rounds)


@pytest.mark.parametrize("draft", DRAFTS)
def test_an_end_token_inside_a_block(target, make, draft):
    drafter, prompt, ended = make(draft), PROMPTS[1], 0
    text = decode(target, prompt, None, Decoding(max_new_tokens=30, ignore_eos=True)).ids
    for index in range(1, 20):
        if text[index] in text[:index]:
            continue
        found, plain = both(target, drafter, prompt, Decoding(), eos_ids=(text[index],))
        assert found.ids == plain.ids == text[: index + 1]
        assert found.finish == "stop"
        ended += 1
    assert ended > 4


@pytest.mark.parametrize("draft", DRAFTS)
def test_no_position_past_the_targets_limit_is_run(target, make, draft, monkeypatch):
    limit = target.config.max_position_embeddings
    prompt = (PROMPTS[1] * limit)[: limit - 9]
    plain = decode(target, prompt, None, Decoding(max_new_tokens=99, ignore_eos=True))
    assert len(plain.ids) == 9
    positions, run = [], Target.run

    def noted(self, ids_BT, **settings):
        if settings["position_ids"] is not None:
            positions.extend(settings["position_ids"].flatten().tolist())
        return run(self, ids_BT, **settings)

    drafter = make(draft)
    if isinstance(drafter, OracleDrafter):
        drafter.learn(prompt, plain.ids)
    monkeypatch.setattr(Target, "run", noted)
    found = decode(target, prompt, drafter, Decoding(max_new_tokens=99, ignore_eos=True))
    assert found.ids == plain.ids
    assert limit - 2 <= max(positions) < limit


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_drafter_used_again_drafts_the_same(target, make, draft):
    """Nothing of a row is left for the next, but for what `suffix` keeps on purpose."""
    drafter, decoding = make(draft), Decoding(max_new_tokens=30, ignore_eos=True)
    runs = [
        [both(target, drafter, prompt, decoding)[0].rounds for prompt in PROMPTS] for _ in range(3)
    ]
    if draft.count(",") == 2 and draft.startswith("suffix"):
        assert runs[0] != runs[1]
    else:
        assert runs[0] == runs[1] == runs[2]


def test_plans_are_read_as_they_are_written():
    wanted = {
        "hybrid:lookup:8,3+chain:3": HybridPlan(LookupPlan(8, 3), ChainPlan(3)),
        "hybrid:suffix:8,4+tree:3,2,6": HybridPlan(SuffixPlan(8, 4), TreePlan(3, 2, 6)),
        "window:4,64,4": WindowPlan(4, 64, 4),
        "window:4,64,0": WindowPlan(4, 64, 0),
        "universal:5": UniversalPlan(5),
        "lookahead:5,3,7": LookaheadPlan(5, 3, 7),
        "suffix:5,6,700": PastPlan(SuffixPlan(5, 6), 700),
        "oracle:4": OraclePlan(4),
        "synthetic:4,0.5,0.25": OraclePlan(4, (0.5, 0.25)),
    }
    for text, plan in wanted.items():
        assert draft_named(text) == plan
        assert plan.label == text
    assert draft_named("hybrid:lookup:8+chain:3") == draft_named("hybrid:lookup:8,3+chain:3")
    assert draft_named("window:4,64") == draft_named("window:4,64,4")
    assert draft_named("tree:3,2,6") == plan_named("tree:3,2,6")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hybrid:lookup:8", r"draft is 'hybrid:lookup:8'; write hybrid:TEXT\+MODEL"),
        ("hybrid:chain:3+chain:3", r"before the \+ goes lookup"),
        ("hybrid:lookup:3+drawn:2,2,4", r"after the \+ goes chain"),
        ("hybrid:lookup:0+chain:3", "lookup length is 0"),
        ("window:4", "write hybrid"),
        ("window:0,5", "window length is 0; give at least 1"),
        ("universal:x", "write hybrid"),
        ("lookahead:5,1,7", "lookahead ngram is 1; give at least 2"),
        ("suffix:5,6,0", "suffix past is 0; give at least 1"),
        ("synthetic:4", "write hybrid"),
        ("synthetic:4,nan", "synthetic alphas are .*; give up to 4 chances from 0 to 1"),
        ("synthetic:1,0.5,0.5", "give up to 1 chances"),
        ("tower:3", "draft is 'tower:3'; write chain:LENGTH.*; or, where text is decoded, hybrid"),
    ],
)
def test_other_plans_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        draft_named(text)


def test_a_plan_with_the_wrong_network_is_refused(target, head):
    for draft, network, message in (
        ("window:4,5", head, "the target drafts for itself"),
        ("universal:4", None, "it needs a draft model: give --model"),
        ("hybrid:lookup:4+chain:2", None, "needs a head and head is None"),
        ("hybrid:lookup:4+tree:2,2,4", as_draft_model(target, target), "a draft model drafts"),
        ("chain:3", target, "needs a head and head is Target"),
    ):
        with pytest.raises(ValueError, match=message):
            drafter_by(draft_named(draft), network)


def test_how_siblings_come_about_is_told(make):
    for draft in DRAFTS:
        is_drawn = draft.startswith("window")
        assert make(draft, 1.0).siblings is (Siblings.SINGLE if is_drawn else Siblings.CHOSEN)
