"""The loop and the offline score agree for every kind of drafter, and planted faults part them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.agreement import Agreement, Check, check, own_texts
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.drafters.model import draft_model
from outrider.eval.offline.texts import Text
from outrider.eval.offline.traces import Trace, build_trace
from outrider.eval.trees.plans import write_static
from outrider.heads import EagleHead, HeadCache
from outrider.scripts import agreement

LAYERS = (1, 3, 5)
Checked = Callable[..., Agreement]


@pytest.fixture(scope="module")
def traces(
    tiny_target: Target,
    make_texts: Callable[..., list[Text]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[float, Trace]:
    prompts = make_texts(Sampling(), 24, 2)
    found = {}
    for temperature in (0.0, 0.6, 1.0):
        sampling = Sampling(temperature=temperature)
        texts = own_texts(tiny_target, prompts, sampling, 16)
        folder = tmp_path_factory.mktemp("own")
        found[temperature] = build_trace(
            tiny_target, texts, folder, sampling=sampling, layers=LAYERS, seed=0
        )
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    "draft", ["chain:3", "tree:3,3,6", "static", "lookup:3", "suffix:3", "model"]
)
def test_every_drafter_agrees(
    draft: str,
    temperature: float,
    tiny_target: Target,
    tiny_head: EagleHead,
    traces: dict[float, Trace],
    tmp_path: Path,
) -> None:
    drafter: Any = None if draft[0] in "ls" and draft != "static" else tiny_head
    if draft == "static":
        write_static(tmp_path / "tree.json", [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
        draft = f"static:{tmp_path / 'tree.json'}"
    if draft == "model":
        drafter, draft = draft_model("layers:3", tiny_target), "chain:3"
    found = check(drafter, tiny_target, traces[temperature], Check(draft=draft))
    if found.is_same_noise:
        assert found.equal == found.prompts
        assert found.loop[0] == pytest.approx(found.offline)
    else:
        # One in twenty intervals misses by chance: the loop's seed is fixed, so this one never.
        assert found.agrees


def late_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts run one position late."""
    real = HeadDrafter._step

    def step(self: HeadDrafter, feature: Any, ids: Any, start: int, depth: int = 0) -> Any:
        return real(self, feature, ids, start + (depth > 0), depth)

    monkeypatch.setattr(HeadDrafter, "_step", step)


def wrong_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's states are taken one layer too deep."""
    layers = property(lambda self: tuple(layer + 1 for layer in self._head.config.aux_layers))
    monkeypatch.setattr(HeadDrafter, "layers", layers)


def late_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rolling back leaves the first dropped row's keys and values in the last kept row."""
    real = HeadCache.truncate

    def truncate(self: HeadCache, length: int) -> None:
        if 0 < length < self.length:
            for store in self._layers.values():
                for buffer in (store.key, store.value):
                    buffer[:, :, length - 1] = buffer[:, :, length]
        real(self, length)

    monkeypatch.setattr(HeadCache, "truncate", truncate)


@pytest.mark.parametrize(
    ("fault", "temperature"),
    # Trees at temperature 1, whose rounds must be equal one by one; their positions are set apart.
    [(late_positions, 0.0), (wrong_layers, 0.0), (wrong_layers, 1.0), (late_rollback, 1.0)],
)
def test_a_planted_fault_breaks_the_agreement(
    fault: Callable[[pytest.MonkeyPatch], None],
    temperature: float,
    tiny_target: Target,
    tiny_head: EagleHead,
    traces: dict[float, Trace],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = "chain:5" if temperature == 0 else "tree:3,2,6"
    whole = check(tiny_head, tiny_target, traces[temperature], Check(draft=draft))
    fault(monkeypatch)
    broken = check(tiny_head, tiny_target, traces[temperature], Check(draft=draft))
    assert whole.agrees
    assert not broken.agrees
    assert broken.equal < whole.equal


def test_the_script_goes_on_where_it_stopped(
    write_files: Callable[[Path], None],
    make_texts: Callable[..., list[Text]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_files(tmp_path)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for text in make_texts(Sampling(), 6, 2):
            row = {"id": text.row_id, "kind": text.kind, "prompt_ids": text.prompt_ids}
            file.write(json.dumps({**row, "answer_ids": text.answer_ids}) + "\n")
    command = ["--target", str(tmp_path / "target"), "--text", str(tmp_path / "rows.jsonl")]
    command += ["--head", str(tmp_path / "run" / "good"), "--model", "layers:2", "--tokens", "10"]
    command += ["--temperature", "0", "--output", str(tmp_path / "out")]
    agreement.main([*command, "--draft", "chain:1", "lookup:2"])
    made: list[str] = []
    real = agreement.check

    def noted(drafter: Any, target: Target, trace: Trace, wanted: Check) -> Agreement:
        made.append(wanted.draft)
        return real(drafter, target, trace, wanted)

    monkeypatch.setattr(agreement, "check", noted)
    agreement.main([*command, "--draft", "chain:1-2", "tree:2,2,3", "lookup:2"])
    assert made == ["chain:2", "chain:2", "tree:2,2,3"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.count("agrees") == 6
    assert "| layers:2 | chain:2 | 0 | greedy | 4 |" in table
    assert torch.get_num_threads() >= 1
    with pytest.raises(ValueError, match="depends on tokens drawn elsewhere"):
        agreement.Settings(draft=("drawn:2,2,4",))


def test_repeats_pool_decodings_of_other_noise(
    tiny_target: Target, tiny_head: EagleHead, traces: dict[float, Trace]
) -> None:
    alone = [
        check(tiny_head, tiny_target, traces[1.0], Check(draft="chain:3", seed=seed))
        for seed in (5, 6)
    ]
    both = check(tiny_head, tiny_target, traces[1.0], Check(draft="chain:3", seed=5, repeats=2))
    low, high = sorted(one.loop[0] for one in alone)
    assert low < both.loop[0] < high
    greedy = Check(draft="chain:3", repeats=3)
    assert check(tiny_head, tiny_target, traces[0.0], greedy).equal == len(traces[0.0])
