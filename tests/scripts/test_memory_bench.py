"""The memory bench: what it measures is what is used, and a step grows with the length."""

import json

import pytest
import torch

from outrider.scripts import memory_bench
from outrider.scripts.memory_bench import ALLOCATOR, MIB, Cell, in_fresh_process, main, peak_of

pytestmark = pytest.mark.skipif(
    not memory_bench.Path("/proc/self/clear_refs").exists(), reason="peaks are read on Linux"
)


def cell(**changes: object) -> Cell:
    given = {"part": "step", "precision": "fp32", "tokens": 128, "steps": 1}
    return Cell(**{**given, "draft_vocab": 512, "device": "cpu", **changes})


@pytest.mark.parametrize("mebibytes", [64, 192])
def test_the_peak_is_what_was_held_at_once(mebibytes):
    def twice() -> None:
        for _ in range(2):  # freed in between: it counts once
            torch.ones(mebibytes * MIB // 4)

    assert peak_of(twice, torch.device("cpu")) / MIB == pytest.approx(mebibytes, abs=4)


def test_what_was_there_before_does_not_count():
    held = torch.ones(64 * MIB // 4)
    assert peak_of(lambda: held.mul_(2), torch.device("cpu")) < 4 * MIB


def test_a_cell_that_fails_says_why():
    with pytest.raises(RuntimeError, match="draft_vocab_size is -1"):
        in_fresh_process(cell(draft_vocab=-1))


def test_all_figures_are_printed_and_written(tmp_path, capsys):
    flags = ("--tokens", "64", "128", "--steps", "1", "--precision", "bf16", "--draft-vocab", "512")
    main([*flags, "--parts", "step", "chunked", "--out", str(tmp_path / "figures.json")])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("   part  precision  K    T  peak MiB  of linear  formula MiB")
    assert len(printed) == 5
    found = json.loads((tmp_path / "figures.json").read_text())
    assert [one["tokens"] for one in found] == [64, 128, 64, 128]
    assert all(one["peak"] > 0 for one in found)


@pytest.mark.slow
def test_a_step_grows_with_the_length_and_not_with_its_square(monkeypatch):
    """Four times the tokens: four times the memory, where attention over all pairs needs sixteen.

    The planted fault is a mask of T x T that is made in every step.
    """
    for name, value in ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    short, long = (in_fresh_process(cell(tokens=tokens))["peak"] for tokens in (512, 2048))
    assert long / short < 4.4
    masks = [tokens**2 * 4 for tokens in (512, 2048)]
    assert (long + masks[1]) / (short + masks[0]) > 4.4


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--tokens", "32"], "tokens holds 32"), (["--steps", "0"], "steps holds 0")],
)
def test_numbers_that_are_too_small_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("\u2502", "").split())
