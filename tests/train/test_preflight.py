"""Refusals before the first step: exit code 2, the field or row, and the remedy."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outrider.data.batches import Batches, StoredRow
from outrider.data.files import alone_in
from outrider.data.rows import Reading, read_rows
from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.link import tables
from outrider.eval.offline.texts import Text
from outrider.eval.offline.traces import build_trace
from outrider.heads import EagleHead
from outrider.heads.formats import load_head
from outrider.train import refusals
from outrider.train.checkpoint import latest
from outrider.train.journal import check_tracker
from outrider.train.kinds import EagleRun
from outrider.train.recipe import parse
from outrider.train.start import make_head
from outrider.train.validate import spread
from outrider.train.vocabulary import byte_tokens, choose_vocabulary, safe_ids

Train = Callable[..., Path]
Refused = Callable[..., str]


@pytest.fixture
def refused(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The message of a refused run; nothing may have been trained."""

    def run(*flags: str, **named: Any) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            train(*flags, **named)
        assert caught.value.code == 2
        assert not (tmp_path / "run" / "checkpoints").exists()
        return capsys.readouterr().err

    return run


@pytest.fixture
def target(target_folder: Path) -> Target:
    return Target.load(str(target_folder))


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_empty_masks_are_refused_with_a_row_shown(tmp_path: Path, refused: Refused) -> None:
    rows = [{"input_ids": [2, 3, 4, 5], "loss_mask": [0] * 4}] * 3
    message = refused(data=written(tmp_path / "empty.jsonl", rows))
    assert "3 of 3 rows have no supervised token" in message
    assert "rendered" in message


def test_missing_data_and_targets_are_refused(tmp_path: Path, refused: Refused) -> None:
    assert "check the spelling" in refused(data=tmp_path / "nope.jsonl")
    assert "nor a Hub id" in refused("--target", "./nope")


def test_a_missing_recipe_is_refused(refused: Refused) -> None:
    assert "shipped recipes: demo" in refused("--recipe", "nope")


def test_layers_that_do_not_exist_are_refused(refused: Refused) -> None:
    assert "aux_layers is (1, 3, 99); give rising ids in 0..8" in refused(
        "--aux-layers", "1", "3", "99"
    )


def test_too_large_a_draft_vocabulary_is_refused(refused: Refused) -> None:
    message = refused("--draft-vocab", "110")
    assert "draft_vocab is 110; the target's tokenizer has 97 tokens" in message


def test_c09_more_draft_tokens_than_distinct_ones_is_noted(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [2 + index % 40 for index in range(60)]
    data = written(tmp_path / "forty.jsonl", [{"input_ids": ids, "loss_mask": [0] + [1] * 59}])
    out = train("--draft-vocab", "64", data=data)
    text = capsys.readouterr().out
    assert "cover 100.00% of supervised tokens (40 distinct)" in text
    assert "draft_vocab 64 exceeds the 40 distinct supervised tokens" in text
    found = load_file(out / "last" / "model.safetensors")
    ids_W = found["d2t"] + torch.arange(64)
    assert len(ids_W.unique()) == 64
    assert set(range(2, 42)) <= set(ids_W.tolist())
    assert int(found["t2d"].sum()) == 64
    full = train("--draft-vocab", "128", data=data, output="full")
    assert "d2t" not in load_file(full / "last" / "model.safetensors")


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracker("none")

    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("outrider.train.journal.metadata.version", absent)
    with pytest.raises(ValueError, match="track is 'wandb', which is not installed; pip install"):
        check_tracker("wandb")


def test_a_gpu_that_is_not_there_is_refused(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU" in refused("--device", "cuda")


def test_heads_of_another_target_are_refused(target: Target) -> None:
    settings = parse(["--target", "t", "--data", "d", "--output", "o"], EagleRun)
    _, head = make_head(settings, target, [])
    changes: list[tuple[dict[str, Any], str]] = [
        (
            {"vocab_size": 130, "draft_vocab_size": 130},
            "the head's vocab_size is 130 and the target's is 128",
        ),
        ({"num_target_layers": 9}, "the head's num_target_layers is 9 and the target's is 8"),
    ]
    for change, message in changes:
        other = EagleHead(replace(head.config, **change))
        with pytest.raises(ValueError, match=message):
            refusals.check_head(other, target)


def test_draft_ids_past_the_tokenizer_are_refused(target: Target) -> None:
    settings = parse(["--target", "t", "--data", "d", "--output", "o"], EagleRun)
    _, head = make_head(settings, target, [])
    wide = replace(head.config, tokenizer_size=128, draft_vocab_size=3)
    with pytest.raises(ValueError, match="holds id 120, but the target's tokenizer ends at 96"):
        refusals.check_head(EagleHead(wide, torch.tensor([1, 2, 120])), target)


class Memory:
    """One row whose features are not finite."""

    def __init__(self, field: str) -> None:
        self.lengths, self.row_ids = [4], ["bad"]
        row = StoredRow(torch.arange(4), torch.ones(4).bool(), torch.zeros(4, 6), torch.zeros(4, 2))
        getattr(row, field)[2, 1] = torch.nan
        self.row = row

    def __len__(self) -> int:
        return 1

    def rows(self, indices: Sequence[int]) -> list[StoredRow]:
        return [self.row for _ in indices]


@pytest.mark.parametrize(("field", "what"), [("aux_TF", "layers"), ("last_TH", "last state")])
def test_non_finite_features_are_refused_by_row(field: str, what: str) -> None:
    batches = Batches(Memory(field), size=4, batch_size=1, seed=0)
    with pytest.raises(ValueError, match=rf"row bad has non-finite features \(the target's {what}"):
        refusals.check_batches(batches, 1)


def test_fewer_packs_than_processes_are_refused() -> None:
    batches = Batches(Memory("aux_TF"), size=4, batch_size=1, seed=0)
    with pytest.raises(ValueError, match="batch_size is 1 with 2 processes"):
        refusals.check_batches(batches, 2)


def test_an_export_that_changes_a_tensor_is_refused(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse(["--target", "t", "--data", "d", "--output", "o"], EagleRun)
    _, head = make_head(settings, target, [])
    refusals.check_export(head, tables(target))

    def spoiled(*args: Any) -> EagleHead:
        again = load_head(*args)
        again.fc.weight.data[0, 0] += 1
        return again

    monkeypatch.setattr(refusals, "load_head", spoiled)
    with pytest.raises(ValueError, match=r"tensor fc.weight changed on its way"):
        refusals.check_export(head, tables(target))


# Warm starts


@pytest.fixture
def other_rows(tmp_path: Path) -> Path:
    """Rows whose frequent tokens are others than those of rows_file."""
    ids = [50 + index % 45 for index in range(60)]
    return written(tmp_path / "other.jsonl", [{"input_ids": ids, "loss_mask": [0, 0] + [1] * 58}])


def same_law(one: Path, other: Path, target: Target) -> bool:
    heads = [load_head(folder, tables(target)) for folder in (one, other)]
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    laws = [head.scatter(head.draft_probs(hidden)) for head in heads]
    return torch.equal(*(law.detach() for law in laws))


def test_c10_a_warm_start_keeps_the_old_heads_vocabulary_and_proposals(
    train: Train, other_rows: Path, target: Target, target_folder: Path
) -> None:
    old = train("--draft-vocab", "40", output="old") / "last"
    argv = ["--target", str(target_folder), "--data", str(other_rows), "--output", "o"]
    rows, _ = read_rows(str(other_rows), target, Reading())
    vocabulary, head = make_head(parse([*argv, "--init", str(old)], EagleRun), target, rows)
    assert vocabulary is not None
    assert torch.equal(vocabulary.draft_ids_W, head.draft_ids_W)
    tokens = torch.cat([row.ids[row.mask] for row in rows])
    inside = torch.isin(tokens, vocabulary.draft_ids_W).double().mean()
    assert vocabulary.covered == pytest.approx(float(inside))
    before = load_file(old / "model.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
    new = train("--init", str(old), "--lr", "1e-12", data=other_rows, output="new") / "last"
    after = load_file(new / "model.safetensors")
    assert torch.equal(before["d2t"], after["d2t"])
    hidden = torch.randn(50, 32)
    ids = [load_head(x, tables(target)).draft_probs(hidden).argmax(-1) for x in (old, new)]
    assert torch.equal(*ids)


def test_c10_a_rebuilt_map_needs_its_switch_and_keeps_known_rows(
    train: Train, other_rows: Path, refused: Refused, target: Target
) -> None:
    old = train("--draft-vocab", "40", output="old") / "last"
    asked = ("--init", str(old), "--draft-vocab", "41")
    message = refused(*asked, data=other_rows)
    assert "draft_vocab is 41 but the head in init" in message
    assert "--rebuild-vocab" in message
    slow = ("--lr", "1e-12", "--rebuild-vocab")
    new = train(*asked, *slow, data=other_rows, output="new") / "last"
    before, after = load_head(old, tables(target)), load_head(new, tables(target))
    assert {*range(50, 89)} <= {*after.draft_ids_W.tolist()} | {*range(89, 95)}
    assert not torch.equal(before.draft_ids_W, after.draft_ids_W[:40])
    shared = sorted({*before.draft_ids_W.tolist()} & {*after.draft_ids_W.tolist()})
    rows = [
        head.lm_head.weight[torch.isin(head.draft_ids_W, torch.tensor(shared))]
        for head in (before, after)
    ]
    torch.testing.assert_close(*rows, rtol=0, atol=1e-6)
    torch.testing.assert_close(before.fc.weight, after.fc.weight, rtol=0, atol=1e-6)


def test_warm_starts_keep_the_geometry(train: Train, refused: Refused) -> None:
    old = str(train("--draft-vocab", "40", output="old") / "last")
    assert "norm_output is True but the head in init" in refused("--init", old, "--norm-output")
    assert "max_positions is 77 but the head in init" in refused(
        "--init", old, "--max-positions", "77"
    )
    assert "aux_layers is (1, 3, 5) but the head in init" in refused(
        "--init", old, "--aux-layers", "1", "3", "5"
    )
    assert "head is eagle1 but the head in init" in refused(
        "--init", old, "--head", "eagle1", "--unroll-steps", "1"
    )


# Vocabulary


def test_frequent_supervised_tokens_and_safe_ids_are_chosen() -> None:
    labels = [torch.tensor([7, 7, 7, 9, 9, 4]), torch.tensor([9, 5])]
    found = choose_vocabulary(labels, 4, vocab_size=12, tokenizer_size=10, always=[0, 1])
    assert found.draft_ids_W.tolist() == [0, 1, 7, 9]
    assert found.distinct == 4
    assert found.covered == pytest.approx(6 / 8)


def test_byte_level_tokens_are_found_in_both_forms() -> None:
    assert byte_tokens(["<0x0A>", "<0xFF>", "a", "<0x>"]) == ["<0x0A>", "<0xFF>"]
    assert byte_tokens(["a", "ab", "\u0120", "\u0100", "\u4e00"]) == ["a", "\u0120", "\u0100"]


def test_safe_ids_hold_special_and_end_tokens(target: Target) -> None:
    assert safe_ids(target.tokenizer, target.eos_ids) == [0, 1]
    assert safe_ids(None, (5,)) == [5]


def test_validation_scores_exported_files_and_keeps_the_best(
    train: Train, tmp_path: Path, heldout_file: Path
) -> None:
    flags = ("--epochs", "4", "--heldout", str(heldout_file), "--heldout-rows", "5")
    out = train(*flags, "--eval-depth", "3")
    lines = [json.loads(x) for x in (out / "heldout.jsonl").read_text("utf-8").splitlines()]
    assert [line["step"] for line in lines] == [7, 14, 21, 28]
    assert all(set(line["tau_by_length"]) == {"1", "2", "3"} for line in lines)
    scores = [line["tau"] for line in lines]
    assert scores == [line["tau_by_length"]["3"] for line in lines]
    kept = json.loads((out / "best" / "heldout.json").read_text(encoding="utf-8"))
    assert kept["tau"] == max(scores)
    newest = latest(out)
    assert newest is not None
    state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
    assert state["position"]["best_step"] == kept["step"]
    assert len(lines[0]["survival"]) == 3


def test_heldout_rows_must_be_answered_and_greedy(
    tmp_path: Path, refused: Refused, rows_file: Path
) -> None:
    assert "has no prompt_ids or no answer_ids" in refused("--heldout", str(rows_file))
    rows = [{"prompt_ids": [2, 3], "answer_ids": [4], "temperature": 1.0}]
    path = written(tmp_path / "warm.jsonl", rows)
    assert "none drawn with" in refused("--heldout", str(path))


def test_heldout_rows_among_the_training_rows_are_refused(
    tmp_path: Path, refused: Refused, heldout_file: Path
) -> None:
    assert "is also training row" in refused("--heldout", str(heldout_file), data=heldout_file)


@pytest.mark.parametrize("limit", [1, 6, 9, 20, 60, 90, 200, None])
def test_a_part_of_the_heldout_rows_holds_every_kind_alike(limit: int | None) -> None:
    # Kinds in turn, as answers of several sources come: steps of 3 would see two of six kinds.
    sizes = dict(zip("abcdef", (20, 20, 20, 20, 20, 5), strict=True))
    texts = [
        Text(f"{kind}{row}", kind, [2, 3], [4])
        for row in range(20)
        for kind, size in sizes.items()
        if row < size
    ]
    chosen = spread(texts, limit)
    assert chosen == [text for text in texts if text in chosen]
    assert len(chosen) == (len(texts) if limit is None else min(limit, len(texts)))
    counts = {kind: sum(text.kind == kind for text in chosen) for kind in sizes}
    level = max(counts.values())
    assert all(count >= min(level - 1, sizes[kind]) for kind, count in counts.items())
    for kind, count in counts.items():
        rows = [int(text.row_id[1:]) for text in chosen if text.kind == kind]
        assert len(set(rows)) == count
        assert all(row >= place * sizes[kind] // count for place, row in enumerate(rows))


def test_a_folder_that_another_process_trains_in_is_refused(
    refused: Refused, train: Train, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    with alone_in(tmp_path / "run"):
        assert "another process is at work in" in refused()
    train()


def test_a_tracker_that_does_not_start_is_told_in_a_line(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("No API key configured")

    monkeypatch.setattr("accelerate.Accelerator.init_trackers", fail)
    monkeypatch.setattr("outrider.train.launch.check_tracker", lambda _: None)
    said = refused("--track", "tensorboard")
    assert "did not start: No API key configured" in said
    assert "WANDB_MODE=offline" in said


def test_a_heldout_trace_must_be_greedy(
    refused: Refused, target_folder: Path, tmp_path: Path
) -> None:
    target = Target.load(str(target_folder))
    ids = torch.tensor([[2, 3, 4]])
    noise = torch.Generator().manual_seed(0)
    for _ in range(12):
        law = target.logits(target.run(ids).last_BTH[:, -1]).float().softmax(-1)
        ids = torch.cat([ids, law.multinomial(1, generator=noise)], dim=1)
    texts = [Text("a", "k", ids[0, :3].tolist(), ids[0, 3:].tolist())]
    sampling = Sampling(temperature=1.0)
    build_trace(target, texts, tmp_path / "warm", sampling=sampling, layers=(2, 4, 5))
    assert "is a trace of temperature 1.0" in refused("--heldout", str(tmp_path / "warm"))


def test_a_draft_vocabulary_that_covers_nothing_is_refused(
    tmp_path: Path, refused: Refused, train: Train
) -> None:
    def rows(name: str, first: int) -> Path:
        ids = [[first + (7 * row + place) % 25 for place in range(16)] for row in range(8)]
        mask = [0] * 8 + [1] * 8
        return written(tmp_path / name, [{"input_ids": one, "loss_mask": mask} for one in ids])

    low, high = rows("low.jsonl", 2), rows("high.jsonl", 60)
    # The ids that are always in leave no room for what is supervised.
    message = refused("--draft-vocab", "2", data=high)
    assert "cover 0.00% of the supervised tokens (at least 5% is needed)" in message
    assert "--rebuild-vocab" in message
    head = train("--draft-vocab", "30", data=low, output="low") / "best"
    head = head if head.exists() else head.with_name("last")
    message = refused("--init", str(head), data=high)
    assert "the draft vocabulary's 30 tokens cover 0.00%" in message


def test_coverage_of_a_kept_vocabulary_and_odd_positions_are_told(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train("--draft-vocab", "40", "--max-positions", "16", output="first")
    said = capsys.readouterr().out
    assert "the head's max_positions is 16 and rows go up to max_length 64" in said
    train("--init", str(first / "last"), output="second")
    assert "draft vocabulary: 40 tokens cover" in capsys.readouterr().out
    train("--max-positions", "999", output="third")
    assert "max_positions is 999, beyond the target's own 128" in capsys.readouterr().out
