"""`outrider check` on rows and templates: cases of data that lies, each with its remedy."""

import json
from datetime import date
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tokenizers.processors import TemplateProcessing

from outrider.data.chat import RowError, Template
from outrider.data.collect import Collector
from outrider.data.forms import RecordReader
from outrider.data.mixture import Numbered
from outrider.data.rows import Reading, Row
from outrider.data.workers import Outcome
from outrider.scripts import cli
from outrider.train.check import template as template_checks
from outrider.train.check.case import SAMPLE, Sample
from outrider.train.check.rows import check_starts
from outrider.train.eagle import main as train

END = "<|end|>"
SMALL = ["--head-intermediate", "32", "--unroll-steps", "2", "--device", "cpu"]
SMALL += ["--max-length", "256"]


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


@pytest.fixture
def check(tmp_path, capsys, make_model, make_tokenizer):
    """Runs `outrider check`: its exit code, its page, its findings by name."""

    def run(rows, *flags, template="chatml", layers=("1", "3", "5"), **model):
        folder = tmp_path / "target"
        make_model(**model).save_pretrained(folder)
        make_tokenizer(template).save_pretrained(folder)
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = ["check", "--target", str(folder), "--data", str(data), *SMALL]
        given += ["--aux-layers", *layers] if layers else []
        given += ["--json", str(tmp_path / "check.json"), *flags]
        capsys.readouterr()
        try:
            cli.main(given)
            code = 0
        except SystemExit as caught:
            code = caught.code
        said = capsys.readouterr()
        if code == 2:
            return SimpleNamespace(code=code, page=said.out, error=said.err)
        record = json.loads((tmp_path / "check.json").read_text())
        found = {one["name"]: SimpleNamespace(**one) for one in record["findings"]}
        return SimpleNamespace(code=code, page=said.out, found=found, record=record, data=data)

    return run


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


def test_c03_history_that_is_rewritten_is_told_and_each_turn_trains(check):
    talk = chat("Hello", "<think>first</think>yes", "why", "<think>then</think>no.")
    result = check([{"id": "t", "messages": talk}], template="strips_earlier_thinking")
    assert result.code == 0
    told = result.found["template prefixes"]
    assert told.verdict == "warn"
    assert "rewrites history in 1 of 1 sample rows, first row 1 message 2" in told.seen
    assert "(rows added: 1)" in told.seen
    assert "(and 1 added, a row for each answer)" in result.found["rows"].seen


def test_c03_a_template_that_strips_the_answer_fails(check):
    talk = chat("Hello", "<think>first</think>yes")
    result = check([{"messages": talk}], template="strips_all_thinking")
    assert result.code == 1
    told = result.found["answers whole"]
    assert told.verdict == "fail"
    assert "row 1 message 1 loses" in told.seen
    assert "outrider generate" in told.remedy


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


def test_generation_tags_are_compared_with_the_boundaries(check):
    assert (
        "agree with render boundaries"
        in check(GOOD[:2], template="tagged").found["generation tags"].seen
    )
    result = check(GOOD[:2], template="tags_the_user")
    assert result.code == 1
    told = result.found["generation tags"]
    assert told.verdict == "fail"
    assert "rows that disagree: 2, first row 1" in told.seen
    assert "correct the tags" in told.remedy


def test_options_that_the_template_does_not_read_fail_and_are_mended(check, tmp_path):
    flags = ("--template-options", "mod=fast", "--fix", str(tmp_path / "fixed"))
    result = check(GOOD, *flags, template="modal")
    first = " ".join(result.page.split("wrote ")[0].split())
    assert "mod is given, and the template reads mode" in first
    assert "did you mean mode?" in first
    assert result.code == 0
    assert result.found["template options"].seen == "mode=fast"
    assert result.record["settings"]["template_options"] == ["mode=fast"]


def test_a_template_that_writes_the_date_is_told(check):
    told = check(GOOD, template="dated").found["date"]
    assert told.verdict == "warn"
    assert "today's date" in told.seen


def test_rows_answered_in_another_mode_fail_and_the_mode_is_mended(check, tmp_path, make_tokenizer):
    asked = chat("Hello")
    tokenizer = make_tokenizer("modal")
    prompt = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=False, mode="fast"
    )
    row = {"messages": asked, "prompt_ids": prompt, "answer_ids": [40, 41, 2]}
    rows = [{**row, "template_options": {"mode": "fast"}}]
    result = check(rows, template="modal")
    assert result.code == 1
    assert "generated by another target, or with other template" in result.found["rows"].seen
    assert result.found["rows"].fix == {"template_options": ["mode=fast"]}
    assert result.found["head"].verdict == "skipped"
    mended = check(rows, "--fix", str(tmp_path / "fixed"), template="modal")
    assert mended.code == 0


def test_rows_without_a_template_need_none(check):
    rows = [{"input_ids": [0, *range(10, 20), 2], "loss_mask": [0] * 6 + [1] * 6}]
    result = check(rows, template=None)
    assert result.code == 0
    assert result.found["template"].verdict == "ok"


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


FAMILIES = Path(__file__).parent / "templates"
FACTS = yaml.safe_load((FAMILIES / "families.yaml").read_text())
MODES = {"harmony": {"reasoning_effort", "date"}, "qwen3": {"enable_thinking"}}


def family(name, make_tokenizer):
    """A template of a well-known family over the tiny tokenizer."""
    facts, tokenizer = FACTS[name], make_tokenizer()
    stops = [*facts["stops"], *facts.get("special", [])]
    tokenizer.add_special_tokens({"eos_token": stops[0], "additional_special_tokens": stops})
    tokenizer.chat_template = (FAMILIES / f"{name}.jinja").read_text()
    return tokenizer, tuple(tokenizer.convert_tokens_to_ids(facts["stops"]))


@pytest.mark.parametrize("name", sorted(FACTS))
def test_templates_of_well_known_families_are_told_rightly(name, make_tokenizer):
    tokenizer, ends = family(name, make_tokenizer)
    for number, case in enumerate(FACTS[name]["cases"], start=1):
        record, sample = {"messages": case["messages"], "tools": case.get("tools")}, Sample()
        reader = RecordReader(
            tokenizer=tokenizer,
            eos_ids=ends,
            tokenizer_size=len(tokenizer) + 1,
            options=case.get("options", {}),
        )
        template = reader.template
        assert template_checks.modes_of(template) == MODES.get(name, set())
        collector = Collector(reader, Reading(max_length=4096))
        try:
            outcome = Outcome(Numbered("d", number, record), reader.encode(record), None)
        except RowError as refusal:
            outcome = Outcome(Numbered("d", number, record), [], str(refusal))
        sample.watch(outcome)
        collector.add(outcome)
        counts, talks = collector.counts, template_checks.talks(sample, reader)
        (told,) = template_checks.check_answers(talks, template, counts)
        strips = any("removes part" in fate.reason for fate in counts.fates)
        assert (told.verdict == "fail") == strips, (case["name"], told)
        (told,) = template_checks.check_prefixes(talks, template, counts.extra_turns)
        assert counts.extra_turns == 0 or told.verdict == "warn", (case["name"], told)
    assert FACTS[name]["cases"]


def test_the_date_is_pinned_in_the_templates_own_form(make_tokenizer):
    tokenizer, ends = family("harmony", make_tokenizer)
    (told,) = template_checks.check_date(Template(tokenizer=tokenizer, eos_ids=ends))
    pin = f"date={date.today():%Y-%m-%d}"
    assert told.fix == {"template_options": (pin,)}
    assert f"--template-options '{pin}'" in told.remedy
    options = {"date": "2024-07-26"}
    pinned = Template(tokenizer=tokenizer, eos_ids=ends, options=options)
    assert [one.verdict for one in template_checks.check_date(pinned)] == ["ok"]


def test_the_sample_is_spread_over_all_rows_and_stays_small():
    sample = Sample()
    for number in range(1000):
        sample.watch(Outcome(Numbered("d", number, {}), [], "refused"))
    places = [kept.found.number for kept in sample.kept]
    assert SAMPLE // 2 <= len(places) <= SAMPLE
    assert places[0] == 0
    assert places[-1] > 900
    assert len({b - a for a, b in pairwise(places)}) == 1
