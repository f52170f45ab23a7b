"""The whole path from acceptance and costs to a comparison, on the demo target."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.outline import outline
from outrider.heads import EagleConfig, EagleHead, save_head
from outrider.scripts import predict_bench


@pytest.mark.slow
def test_stages_are_kept_and_a_second_run_times_nothing_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    target = outline("smollm2-demo", dtype=torch.float32, reads_rows=False)
    config = EagleConfig.from_target(target.config, draft_vocab_size=512)
    save_head(EagleHead(config, torch.arange(512)), tmp_path / "head")
    threads = torch.get_num_threads()
    argv = ["--head", str(tmp_path / "head"), "--work", str(tmp_path / "work"), "--prompts", "2",
            "--tokens", "4", "--rounds", "1", "--batches", "1", "2", "--drafts", "chain:1",
            "tree:2,2,3", "--cost-drafts", "chain:1", "tree:2,2,3"]  # fmt: skip
    shown: list[str] = []
    for _ in range(2):
        with pytest.raises(SystemExit):
            predict_bench.main(argv)
        shown.append(capsys.readouterr().out)
    torch.set_num_threads(threads)
    assert shown[0] == shown[1]
    lines = (tmp_path / "work" / "speeds.jsonl").read_text().splitlines()
    runs = [(one["batch"], one["draft"], one["turn"]) for one in map(json.loads, lines)]
    assert len(set(runs)) == len(runs) == 2 * (3 + 2)
    found = json.loads((tmp_path / "work" / "compared.json").read_text())
    # In float32 a draft decodes the very text that acceptance was scored on.
    for row in found["rows"]:
        if row["batch"] == 1:
            assert row["tau_measured"] == pytest.approx(row["tau_predicted"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": 0}, "prompts is 0"),
        ({"batches": (0,)}, r"batches is \(0,\)"),
        ({"drafts": ("chain",)}, "draft is 'chain'"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        predict_bench.Settings(head="h", work=tmp_path, **changes)
