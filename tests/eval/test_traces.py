"""Traces hold the target's own text, say whose it is, and survive a kill."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.data.sampling import Sampling, process
from outrider.data.target import Target
from outrider.eval.offline import traces
from outrider.eval.offline.texts import Text
from outrider.eval.offline.traces import Trace, build_trace

LAYERS = (1, 3, 5)
GREEDY, WARM = Sampling(), Sampling(temperature=1.0)


def build(target: Target, texts: list[Text], folder: Path, sampling: Sampling = GREEDY) -> Trace:
    return build_trace(target, texts, folder, sampling=sampling, layers=LAYERS)


def test_a_row_holds_states_and_law_of_its_own_forward_pass(
    tiny_target: Target, sampled_texts: list[Text], tmp_path: Path
) -> None:
    trace = build(tiny_target, sampled_texts, tmp_path / "t", WARM)
    assert len(trace) == len(sampled_texts)
    assert trace.sampling == WARM
    for index in (0, 17, 39):
        text, row = sampled_texts[index], trace.row(index)
        ids = text.prompt_ids + text.answer_ids
        assert row.ids_T.tolist() == ids
        assert (row.row_id, row.kind, row.num_tokens) == (
            text.row_id,
            text.kind,
            len(text.answer_ids),
        )
        alone = tiny_target.run(torch.tensor([ids]), layers=LAYERS)
        torch.testing.assert_close(row.aux_TF, alone.aux_BTF[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(row.last_TH, alone.last_BTH[0], atol=1e-4, rtol=1e-4)
        before = len(text.prompt_ids) - 1
        logits = tiny_target.logits(alone.last_BTH[0, before:-1])
        logp = process(logits, WARM).log()
        chosen = logp[range(len(text.answer_ids)), text.answer_ids]
        torch.testing.assert_close(row.logprob_N, chosen, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(row.log_normaliser_N, logits.logsumexp(-1), atol=1e-4, rtol=0)
        torch.testing.assert_close(
            row.entropy_N, -(logp.exp() * logp).sum(-1), atol=1e-3, rtol=1e-3
        )
        assert row.top_ids_NM[:, 0].tolist() == logits.argmax(-1).tolist()


def test_layers_are_picked_in_the_order_asked(
    tiny_target: Target, greedy_texts: list[Text], tmp_path: Path
) -> None:
    trace = build(tiny_target, greedy_texts, tmp_path / "t")
    whole = trace.row(0).aux_TF
    swapped = trace.row(0, (5, 1)).aux_TF
    assert torch.equal(swapped, torch.cat([whole[:, 64:], whole[:, :32]], -1))
    with pytest.raises(ValueError, match=r"reads layers \[2\].*trace again with --layers 2"):
        trace.row(0, (2,))


def test_own_text_passes_and_foreign_text_is_refused(
    tiny_target: Target, greedy_texts: list[Text], sampled_texts: list[Text], tmp_path: Path
) -> None:
    policy = build(tiny_target, greedy_texts, tmp_path / "greedy").policy
    assert (policy.mismatches, policy.is_off) == (0, False)
    assert policy.tokens == sum(len(text.answer_ids) for text in greedy_texts)
    assert abs(build(tiny_target, sampled_texts, tmp_path / "warm", WARM).policy.z) < 3
    with pytest.raises(ValueError, match="not this target's own at this sampling"):
        build(tiny_target, sampled_texts, tmp_path / "a")
    with pytest.raises(ValueError, match="not this target's own"):
        build(tiny_target, greedy_texts, tmp_path / "b", WARM)


def test_a_wrong_temperature_is_refused(
    tiny_target: Target, make_texts: Callable[..., list[Text]], tmp_path: Path
) -> None:
    texts = make_texts(Sampling(temperature=0.6), 40)
    assert not build(tiny_target, texts, tmp_path / "a", Sampling(temperature=0.6)).policy.is_off
    with pytest.raises(ValueError, match="z ="):
        build(tiny_target, texts, tmp_path / "b", WARM)


def test_a_token_that_the_filter_forbids_is_refused(
    tiny_target: Target, sampled_texts: list[Text], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"[1-9]\d* impossible"):
        build(tiny_target, sampled_texts, tmp_path, Sampling(temperature=1.0, top_k=2))


def test_penalties_follow_the_path(
    tiny_target: Target, make_texts: Callable[..., list[Text]], tmp_path: Path
) -> None:
    sampling = Sampling(temperature=0.8, repetition_penalty=1.5, top_p=0.95)
    texts = make_texts(sampling, 20)
    assert build(tiny_target, texts, tmp_path, sampling).policy.impossible == 0


def test_a_stopped_build_goes_on_and_a_finished_one_is_reused(
    tiny_target: Target, sampled_texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = traces._write_shard
    calls: list[object] = []

    def stops_at_second(*arguments: object, key: str) -> None:
        calls.append(arguments[2])
        if calls == [0, 16]:
            raise KeyboardInterrupt
        original(*arguments, key=key)  # type: ignore[arg-type]

    monkeypatch.setattr(traces, "_write_shard", stops_at_second)
    with pytest.raises(KeyboardInterrupt):
        build(tiny_target, sampled_texts, tmp_path / "t", WARM)
    with pytest.raises(ValueError, match="not a finished trace"):
        Trace(tmp_path / "t")
    build(tiny_target, sampled_texts, tmp_path / "t", WARM)
    assert calls == [0, 16, 16, 32]
    build(tiny_target, sampled_texts, tmp_path / "t", WARM)
    assert calls == [0, 16, 16, 32]
    monkeypatch.undo()
    whole = build(tiny_target, sampled_texts, tmp_path / "whole", WARM)
    resumed = Trace(tmp_path / "t")
    assert all(torch.equal(whole.row(i).aux_TF, resumed.row(i).aux_TF) for i in range(40))


def test_another_trace_in_the_folder_is_never_used(
    tiny_target: Target, greedy_texts: list[Text], tmp_path: Path
) -> None:
    build(tiny_target, greedy_texts, tmp_path)
    with pytest.raises(ValueError, match=r"holds another trace .*layers is \[1, 3, 5\]"):
        build_trace(tiny_target, greedy_texts, tmp_path, sampling=GREEDY, layers=(1, 3))
    with pytest.raises(ValueError, match="text is"):
        build(tiny_target, greedy_texts[:-1], tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["info"]["code"] = "0.0.1"
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert build(tiny_target, greedy_texts, tmp_path).info.code == "0.0.1"
    meta["info"]["format"] = 99
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ValueError, match="format 99"):
        Trace(tmp_path)


def test_bad_rows_are_refused_by_name(
    tiny_target: Target, greedy_texts: list[Text], tmp_path: Path
) -> None:
    first = greedy_texts[0]
    cases: list[tuple[list[Text], str]] = [
        ([], "no rows"),
        ([first, first], "'row-0' appears 2 times"),
        ([Text("row-9", "chat", [5], [6, 7])], "'row-9' has 1 prompt"),
        ([Text("row-9", "chat", [5, 6], [])], "0 answer tokens"),
        ([Text("row-9", "chat", [5, 6], [61])], "token 61"),
        ([Text("row-9", "chat", [5, -3], [6])], "token -3"),
    ]
    for texts, message in cases:
        with pytest.raises(ValueError, match=message):
            build(tiny_target, texts, tmp_path)


def test_on_policy_counts_add_up() -> None:
    one = traces.OnPolicy(is_greedy=True, tokens=1000, mismatches=2)
    assert not one.is_off
    assert (one + replace(one, mismatches=3)).is_off


def test_shards_and_list_of_unlike_traces_are_told_apart(
    tiny_target: Target, greedy_texts: list[Text], sampled_texts: list[Text], tmp_path: Path
) -> None:
    greedy = build(tiny_target, greedy_texts, tmp_path / "a")
    warm = build(tiny_target, sampled_texts, tmp_path / "b", WARM)
    shard, meta = "shard-00000.safetensors", tmp_path / "a" / "meta.json"
    whole = (tmp_path / "a" / shard).read_bytes(), meta.read_text()
    (tmp_path / "a" / shard).write_bytes((tmp_path / "b" / shard).read_bytes())
    with pytest.raises(ValueError, match="are not of one trace"):
        greedy.row(0)
    (tmp_path / "a" / shard).write_bytes(whole[0])
    greedy.row(0)
    for field, value in (("sampling", {"temperature": 1.0}), ("layers", [5, 3, 1])):
        changed = json.loads(whole[1])
        changed["info"][field] = value
        meta.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match="are not of one trace"):
            Trace(tmp_path / "a").row(0)
    assert len(warm) == len(sampled_texts)


def test_shards_left_behind_by_another_trace_are_not_taken_up(
    tiny_target: Target, greedy_texts: list[Text], tmp_path: Path
) -> None:
    build(tiny_target, greedy_texts, tmp_path)
    (tmp_path / "meta.json").unlink()
    with pytest.raises(ValueError, match="are not of one trace"):
        build(tiny_target, greedy_texts[::-1], tmp_path)


@pytest.mark.parametrize("what", ["cut", "rows", "info", "strange", "policy", "list", "format"])
def test_a_damaged_list_is_named(
    what: str, tiny_target: Target, greedy_texts: list[Text], tmp_path: Path
) -> None:
    build(tiny_target, greedy_texts, tmp_path)
    path = tmp_path / "meta.json"
    meta = json.loads(path.read_text())
    if what in ("rows", "info"):
        del meta[what]
    elif what == "strange":
        meta["info"]["strange"] = 1
    elif what == "policy":
        meta["policy"]["strange"] = 1
    elif what == "format":
        meta["info"]["format"] = "2"
    text = "[]" if what == "list" else json.dumps(meta)
    path.write_text(text[: len(text) // 2] if what == "cut" else text)
    with pytest.raises(ValueError, match=r"meta\.json is damaged|has trace format '2'"):
        Trace(tmp_path)
