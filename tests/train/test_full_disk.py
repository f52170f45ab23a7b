"""A disk that is full when heads and checkpoints are written: told, nothing torn, and gone on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
def test_a_training_without_room_says_so_and_goes_on_later(
    share: float,
    train: Callable[..., Path],
    make_disk: Callable[[int], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--store", str(tmp_path / "store"), "--save-every", "3")
    whole = train(*flags, output="whole")
    sizes = [path.stat().st_size for path in whole.rglob("*") if path.is_file()]
    disk = make_disk(round(share * sum(sizes)))
    out = ("--output", str(disk.path / "run"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        train(*flags, *out)
    assert ended.value.code in (1, 2)
    said = capsys.readouterr().err
    assert "error: " in said
    assert "cannot be written" in said
    assert "free some space" in said
    left = [path.name for path in disk.path.rglob("*")]
    assert not [name for name in left if ".writing-" in name or ".new-" in name], left
    disk.grow(4 * sum(sizes))
    train(*flags, *out)
    ours, theirs = (
        load_file(one / "last" / "model.safetensors") for one in (disk.path / "run", whole)
    )
    assert all((ours[name] == theirs[name]).all() for name in theirs)
