"""What engines say when nothing was drafted yet, when they start anew, and when they are wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.eval.production.engine_log import read_windows
from outrider.eval.production.window import Window
from outrider.scripts.cli import main as outrider
from outrider.scripts.drift_command import totals

ENGINE = Path(__file__).parent / "engine"
LABELS = 'engine="0",model_name="m"'


def scrape(drafts: object, at: tuple[object, ...], *, accepted: object, tokens: object) -> str:
    lines = [
        f"vllm:spec_decode_num_drafts_total{{{LABELS}}} {drafts}",
        f"vllm:spec_decode_num_draft_tokens_total{{{LABELS}}} {tokens}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{LABELS}}} {accepted}",
    ]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{name}{{{LABELS},position="{i}"}} {count}' for i, count in enumerate(at)]
    return "\n".join(lines) + "\n"


def line(accepted: int, drafted: int, mean: str, rates: str) -> str:
    return (
        f"INFO 12-01 10:00:00 SpecDecoding metrics: Mean acceptance length: {mean}, Accepted: "
        f"{accepted} tokens, Drafted: {drafted} tokens, Per-position acceptance rate: {rates}\n"
    )


def test_an_engine_that_started_anew_and_has_drafted_more_since_is_counted_from_nought() -> None:
    before = scrape(220, (50, 10), accepted=60, tokens=440)
    after = scrape(230, (15, 5), accepted=20, tokens=460)
    first, second = read_windows([("a", before), ("b", after)])
    assert (first.rounds, second.rounds) == (220, 230)
    assert second.accepted_at == (15, 5)


@pytest.mark.parametrize(
    "text",
    [
        scrape(100, (23, 5), accepted="NaN", tokens=200),
        scrape(100, ("+Inf", 5), accepted=28, tokens=200),
        scrape(100, (-23, 5), accepted=28, tokens=200),
        scrape(100, (5, 23), accepted=28, tokens=200),
        scrape(100, (230, 5), accepted=235, tokens=200),
    ],
)
def test_counts_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="never rise with the position"):
        read_windows([("metrics", text)])


def test_a_position_that_is_no_number_is_named() -> None:
    text = scrape(100, (23,), accepted=23, tokens=100)
    for wrong in (text.replace('position="0"', 'position="x"'), text.replace("position", "pos")):
        with pytest.raises(ValueError, match=r"per_pos_total has the labels .* is a number"):
            read_windows([("metrics", wrong)])


def test_lines_that_tell_no_rounds_are_passed_over() -> None:
    whole = line(28, 200, "1.28", "0.230, 0.050")
    idle = line(0, 0, "1.00", "0.000, 0.000")
    scarce = line(1, 300, "1.00", "0.003, 0.000")  # of unlike lengths, and the mean says nothing
    assert [one.rounds for one in read_windows([("log", idle + whole + scarce)])] == [100]


def test_rates_of_unlike_drafts_never_count_more_than_the_rounds() -> None:
    (found,) = read_windows([("log", line(100, 300, "2.34", "1.000, 0.340"))])
    assert not found.has_one_length
    assert found.accepted_at[0] <= found.rounds


def test_a_schedule_by_batch_size_is_told_from_the_drafted_tokens() -> None:
    at = (600, 200, 100)
    (even,) = read_windows([("m", scrape(1000, at, accepted=900, tokens=2990))])
    (uneven,) = read_windows([("m", scrape(1000, at, accepted=900, tokens=2000))])
    assert (even.has_one_length, even.notes) == (True, ())
    assert not uneven.has_one_length
    assert "unlike lengths" in uneven.notes[0]


def test_windows_of_two_lengths_are_not_added_up() -> None:
    two = Window(engine="vllm", route="r", when="a", rounds=9, accepted=3, accepted_at=(2, 1))
    three = replace(two, accepted_at=(2, 1, 0))
    assert totals([two, three]) == []
    assert totals([two, two])[0].accepted_at == (4, 2)


def test_answers_in_a_list_are_read_and_histograms_of_no_counts_refused() -> None:
    answer = {"meta_info": {"spec_accept_histogram": [3, 1, 0]}}
    (found,) = read_windows([("a.jsonl", json.dumps([answer, answer]))])
    assert (found.requests, found.rounds) == (2, 8)
    for wrong in (["a", 1], 5, [5, -3, 2]):
        row = {"meta_info": {"spec_accept_histogram": wrong}}
        with pytest.raises(ValueError, match="has the histogram"):
            read_windows([("a.jsonl", json.dumps(row))])
    with pytest.raises(ValueError, match="holds no figures"):
        read_windows([("a.jsonl", json.dumps({"meta_info": "none"}))])


def test_what_was_not_tested_is_not_called_free_of_drift(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prediction = ["drift", "--prediction", str(ENGINE / "prediction.json"), "--head", "g2/best"]
    log, out = tmp_path / "m.txt", tmp_path / "drift.json"
    log.write_text(scrape(0, (0, 0, 0), accepted=0, tokens=0))
    with pytest.raises(SystemExit) as stopped:
        outrider([*prediction, "--log", str(log)])
    assert stopped.value.code == 2
    assert "no calls that judged a draft yet" in capsys.readouterr().err
    log.write_text('sglang:spec_accept_length{model_name="m"} 1.9\n')
    outrider([*prediction, "--log", str(log), "--out", str(out)])
    said = capsys.readouterr().out
    assert "nothing was tested" in said
    assert "no drift" not in said
    json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    answers = tmp_path / "a.jsonl"
    answers.write_text(json.dumps({"meta_info": {"spec_accept_histogram": [0, 0, 0, 0]}}) + "\n")
    outrider([*prediction, "--log", str(answers), "--out", str(out)])
    assert "nothing was tested" in capsys.readouterr().out
    json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
