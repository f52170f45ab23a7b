"""Cases of data that lies, through the commands that users give: features and train."""

import json

import pytest
import torch
from safetensors import safe_open

from outrider.data.rowcache import load_read
from outrider.scripts import features_command
from outrider.train.eagle import main as train

END = "<|end|>"
SMALL = ["--head-intermediate", "32", "--unroll-steps", "1", "--log-every", "1", "--device", "cpu"]


def chat(*contents):
    return [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]


@pytest.fixture
def command(tmp_path, make_model, make_tokenizer):
    """Runs a command on rows under a template; returns the rows it read."""

    def run(which, rows, *flags, template="chatml", name="run", model=None):
        tokenizer = make_tokenizer(template)
        model = make_model() if model is None else model
        model.save_pretrained(tmp_path / "target")
        tokenizer.save_pretrained(tmp_path / "target")
        data = tmp_path / f"{name}.jsonl"
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        data.write_text("\n".join(lines) + "\n")
        given = ["--target", str(tmp_path / "target"), "--data", str(data)]
        given += ["--row-report", str(tmp_path / f"{name}.report.jsonl")]
        store = tmp_path / f"{name}-store"
        if which == "features":
            features_command.main([*given, "--out", str(store), "--layers", "1", "3", "5", *flags])
        else:
            given += ["--aux-layers", "1", "3", "5", "--store", str(store), *SMALL]
            train([*given, "--output", str(tmp_path / name), *flags])
        (found,) = (store / "rows").glob("*.safetensors")
        return load_read(found)

    return run


def answers(read, tokenizer):
    return [tokenizer.decode(row.ids[row.mask].tolist()) for row in read.rows]


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def report(tmp_path, name="run"):
    return [
        json.loads(line)
        for line in (tmp_path / f"{name}.report.jsonl").read_text().split("\n")[:-1]
    ]


C01 = [
    {"messages": chat("Hello", "Hello there")},
    {"messages": chat("What is the time?", "four.")},
    {"messages": chat("Hi", "I am fine.", "And you?", "yes, no.")},
    {"messages": [{"role": "system", "content": "Write."}, *chat("a fox", "  spaced out ")]},
]


def test_c01_training_supervises_the_answers_and_nothing_else(command, tmp_path, make_tokenizer):
    read = command("train", C01)
    assert answers(read, make_tokenizer()) == [
        f"Hello there{END}",
        f"four.{END}",
        f"I am fine.{END}yes, no.{END}",
        f"  spaced out {END}",
    ]
    found = losses(tmp_path / "run")
    assert found
    assert all(0 < loss < 20 for loss in found)


def test_c01_rows_of_another_role_marker_end_the_run_before_a_step(command, tmp_path, capsys):
    rows = [{"text": f"### User: Hi\n### Bot: line {letter}\n"} for letter in "abcd"]
    with pytest.raises(SystemExit) as caught:
        command("train", rows)
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert "4 of 4 rows have no supervised token" in told
    assert "### Bot: line a" in told
    assert "give the rows as messages" in told
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_c02_each_odd_row_is_refused_by_number_and_the_others_train(command, tmp_path, capsys):
    rows = [
        {"id": "good", "messages": chat("Hello", "Paris")},
        {"messages": [{"role": "system", "content": "x"}, *chat("a", "b")]},
        {"messages": [{"role": "assistant", "content": "hi"}, *chat("a", "b")]},
        {"messages": [*chat("a"), *chat("a", "b")]},
        {"messages": chat("a", "")},
        {"messages": chat("a")},
        {"messages": chat("why", "yes, no.")},
    ]
    read = command("train", rows, template="strict")
    assert "7 read, 2 kept, 0 cut, 0 dropped, 5 refused" in capsys.readouterr().out
    told = report(tmp_path)
    assert [line["number"] for line in told] == [1, 2, 3, 4, 5, 6, 7]
    outcomes = ["kept", *["refused"] * 5, "kept"]
    assert [line["outcome"] for line in told] == outcomes
    reasons = ["", "no system role", "alternate", "alternate", "empty answer", "no assistant", ""]
    assert all(reason in line["reason"] for reason, line in zip(reasons, told, strict=True))
    assert [row.row_id for row in read.rows] == ["good", "7"]
    assert all(loss > 0 for loss in losses(tmp_path / "run"))


def test_c03_each_turn_trains_what_the_model_saw_and_said_then(command, make_tokenizer, capsys):
    talk = chat("Hello", "<think>first</think>yes", "why", "<think>then</think>no.")
    read = command("train", [{"id": "t", "messages": talk}], template="strips_earlier_thinking")
    assert "1 added as turns of their own" in capsys.readouterr().out
    tokenizer = make_tokenizer("strips_earlier_thinking")
    asked = f"<|turn|>user\nHello{END}\n<|turn|>assistant\n"
    again = f"yes{END}\n<|turn|>user\nwhy{END}\n<|turn|>assistant\n"
    assert [tokenizer.decode(row.ids.tolist()) for row in read.rows] == [
        f"{asked}<think>first</think>yes{END}\n",
        f"{asked}{again}<think>then</think>no.{END}\n",
    ]
    assert answers(read, tokenizer) == [
        f"<think>first</think>yes{END}",
        f"<think>then</think>no.{END}",
    ]


def test_c03_an_answer_that_the_template_cuts_ends_the_run(command, capsys):
    talk = chat("Hello", "<think>first</think>yes")
    with pytest.raises(SystemExit) as caught:
        command("train", [{"messages": talk}], template="strips_all_thinking")
    assert caught.value.code == 2
    assert "row 1 refused: message 1: the template removes part" in capsys.readouterr().err


def test_c04_all_turn_ends_train_and_no_row_changes_anothers_loss(command, tmp_path, capsys):
    rows = [
        {"messages": chat("Hello", "Paris")},
        {"messages": chat("Hi", "I am fine.", "And you?", "yes, no.", "why", "four.")},
    ]
    both = command("train", rows, name="both")
    assert f"turn ends trained: {END} 4 times (of 4 answers)" in capsys.readouterr().out
    counts = []
    for number, row in enumerate(rows):
        read = command("train", [row], name=f"alone{number}")
        counts.append(int(read.rows[0].mask.sum()))
        assert torch.equal(read.rows[0].ids, both.rows[number].ids)
        assert torch.equal(read.rows[0].mask, both.rows[number].mask)
    alone = [losses(tmp_path / f"alone{number}")[0] for number in range(2)]
    together = losses(tmp_path / "both")[0]
    wanted = sum(loss * count for loss, count in zip(alone, counts, strict=True)) / sum(counts)
    assert together == pytest.approx(wanted, abs=2e-5)


def independent(model, ids, layers):
    """What transformers' own hidden_states say, with the last layer taken before the norm."""
    kept = {}

    def keep(layer):
        def hook(_, args, kwargs):
            kept[layer] = (args[0] if args else kwargs["hidden_states"]).clone()

        return hook

    hooks = [
        model.model.layers[layer].register_forward_pre_hook(keep(layer), with_kwargs=True)
        for layer in layers
        if layer < len(model.model.layers)
    ]
    final = model.model.norm.register_forward_pre_hook(
        lambda _, args: kept.__setitem__(len(model.model.layers), args[0].clone())
    )
    with torch.no_grad():
        model(input_ids=ids[None])
    for hook in (*hooks, final):
        hook.remove()
    return torch.cat([kept[layer][0] for layer in layers], -1)


@pytest.mark.parametrize("family", ["llama", "qwen", "gemma"])
@pytest.mark.parametrize("layers", [("1", "3", "5"), ("6",)])
def test_c06_stored_states_are_those_of_independent_hooks(
    command, tmp_path, make_model, family, layers
):
    model = make_model(family)
    chosen = ["--layers", *layers, "--feature-dtype", "float32"]
    read = command("features", C01[:1], *chosen, model=model)
    (shard,) = (tmp_path / "run-store").glob("*/features-*.safetensors")
    with safe_open(shard, "pt") as file:
        stored = file.get_tensor("aux")
    wanted = independent(model.eval(), read.rows[0].ids, [int(layer) for layer in layers])
    assert torch.equal(stored, wanted)


def test_c06_the_config_states_the_layers_and_a_shallow_target_needs_them_named(
    command, tmp_path, make_model, capsys
):
    shallow = make_model(num_hidden_layers=4)
    with pytest.raises(SystemExit) as caught:
        command("train", C01, "--head", "eagle3", "--aux-layers", "2", "2", "1", model=shallow)
    assert caught.value.code == 2
    capsys.readouterr()
    arguments = ["--target", str(tmp_path / "target"), "--data", str(tmp_path / "run.jsonl")]
    with pytest.raises(SystemExit) as caught:
        train([*arguments, "--output", str(tmp_path / "defaults"), *SMALL])
    assert caught.value.code == 2
    assert "give aux_layers explicitly" in capsys.readouterr().err
    command("train", C01, "--aux-layers", "1", "2", "3", model=shallow, name="named")
    config = json.loads((tmp_path / "named" / "last" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]  # outputs
    assert config["outrider"]["head"]["aux_layers"] == [1, 2, 3]


def lengths(most):
    """Rows of most - 1, most and most + 1 tokens, and one whose answer begins after the cut."""
    for length, start in ((most - 1, 3), (most, 3), (most + 1, 3), (most + 6, most)):
        ids = [10 + place for place in range(length - 1)] + [2]
        yield {"input_ids": ids, "loss_mask": [0] * start + [1] * (length - start)}


def test_c19_counts_are_right_and_a_shorter_length_at_training_is_obeyed(command, tmp_path, capsys):
    read = command("features", [*lengths(12)], "--max-length", "12")
    assert "4 read, 2 kept, 1 cut, 1 dropped, 0 refused" in capsys.readouterr().out
    assert [len(row) for row in read.rows] == [11, 12, 12]
    assert [line["outcome"] for line in report(tmp_path)] == ["kept", "kept", "cut", "dropped"]
    assert "no supervised one before max_length 12" in report(tmp_path)[3]["reason"]
    read = command("train", [*lengths(12)], "--max-length", "8", name="shorter")
    assert "4 read, 0 kept, 3 cut, 1 dropped, 0 refused" in capsys.readouterr().out
    assert [len(row) for row in read.rows] == [8, 8, 8]
    assert all(row.mask[2:].any() for row in read.rows)
    command("train", [*lengths(12)], "--max-length", "12", "--on-long", "drop", name="dropping")
    assert "4 read, 2 kept, 0 cut, 2 dropped, 0 refused" in capsys.readouterr().out
    assert report(tmp_path, "dropping")[2]["reason"] == "13 tokens, longer than max_length 12"
