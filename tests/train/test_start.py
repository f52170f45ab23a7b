"""New heads start with induction heads, the same in every layout, unless told not to."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from outrider.data.batches import Batches, StoredRow
from outrider.data.layout import layout_of
from outrider.data.rows import Reading, Row, read_rows
from outrider.data.states import OnlineFeatures
from outrider.data.store import FeatureStore
from outrider.data.target import Target
from outrider.eval.link import tables
from outrider.heads import EagleHead
from outrider.heads.base import States
from outrider.heads.eagle import EagleConfig
from outrider.heads.induction import start_induction
from outrider.train.eagle import main
from outrider.train.start import fit_to_states, start_from_states

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


@pytest.mark.parametrize(
    "start",
    [
        lambda head, batches: start_from_states(head, batches).num_heads == 2,
        lambda head, batches: fit_to_states(head, batches, 2).num_rows > 0,
    ],
    ids=["induction", "fitted"],
)
def test_the_start_does_not_depend_on_the_batch(
    wide_folder: Path, repeated_rows: Path, start: Callable[[EagleHead, Batches], bool]
) -> None:
    target = Target.load(str(wide_folder))
    rows, _ = read_rows(str(repeated_rows), target, Reading(max_length=64))
    weights = []
    for size in (1, 2, 7):
        torch.manual_seed(0)
        head = EagleHead(EagleConfig.from_target(target.config)).attach(tables(target))
        source = OnlineFeatures(target, rows, layers=head.config.aux_layers)
        assert start(head, Batches(source, size=64, batch_size=size, seed=5))
        weights.append({name: value.clone() for name, value in head.state_dict().items()})
    for other in weights[1:]:
        assert all(torch.equal(value, other[name]) for name, value in weights[0].items())


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_packed_store_starts_from_the_positions_it_keeps(
    wide_folder: Path, repeated_rows: Path, tmp_path: Path, form: str
) -> None:
    """Rows go on long after their last supervised token; there a packed store gives zeros."""
    target = Target.load(str(wide_folder))
    read, _ = read_rows(str(repeated_rows), target, Reading(max_length=64))
    place_T = torch.arange(45)
    rows = [Row(row.ids, (place_T >= 15) & (place_T < 24), row.row_id, "", 15) for row in read]

    def head() -> EagleHead:
        torch.manual_seed(0)
        return EagleHead(EagleConfig.from_target(target.config)).attach(tables(target))

    ours, reference = head(), head()
    layers = ours.config.aux_layers
    store = FeatureStore.build_or_open(
        target, rows, layout=layout_of(target, layers, form), root=tmp_path, progress=False
    )
    found = start_from_states(ours, Batches(store, size=45, batch_size=4, seed=5))
    # The law before token 23 is the last one, so positions 0 to 22 are all that is known; the
    # sample of 32 rows a channel takes every row.
    known = OnlineFeatures(target, rows, layers=layers).rows(range(len(rows)))
    states = States(
        torch.stack([row.aux_TF for row in known]),
        torch.stack([row.last_TH for row in known]),
        torch.stack([row.ids_T for row in known]),
        place_T.expand(len(rows), -1),
    )
    document_BT = (place_T <= 22).long().expand(len(rows), -1)
    expected = start_induction(reference, states, document_BT)
    assert found.num_heads == expected.num_heads == 2
    assert found.fit == pytest.approx(expected.fit, abs=0.01)
    for name, weight in reference.state_dict().items():
        gap = (ours.state_dict()[name] - weight).norm() / weight.norm().clamp(min=1e-9)
        assert gap < (0.02 if form == "int8" else 0.2), name


def test_a_packed_store_starts_as_a_raw_one(
    wide_folder: Path, repeated_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It keeps no last states: the start takes them from the target."""
    said = []
    for form in ("float32", "int4"):
        given = f"--target {wide_folder} --data {repeated_rows} --output {tmp_path / form}"
        rest = f"--feature-dtype {form} --target-dtype float32 --start fitted --stop-after-steps 1"
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
    lines = {"induction": "induction start: 2 query heads", "fitted": "fitted start: least", "": ""}
    for name in ("induction", "fitted", "target"):
        folder, flag = tmp_path / name, f"--start {name}"
        given = f"--target {wide_folder} --data {repeated_rows} --output {folder} {flag}"
        steps = ["--max-length", "64", "--stop-after-steps", "1", "--log-every", "1"]
        with pytest.raises(SystemExit, match="0"):
            main([*given.split(), *steps])
        out = capsys.readouterr().out
        assert [key for key, line in lines.items() if key and line in out] == [name] * (
            name != "target"
        )
        metrics = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        first_losses.append(json.loads(metrics[0])["loss"])
    assert len(set(first_losses)) == 3


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
        start_from_states(head, Batches(source, size=64, batch_size=1, seed=5))
    with pytest.raises(ValueError, match="row r17 has non-finite features"):
        fit_to_states(head, Batches(source, size=64, batch_size=1, seed=5), 2)
