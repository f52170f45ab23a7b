"""Draft models, suffixes and block verification: scored offline as the loop and counting do."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.by_plan import drafter_by
from outrider.eval.drafters.model import DraftModel, as_draft_model, draft_model
from outrider.eval.drafters.past import LEAST_CHANCE
from outrider.eval.drafters.suffix import SuffixDrafter
from outrider.eval.metrics import count
from outrider.eval.noise import KeyedNoise
from outrider.eval.offline.chain import score_chain
from outrider.eval.offline.lookup import score_lookup
from outrider.eval.offline.model import score_model
from outrider.eval.offline.texts import Text, read_texts
from outrider.eval.offline.traces import Trace, build_trace
from outrider.eval.stats import ratio
from outrider.eval.trees.plans import ChainPlan, LookupPlan, SuffixPlan, expand, plan_named
from outrider.heads import EagleHead

LAYERS, LENGTH = (1, 3, 5), 24
WARM = Sampling(temperature=1.0)


@pytest.fixture(scope="module")
def model(tiny_target: Target) -> DraftModel:
    return draft_model("layers:3", tiny_target)


@pytest.fixture(scope="module")
def greedy_trace(
    tiny_target: Target, greedy_texts: list[Text], tmp_path_factory: pytest.TempPathFactory
) -> Trace:
    folder = tmp_path_factory.mktemp("greedy")
    return build_trace(tiny_target, greedy_texts[:8], folder, sampling=Sampling(), layers=LAYERS)


@pytest.fixture(scope="module")
def warm_trace(
    tiny_target: Target, sampled_texts: list[Text], tmp_path_factory: pytest.TempPathFactory
) -> Trace:
    folder = tmp_path_factory.mktemp("warm")
    return build_trace(tiny_target, sampled_texts, folder, sampling=WARM, layers=LAYERS)


def test_first_layers_are_the_targets_own(tiny_target: Target, model: DraftModel) -> None:
    ids = torch.tensor([[5, 9, 7, 11]])
    inner = tiny_target.run_inner(ids, layers=(3,))
    torch.testing.assert_close(
        model.model.run(ids).last_BTH, tiny_target.decoder.norm(inner), atol=1e-5, rtol=1e-5
    )
    assert tiny_target.num_layers == 6
    assert model.model.output_VH.data_ptr() == tiny_target.output_VH.data_ptr()


def test_a_model_of_another_tokenizer_is_refused(tiny_target: Target) -> None:
    other = replace(tiny_target, tokenizer_size=tiny_target.tokenizer_size - 1)
    with pytest.raises(ValueError, match="has another tokenizer"):
        as_draft_model(other, tiny_target)


@pytest.mark.parametrize("length", [1, 4])
def test_a_models_greedy_rounds_are_the_loops(
    length: int, tiny_target: Target, model: DraftModel, greedy_trace: Trace
) -> None:
    scores = score_model(model, greedy_trace, tiny_target, lengths=(1, 2, 4))
    for index in range(len(greedy_trace)):
        row = greedy_trace.row(index)
        ids = row.ids_T.tolist()
        drafter = drafter_by(ChainPlan(length), model)
        decoding = Decoding(max_new_tokens=row.num_tokens)
        found = decode(tiny_target, ids[: row.prompt_length], drafter, decoding)
        assert found.ids == ids[row.prompt_length :]
        assert len(found.rounds) == scores[length].rounds_R[index]
        counts = count([found.rounds], depth=length)
        assert counts.kept_at == tuple(scores[length].kept_RK[index])
        assert counts.drafted == scores[length].drafted_R[index]
        cut = sum(one.emitted <= one.accepted for one in found.rounds)
        # A round that accepts its last draft with the text's last token is complete, not cut.
        assert scores[length].cut_R[index] <= cut


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["head", "model"])
def test_sampled_tau_of_drawn_chains_lies_in_the_loops_interval(
    kind: str,
    rule: str,
    tiny_target: Target,
    tiny_head: EagleHead,
    model: DraftModel,
    sampled_texts: list[Text],
    warm_trace: Trace,
) -> None:
    texts, drafts = sampled_texts[:16], tiny_head if kind == "head" else model
    if isinstance(drafts, EagleHead):
        score = score_chain(drafts, warm_trace, tiny_target, lengths=(4,), rule=rule)[4]
    else:
        score = score_model(drafts, warm_trace, tiny_target, lengths=(4,), rule=rule)[4]
    decoded = [
        decode(
            tiny_target,
            text.prompt_ids,
            drafter_by(ChainPlan(4), drafts, temperature=1.0),
            Decoding(max_new_tokens=LENGTH, sampling=WARM, rule=rule, seed=5),
            row=index,
        )
        for index, text in enumerate(texts)
    ]
    emitted = [float(sum(one.emitted for one in run.rounds)) for run in decoded]
    rounds = [float(len(run.rounds)) for run in decoded]
    interval = ratio(emitted, rounds, confidence=0.99)
    spread = ratio(score.tokens_R, score.rounds_R, confidence=0.99)
    assert interval.low - spread.high + spread.value <= score.tau
    assert score.tau <= interval.high + spread.value - spread.low


def test_block_verification_never_takes_more_rounds(
    tiny_target: Target, tiny_head: EagleHead, warm_trace: Trace
) -> None:
    lengths = (1, 2, 4)
    plain = score_chain(tiny_head, warm_trace, tiny_target, lengths=lengths, rule="rejection")
    block = score_chain(tiny_head, warm_trace, tiny_target, lengths=lengths, rule="block")
    np.testing.assert_allclose(block[1].rounds_R, plain[1].rounds_R, rtol=1e-5)
    assert (block[4].rounds_R <= plain[4].rounds_R + 1e-6).all()
    assert block[4].rounds_R.sum() < plain[4].rounds_R.sum() - 1
    traversal = score_chain(tiny_head, warm_trace, tiny_target, lengths=(4,), rule="traversal")[4]
    np.testing.assert_array_equal(traversal.rounds_R, block[4].rounds_R)


def counted(ids: list[int], length: int, match: int) -> list[int]:
    """The most frequent continuation, counted afresh over the whole text for every token."""
    drafts: list[int] = []
    chance = 1.0
    while len(drafts) < length:
        recent = (ids + drafts)[-match:] if match else []
        for first in range(len(recent)):
            gram = recent[first:]
            ends = [end for end in range(len(gram), len(ids)) if ids[end - len(gram) : end] == gram]
            if ends:
                break
        else:
            break
        followers = [ids[end] for end in ends]
        best = max(
            set(followers),
            key=lambda one: (followers.count(one), max(e for e in ends if ids[e] == one)),
        )
        chance *= followers.count(best) / len(followers)
        if chance < LEAST_CHANCE:
            break
        drafts.append(best)
    return drafts


@pytest.mark.parametrize(("length", "match"), [(1, 2), (4, 1), (6, 4)])
def test_suffix_drafts_are_what_counting_finds(length: int, match: int) -> None:
    rng = random.Random(1)
    found = 0
    for _ in range(30):
        ids = [rng.randrange(3) for _ in range(rng.randrange(1, 25))]
        drafter = SuffixDrafter(SuffixPlan(length, match))
        drafter.start(ids, None)
        for _ in range(5):
            drafts = list(drafter.propose(length, None).tree.tokens[1:])
            assert drafts == counted(ids, length, match)
            assert drafts[:1] == list(drafter.propose(1, None).tree.tokens[1:])
            found += len(drafts)
            more = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
            ids = ids + more
            drafter.accept(more, None)
    assert found > 100


@pytest.mark.parametrize("plan", [SuffixPlan(4, 3), LookupPlan(4, 2)])
def test_text_drafters_greedy_rounds_are_the_loops(
    plan: SuffixPlan | LookupPlan, tiny_target: Target, greedy_trace: Trace
) -> None:
    together = score_lookup(greedy_trace, tiny_target, plan, lengths=(1, 2, 4))
    accepted = 0
    for length, score in together.items():
        alone = score_lookup(greedy_trace, tiny_target, replace(plan, length=length))[length]
        np.testing.assert_array_equal(alone.rounds_R, score.rounds_R)
        assert score.draft == replace(plan, length=length).label
        for index in range(len(greedy_trace)):
            row = greedy_trace.row(index)
            found = decode(
                tiny_target,
                row.ids_T[: row.prompt_length].tolist(),
                drafter_by(replace(plan, length=length), None),
                Decoding(max_new_tokens=row.num_tokens),
            )
            assert len(found.rounds) == score.rounds_R[index]
            assert sum(one.drafted for one in found.rounds) == score.drafted_R[index]
            accepted += sum(one.accepted for one in found.rounds)
        ended = sum(part.sum() for part in score.ends().values())
        assert ended == pytest.approx(score.rounds_R.sum())
    assert accepted > 10


def test_match_with_the_same_noise_takes_the_same_rounds(
    tiny_target: Target, sampled_texts: list[Text], warm_trace: Trace
) -> None:
    plan = SuffixPlan(3, 4)
    score = score_lookup(warm_trace, tiny_target, plan)[3]
    for index, text in enumerate(sampled_texts[:8]):
        decoding = Decoding(max_new_tokens=LENGTH, sampling=WARM, rule="match")
        found = decode(tiny_target, text.prompt_ids, drafter_by(plan, None), decoding, row=index)
        assert found.ids == text.answer_ids
        assert len(found.rounds) == score.rounds_R[index]


def test_proposing_twice_changes_nothing(tiny_target: Target, model: DraftModel) -> None:
    drafter = drafter_by(ChainPlan(3), model)
    drafter.start([5, 6, 7], tiny_target.run(torch.tensor([[5, 6]])))
    first = drafter.propose(3, KeyedNoise(0, 0, 3)).tree
    assert drafter.propose(3, KeyedNoise(0, 0, 3)).tree == first
    drafter.accept([8, 9], tiny_target.run(torch.tensor([[5, 6]])))
    fresh = drafter_by(ChainPlan(3), model)
    fresh.start([5, 6, 7, 8, 9], tiny_target.run(torch.tensor([[5, 6]])))
    noise = KeyedNoise(0, 0, 5)
    assert drafter.propose(3, noise).tree == fresh.propose(3, noise).tree


def test_ranges_and_plans_are_read_and_refused() -> None:
    assert expand(["chain:2-4", "tree:2,2,4", "suffix:1-2,3", "chain:3"]) == (
        "chain:2",
        "chain:3",
        "chain:4",
        "tree:2,2,4",
        "suffix:1,3",
        "suffix:2,3",
    )
    assert plan_named("suffix:5") == SuffixPlan(5, 8)
    for bad in ("suffix:", "suffix:0", "suffix:3,0", "suffix:1,2,3"):
        with pytest.raises(ValueError, match="suffix"):
            plan_named(bad)
    for bad in ("chain:0-3", "chain:4-2", "lookup:1-x"):
        with pytest.raises(ValueError, match="write a range"):
            expand([bad])


LOGGED = [
    {"id": "a", "prompt_ids": [5, 6], "answer_ids": [7, 8], "kind": "chat"},
    {"request_id": "b", "prompt_token_ids": [5, 6], "outputs": [{"token_ids": [7, 8]}]},
    {"id": "c", "choices": [{"token_ids": [7, 8], "prompt_token_ids": [5, 6]}]},
    {"id": "d", "prompt_token_ids": [5, 6], "choices": [{"token_ids": [7]}, {"token_ids": [8]}]},
    {"request": {"prompt": [5, 6], "temperature": 1.0, "top_k": -1},
     "response": {"id": "e", "choices": [{"token_ids": [7, 8], "text": "x"}]}},
    {"id": "f", "input_ids": [5, 6], "output_ids": [7, 8], "meta_info": {"id": "z"}},
    {"id": "g", "request": {"input_ids": [5, 6], "temperature": 0.5}, "output_ids": [7, 8]},
]  # fmt: skip


def test_server_logs_are_read_in_every_form(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in LOGGED))
    texts = read_texts(str(log), WARM)
    assert [text.row_id for text in texts] == ["a", "b", "c", "d-0", "d-1", "e", "f"]
    assert all(text.prompt_ids == [5, 6] for text in texts)
    assert [text.answer_ids for text in texts[3:5]] == [[7], [8]]
    assert texts[0].kind == "chat"
    cool = read_texts(str(log), Sampling(temperature=0.5))
    assert [text.row_id for text in cool] == ["a", "b", "c", "d-0", "d-1", "f", "g"]
    log.write_text(json.dumps({"id": "h", "choices": [{"text": "no ids"}]}) + "\n")
    with pytest.raises(ValueError, match="return_token_ids"):
        read_texts(str(log), WARM)


def test_off_policy_tokens_of_probability_zero_are_never_accepted(
    tiny_target: Target, tiny_head: EagleHead, sampled_texts: list[Text], tmp_path: Path
) -> None:
    narrow = Sampling(temperature=1.0, top_k=2)
    made: Callable[..., Trace] = build_trace
    trace = made(
        tiny_target,
        sampled_texts,
        tmp_path,
        sampling=narrow,
        layers=LAYERS,
        allow_off_policy=True,
    )
    assert trace.policy.is_off
    score = score_chain(tiny_head, trace, tiny_target, lengths=(3,))[3]
    assert np.isfinite(score.rounds_R).all()
    with pytest.raises(ValueError, match="not this target's own"):
        Trace(tmp_path)
