"""Every command of the README runs: flags are checked here, whole blocks with OUTRIDER_README=1."""

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```$", README, flags=re.M | re.S)
# Run by .ci/run itself, as stages of their own.
STAGES = {"bash scripts/demo.sh", "bash scripts/test.sh", "bash scripts/demo.sh --quick"}
STAGES |= {"bash scripts/test.sh --full"}


def commands():
    for language, text in BLOCKS:
        if language == "bash":
            joined = text.replace("\\\n", " ")
            yield from (line.strip() for line in joined.splitlines() if line.strip())


def without_comment(line):
    return re.sub(r"\s+#.*", "", line)


@cache
def help_of(*program):
    done = subprocess.run([*program, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def program_of(words):
    if words[0] == "outrider":
        return (sys.executable, "-m", "outrider.scripts.cli", words[1])
    if words[:2] == ["accelerate", "launch"]:
        return (sys.executable, next(word for word in words if word.endswith(".py")))
    return None


def test_there_are_commands_to_check():
    assert len(list(commands())) >= 12


def test_every_flag_in_the_readme_exists():
    checked = 0
    for line in commands():
        words = shlex.split(without_comment(line))
        program = program_of(words)
        if program is None:
            continue
        start = words.index(program[-1]) if words[0] == "accelerate" else 1
        for flag in (word for word in words[start:] if word.startswith("--")):
            assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_of(*program)), (
                flag,
                line,
            )
            checked += 1
    assert checked > 10


def test_the_first_screen_has_both_commands_and_ci_runs_them():
    first_screen = "\n".join(README.splitlines()[:40])
    run = (ROOT / ".ci" / "run").read_text()
    for command in ("bash scripts/demo.sh", "bash scripts/test.sh"):
        assert command in first_screen
        assert command in run


def test_files_named_in_the_readme_exist():
    names = re.findall(r"`((?:heads|train|data|eval|scripts|tests)/[\w./-]+)`", README)
    assert len(names) >= 11
    for name in names:
        assert (ROOT / name).exists(), name


@pytest.mark.skipif(
    "OUTRIDER_README" not in os.environ, reason="set OUTRIDER_README=1 to run whole blocks"
)
@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_block_runs(index):
    language, text = BLOCKS[index]
    if language == "python":
        done = subprocess.run(
            [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True
        )
    else:
        lines = text.replace("\\\n", " ").splitlines()
        script = "\n".join(line for line in lines if without_comment(line).strip() not in STAGES)
        done = subprocess.run(["bash", "-euc", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
