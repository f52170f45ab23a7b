"""Decoding with drafts writes what the target alone would: identities, limits, planted faults."""

import copy
from dataclasses import replace
from functools import cache
from itertools import chain

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from outrider.data.cache import RowCache
from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval import decode as decode_module
from outrider.eval import rules
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters import Draft
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.drafters.replay import Plain, Replay, Uniform
from outrider.eval.link import tables
from outrider.eval.trees.plans import ChainPlan, plan_named
from outrider.eval.trees.tree import Tree
from outrider.heads import EagleConfig, EagleHead

PROMPTS = ([5, 9, 14, 22], [41, 7, 7, 30, 12, 55, 8], [60])
VOCAB = 61


@pytest.fixture(scope="module")
def target(tiny_target):
    """Double precision: no near tie can hide or excuse a difference."""
    return Target.from_model(copy.deepcopy(tiny_target.model).double())


@pytest.fixture(scope="module")
def heads(tiny_head, target):
    torch.manual_seed(2)
    eagle1 = EagleHead(EagleConfig.from_target(target.config, kind="eagle1"))
    untrained = EagleHead(tiny_head.config, tiny_head.draft_ids_W)
    found = {"trained": copy.deepcopy(tiny_head), "untrained": untrained, "eagle1": eagle1}
    return {name: head.double().attach(tables(target)).eval() for name, head in found.items()}


DRAFTERS = [
    "plain",
    "perfect",
    "forks",
    "wrong",
    "uniform",
    "untrained chain:4",
    "trained chain:1",
    "trained chain:4",
    "trained tree:3,3,8",
    "trained tree:2,5,20",
    "eagle1 chain:4",
    "eagle1 tree:3,3,8",
]


class Forks(Replay):
    """A tree along the given text: at every depth the right token behind a wrong sibling."""

    def propose(self, max_depth, noise):
        path = super().propose(max_depth, noise).tree.tokens
        tokens, parents, parent = [path[0]], [-1], 0
        for token in path[1:]:
            tokens += [(token + 1) % VOCAB, token]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return Draft(Tree(tuple(tokens), tuple(parents)))


def make(name, heads, text, temperature=0.0):
    if name == "plain":
        return Plain()
    if name == "perfect":
        return Replay(text, 4)
    if name == "forks":
        return Forks(text, 4)
    if name == "wrong":
        return Replay(text, 4, shift=1, vocab_size=VOCAB)
    if name == "uniform":
        return Uniform(VOCAB, 3)
    head, plan = name.split()
    return HeadDrafter(heads[head], plan_named(plan), temperature=temperature)


def greedy_text(target, prompt, count, sampling=None):
    """The slowest reference: a whole pass for every token."""
    room = target.config.max_position_embeddings + 1 - len(prompt)
    return list(_greedy_text(target, tuple(prompt), min(31, room), sampling))[:count]


@cache
def _greedy_text(target, prompt, count, sampling):
    ids = list(prompt)
    penalty = 1.0 if sampling is None else sampling.repetition_penalty
    for _ in range(count):
        logits = target.logits(target.run(torch.tensor([ids])).last_BTH[0, -1])
        for token in set(ids):
            is_positive = logits[token] > 0
            logits[token] = logits[token] / penalty if is_positive else logits[token] * penalty
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def assert_consistent(found, prompt_length):
    assert len(found.ids) == 1 + sum(one.emitted for one in found.rounds)
    assert not found.is_drafted[0]
    kept = sum(min(one.accepted, one.emitted) for one in found.rounds)
    assert sum(found.is_drafted) == kept
    for one in found.rounds[:-1]:
        assert one.emitted == one.accepted + 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_c17_greedy_output_equals_plain_decoding(target, heads, name):
    for prompt in PROMPTS:
        text = greedy_text(target, prompt, 30)
        for count in (1, 2, 30) if prompt == PROMPTS[0] else (30,):
            drafter = make(name, heads, [*prompt, *text, *[0] * 9])
            found = decode(target, prompt, drafter, Decoding(max_new_tokens=count, ignore_eos=True))
            assert found.ids == text[:count]
            assert found.finish == "length"
            assert_consistent(found, len(prompt))


def test_c17_a_perfect_draft_accepts_all_and_a_wrong_one_none(target, heads):
    prompt = PROMPTS[0]
    text = greedy_text(target, prompt, 31)
    decoding = Decoding(max_new_tokens=31, ignore_eos=True)
    perfect = decode(target, prompt, make("perfect", heads, [*prompt, *text, *[0] * 9]), decoding)
    assert [(one.drafted, one.accepted, one.emitted) for one in perfect.rounds] == [(4, 4, 5)] * 6
    wrong = decode(target, prompt, make("wrong", heads, [*prompt, *text, *[0] * 9]), decoding)
    assert [(one.accepted, one.emitted) for one in wrong.rounds] == [(0, 1)] * 30


@pytest.mark.parametrize("name", DRAFTERS)
def test_c17_a_prompt_one_token_short_of_the_limit(target, heads, name):
    limit = target.config.max_position_embeddings
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(4, VOCAB, (limit - 1,), generator=generator).tolist()
    for short, count in ((prompt, 1), (prompt[:-1], 2)):
        text = greedy_text(target, short, count)
        drafter = make(name, heads, [*short, *text, *[0] * 9])
        found = decode(target, short, drafter, Decoding(max_new_tokens=30, ignore_eos=True))
        assert found.ids == text
        assert found.finish == "length"


@pytest.mark.parametrize("name", ["trained chain:4", "trained tree:3,3,8"])
def test_no_position_past_the_targets_limit_is_run(target, heads, name, monkeypatch):
    limit = target.config.max_position_embeddings
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(4, VOCAB, (limit - 6,), generator=generator).tolist()
    text = [*prompt, *greedy_text(target, prompt, 7), *[0] * 9]
    positions, run = [], Target.run

    def noted(self, ids_BT, **settings):
        positions.extend(settings["position_ids"].flatten().tolist())
        return run(self, ids_BT, **settings)

    drafter = make(name, heads, text)
    monkeypatch.setattr(Target, "run", noted)
    decode(target, prompt, drafter, Decoding(max_new_tokens=99, ignore_eos=True))
    assert max(positions) == limit - 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_c17_an_end_token_inside_an_accepted_block(target, heads, name):
    prompt = PROMPTS[1]
    text = greedy_text(target, prompt, 30)
    for index in range(2, 12):
        if text[index] in text[:index]:
            continue
        ending = replace(target, eos_ids=(text[index],))
        found = decode(ending, prompt, make(name, heads, [*prompt, *text, *[0] * 9]), Decoding())
        assert found.ids == text[: index + 1]
        assert found.finish == "stop"
        assert_consistent(found, len(prompt))


def test_an_end_token_cuts_the_round_that_drafted_beyond_it(target, heads):
    prompt = PROMPTS[1]
    text = greedy_text(target, prompt, 12)
    index = next(i for i in range(2, 5) if text[i] not in text[:i])
    ending = replace(target, eos_ids=(text[index],))
    found = decode(ending, prompt, Replay([*prompt, *text], 8), Decoding())
    (only,) = found.rounds
    assert (only.drafted, only.accepted, only.emitted) == (8, 8, index)
    assert found.is_drafted == [False] + [True] * index


@pytest.mark.parametrize("name", DRAFTERS)
def test_c17_a_repetition_penalty_sees_the_path(target, heads, name):
    sampling = Sampling(repetition_penalty=1.3)
    for prompt in PROMPTS[:2]:
        text = greedy_text(target, prompt, 24, sampling)
        assert text != greedy_text(target, prompt, 24)
        drafter = make(name, heads, [*prompt, *text, *[0] * 9])
        decoding = Decoding(max_new_tokens=24, sampling=sampling, ignore_eos=True)
        assert decode(target, prompt, drafter, decoding).ids == text


SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6, top_k=20, top_p=0.9, min_p=0.02),
    Sampling(temperature=1.2, repetition_penalty=1.2),
    Sampling(
        temperature=1.0,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logit_bias=((11, 2.0), (7, -1.0)),
        bad_words=("7,7", "30"),
        top_k=30,
        top_p=0.95,
        filters="joint",
    ),
]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_match_writes_the_text_of_plain_sampling(target, heads, name, sampling):
    decoding = Decoding(max_new_tokens=16, sampling=sampling, rule="match", seed=5)
    for row, prompt in enumerate(PROMPTS[:2]):
        plain = decode(target, prompt, None, decoding, row=row)
        drafter = make(name, heads, [*prompt, *plain.ids, *[0] * 9])
        found = decode(target, prompt, drafter, decoding, row=row)
        assert found.ids == plain.ids
        if name in ("perfect", "forks"):
            assert all(one.accepted == 4 for one in found.rounds[:-1])


def test_match_with_drawn_drafts_writes_the_same_text(target, heads):
    decoding = Decoding(max_new_tokens=24, sampling=SAMPLINGS[0], rule="match")
    plain = decode(target, PROMPTS[0], None, decoding)
    drafter = make("trained chain:4", heads, [], temperature=1.0)
    assert decode(target, PROMPTS[0], drafter, decoding).ids == plain.ids


def test_texts_differ_by_row_and_seed(target):
    texts = {
        tuple(decode(target, PROMPTS[0], None, replace(decoding, seed=seed), row=row).ids)
        for decoding in (Decoding(max_new_tokens=12, sampling=SAMPLINGS[0]),)
        for seed in (0, 1)
        for row in (0, 1)
    }
    assert len(texts) == 4


def test_tree_node_logits_equal_those_of_the_linear_prefix(target, heads):
    prompt = PROMPTS[1]
    run = decode_module._Run(target, prompt, Plain(), Decoding(ignore_eos=True), 0, rules.greedy)
    run.prefill()
    root = run.new_ids[0]
    tree = Tree((root, 8, 9, 10, 11, 12, 13, 14), (-1, 0, 0, 1, 1, 2, 5, 4))
    _, logits_NV = run._verify(tree)
    for node in range(len(tree)):
        linear = [*prompt, root, *(tree.tokens[step] for step in tree.path(node))]
        expected = target.logits(target.run(torch.tensor([linear])).last_BTH[0, -1])
        assert (logits_NV[node] - expected).abs().max() < 1e-9


@pytest.mark.parametrize("name", ["trained chain:4", "trained tree:3,3,8", "perfect", "forks"])
def test_the_targets_cache_after_rounds_is_that_of_a_linear_pass(target, heads, name):
    prompt = PROMPTS[0]
    text = [*prompt, *greedy_text(target, prompt, 30)]
    drafter = make(name, heads, text)
    run = decode_module._Run(target, prompt, drafter, Decoding(ignore_eos=True), 0, rules.greedy)
    run.prefill()
    for _ in range(4):
        run.round()
        length = len(run._ids) - 1
        fresh = RowCache(1)
        target.run(torch.tensor([run._ids[:-1]]), cache=fresh)
        for ours, theirs in zip(run._cache.keys, fresh.keys, strict=True):
            assert (ours[:, :, :length] - theirs[:, :, :length]).abs().max() < 1e-9
    assert any(one.accepted for one in run.rounds)


def test_tokens_are_streamed_as_they_come(target, heads):
    seen = []
    found = decode(
        target,
        PROMPTS[0],
        make("trained chain:4", heads, []),
        Decoding(max_new_tokens=20, ignore_eos=True),
        on_tokens=lambda ids, is_drafted: seen.append((list(ids), list(is_drafted))),
    )
    assert [len(ids) for ids, _ in seen] == [1, *(one.emitted for one in found.rounds)]
    assert list(chain(*(ids for ids, _ in seen))) == found.ids
    assert list(chain(*(is_drafted for _, is_drafted in seen))) == found.is_drafted


def test_time_is_split(target, heads):
    found = decode(target, PROMPTS[0], make("trained chain:4", heads, []), Decoding())
    seconds = found.seconds
    assert min(seconds.prefill, seconds.draft, seconds.verify, seconds.other) > 0
    assert seconds.decode == seconds.draft + seconds.verify + seconds.other


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["chain:4", "tree:3,3,8"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_loop_runs_on_a_gpu(target, heads, plan, sampling):
    there = Target.from_model(copy.deepcopy(target.model).to("cuda"))
    head = copy.deepcopy(heads["trained"]).to("cuda").attach(tables(there))
    decoding = Decoding(max_new_tokens=24, sampling=sampling, rule="match", ignore_eos=True)
    plain = decode(there, PROMPTS[0], None, decoding)
    assert decode(there, PROMPTS[0], HeadDrafter(head, plan_named(plan)), decoding).ids == plain.ids


# Planted faults: each must change the text or trip an assertion.


def texts_equal(target, heads, name):
    decoding = Decoding(max_new_tokens=24, ignore_eos=True)
    found = []
    for prompt in PROMPTS:
        text = greedy_text(target, prompt, 24)
        found.append(
            decode(target, prompt, make(name, heads, [*prompt, *text]), decoding).ids == text
        )
    return found


def test_an_uncompacted_tree_is_noticed(target, heads, monkeypatch):
    def first_slots(self, row, start, keep):
        self.truncate([start + len(keep)])

    monkeypatch.setattr(RowCache, "compact", first_slots)
    assert not all(texts_equal(target, heads, "forks"))


def test_a_causal_mask_over_a_tree_is_noticed(target, heads, monkeypatch):
    masks = decode_module.attention_masks
    monkeypatch.setattr(decode_module, "attention_masks", lambda *args: masks(*args[:4], None))
    assert not all(texts_equal(target, heads, "forks"))


def test_positions_by_slot_in_a_tree_are_noticed(target, heads, monkeypatch):
    positions = decode_module.query_positions
    monkeypatch.setattr(decode_module, "query_positions", lambda *args: positions(*args[:2]))
    assert not all(texts_equal(target, heads, "forks"))


def test_rejected_drafts_left_in_the_cache_are_noticed(target, heads, monkeypatch):
    monkeypatch.setattr(RowCache, "truncate", lambda self, lengths: None)
    with pytest.raises(AssertionError):
        texts_equal(target, heads, "trained chain:4")


def test_states_of_the_wrong_nodes_change_the_drafts_but_not_the_text(target, heads, monkeypatch):
    decoding = Decoding(max_new_tokens=30, ignore_eos=True)

    def decoded():
        found = [decode(target, p, make("trained chain:4", heads, []), decoding) for p in PROMPTS]
        return [one.ids for one in found], [one.rounds for one in found]

    text, right = decoded()
    rows = decode_module._rows
    monkeypatch.setattr(
        decode_module, "_rows", lambda captured, kept: rows(captured, (0,) * len(kept))
    )
    same, wrong = decoded()
    assert same == text
    assert wrong != right


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "the prompt has 0 tokens; give 1 to 255"), ([5] * 256, "has 256 tokens; give 1 to 255")],
)
def test_prompts_that_leave_no_room_are_refused(target, prompt, message):
    with pytest.raises(ValueError, match=message):
        decode(target, prompt)


@pytest.mark.parametrize(
    ("temperature", "rule", "message"),
    [
        (
            1.0,
            "greedy",
            "rule is 'greedy' at temperature 1.0; use greedy at 0, and above it match",
        ),
        (0.0, "match", "rule is 'match' at temperature 0.0; use greedy at 0"),
        (
            1.0,
            "rejection",
            r"judges drafts of kind single \(chain: draws a token a step\), these are chosen",
        ),
        (1.0, "typical", "no verification rule called 'typical'; choose one of greedy, rejection"),
    ],
)
def test_a_rule_that_would_not_be_exact_is_refused(target, heads, temperature, rule, message):
    drafter = HeadDrafter(heads["trained"], ChainPlan(2))
    decoding = Decoding(sampling=Sampling(temperature=temperature), rule=rule)
    with pytest.raises(ValueError, match=message):
        decode(target, PROMPTS[0], drafter, decoding)


def test_max_new_tokens_must_be_positive():
    with pytest.raises(ValueError, match="max_new_tokens is 0; write at least 1"):
        Decoding(max_new_tokens=0)


def test_texts_end_before_longrope_turns_other_angles():
    torch.manual_seed(5)
    first, factors = 16, {"short_factor": [1.0] * 3, "long_factor": [2.0, 9.0, 30.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    config = Phi3Config(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        original_max_position_embeddings=first,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        rope_parameters={**rope, "original_max_position_embeddings": first},
    )
    target = Target.from_model(Phi3ForCausalLM(config))
    decoding = Decoding(max_new_tokens=40)
    plain = decode(target, [1, 2, 3, 4], None, decoding)
    assert len(plain.ids) == first - 4
    for length in (1, 3, 8):
        drafter = Replay([1, 2, 3, 4, *plain.ids, *range(8)], length)
        assert decode(target, [1, 2, 3, 4], drafter, decoding).ids == plain.ids
    with pytest.raises(ValueError, match=f"give 1 to {first - 1}"):
        decode(target, list(range(first)), None, decoding)
