"""New heads start fitted, the same in every layout, unless told not to."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.data.batches import Batches, StoredRow
from outrider.data.rows import Reading, read_rows
from outrider.data.states import OnlineFeatures
from outrider.data.target import Target
from outrider.eval.link import tables
from outrider.heads import EagleHead
from outrider.heads.eagle import EagleConfig
from outrider.train.eagle import main
from outrider.train.start import start_from_states

VOCAB = 128


@pytest.fixture(scope="module")
def repeated_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that say 15 random tokens three times."""
    made = torch.Generator().manual_seed(3)
    rows = []
    for number in range(40):
        ids = torch.randint(2, VOCAB, (15,), generator=made).tolist() * 3
        rows.append({"id": f"r{number}", "input_ids": ids, "loss_mask": [0] * 15 + [1] * 30})
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("batch_size", [2, 7])
def test_the_start_does_not_depend_on_the_batch(
    wide_folder: Path, repeated_rows: Path, batch_size: int
) -> None:
    target = Target.load(str(wide_folder))
    rows, _ = read_rows(str(repeated_rows), target, Reading(max_length=64))
    weights = []
    for size in (1, batch_size):
        torch.manual_seed(0)
        head = EagleHead(EagleConfig.from_target(target.config)).attach(tables(target))
        source = OnlineFeatures(target, rows, layers=head.config.aux_layers)
        batches = Batches(source, size=64, batch_size=size, seed=5)
        assert start_from_states(head, batches, 2).num_rows > 0
        weights.append({name: value.clone() for name, value in head.state_dict().items()})
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_packed_store_starts_as_a_raw_one(
    wide_folder: Path, repeated_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It keeps no last states: the start takes them from the target."""
    said = []
    for form in ("float32", "int4"):
        given = f"--target {wide_folder} --data {repeated_rows} --output {tmp_path / form}"
        rest = f"--feature-dtype {form} --target-dtype float32 --stop-after-steps 1"
        with pytest.raises(SystemExit, match="0"):
            main([*given.split(), *rest.split(), "--max-length", "64"])
        lines = capsys.readouterr().out.splitlines()
        said += [line for line in lines if line.startswith("fitted start")]
    assert len(said) == 2
    assert said[0] == said[1]


def test_a_run_says_and_does_what_the_flag_asks(
    wide_folder: Path, repeated_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_losses = []
    for flag in ("--fitted-start", "--no-fitted-start"):
        folder = tmp_path / flag
        given = f"--target {wide_folder} --data {repeated_rows} --output {folder} {flag}"
        steps = ["--max-length", "64", "--stop-after-steps", "1", "--log-every", "1"]
        with pytest.raises(SystemExit, match="0"):
            main([*given.split(), *steps])
        said = "fitted start: least squares on" in capsys.readouterr().out
        assert said == (flag == "--fitted-start")
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        first_losses.append(json.loads(lines[0])["loss"])
    assert first_losses[0] != first_losses[1]


def test_a_row_whose_features_are_not_finite_is_named(
    wide_folder: Path, repeated_rows: Path
) -> None:
    target = Target.load(str(wide_folder))
    rows, _ = read_rows(str(repeated_rows), target, Reading(max_length=64))
    head = EagleHead(EagleConfig.from_target(target.config)).attach(tables(target))
    source = OnlineFeatures(target, rows, layers=head.config.aux_layers)
    whole = source.rows

    def broken(indices: Sequence[int]) -> list[StoredRow]:
        found = whole(indices)
        return [
            row._replace(aux_TF=row.aux_TF / 0) if index == 17 else row
            for index, row in zip(indices, found, strict=True)
        ]

    source.rows = broken  # pyrefly: ignore[bad-assignment] - as a target that overflows
    with pytest.raises(ValueError, match="row r17 has non-finite features"):
        start_from_states(head, Batches(source, size=64, batch_size=1, seed=5), 2)
