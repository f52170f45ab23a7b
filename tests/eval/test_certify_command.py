"""`outrider certify`: tables, JSON, a user's own rule, and the exit status."""

import json
from dataclasses import replace

import pytest

from outrider.eval.certificate import contest, grid, keyed
from outrider.eval.certificate.keyed import KeyedByPosition, judge_keys
from outrider.eval.rules.verdict import Siblings
from outrider.scripts import certify_command
from outrider.scripts.certify_command import main
from outrider.scripts.cli import main as outrider

ONE = ["--processes", "1"]


def test_one_rule_on_one_tree(capsys, tmp_path):
    main(["--rule", "without", "--tree", "[2,1]", "--json", str(tmp_path / "out.json"), *ONE])
    shown = capsys.readouterr().out
    assert "1 of 1 exact, 33 laws compared" in shown
    assert "all exact" in shown
    cell = json.loads((tmp_path / "out.json").read_text())["cells"][0]
    assert (cell["rule"], cell["drafts"], cell["exact_distance"]) == ("without", "without", "0")


def test_the_faults_of_a_rule_are_judged_with_it(capsys, tmp_path):
    main(["--rule", "greedy", "--quick", "--json", str(tmp_path / "out.json"), *ONE])
    assert "mutation score 1 of 1" in capsys.readouterr().out
    mutant = json.loads((tmp_path / "out.json").read_text())["mutants"][0]
    assert mutant["killed"]
    assert mutant["what"]


def test_a_users_own_rule_that_is_wrong_ends_with_status_1(capsys, tmp_path, monkeypatch):
    (tmp_path / "my_rules.py").write_text(
        "from outrider.eval.rules import Verdict\n"
        "def first(tree, laws, random):\n"
        "    return Verdict(path=(), token=int(laws.target(0).argmax()))\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        main(["--rule", "my_rules:first", "--drafts", "iid", "--tree", "[2,1]", *ONE])
    shown = capsys.readouterr().out
    assert "0 of 1 exact" in shown
    assert "NOT EXACT" in shown
    assert "your rule was judged on iid drafts; for one that is made for others give" in shown


def test_the_record_of_a_whole_run_tells_of_keys_contests_and_the_verdict(
    capsys, tmp_path, monkeypatch
):
    cells = [grid.Cell("match", Siblings.CHOSEN, "[2,1]")]
    monkeypatch.setattr(certify_command, "chosen_cells", lambda settings, rules: cells)
    monkeypatch.setattr(keyed, "SETTINGS", [("block", "chain:2", 2, 4)])
    monkeypatch.setattr(certify_command, "MUTANTS", {})
    monkeypatch.setattr(certify_command, "BATCHED", {})
    out = tmp_path / "out.json"
    main(["--quick", "--json", str(out), *ONE])
    record = json.loads(out.read_text())
    assert (record["verdict"], record["is_sound"]) == ("all exact", True)
    assert record["seconds"] > 0
    assert {one["exact_distance"] for one in record["keys"]} == {"0"}
    assert max(one["distance_by_position_alone"] for one in record["keys"]) > 0.01
    block, *others = record["contests"]
    assert (block["is_theorem"], block["num_lost"], block["num_pairs"]) == (True, 0, 50)
    assert block["mean_new"] > block["mean_old"] > 1
    assert len(others) == 3
    # Under keys that rounds share nothing is sound, and the record says so.
    monkeypatch.setattr(certify_command, "judge_keys", lambda *_: judge_keys(KeyedByPosition))
    with pytest.raises(SystemExit, match="1"):
        main(["--quick", "--json", str(out), *ONE])
    assert json.loads(out.read_text())["verdict"] == "NOT EXACT"
    capsys.readouterr()


def test_a_lost_theorem_ends_with_status_1(capsys, monkeypatch):
    lost = replace(contest.block_against_rejection(1), num_lost=1)
    monkeypatch.setattr(certify_command.contest, "block_against_rejection", lambda _: lost)
    monkeypatch.setattr(certify_command, "show_keys", list)
    monkeypatch.setattr(certify_command, "chosen_cells", lambda *_: [])
    monkeypatch.setattr(certify_command, "MUTANTS", {})
    monkeypatch.setattr(certify_command, "BATCHED", {})
    with pytest.raises(SystemExit, match="1"):
        main(["--quick", *ONE])
    assert "NOT EXACT" in capsys.readouterr().out


def test_a_fault_that_passes_ends_with_status_1(monkeypatch, capsys):
    from outrider.eval.certificate import mutants

    honest = mutants.MUTANTS["greedy at a soft target"]
    sound = mutants.Mutant(
        what=honest.what,
        rule="greedy",
        run=lambda la: lambda text, r: (r.draw(0, la.target(text)),),
    )
    monkeypatch.setitem(mutants.MUTANTS, "greedy at a soft target", sound)
    with pytest.raises(SystemExit, match="1"):
        main(["--rule", "greedy", "--quick", *ONE])
    assert "ALIVE" in capsys.readouterr().out


def test_the_batched_code_is_compared_with_the_rules(capsys, tmp_path):
    main(["--rule", "match", "--quick", "--json", str(tmp_path / "out.json"), *ONE])
    assert "batched code tied to the rules: 1 rules, " in capsys.readouterr().out
    (one,) = json.loads((tmp_path / "out.json").read_text())["batched"]
    assert (one["rule"], one["differences"]) == ("match", [])
    assert one["decisions"] > 300


def test_batched_code_that_differs_ends_with_status_1(monkeypatch, capsys):
    from outrider.eval.batched import walk as batched_walk

    monkeypatch.setattr(batched_walk, "_left", lambda shares, outside: 1 + shares)
    with pytest.raises(SystemExit, match="1"):
        main(["--rule", "point_mass", "--quick", *ONE])
    assert "batched point_mass DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rule", "typical"], "rule is 'typical'; choose one of greedy"),
        (["--rule", "nowhere:verify"], "No module named 'nowhere'; give MODULE:FUNCTION"),
        (["--rule", "block", "--tree", "[9]"], r"tree is '\[9\]', which none of these trees"),
    ],
)
def test_what_cannot_be_certified_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        main([*arguments, *ONE])


def test_two_processes_give_the_same_table():
    cells = [cell for cell in grid.grid() if cell.tree == "[1,2]" and cell.rule == "without"]
    assert [one.distance for one in grid.certify_all(cells, processes=2)] == [0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("return None", "AttributeError"),
        ("return Verdict(path=(7, 99), token=0)", "IndexError"),
    ],
)
def test_a_rule_that_fails_is_named_with_its_tree(tmp_path, monkeypatch, capsys, body, said):
    monkeypatch.chdir(tmp_path)
    name = f"rule_{abs(hash(body))}"
    lines = ["from outrider.eval.rules.verdict import Verdict", "def mine(tree, laws, random):"]
    (tmp_path / f"{name}.py").write_text("\n".join([*lines, f"    {body}"]) + "\n")
    command = ["certify", "--rule", f"{name}:mine", "--tree", "[2,1]", "--processes", "1"]
    with pytest.raises(SystemExit) as stopped:
        outrider(command)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert f"rule '{name}:mine' failed on iid drafts, tree [2,1], law 1" in message
    assert said in message
    assert "than iid, give --drafts chosen or hybrid or single or without" in message
