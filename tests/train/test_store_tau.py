"""The cost of packed stores in tau: pairs by seed, both intervals, and a real run of tiny heads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from outrider.data.target import Target
from outrider.eval.offline.scores import Score
from outrider.eval.stats import mean_quotient
from outrider.scripts.store_tau import (
    Settings,
    command_of,
    comparisons,
    main,
    markdown,
    over_seeds,
)
from outrider.train.kinds import EagleRun
from outrider.train.recipe import parse


def score(rounds: list[float], tokens: list[float]) -> Score:
    none: Any = np.zeros((len(rounds), 1))
    return Score(
        draft="chain:3", rule="greedy", row_ids=tuple(map(str, range(len(rounds)))),
        kinds=("all",) * len(rounds), tokens_R=np.array(tokens), rounds_R=np.array(rounds),
        drafted_R=none[:, 0], judged_RK=none, kept_RK=none, hit_RK=none, best_RK=none,
        inside_RK=none, top_inside_RK=none, wide_RK=none, cut_R=none[:, 0], undrafted_R=none[:, 0],
    )  # fmt: skip


def test_quotients_are_taken_seed_by_seed() -> None:
    tokens = [10.0, 20.0, 30.0, 40.0]
    raw = {0: [5.0, 10.0, 15.0, 20.0], 1: [4.0, 8.0, 12.0, 16.0]}
    packed = {0: [5.5, 11.0, 16.5, 22.0], 1: [4.0, 8.0, 12.0, 16.0]}
    found = {
        name: {seed: {3: score(rounds, tokens)} for seed, rounds in by_seed.items()}
        for name, by_seed in (("bfloat16", raw), ("int8", packed))
    }
    (one,) = comparisons(found)
    assert one["by_seed"] == {0: pytest.approx(1 / 1.1), 1: pytest.approx(1.0)}
    assert one["over_prompts"]["value"] == pytest.approx((1 / 1.1 + 1) / 2)
    text = markdown(found, [one])
    assert "| bfloat16 | 3 | 2.000 | 2.500 | 1 |  |  |" in text
    assert "| int8 | 3 | 1.818 | 2.500 | 0.9545 |" in text


def test_the_mean_quotient_has_the_interval_of_a_paired_bootstrap() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(20, 60, 80).astype(float)
    rounds = [tokens / rng.uniform(1.5, 2.5, 80) for _ in range(4)]
    pairs = [((tokens, rounds[i]), (tokens, rounds[i + 1])) for i in (0, 2)]
    found = mean_quotient(pairs)
    drawn = rng.integers(0, 80, (4000, 80))
    ratios = [rounds[i + 1][drawn].sum(1) / rounds[i][drawn].sum(1) for i in (0, 2)]
    low, high = np.quantile(np.mean(ratios, axis=0), [0.025, 0.975])
    assert found.low == pytest.approx(low, abs=0.004)
    assert found.high == pytest.approx(high, abs=0.004)
    # One round of all prompts scales both sides alike: pairing takes it away.
    same = mean_quotient([((tokens, rounds[0]), (tokens, 2 * rounds[0]))])
    assert (same.low, same.value, same.high) == pytest.approx((2.0, 2.0, 2.0))
    with pytest.raises(ValueError, match="pairs is empty"):
        mean_quotient([])
    with pytest.raises(ValueError, match="per-prompt arrays have shapes"):
        mean_quotient([((tokens, rounds[0]), (tokens[:5], rounds[0][:5]))])


def test_the_interval_over_seeds_is_students() -> None:
    found = over_seeds([0.99, 1.0, 1.01])
    half = 4.302653 * np.std(np.log([0.99, 1.0, 1.01]), ddof=1) / np.sqrt(3)
    middle = np.mean(np.log([0.99, 1.0, 1.01]))
    assert found.value == pytest.approx(np.exp(middle))
    assert found.low == pytest.approx(np.exp(middle - half), rel=1e-6)
    assert found.high == pytest.approx(np.exp(middle + half), rel=1e-6)
    assert np.isnan(over_seeds([0.99]).low)
    single: Any = {name: {0: {3: score([5.0, 4.0], [9.0, 9.0])}} for name in ("bfloat16", "int8")}
    assert markdown(single, comparisons(single)).endswith("| 1.0000 | [1.0000, 1.0000] |  |\n")


def test_runs_differ_in_store_and_seed_only() -> None:
    settings = Settings()
    seen = {
        (form, seed): parse(command_of(settings, form, seed), EagleRun).flat()
        for form in settings.forms
        for seed in settings.seeds
    }
    first = seen["bfloat16", 0]
    for (form, seed), one in seen.items():
        changed = {name for name, value in one.items() if value != first[name]} - {"output"}
        wanted = {"feature_dtype"} if form != "bfloat16" else set()
        assert changed == wanted | ({"seed"} if seed else set())


@pytest.mark.parametrize("name", ["forms", "seeds", "lengths"])
def test_nothing_and_repeats_are_refused(name: str) -> None:
    wrong: Any = {name: ()}
    with pytest.raises(ValueError, match=f"{name} is"):
        Settings(**wrong)
    with pytest.raises(ValueError, match="each once"):
        Settings(seeds=(1, 1))


@pytest.mark.slow
def test_heads_are_trained_once_and_compared(
    target_folder: Path, rows_file: Path, heldout_file: Path, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    recipe = tmp_path / "tiny.yaml"
    shared = {"head": "eagle3", "draft_vocab": 40, "unroll_steps": 2, "max_length": 64}
    recipe.write_text(yaml.safe_dump(shared | {"top_k": 40, "lr": 0.01}), encoding="utf-8")
    given = {"output": tmp_path / "tau", "recipe": recipe, "target": target_folder,
             "data": rows_file, "heldout": heldout_file, "max-tokens": 200}  # fmt: skip
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    flags += ["--forms", "bfloat16", "int8", "--seeds", "0", "1", "--lengths", "2"]
    threads = torch.get_num_threads()
    try:
        main(flags)
        capfd.readouterr()
        main(flags)
    finally:
        torch.set_num_threads(threads)
    assert capfd.readouterr().out.count("done already") == 4
    record = json.loads((tmp_path / "tau" / "store-tau.json").read_text())
    assert Target.load(str(target_folder)).vocab_size == 128
    (one,) = record["quotients"]
    taus = record["tau"]
    for seed in ("0", "1"):
        quotient = taus["int8"][seed]["2"] / taus["bfloat16"][seed]["2"]
        assert one["by_seed"][seed] == pytest.approx(quotient)
    assert "| int8 | 2 |" in (tmp_path / "tau" / "table.md").read_text()
