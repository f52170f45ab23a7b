"""`outrider check` as a command: every kind of run, its page, its JSON, and the run asked for."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.data import store, thinned
from outrider.scripts import features_command
from outrider.train.check import needs, page, runner
from outrider.train.check.finding import Finding, failed, refuse

Check = Callable[..., Any]


@pytest.mark.parametrize(
    "flags",
    [
        ("--unroll-steps", "2"),
        ("--draft-vocab", "60", "--feature-dtype", "int8", "--unroll-steps", "2"),
        ("--head", "eagle1"),
        ("--head", "medusa", "--num-draft-heads", "2"),
        ("--head", "medusa", "--num-draft-heads", "2", "--joint", "full"),
        ("--head", "hydra", "--num-draft-heads", "2"),
        ("--head", "mtp"),
        ("--online", "--precision", "bf16", "--target-dtype", "bfloat16"),
    ],
)
def test_every_kind_of_run_passes_on_good_input(check: Check, flags: tuple[str, ...]) -> None:
    result = check(*flags)
    assert result.code == 0, result.said
    assert not [one for one in result.found.values() if one.verdict in ("fail", "skipped")]
    assert {"layer capture", "one step", "save and reload", "memory", "time"} <= set(result.found)
    assert "ready to train" in result.said
    assert result.found["one step"].verdict == "ok"


# The run


def test_features_that_do_not_fit_on_the_disk_fail(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 100
    disks = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=free))
    monkeypatch.setattr(needs, "shutil", disks)
    result = check()
    assert result.wrong == ["disk space"]
    told = result.found["disk space"]
    assert "take 0.00 GiB of 0.00 GiB that are free" in told.seen
    assert "--feature-dtype int8" in told.remedy
    disk = result.record["plan"]["disk_bytes"]
    heads = round(disk["checkpoints"] + disk["exports"])
    assert disk["features"] > 100

    free = heads
    assert check("--online").code == 0
    assert check().wrong == ["disk space"]
    free = heads - 1
    assert check("--online").wrong == ["disk space"]


def test_features_that_are_stored_already_need_no_room(
    check: Check,
    train: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    rows_file: Path,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(store, "SHARD_TOKENS", 64)
    run = ("--store", str(tmp_path / "stored"), "--output", str(tmp_path / "checked"))
    run += ("--unroll-steps", "2")
    disk = check(*run).record["plan"]["disk_bytes"]
    heads = round(disk["checkpoints"] + disk["exports"])
    free = heads + round(disk["features"] / 2)
    monkeypatch.setattr(
        needs, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=free))
    )
    assert check(*run).wrong == ["disk space"]
    with pytest.raises(SystemExit, match="0"):
        train(*run, "--stop-after-steps", "1")
    free = heads
    assert check(*run).code == 0
    shards = sorted((tmp_path / "stored").glob("*/features-*.safetensors"))
    left = sum(shard.stat().st_size for shard in shards[1:3])
    for shard in shards[1:3]:
        shard.unlink()
    free = heads + round(1.05 * left)
    partly = check(*run)
    assert partly.code == 0
    assert "the features that are not stored yet" in partly.found["disk space"].seen
    free = heads + round(0.95 * left)
    assert check(*run).wrong == ["disk space"]
    free = heads + round(1.05 * left)  # other features than those that are there
    assert check(*run, "--feature-dtype", "float32").wrong == ["disk space"]


def test_features_over_a_vocabulary_by_mass_are_found_once_it_is_chosen(
    check: Check,
    train: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    target_folder: Path,
    rows_file: Path,
) -> None:
    monkeypatch.setattr(store, "SHARD_TOKENS", 64)
    packed = ("--feature-dtype", "int8", "--draft-vocab", "30", "--max-length", "64")
    packed += ("--draft-vocab-by", "mass", "--top-k", "8")
    place = tmp_path / "stored"
    run = ("--store", str(place), "--output", str(tmp_path / "run"), "--unroll-steps", "2")
    none = check(*run, *packed).found["stored features"]
    assert none.seen == f"none yet in {place}"

    given = {"target": target_folder, "data": rows_file, "out": place}
    words = [word for name in given for word in (f"--{name}", str(given[name]))]
    features_command.main([*words, *packed])
    found = check(*run, *packed)
    assert "holds all of this run's; left: 0.00 GiB" in found.found["stored features"].seen
    assert "30 tokens cover" in found.found["draft vocabulary"].seen  # the target's own choice
    disk = found.record["plan"]["disk_bytes"]
    heads = round(disk["checkpoints"] + disk["exports"])
    disks = SimpleNamespace(free=heads)
    usage = SimpleNamespace(disk_usage=lambda _: disks)
    monkeypatch.setattr(needs, "shutil", usage)
    assert check(*run, *packed).code == 0

    shards = sorted(place.glob("*/features-*.safetensors"))
    left = sum(shard.stat().st_size for shard in shards[1:3])
    for shard in shards[1:3]:
        shard.unlink()
    disks.free = heads + round(1.05 * left)
    partly = check(*run, *packed)
    assert partly.code == 0
    assert "holds a part of this run's; left" in partly.found["stored features"].seen
    disks.free = heads + round(0.95 * left)
    assert check(*run, *packed).wrong == ["disk space"]

    for kept in (place / "vocabularies").iterdir():
        kept.unlink()
    unknown = check(*run, *packed)
    told = unknown.found["stored features"].seen
    assert "whether they are this run's cannot be told" in told
    assert f"the target chooses by its probability when training starts ({place}" in told
    assert (unknown.code, unknown.found["disk space"].verdict) == (0, "warn")
    assert "training tells, and refuses before" in unknown.found["disk space"].remedy
    disks.free = heads - 1  # too little whatever is stored
    assert check(*run, *packed).wrong == ["disk space"]
    # Laws over all of the target's tokens depend on no choice.
    whole = check(*run, *packed, "--teacher-over", "target").found["stored features"].seen
    assert "holds others than this run's" in whole


def test_a_sample_of_the_rows_tells_no_stored_features(
    check: Check,
    train: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    rows_file: Path,
    tmp_path: Path,
) -> None:
    data = tmp_path / "many.jsonl"
    data.write_text(rows_file.read_text("utf-8") * 8, encoding="utf-8")
    flags = ("--store", str(tmp_path / "stored"), "--unroll-steps", "2")
    with pytest.raises(SystemExit, match="0"):
        train(*flags, "--stop-after-steps", "1", data=data)
    monkeypatch.setattr(runner, "thin", partial(thinned.thin, most_work=1100))
    sampled = check(*flags, data=data).found["stored features"].seen
    assert "only a sample was read (--every-row reads all)" in sampled
    every = check(*flags, "--every-row", data=data).found["stored features"].seen
    assert "holds all of this run's; left: 0.00 GiB" in every


def test_the_plan_is_what_the_trainer_plans(
    check: Check, train: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    result = check("--unroll-steps", "2", "--output", "runs/x")
    capsys.readouterr()
    train("--plan")
    said = capsys.readouterr().out
    plan = result.record["plan"]
    assert f"  {result.found['steps'].seen}\n" in said
    assert f"memory (estimate): peak {plan['memory_bytes']['peak'] / 2**30:.2f} GiB" in said
    assert plan["steps"]["total"] > 1


def test_heldout_rows_are_checked(check: Check, heldout_file: Path, rows_file: Path) -> None:
    none = check().found["held-out rows"]
    assert none.verdict == "warn"
    assert "best/ stays empty" in none.seen
    good = check("--heldout", str(heldout_file))
    assert good.found["held-out rows"].seen.startswith("10 in ")
    both = check("--heldout", str(heldout_file), data=heldout_file)
    assert both.code == 1
    assert "is also training row" in both.found["held-out rows"].seen
    assert "no prompt_ids" in check("--heldout", str(rows_file)).found["held-out rows"].seen


def test_large_data_is_checked_by_a_sample_that_is_told_as_one(
    check: Check, monkeypatch: pytest.MonkeyPatch, rows_file: Path, tmp_path: Path
) -> None:
    lines = rows_file.read_text("utf-8").splitlines(keepends=True) * 8
    lines[0] = '{"id": "r0", "input_ids": [5, 6, 7]}\n'  # the first is always in a sample
    data = tmp_path / "many.jsonl"
    data.write_text("".join(lines), encoding="utf-8")
    whole = check(data=data)
    assert "224 read: 223 kept, 0 cut, 0 dropped, 1 refused" in whole.found["rows"].seen
    assert "sample" not in whole.said.partition("sample rows")[0]

    monkeypatch.setattr(runner, "thin", partial(thinned.thin, most_work=1100))
    result = check(data=data)
    rows_seen = result.found["rows"].seen
    kept = [number for number in range(1, 225) if thinned.is_kept(number, 4)]
    assert f"a sample, 1 of 4 of 224 records: {len(kept)} read: {len(kept) - 1} kept" in rows_seen
    assert result.found["refused rows"].seen.startswith("1 (")
    assert "estimated from the sample" in result.found["steps"].seen
    ours, all_rows = (one.record["plan"] for one in (result, whole))
    for told in ("disk_bytes", "seconds"):
        assert ours[told]["total"] == pytest.approx(all_rows[told]["total"], rel=0.2)
    assert ours["tokens"] == pytest.approx(all_rows["tokens"], rel=0.1)

    limited = check("--max-tokens", "1000", data=data)
    assert limited.record["plan"]["tokens"] == 1000
    for flags in (("--every-row",), ("--row-report", str(tmp_path / "report.jsonl"))):
        assert check(*flags, data=data).found["rows"].seen == whole.found["rows"].seen
    fixed = check("--fix", str(tmp_path / "fixed"), data=data)
    assert fixed.code == 0
    assert len((tmp_path / "fixed" / "rows.jsonl").read_text("utf-8").splitlines()) == 223


# The command


def test_flags_of_the_trainers_are_parsed_as_they_do(check: Check, tmp_path: Path) -> None:
    assert check("--max-lenght", "3").code == 2
    assert "choose one of eagle3, eagle1, medusa" in check("--head", "medusae").said
    assert "there is no folder" in check("--html", str(tmp_path / "no" / "page.html")).said
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("head: medusa\nnum_draft_heads: 3\n", encoding="utf-8")
    result = check("--recipe", str(recipe))
    assert (result.code, result.record["settings"]["num_draft_heads"]) == (0, 3)


def test_the_page_holds_every_finding_and_needs_no_other_file(check: Check, tmp_path: Path) -> None:
    result = check("--html", str(tmp_path / "page.html"), "--show", "2", "--norm-before-residual")
    html = (tmp_path / "page.html").read_text("utf-8")
    assert "http" not in html.replace("<!DOCTYPE html>", "")
    assert "src=" not in html
    for one in result.found.values():
        assert f'<td class="name">{one.name}</td>' in html
    assert html.count('<div class="row">') == 2 == len(result.record["rows"])
    assert '<span class="on' in html
    pieces = [piece for row in result.record["rows"] for piece in row["pieces"]]
    assert {on for _, on, _ in pieces} == {True, False}
    assert all(
        {"group", "name", "verdict", "seen", "remedy", "fix"} == set(one)
        for one in result.record["findings"]
    )
    assert result.record["is_good"] is True


def test_colours_mark_verdicts_and_tokens(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = check().said
    assert "\x1b[" not in plain
    monkeypatch.setattr("outrider.scripts.check_command.is_colored", lambda: True)
    said = check("--norm-before-residual").said
    assert f"\x1b[{page.COLORS['warn']}mwarn" in said
    assert f"\x1b[{page.SUPERVISED}m" in said


@pytest.mark.parametrize(("load", "threads"), [(0.2, 2), (1.3, 2), (2.6, 1), (9.0, 1)])
def test_no_more_threads_are_used_than_processors_are_idle(
    check: Check, monkeypatch: pytest.MonkeyPatch, load: float, threads: int
) -> None:
    used, before = list[int](), torch.get_num_threads()
    monkeypatch.setattr("os.getloadavg", lambda: (load, 9.0, 9.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    watched = runner.Check("seen", lambda _: used.append(torch.get_num_threads()) or ())
    monkeypatch.setattr(runner, "CHECKS", (watched,))
    try:
        check("--threads", "2")
    finally:
        torch.set_num_threads(before)
    assert used == [threads]


def test_a_check_that_stumbles_is_a_finding_and_the_others_go_on(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(runner.target_checks, "check_capture", broken)
    result = check()
    assert result.code == 1
    assert result.wrong == ["capture"]
    assert "stopped by RuntimeError: no such kernel" in result.found["capture"].seen
    monkeypatch.setenv("OUTRIDER_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="no such kernel"):
        check()


def test_a_refusal_tells_the_first_failure_only() -> None:
    told = [Finding("a", "warn", "odd"), Finding("b", "fail", "seen", "do"), failed("c", OSError())]
    with pytest.raises(ValueError, match=r"^seen; do$"):
        refuse(told)
    refuse(told[:1])
