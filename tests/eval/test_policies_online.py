"""Policies replayed offline are what the decode loop does with the same policies in it."""

import json
import re

import pytest

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.policed import PolicyDrafter
from outrider.eval.offline.chain import score_chain
from outrider.eval.offline.traces import build_trace
from outrider.eval.policies.figures import Costs, play
from outrider.eval.policies.named import policy_named
from outrider.eval.policies.paths import head_rows
from outrider.eval.stats import ratio
from outrider.scripts.cli import main as outrider

LAYERS, LENGTH = (1, 3, 5), 24
WARM = Sampling(temperature=1.0)
POLICIES = (
    "fixed:3",
    "confidence:0.3,5",
    "kept:0.3,5",
    "entropy:1.5,5",
    "heuristic:2,6",
    "transient:2,6",
    "dynamic:0.4,5",
    "table:1=4,8=2@9",
)


def online(target, head, texts, name, decoding, temperature=0.0):
    """Rounds, drafted tokens and draft steps of every prompt, one drafter for all of them."""
    drafter = PolicyDrafter(head, policy_named(name), temperature=temperature)
    found, steps = [], 0
    for text in texts:
        row = int(text.row_id.split("-")[1])
        one = decode(target, text.prompt_ids, drafter, decoding, row=row)
        drafted = sum(each.drafted for each in one.rounds)
        found.append((one.ids, len(one.rounds), drafted, drafter.draft_steps - steps))
        steps = drafter.draft_steps
    return found


def offline(head, trace, name, rule):
    rows = head_rows(head, trace, depth=policy_named(name).most, rule=rule)
    return play([policy_named(name)], zip(trace.row_ids, rows, strict=True), Costs(c=0.1))[0]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("rule", ["greedy", "match"])
def test_chosen_drafts_take_the_same_rounds_and_drafts_in_every_prompt(
    name, rule, tiny_target, tiny_head, greedy_texts, sampled_texts, tmp_path
):
    sampling, texts = (Sampling(), greedy_texts) if rule == "greedy" else (WARM, sampled_texts)
    texts = texts[:6]
    trace = build_trace(tiny_target, texts, tmp_path, sampling=sampling, layers=LAYERS)
    decoding = Decoding(max_new_tokens=LENGTH, sampling=sampling, rule=rule)
    found = online(tiny_target, tiny_head, texts, name, decoding)
    assert [ids for ids, *_ in found] == [text.answer_ids for text in texts]
    score = offline(tiny_head, trace, name, rule)
    columns = zip(score.rounds_R, score.drafted_R, score.laws_R, strict=True)
    assert [counts for _, *counts in found] == [[*counts] for counts in columns]


@pytest.mark.parametrize("name", ["confidence:0.3,5", "kept:0.3,5", "heuristic:2,6"])
def test_drawn_drafts_agree_within_the_loops_interval(
    name, tiny_target, tiny_head, sampled_texts, tmp_path
):
    texts = sampled_texts[:24]
    trace = build_trace(tiny_target, texts, tmp_path, sampling=WARM, layers=LAYERS)
    decoding = Decoding(max_new_tokens=LENGTH, sampling=WARM, rule="rejection", seed=11)
    found = online(tiny_target, tiny_head, texts, name, decoding, temperature=1.0)
    score = offline(tiny_head, trace, name, "rejection")
    emitted = [float(len(ids) - 1) for ids, *_ in found]
    for column, here_R in ((1, score.rounds_R), (2, score.drafted_R), (3, score.laws_R)):
        counted = [float(one[column]) for one in found]
        theirs = ratio(counted, emitted, confidence=0.99)
        ours = ratio(here_R, score.tokens_R, confidence=0.99)
        assert theirs.low - (ours.high - ours.value) <= ours.value
        assert ours.value <= theirs.high + (ours.value - ours.low)


def test_a_fixed_length_scores_as_a_chain_does(tiny_target, tiny_head, sampled_texts, tmp_path):
    texts = sampled_texts[:8]
    trace = build_trace(tiny_target, texts, tmp_path, sampling=WARM, layers=LAYERS)
    for rule in ("rejection", "match"):
        chain = score_chain(tiny_head, trace, tiny_target, lengths=[3], rule=rule)[3]
        fixed = offline(tiny_head, trace, "fixed:3", rule)
        assert fixed.rounds_R == pytest.approx(chain.rounds_R, abs=1e-4)
        assert fixed.kept_R == pytest.approx(chain.hit_RK.sum(1), abs=1e-4)
        assert fixed.judged_R == pytest.approx(chain.judged_RK.sum(1), abs=1e-4)
        assert fixed.drafted_R == pytest.approx(3 * fixed.rounds_R)


def test_past_the_heads_positions_no_policy_drafts(tiny_target, tiny_head, greedy_texts, tmp_path):
    texts = greedy_texts[:4]
    trace = build_trace(tiny_target, texts, tmp_path, sampling=Sampling(), layers=LAYERS)
    config = tiny_head.config
    try:
        object.__setattr__(config, "max_position_embeddings", 14)
        for name in ("fixed:3", "heuristic:2,6"):
            found = online(tiny_target, tiny_head, texts, name, Decoding(max_new_tokens=LENGTH))
            score = offline(tiny_head, trace, name, "greedy")
            assert [one[1:3] for one in found] == [
                *zip(score.rounds_R, score.drafted_R, strict=True)
            ]
    finally:
        object.__setattr__(config, "max_position_embeddings", 256)


def test_the_oracle_cannot_be_run(tiny_head):
    with pytest.raises(ValueError, match="it knows the future"):
        PolicyDrafter(tiny_head, policy_named("oracle:3"))


def test_the_command_replays_and_writes(write_files, greedy_texts, sampled_texts, tmp_path, capsys):
    write_files(tmp_path)
    target = Target.load(str(tmp_path / "target"))
    for name, texts, sampling in (
        ("cold", greedy_texts, Sampling()),
        ("warm", sampled_texts, WARM),
    ):
        build_trace(target, texts[:8], tmp_path / name, sampling=sampling, layers=LAYERS)
    out = tmp_path / "policies.json"
    words = ["policies", "--target", str(tmp_path / "target")]
    words += ["--head", str(tmp_path / "run" / "good"), "--out", str(out)]
    words += ["--trace", str(tmp_path / "cold"), "--trace", str(tmp_path / "warm")]
    words += ["--policy", "fixed:2", "dynamic:0.4,4", "oracle:4", "--c", "0.1"]
    outrider([*words, "--verify", "1=1", "4=1.2"])
    said = capsys.readouterr().out
    assert "dynamic:0.4,4 is left out on warm" in said
    assert "speed-up at c = 0.1" in said
    results = json.loads(out.read_text())["policies"]["results"]
    assert [(one["trace"], one["policy"]) for one in results] == [
        ("cold", "fixed:2"),
        ("cold", "dynamic:0.4,4"),
        ("cold", "oracle:4"),
        ("warm", "fixed:2"),
        ("warm", "oracle:4"),
    ]
    assert results[2]["speedup"]["value"] > results[0]["speedup"]["value"]
    for more, message in (
        (["--policy", "fixed"], "write fixed:K"),
        (["--verify", "a"], "write TOKENS=RATIO"),
        (["--out", "x.txt"], "ends in .json"),
    ):
        with pytest.raises(SystemExit) as stopped:
            outrider([*words, *more])
        assert stopped.value.code == 2
        assert message in " ".join(re.findall(r"[^\s│|]+", capsys.readouterr().err))
