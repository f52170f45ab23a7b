"""`outrider check` on rows: cases of data that lies, each with its remedy."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from outrider.data.mixture import Numbered
from outrider.data.rows import Row
from outrider.data.workers import Outcome
from outrider.train.check.case import SAMPLE, Sample
from outrider.train.check.rows import check_starts
from outrider.train.eagle import main as train

END = "<|end|>"


def chat(*contents):
    return [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]


GOOD = [
    {"id": "a", "messages": chat("Hello", "Hello there")},
    {"id": "b", "messages": chat("What is the time?", "four.")},
    {"id": "c", "messages": chat("Hi", "I am fine.", "And you?", "yes, no.")},
    {"id": "d", "messages": [{"role": "system", "content": "Write."}, *chat("a fox", "spaced")]},
]


def failed(result):
    return [name for name, one in result.found.items() if one.verdict == "fail"]


def test_a_good_input_passes_every_check(check):
    result = check(GOOD)
    assert result.code == 0
    assert not failed(result)
    assert not [one for one in result.found.values() if one.verdict == "skipped"]
    assert result.found["rows"].seen == "4 read: 4 kept, 0 cut, 0 dropped, 0 refused"
    assert result.found["turn ends"].seen == f"trained: {END} 5 times (of 5 answers)"
    assert result.found["template prefixes"].verdict == "ok"
    assert (
        "7 of 7 messages extend the text (4 sample rows)" in result.found["template prefixes"].seen
    )
    assert result.page.endswith("ready to train\n")
    assert "{{Hello there<|end|>}}" in result.page
    assert all(one.remedy for one in result.found.values() if one.verdict == "warn")


def test_supervised_shares_are_told_by_role(check):
    seen = check(GOOD).found["supervised tokens"].seen
    assert "user 0 of " in seen
    assert "system 0 of " in seen
    assert "assistant " in seen


def test_c01_another_role_marker_leaves_every_mask_empty(check):
    rows = [{"text": f"### User: Hi\n### Bot: line {letter}\n"} for letter in "abcd"]
    result = check(rows)
    assert result.code == 1
    masks = result.found["masks"]
    assert "4 of 4 rows have no supervised token" in masks.seen
    assert "### Bot: line a" in masks.seen
    assert "give the rows as messages" in masks.remedy
    assert result.found["rows"].verdict == "fail"
    assert result.found["step"].verdict == "skipped"
    assert result.found["layer capture"].verdict == "ok"  # what can go on goes on
    assert "NOT READY" in result.page


C02 = [
    {"id": "good", "messages": chat("Hello", "Paris")},
    {"messages": [{"role": "system", "content": "x"}, *chat("a", "b")]},
    {"messages": [{"role": "assistant", "content": "hi"}, *chat("a", "b")]},
    {"messages": [*chat("a"), *chat("a", "b")]},
    {"messages": chat("a", "")},
    {"messages": chat("a")},
    {"messages": chat("why", "yes, no.")},
]


def test_c02_refused_rows_are_named_and_a_file_without_them_is_written(check, tmp_path):
    result = check(C02, "--fix", str(tmp_path / "fixed"), template="strict")
    first, second = result.page.split("wrote ")
    assert "7 read: 2 kept, 0 cut, 0 dropped, 5 refused; 71% of the rows are lost" in first
    for told in ("rows 3, 4: ", "rows 2: ", "no system role", "rows 5: ", "empty answer"):
        assert told in " ".join(first.split())
    assert "NOT READY" in first
    assert "ready to train" in second
    assert result.code == 0
    kept = (tmp_path / "fixed" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == [C02[0], C02[6]]
    lines = result.data.read_text().splitlines()
    assert [json.loads(line) for line in lines] == C02  # the user's file is as it was


def test_c04_turn_ends_are_supervised_where_pad_is_eos(check):
    talk = chat("Hi", "I am fine.", "And you?", "yes, no.", "why", "four.")
    result = check([{"messages": chat("Hello", "Paris")}, {"messages": talk}])
    assert result.found["turn ends"].seen == f"trained: {END} 4 times (of 4 answers)"
    assert result.found["turn ends"].verdict == "ok"


def test_turn_ends_that_generation_does_not_stop_at_fail(check):
    result = check(GOOD, eos_token_id=0, pad_token_id=0)
    assert result.code == 1
    assert "ends every answer in <|end|> (id 2)" in result.found["turn ends"].seen
    assert "generation_config.json" in result.found["turn ends"].remedy


def test_ends_that_never_train_are_told(check):
    rows = [{"input_ids": list(range(5, 25)), "loss_mask": [0] * 5 + [1] * 15}]
    told = check(rows).found["turn ends"]
    assert told.verdict == "warn"
    assert "eos_token_id [2]" in told.remedy


@pytest.mark.parametrize("family", ["llama", "qwen", "gemma"])
@pytest.mark.parametrize("layers", [("1", "3", "5"), ("6",)])
def test_c06_captured_states_are_those_of_independent_hooks(check, family, layers):
    result = check(GOOD, family=family, layers=layers)
    told = result.found["layer capture"]
    assert told.verdict == "ok"
    assert "ids 0..6 equal independent hooks bit for bit" in told.seen
    assert f"this head reads {[int(layer) for layer in layers]}" in told.seen
    assert result.found["rotary positions"].verdict == "ok"
    assert not failed(result)


@pytest.mark.parametrize(("depth", "chosen"), [(4, [1, 2, 3]), (2, [1]), (1, [1]), (6, [1, 3, 5])])
def test_c06_a_shallow_target_fails_and_the_fix_names_layers(check, tmp_path, depth, chosen):
    fixed = tmp_path / "fixed"
    result = check(GOOD, "--fix", str(fixed), layers=None, num_hidden_layers=depth)
    first, second = result.page.split("wrote ")
    assert "give aux_layers explicitly" in " ".join(first.split())
    assert "fail    head" in first
    assert f"aux_layers: None -> {tuple(chosen)}" in second
    assert result.code == 0
    assert f"this head reads {chosen}" in result.found["layer capture"].seen
    train(["--recipe", str(fixed / "recipe.yaml"), "--output", str(tmp_path / "run")])
    config = json.loads((tmp_path / "run" / "last" / "config.json").read_text())
    assert config["outrider"]["head"]["aux_layers"] == chosen


def lengths(most):
    """Rows of most - 1, most and most + 1 tokens, and one whose answer begins after the cut."""
    for length, start in ((most - 1, 3), (most, 3), (most + 1, 3), (most + 6, most)):
        ids = [10 + place for place in range(length - 1)] + [2]
        yield {"input_ids": ids, "loss_mask": [0] * start + [1] * (length - start)}


def test_c19_cut_and_dropped_rows_are_counted_and_a_length_is_proposed(check, tmp_path):
    result = check([*lengths(12)], "--max-length", "12", "--fix", str(tmp_path / "fixed"))
    first = " ".join(result.page.split("wrote ")[0].split())
    assert "4 read: 2 kept, 1 cut, 1 dropped, 0 refused; 25% of the rows are lost" in first
    assert "longest 18, max_length 12; 2 of 4 rows are longer: 1 cut, 1 dropped" in first
    assert "--max-length 64 keeps 100% of the rows whole" in first
    assert "max_length: 12 -> 64" in result.page
    assert result.code == 0
    assert result.found["rows"].seen == "4 read: 4 kept, 0 cut, 0 dropped, 0 refused"


def test_rows_that_are_all_too_long_fail(check):
    rows = [*lengths(40)]
    result = check(rows, "--max-length", "16", "--on-long", "drop")
    assert result.code == 1
    assert {"rows", "lengths"} == set(failed(result))
    assert "100% of the rows are lost" in result.found["rows"].seen
    assert "--max-length 64 keeps 100% of the rows whole" in result.found["lengths"].remedy
    assert result.found["lengths"].fix == {"max_length": 64}


def test_a_length_beyond_the_target_is_not_proposed(check):
    ids = [10 + place % 200 for place in range(300)]
    rows = [{"input_ids": ids, "loss_mask": [0, 0] + [1] * 298}]
    told = check(rows, "--max-length", "256").found["lengths"]
    assert told.verdict == "warn"
    assert told.remedy == "the target has 256 positions; split the longer rows"
    assert not told.fix


def test_ids_outside_the_vocabulary_are_refused_by_number(check):
    rows = [{"input_ids": [5, 6, 7, 389 + n], "loss_mask": [0, 0, 1, 1]} for n in range(3)]
    result = check(rows, vocab_size=400)  # padded: the rows exist, the tokens do not
    assert result.code == 1
    told = result.found["refused rows"].seen
    assert (
        "rows 1, 2, 3: token id 389 at position 3 is outside the target's vocabulary (0 to 388)"
        in told
    )
    assert "400 rows of the output head, 11 of them padding" in result.found["vocabulary"].seen
    assert result.found["vocabulary"].verdict == "ok"


def test_few_refused_rows_are_told_and_do_not_fail(check):
    result = check([*GOOD * 5, {"messages": chat("a")}], "--max-unsupervised", "0.1")
    assert result.code == 0
    assert result.found["rows"].verdict == "warn"
    assert "rows 21: no assistant message" in result.found["refused rows"].seen


def test_bos_twice_fails_and_bos_that_is_lacking_is_told(check, make_tokenizer):
    row = {"input_ids": [0, 0, *range(10, 20)], "loss_mask": [0] * 6 + [1] * 6}
    result = check([row])
    assert result.code == 1
    assert result.found["BOS"].verdict == "fail"
    assert "rows that begin with BOS twice: 1 (1)" in result.found["BOS"].seen
    once = {"input_ids": [0, *range(10, 20)], "loss_mask": [0] * 6 + [1] * 5}
    assert check([once]).found["BOS"].verdict == "ok"


def test_a_tokenizer_that_adds_bos_is_compared_with_the_rows(make_target):
    target = make_target()
    backend = target.tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 0)]
    )
    row = Row(torch.tensor([10, 11, 2]), torch.tensor([False, False, True]), "r", "all", 2)
    (told,) = check_starts(SimpleNamespace(rows=[row]), target)
    assert told.verdict == "warn"
    assert "1 rows lack the BOS token that the tokenizer adds (r)" in told.seen


def test_rows_supervised_throughout_are_told(check):
    told = check([{"input_ids": [*range(10, 20), 2], "loss_mask": [1] * 11}]).found
    assert told["supervised tokens"].verdict == "warn"
    assert "mark the prompts' tokens with 0" in told["supervised tokens"].remedy


def test_data_that_is_not_there_fails_and_the_target_is_still_checked(check, tmp_path):
    result = check(GOOD, "--data", str(tmp_path / "nope.jsonl"))
    assert result.code == 1
    assert "check the spelling" in result.found["rows"].remedy
    assert result.found["layer capture"].verdict == "ok"
    assert result.found["head"].seen == "needs the rows, which a check above did not get"


def test_a_folder_with_other_files_is_not_written_to(check, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    result = check(GOOD, "--fix", str(tmp_path / "mine"))
    assert result.code == 2
    assert "name a new folder" in result.error


def test_nothing_is_written_where_nothing_is_to_fix(check, tmp_path):
    result = check(GOOD, "--fix", str(tmp_path / "fixed"))
    assert result.code == 0
    assert not (tmp_path / "fixed").exists()
    assert not (tmp_path / "runs").exists()


def test_the_sample_is_spread_over_all_rows_and_stays_small():
    sample = Sample()
    for number in range(1000):
        sample.watch(Outcome(Numbered("d", number, {}), [], "refused"))
    places = [kept.found.number for kept in sample.kept]
    assert SAMPLE // 2 <= len(places) <= SAMPLE
    assert places[0] == 0
    assert places[-1] > 900
    assert len({b - a for a, b in pairwise(places)}) == 1
