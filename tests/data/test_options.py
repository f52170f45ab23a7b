"""The chat template's mode: given by flag, saved with the head, compared wherever it is judged."""

import json
import warnings

import pytest

from outrider.data.options import mode_difference, parse_options, state_options
from outrider.data.template import template_hash
from outrider.scripts.cli import main as outrider
from outrider.train.eagle import main as train


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ((), {}),
        (("enable_thinking=false", "depth=3"), {"enable_thinking": False, "depth": 3}),
        (("date=26 Jul 2024", "a=b=c", "empty="), {"date": "26 Jul 2024", "a": "b=c", "empty": ""}),
        (('style={"x": [1]}',), {"style": {"x": [1]}}),
    ],
)
def test_options_are_json_where_they_can_be_else_text(words, options):
    assert parse_options(words) == options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("enable_thinking",), "write NAME=VALUE"),
        (("2x=1",), "write NAME=VALUE"),
        (("tools=[]",), "which rows decide"),
        (("a=1", "a=2"), "stands there already"),
    ],
)
def test_options_that_make_no_sense_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        parse_options(words)


def test_modes_are_compared_by_content():
    assert state_options({"b": 1, "a": 2}) == state_options({"a": 2, "b": 1})
    assert state_options({}) == ""
    assert mode_difference({}, "x", "it") is None  # a head that keeps no note
    notes = {"template_options": {"mode": "short"}}
    assert mode_difference(notes, state_options({"mode": "short"}), "it") is None
    found = mode_difference(notes, "", "the trace")
    assert found == (
        'the head was trained with template options {"mode": "short"}, the trace has (none)'
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory, make_model, make_tokenizer):
    """A target with modes, a head of one mode, and text of either."""
    root = tmp_path_factory.mktemp("modes")
    target = str(root / "target")
    make_model(num_hidden_layers=8, vocab_size=389).save_pretrained(target)
    make_tokenizer("modal").save_pretrained(target)
    asked = [{"id": f"p{n}", "messages": [{"role": "user", "content": f"{n}"}]} for n in range(4)]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, asked)))
    talks = [
        {"messages": [*one["messages"], {"role": "assistant", "content": "Paris"}]} for one in asked
    ]
    (root / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    for name, mode in (("short", ["--template-options", "mode=short"]), ("none", [])):
        rows = str(root / f"{name}.jsonl")
        given = ["--target", target, "--prompts", str(root / "prompts.jsonl"), "--out", rows]
        outrider(["generate", *given, "--max-new-tokens", "6", "--temperature", "0", *mode])
        given = ["--target", target, "--text", rows, "--out", str(root / f"{name}-trace")]
        outrider(["trace", *given, "--temperature", "0"])
    run(root, "talks", "head", "--template-options", "mode=short")
    return root


def run(root, data, output, *flags):
    given = {"target": root / "target", "data": root / f"{data}.jsonl", "output": root / output}
    given |= {"unroll-steps": 1, "head-intermediate": 32, "device": "cpu"}
    train([*(word for name in given for word in (f"--{name}", str(given[name]))), *flags])


def test_training_renders_in_the_mode_and_saves_it_with_the_head(place, make_tokenizer):
    notes = json.loads((place / "head" / "last" / "config.json").read_text())["outrider"]
    assert notes["chat"] == {
        "template": template_hash(make_tokenizer("modal")),
        "template_options": {"mode": "short"},
        "rows_with_tools": 0,
    }
    recipe = (place / "head" / "settings.yaml").read_text()
    assert "template_options:\n- mode=short\n" in recipe


def test_generated_rows_state_their_mode(place, make_tokenizer):
    first = json.loads((place / "short.jsonl").read_text().splitlines()[0])
    assert first["template_options"] == {"mode": "short"}
    text = make_tokenizer("modal").decode(first["prompt_ids"])
    assert text == "<|turn|>mode short<|end|>\n<|turn|>user\n0<|end|>\n<|turn|>assistant\n"
    assert "template_options" not in (place / "none.jsonl").read_text()


def evaluate(place, trace):
    given = ["--target", str(place / "target"), "--trace", str(place / trace)]
    given += ["--draft", "chain:1", "--head", str(place / "head" / "last")]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        from outrider.scripts import eval_command

        eval_command.main(given)
    return [str(one.message) for one in found]


def test_evaluation_on_text_of_another_mode_is_noted(place, capsys):
    assert not [line for line in evaluate(place, "short-trace") if "template" in line]
    (line,) = (line for line in evaluate(place, "none-trace") if "template" in line)
    assert 'trained with template options {"mode": "short"}' in line
    assert "none-trace has (none); output stays exact" in line


def test_decoding_takes_the_heads_mode_unless_told_otherwise(place, capsys):
    given = ["decode", "--target", str(place / "target"), "--head", str(place / "head" / "last")]
    given += ["--prompt", "Hello", "--max-new-tokens", "3", "--skip-plain"]
    sizes = []
    for more in ([], ["--template-options", "mode=short"], ["--template-options", "mode=longer"]):
        outrider([*given, *more])
        printed = capsys.readouterr()
        sizes.append(int(printed.out.split("--- prompt 1 (")[1].split()[0]))
        assert ("this command has" in printed.err) == ("mode=longer" in more)
    assert sizes[0] == sizes[1] < sizes[2]


def test_a_changed_template_is_noted(place, make_tokenizer, tmp_path, make_model, capsys):
    make_model(num_hidden_layers=8, vocab_size=389).save_pretrained(tmp_path)
    make_tokenizer("chatml").save_pretrained(tmp_path)
    given = ["decode", "--target", str(tmp_path), "--head", str(place / "head" / "last")]
    outrider([*given, "--prompt", "Hello", "--max-new-tokens", "3", "--skip-plain"])
    told = capsys.readouterr().err
    assert "was trained with chat template" in told
    assert "may seldom be accepted" in told


def test_rows_answered_in_another_mode_are_refused_and_held_out_ones_noted(place, capsys):
    with pytest.raises(SystemExit) as caught:
        run(place, "short", "refused")
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert "with other template options (the row says {'mode': 'short'}, this run has {})" in told
    mode = ["--template-options", "mode=short"]
    run(place, "talks", "noted", *mode, "--heldout", str(place / "none.jsonl"))
    assert "held-out text has (none); its figures" in capsys.readouterr().out
    run(place, "talks", "quiet", *mode, "--heldout", str(place / "short.jsonl"))
    assert "held-out text has" not in capsys.readouterr().out


def test_a_template_that_writes_the_date_is_noted(
    place, make_tokenizer, tmp_path, make_model, capsys
):
    make_model(num_hidden_layers=8, vocab_size=389).save_pretrained(tmp_path / "target")
    make_tokenizer("dated").save_pretrained(tmp_path / "target")
    (tmp_path / "talks.jsonl").write_text((place / "talks.jsonl").read_text())
    run(tmp_path, "talks", "run", "--plan")
    assert "the chat template writes today's date" in capsys.readouterr().out
