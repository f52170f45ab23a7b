"""Acceptance that engines report, read from a real vLLM's files, and the test for its drift."""

import json
import re
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from outrider.eval.offline.scores import Score, spread
from outrider.eval.production.drift import Prediction, judge
from outrider.eval.production.engine_log import read_windows
from outrider.eval.production.window import Window
from outrider.scripts.cli import main as outrider

ENGINE = Path(__file__).parent / "engine"
ROUTE = "engine=0,model_name=smollm2-demo"


def text(name: str) -> str:
    return (ENGINE / name).read_text()


def test_scrapes_of_a_real_vllm_give_windows_between_them() -> None:
    names = ("vllm_metrics_5.txt", "vllm_metrics_10.txt")
    first, second = read_windows([(name, text(name)) for name in names])
    assert (first.route, second.route) == (ROUTE, ROUTE)
    assert second.when == "vllm_metrics_5.txt to vllm_metrics_10.txt"
    assert (first.requests, second.requests) == (5, 5)
    assert first.rounds + second.rounds == 419
    whole = [a + b for a, b in zip(first.accepted_at, second.accepted_at, strict=True)]
    assert whole == [221, 109, 56]
    assert first.accepted + second.accepted == sum(whole)


def test_lines_of_a_real_vllm_log_give_the_same_counts() -> None:
    windows = read_windows([("vllm_log.txt", text("vllm_log.txt"))])
    assert [one.rounds for one in windows] == [75, 83, 71, 95, 59, 36]
    assert [one.when for one in windows][:2] == ["11-30 20:28:50", "11-30 20:28:55"]
    assert not any(one.notes for one in windows)
    at = np.sum([one.accepted_at for one in windows], axis=0)
    assert at.tolist() == [221, 109, 56]
    assert all(sum(one.accepted_at) == one.accepted for one in windows)


def test_an_engine_that_started_anew_is_counted_from_nought() -> None:
    later = text("vllm_metrics_10.txt")
    again = [("a", later), ("b", text("vllm_metrics_5.txt"))]
    assert [one.rounds for one in read_windows(again)] == [
        419,
        read_windows([("b", text("vllm_metrics_5.txt"))])[0].rounds,
    ]


# SGLang does not run on CPUs: these are in the form of its sources, `scheduler_metrics_mixin.py`
# and `tokenizer_manager.py` (0.5), not a server's own words.
SGLANG_LOG = """\
[2026-11-02 10:00:01 TP0] Prefill batch, #new-seq: 1, #new-token: 12, token usage: 0.00, \
#running-req: 0, #queue-req: 0,
[2026-11-02 10:00:05 TP0] Decode batch, #running-req: 2, #token: 512, token usage: 0.01, \
accept len: 2.25, accept rate: 0.42, cuda graph: True, gen throughput (token/s): 120.00, \
#queue-req: 0,
"""
SGLANG_METRICS = """\
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="0"} 2.5
sglang:spec_accept_rate{engine_type="unified",model_name="m",tp_rank="0"} 0.5
"""


def test_sglangs_forms_are_read() -> None:
    (line,) = read_windows([("log", SGLANG_LOG)])
    assert (line.rounds, line.accepted, line.when) == (80, 100, "2026-11-02 10:00:05")
    assert "40 steps" in line.notes[0]
    (gauge,) = read_windows([("metrics", SGLANG_METRICS)])
    assert (gauge.rounds, gauge.mean_length) == (0, 2.5)
    answers = "\n".join(
        json.dumps({"route": route, "meta_info": {key: histogram, "spec_verify_ct": 6}})
        for route, key, histogram in (
            ("chat", "spec_correct_drafts_histogram", [1, 2, 2, 1]),
            ("chat", "spec_accept_histogram", [3, 3]),
            ("code", "spec_correct_drafts_histogram", [0, 0, 1, 5]),
        )
    )
    chat, code = read_windows([("answers.jsonl", answers)])
    assert (chat.route, chat.requests, chat.rounds) == ("chat", 2, 12)
    assert chat.accepted_at == (8, 3, 1)
    assert code.accepted_at == (6, 6, 5)


def test_what_holds_no_figures_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nothing\.txt holds no figures"):
        read_windows([("nothing.txt", "INFO: started\n")])


# The test


DEPTH, LENGTH = 3, 60


def traffic(rng: np.random.Generator, prompts: int, shift: float = 0.0) -> list[np.ndarray]:
    """Accepted drafts of every round of every prompt; rates differ from prompt to prompt."""
    rates = np.clip(rng.beta(4, 3, size=prompts) + shift, 0.01, 0.99)
    return [np.minimum(rng.geometric(1 - rate, size=LENGTH) - 1, DEPTH) for rate in rates]


def judged_and_kept(rounds: np.ndarray) -> tuple[list[int], list[int]]:
    judged = [int((rounds >= i).sum()) for i in range(DEPTH)]
    return judged, [int((rounds > i).sum()) for i in range(DEPTH)]


def predicted(requests: list[np.ndarray]) -> Prediction:
    """As an offline score of these prompts would say it."""
    pairs = [judged_and_kept(one) for one in requests]
    judged_RK = np.array([judged for judged, _ in pairs], dtype=float)
    kept_RK = np.array([kept for _, kept in pairs], dtype=float)
    rounds_R = np.full(len(requests), float(LENGTH))
    zeros = dict.fromkeys(("best_RK", "wide_RK", "inside_RK", "top_inside_RK"), kept_RK)
    score = Score(
        draft="chain:3",
        rule="greedy",
        row_ids=tuple(map(str, range(len(requests)))),
        kinds=("all",) * len(requests),
        tokens_R=rounds_R + kept_RK.sum(1),
        rounds_R=rounds_R,
        drafted_R=rounds_R * DEPTH,
        judged_RK=judged_RK,
        kept_RK=kept_RK,
        hit_RK=kept_RK,
        cut_R=0 * rounds_R,
        undrafted_R=0 * rounds_R,
        **zeros,
    )
    result = {"rule": "greedy", "rounds": float(rounds_R.sum()), "spread": spread(score)}
    return Prediction.of(result, "vllm", label="made")


def window(requests: list[np.ndarray], *, tells_requests: bool = True) -> Window:
    rounds = np.concatenate(requests)
    at = tuple(float((rounds > i).sum()) for i in range(DEPTH))
    return Window(
        engine="vllm",
        route="r",
        when="w",
        rounds=float(len(rounds)),
        accepted=sum(at),
        accepted_at=at,
        requests=len(requests) if tells_requests else None,
    )


@pytest.mark.parametrize("tells_requests", [True, False])
def test_false_alarms_stay_at_the_level_where_a_binomial_test_cries_wolf(
    tells_requests: bool,
) -> None:
    rng = np.random.default_rng(1)
    alarms = naive = 0
    trials = 400
    for _ in range(trials):
        known, now = predicted(traffic(rng, 40)), traffic(rng, 60)
        seen = window(now, tells_requests=tells_requests)
        alarms += judge([(seen, known)])[0].is_drift
        first = binom(seen.rounds, known.depths[0].value)
        naive += min(first.cdf(seen.accepted_at[0]), first.sf(seen.accepted_at[0] - 1)) < 0.025
    assert alarms / trials < 0.07  # three standard errors above 0.05 would be 0.083
    assert naive / trials > 0.4


def test_a_change_of_rate_is_found_and_told_where() -> None:
    rng = np.random.default_rng(2)
    known = predicted(traffic(rng, 100))
    found = [judge([(window(traffic(rng, 150, -0.12)), known)])[0] for _ in range(100)]
    assert sum(one.is_drift for one in found) >= 90
    assert all(one.worst.found < one.worst.predicted for one in found if one.is_drift)


def test_of_drafts_of_unlike_lengths_only_the_first_position_is_tested() -> None:
    rng = np.random.default_rng(5)
    known, requests = predicted(traffic(rng, 60)), traffic(rng, 60)
    seen = window(requests)
    # Half of the rounds drafted one token of three: what they would have accepted is not there.
    lost = tuple(np.round(np.array(seen.accepted_at) * (1, 0.5, 0.5)))
    mixed = replace(seen, accepted_at=lost, accepted=sum(lost))
    assert judge([(mixed, known)])[0].is_drift
    verdict = judge([(replace(mixed, has_one_length=False), known)])[0]
    assert [one.what for one in verdict.compared] == ["position 1"]
    assert not verdict.is_drift


def test_over_many_windows_the_level_holds_for_all_together() -> None:
    rng = np.random.default_rng(3)
    any_alarm = 0
    for _ in range(150):
        known = predicted(traffic(rng, 60))
        pairs = [(window(traffic(rng, 30)), known) for _ in range(8)]
        any_alarm += any(one.is_drift for one in judge(pairs))
    assert any_alarm / 150 < 0.1


def test_what_lies_behind_the_end_is_not_drift() -> None:
    """A tenth of the rounds ends an answer; vLLM accepts all behind it, and that is all that is
    unlike: without the allowance it would be called drift."""
    prompts, rounds = 50, 10.0
    judged, kept = np.array([500.0, 250.0, 120.0]), np.array([300.0, 150.0, 60.0])
    result = {
        "rule": "rejection",
        "rounds": prompts * rounds,
        "spread": {
            "prompts": prompts,
            "calls": {"kept": kept.sum(), "squares": prompts * rounds**2, "off_squares": 1.0},
            "depths": [
                {"judged": j, "kept": k, "hit": k, "squares": j**2 / prompts, "off_squares": 0.1}
                for j, k in zip(judged, kept, strict=True)
            ],
        },
    }
    known = Prediction.of(result, "vllm", label="made")
    # 50 rounds ended with draft 1, 30 with draft 2: the next drafts were judged and accepted.
    at = (3000.0, 10 * (150 + 50.0), 10 * (60 + 50.0 + 30.0))
    seen = Window(
        engine="vllm",
        route="r",
        when="w",
        rounds=5000,
        accepted=sum(at),
        accepted_at=at,
        requests=500,
    )
    assert not judge([(seen, known)])[0].is_drift
    strict = Prediction.of(result, "sglang", label="made")  # which allows nothing above the rate
    assert judge([(seen, strict)])[0].is_drift


def test_an_average_without_counts_is_shown_and_not_tested() -> None:
    (gauge,) = read_windows([("metrics", SGLANG_METRICS)])
    known = predicted(traffic(np.random.default_rng(4), 20))
    (verdict,) = judge([(gauge, known)])
    assert verdict.compared == ()
    assert not verdict.is_drift


# The command


def drift(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = 0
    try:
        outrider(["drift", "--prediction", str(ENGINE / "prediction.json"), *words])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    said = capsys.readouterr()
    return code, said.out + " ".join(re.findall(r"[^\s│|]+", said.err))


def test_the_served_head_has_not_drifted_and_another_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [
        "--log",
        str(ENGINE / "vllm_metrics_5.txt"),
        "--log",
        str(ENGINE / "vllm_metrics_10.txt"),
    ]
    out = tmp_path / "drift.json"
    code, said = drift(capsys, *logs, "--head", "g2/best", "--out", str(out))
    assert code == 0
    assert "no drift at level 0.05" in said
    assert re.search(r"all 2 windows +419 +1\.921 +1\.943 +0\.527 0\.493 0\.514", said)
    assert [one["window"]["rounds"] for one in json.loads(out.read_text())["windows"]][-1] == 419
    code, said = drift(capsys, *logs, "--head", "medusa/best")
    assert code == 1
    assert f"drift: {ROUTE}, all 2 windows: length 1.921, predicted 1.335" in said


def test_a_route_may_be_held_against_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    logs = ["--log", str(ENGINE / "vllm_log.txt"), "--head", "g2/best"]
    _, said = drift(capsys, *logs, "--kind", "vllm_log.txt=code_edit")
    kinds = json.loads(text("prediction.json"))["evaluation"]["results"][0]["by_kind"]
    assert f"{kinds['code_edit']['survival'][0]['value']:.3f}" in said
    for words, message in (
        (["--kind", "vllm_log.txt=poems"], "no kind 'poems'"),
        (["--kind", "other=chat"], "names the routes ['other']"),
        (["--kind", "other"], "write ROUTE=KIND"),
        (["--level", "2"], "level is 2"),
        (["--draft", "chain:4"], "0 predictions fit draft 'chain:4'"),
    ):
        code, said = drift(capsys, *logs, *words)
        assert code == 2
        assert message in said


def test_a_server_is_asked_for_its_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write((ENGINE / "vllm_metrics_10.txt").read_bytes())

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        code, said = drift(capsys, "--log", address, "--head", "g2/best")
        server.shutdown()
    assert code == 0
    assert " 419 " in said


def test_predictions_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    old = {"rule": "greedy", "rounds": 3.0}
    with pytest.raises(ValueError, match="make it again"):
        Prediction.of(old, "vllm", label="old")
    with pytest.raises(ValueError, match="is of one prompt"):
        Prediction.of(old | {"spread": {"prompts": 1}}, "vllm", label="one")
