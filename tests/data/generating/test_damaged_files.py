"""Files of a stopped or finished run that a power cut or a hand damaged, through the command."""

import json
import re
from types import SimpleNamespace

import pytest

from outrider.data.local_answers import LocalAnswers
from outrider.data.manifest import manifest_path
from outrider.data.rowfile import PartialRows
from outrider.scripts.cli import main as outrider

DONE = 7
"""Rows that the stopped run answered."""


class Several(LocalAnswers):
    """Answers DONE prompts, then the power fails."""

    def answer(self, prompts, emit):
        super().answer(prompts[:DONE], emit)
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def command(root):
    """The words of the command but the file it writes."""
    words = ["--target", str(root / "target"), "--prompts", str(root / "prompts.jsonl")]
    return ["generate", *words, "--max-new-tokens", "6", "--out"]


@pytest.fixture(scope="module")
def made(command, tmp_path_factory):
    """What a run writes that nothing befell, and the partial file of one that stopped."""
    out = tmp_path_factory.mktemp("whole") / "rows.jsonl"
    partial = out.with_name("rows.jsonl.partial.jsonl")
    with pytest.MonkeyPatch.context() as stopped:
        stopped.setattr("outrider.scripts.generate_command.LocalAnswers", Several)
        with pytest.raises(SystemExit):
            outrider([*command, str(out)])
    begun = partial.read_bytes()
    assert begun.count(b"\n") == DONE + 2
    outrider([*command, str(out)])
    return SimpleNamespace(
        whole=out.read_bytes(), manifest=manifest_path(out).read_bytes(), begun=begun
    )


@pytest.fixture
def run(command, capsys):
    """The command; its exit status and what it says."""

    def run(out, *more):
        code = 0
        try:
            outrider([*command, str(out), *more])
        except SystemExit as caught:
            code = caught.code
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture
def whole(made):
    return made.whole


@pytest.fixture
def begun(made, tmp_path):
    """A run that stopped: where its rows go, and its partial file."""
    out = tmp_path / "rows.jsonl"
    partial = out.with_name("rows.jsonl.partial.jsonl")
    partial.write_bytes(made.begun)
    return out, partial


def half(line):
    return line[: len(line) // 2]


DAMAGE = {
    "cut": (lambda x: [*x[:-1], half(x[-1])], 1, 1),
    "zeros at the end": (lambda x: [*x, b"\0" * 4096], 1, 0),
    "a line of zeros at the end": (lambda x: [*x, b"\0" * 512 + b"\n"], 1, 0),
    "half a line, then zeros": (lambda x: [*x[:-1], half(x[-1]) + b"\0" * 512], 1, 1),
    "another kind of JSON": (lambda x: [*x, b"[]\n"], 1, 0),
    "an object that is no row": (lambda x: [*x, b'{"id": 3}\n', b"{}\n"], 2, 0),
    "bytes that are no text": (lambda x: [*x[:5], b'{"id": "\xff\xfe"}\n', *x[5:]], 1, 0),
    "half a line amid others": (lambda x: [*x[:4], half(x[4]), *x[5:]], 1, 2),
    "zeros amid others": (lambda x: [*x[:4], b"\0" * len(x[4]), *x[5:]], 1, 2),
    "the line of the run": (lambda x: [x[0], b"\0\n", *x[2:]], 1, 0),
}
"""How the lines of a partial file are damaged, how many are damaged then, and the rows lost."""


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_lines_are_counted_and_their_rows_made_again(name, run, begun, whole):
    out, partial = begun
    damage, num_lines, num_lost = DAMAGE[name]
    partial.write_bytes(b"".join(damage(partial.read_bytes().splitlines(keepends=True))))
    code, said = run(out)
    assert code == 0, said
    assert f"note: {partial}: {num_lines} damaged line{'s' * (num_lines > 1)} left out" in said
    assert f"{DONE - num_lost} rows taken over from a stopped run" in said
    assert out.read_bytes() == whole
    assert not partial.exists()
    assert json.loads(manifest_path(out).read_text())["counts"]["rows"] == whole.count(b"\n")


def test_rows_after_a_damaged_line_survive_a_second_stop(run, begun, whole, monkeypatch):
    out, partial = begun
    lines = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(b"".join([*lines[:3], b"\0" * 64 + b"\n", *lines[4:]]))
    with monkeypatch.context() as stopped:
        stopped.setattr("outrider.scripts.generate_command.LocalAnswers", Several)
        assert run(out)[0] == 130
    assert partial.read_bytes().startswith(b"".join(lines[:3]))
    code, said = run(out)
    assert code == 0
    assert "1 damaged line left out" in said
    assert f"{2 * DONE - 1} rows taken over" in said
    assert out.read_bytes() == whole


@pytest.mark.parametrize("first", [b"\0" * 80 + b"\n", b"[]\n", b""])
def test_a_file_whose_settings_are_lost_is_refused_until_told_to_overwrite(
    first, run, begun, whole
):
    out, partial = begun
    _, *others = partial.read_bytes().splitlines(keepends=True)
    damaged = first + b"".join(others)
    partial.write_bytes(damaged)
    code, said = run(out)
    assert code == 2
    assert "its first line, which says what it was begun with, is damaged" in said
    assert f"the {DONE + 1} whole lines after it" in said
    assert "start again with overwrite" in said
    assert partial.read_bytes() == damaged
    code, said = run(out, "--overwrite")
    assert code == 0, said
    assert "0 rows taken over" in said
    assert out.read_bytes() == whole


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b'{"target": "4', b"\0\n\0\n", b"[]\n"])
def test_a_file_that_holds_nothing_whole_begins_anew(content, run, begun, whole):
    out, partial = begun
    partial.write_bytes(content)
    code, said = run(out)
    assert code == 0, said
    assert out.read_bytes() == whole


def test_overwrite_works_on_a_damaged_partial_file(run, begun, whole):
    out, partial = begun
    first, *others = partial.read_bytes().splitlines(keepends=True)
    partial.write_bytes(b"".join([first, b"\0\n", *others[:3], half(others[4]), *others[5:], b"["]))
    code, said = run(out, "--overwrite")
    assert code == 0, said
    assert out.read_bytes() == whole


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"settings": {}}', "\0\0", "drop"])
def test_a_damaged_manifest_is_told_and_overwritten(content, run, made, tmp_path):
    out = tmp_path / "rows.jsonl"
    out.write_bytes(made.whole)
    manifest, good = manifest_path(out), made.manifest.decode()
    if content == "drop":
        content = json.dumps({name: x for name, x in json.loads(good).items() if name != "counts"})
    manifest.write_text(content)
    code, said = run(out)
    assert code == 2
    told = rf"{re.escape(str(manifest))} is damaged, so nobody can say what rows.jsonl was made"
    assert re.search(told, said)
    assert "give overwrite to replace it" in said
    code, said = run(out, "--overwrite")
    assert code == 0, said
    assert manifest.read_text() == good
    assert out.read_bytes() == made.whole


def test_rows_may_have_a_field_called_run(tmp_path):
    path = tmp_path / "rows.jsonl.partial.jsonl"
    with PartialRows(path, {"seed": 0}) as rows:
        rows.note({"outrider": "1"})
        rows.append({"id": "a", "run": {"by": "x"}})
    with PartialRows(path, {"seed": 0}) as again:
        assert again.rows == {"a": {"id": "a", "run": {"by": "x"}}}
        assert again.notes == [{"outrider": "1"}]
