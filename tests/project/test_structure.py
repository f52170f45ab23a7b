"""The house keeps its shape: import direction, package list, names, sizes, console script."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("heads", "data", "eval", "train", "scripts")
# A room may import itself and the rooms named here.
ALLOWED = {
    "heads": set(),
    "data": set(),
    "eval": {"heads", "data"},
    "train": {"heads", "data", "eval"},
    "scripts": {"heads", "data", "eval", "train"},
}


def sources(room):
    return sorted((ROOT / room).rglob("*.py"))


def outrider_imports(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def forbidden(room, text):
    rooms = {name.split(".")[1] for name in outrider_imports(text) if name.startswith("outrider.")}
    return rooms - ALLOWED[room] - {room}


def test_imports_go_one_way():
    checked = 0
    for room in ROOMS:
        for path in sources(room):
            assert not forbidden(room, path.read_text()), (
                f"{path} imports {forbidden(room, path.read_text())}"
            )
            checked += 1
    assert checked > 25


def test_a_backward_import_is_seen():
    assert forbidden("heads", "from outrider.data.target import Target") == {"data"}
    assert forbidden("data", "import outrider.eval.decode") == {"eval"}
    assert forbidden("eval", "from outrider import train") == {"train"}


def test_package_list_names_every_folder():
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    folders = {
        "outrider." + ".".join(path.parent.relative_to(ROOT).parts)
        for room in ROOMS
        for path in sources(room)
    }
    assert listed == folders
    assert all(
        (ROOT / name.removeprefix("outrider.").replace(".", "/") / "__init__.py").exists()
        for name in listed
    )


def test_no_module_shadows_a_dependency_or_the_standard_library():
    taken = set(sys.stdlib_module_names) | set(importlib.metadata.packages_distributions())
    taken -= {"outrider", *ROOMS}
    names = {path.stem for room in ROOMS for path in sources(room)} - {"__init__"}
    assert not names & taken, names & taken


@pytest.mark.parametrize("room", ROOMS)
def test_files_stay_readable(room):
    for path in sources(room):
        assert len(path.read_text().splitlines()) <= 400, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 80, f"{path}: {node.name}"


def test_nothing_is_called_utils():
    banned = {"utils", "common", "helpers"}
    assert not [path for room in ROOMS for path in sources(room) if path.stem in banned]


def test_entry_scripts_define_functions_only():
    entries = [ROOT / "train" / f"{kind}.py" for kind in ("eagle", "hydra", "medusa", "mtp")]
    for path in [*entries, *(ROOT / "scripts").glob("*_command.py")]:
        tree = ast.parse(path.read_text())
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        if path.parent.name == "train":
            assert not classes, (
                f"{path} defines {classes}: pickled as __main__ they cannot be loaded"
            )


def test_no_trace_of_the_workshop():
    words = re.compile(r"/(?:work|root)/|\bTODO\b|\bFIXME\b")
    for room in (*ROOMS, "tests"):
        for path in (ROOT / room).rglob("*.py"):
            if path.name != "test_structure.py":
                found = words.search(path.read_text())
                assert not found, f"{path}: {found.group()}"


def test_every_command_answers_help():
    from outrider.scripts.cli import COMMANDS

    for name, (module, _) in COMMANDS.items():
        assert (ROOT / "scripts" / f"{module}.py").exists(), name
    done = subprocess.run(
        [sys.executable, "-m", "outrider.scripts.cli", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)


def test_an_unknown_command_is_refused_with_the_choices():
    done = subprocess.run(
        [sys.executable, "-m", "outrider.scripts.cli", "evil"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "'evil'" in done.stderr
    assert "eval" in done.stderr
