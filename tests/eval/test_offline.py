"""Offline scores against a slow reference that redrafts every round from an empty cache."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from outrider.data.sampling import Sampling, process
from outrider.data.target import Target
from outrider.eval.offline.chain import score_chain
from outrider.eval.offline.scores import Score, difference
from outrider.eval.offline.summary import summary
from outrider.eval.offline.texts import Text
from outrider.eval.offline.traces import Trace, build_trace
from outrider.heads import EagleHead, HeadCache

LAYERS = (1, 3, 5)
WARM = Sampling(temperature=0.6)


@pytest.fixture(scope="module")
def greedy_trace(
    tiny_target: Target, greedy_texts: list[Text], tmp_path_factory: pytest.TempPathFactory
) -> Trace:
    folder = tmp_path_factory.mktemp("greedy")
    return build_trace(tiny_target, greedy_texts, folder, sampling=Sampling(), layers=LAYERS)


@pytest.fixture(scope="module")
def warm_trace(
    tiny_target: Target,
    make_texts: Callable[..., list[Text]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Trace:
    texts = make_texts(WARM, 12)
    folder = tmp_path_factory.mktemp("warm")
    return build_trace(tiny_target, texts, folder, sampling=WARM, layers=LAYERS)


def drafted(head: EagleHead, trace: Trace, index: int, place: int, steps: int) -> list[np.ndarray]:
    """Draft logits over target ids, step by step, for a round that starts at `place`."""
    row = trace.row(index, LAYERS)
    root = row.prompt_length + place - 2
    cache = HeadCache()
    feature = head.project(row.aux_TF[None, : root + 1], None)
    hidden = head.step(feature, row.ids_T[None, 1 : root + 2], torch.arange(root + 1)[None], cache)[
        :, -1:
    ]
    found = []
    for step in range(steps):
        logits = torch.full((61,), -torch.inf)
        logits[head.draft_ids_W] = head.draft_logits(hidden)[0, 0]
        found.append(logits.double().numpy())
        if root + 2 + step < len(row.ids_T):
            token = row.ids_T[root + 2 + step].reshape(1, 1)
            hidden = head.step(hidden, token, torch.tensor([[root + 1 + step]]), cache)
    return found


def law(target: Target, trace: Trace, index: int, place: int) -> np.ndarray:
    row = trace.row(index)
    ids = row.ids_T[: row.prompt_length + place]
    logits = target.logits(target.run(ids[None]).last_BTH[0, -1:])
    seen = torch.zeros(1, 61, dtype=torch.bool)
    seen[0, ids] = True
    return process(logits, trace.sampling, seen)[0].double().numpy()


def reference(
    head: EagleHead, target: Target, trace: Trace, index: int, length: int, rule: str
) -> dict[str, np.ndarray]:
    """Rounds and per-depth sums of one row, by recursion over rounds in plain Python."""
    row = trace.row(index)
    num = row.num_tokens
    text = row.ids_T[row.prompt_length :].tolist()
    sums = {name: np.zeros(length) for name in ("judged", "kept", "hit", "best", "inside")}
    rounds = 0.0
    start = {1: 1.0} if num > 1 else {}
    while start:
        place = min(start)
        chance = start.pop(place)
        rounds += chance
        for depth, logits in enumerate(drafted(head, trace, index, place, length)):
            at = place + depth
            if at >= num:
                break
            p, token = law(target, trace, index, at), text[at]
            if rule == "rejection":
                q = np.exp((logits - logits.max()) / trace.sampling.temperature)
                q /= q.sum()
                accept, kept = min(1.0, q[token] / p[token]), np.minimum(p, q).sum()
            else:
                guess = int(logits.argmax())
                accept, kept = float(guess == token), p[guess]
            inside = p[np.isfinite(logits)].sum()
            for name, value in zip(sums, (1, kept, accept, kept, inside), strict=True):
                sums[name][depth] += chance * value
            if at + 1 < num:
                start[at + 1] = start.get(at + 1, 0.0) + chance * (1 - accept)
            chance *= accept
        else:
            # All accepted: the bonus token is the text's next.
            if place + length + 1 < num:
                after = place + length + 1
                start[after] = start.get(after, 0.0) + chance
    return {"rounds": np.array(rounds), **sums}


@pytest.mark.parametrize(
    ("rule", "fixture"),
    [("greedy", "greedy_trace"), ("rejection", "warm_trace"), ("match", "warm_trace")],
)
def test_scores_equal_redrafting_every_round(
    rule: str,
    fixture: str,
    tiny_head: EagleHead,
    tiny_target: Target,
    request: pytest.FixtureRequest,
) -> None:
    trace = request.getfixturevalue(fixture)
    scores = score_chain(tiny_head, trace, tiny_target, lengths=(1, 3), rule=rule)
    for length, index in ((1, 0), (3, 1), (3, 4)):
        score = scores[length]
        truth = reference(tiny_head, tiny_target, trace, index, length, rule)
        assert score.rounds_R[index] == pytest.approx(float(truth["rounds"]), abs=2e-3)
        for name, column in (
            ("judged", score.judged_RK),
            ("kept", score.kept_RK),
            ("hit", score.hit_RK),
            ("best", score.best_RK),
            ("inside", score.inside_RK),
        ):
            assert column[index] == pytest.approx(truth[name], abs=2e-3), name


def test_rows_keep_the_traces_order(
    tiny_head: EagleHead, tiny_target: Target, greedy_trace: Trace
) -> None:
    whole = score_chain(tiny_head, greedy_trace, tiny_target, lengths=(2,))[2]
    assert whole.row_ids == greedy_trace.row_ids
    some = score_chain(tiny_head, greedy_trace, tiny_target, lengths=(2,), rows=[5, 2])[2]
    assert some.row_ids == ("row-5", "row-2")
    assert some.rounds_R.tolist() == whole.rounds_R[[5, 2]].tolist()


def test_lengths_do_not_change_each_other(
    tiny_head: EagleHead, tiny_target: Target, warm_trace: Trace
) -> None:
    together = score_chain(tiny_head, warm_trace, tiny_target, lengths=(1, 4))
    alone = score_chain(tiny_head, warm_trace, tiny_target, lengths=(1,))
    np.testing.assert_allclose(together[1].rounds_R, alone[1].rounds_R, rtol=1e-6)
    assert together[4].tau > together[1].tau


def test_figures_of_a_summary_hang_together(
    tiny_head: EagleHead, tiny_target: Target, warm_trace: Trace
) -> None:
    score = score_chain(tiny_head, warm_trace, tiny_target, lengths=(3,))[3]
    figures = summary(score)
    assert figures["tau"]["low"] < figures["tau"]["value"] < figures["tau"]["high"]
    survival = [entry["value"] for entry in figures["survival"]]
    assert survival == sorted(survival, reverse=True)
    assert np.cumprod(figures["conditional"]) == pytest.approx(survival)
    assert 0 < figures["alpha"]["value"] <= figures["alpha_star"]["value"] + 1e-6
    assert figures["ceiling"] < 1
    # Without cut rounds tau would be 1 + the survivals; cuts can only lower it.
    assert figures["tau"]["value"] <= 1 + sum(survival) + 0.05
    assert set(figures["by_kind"]) == {"chat", "code"}
    assert sum(part["tokens"] for part in figures["by_kind"].values()) == figures["tokens"]
    for dimension in ("place", "context", "entropy"):
        parts = figures[f"by_{dimension}"]
        assert sum(part["tokens"] for part in parts) == figures["tokens"]
        assert sum(part["starts"] for part in parts) == pytest.approx(figures["rounds"])
        assert sum(part["judged"] for part in parts) == pytest.approx(figures["judged"])


def test_a_head_does_not_differ_from_itself(
    tiny_head: EagleHead, tiny_target: Target, warm_trace: Trace
) -> None:
    scores = score_chain(tiny_head, warm_trace, tiny_target, lengths=(1, 3))
    assert tuple(difference(scores[3], scores[3])) == (0.0, 0.0, 0.0)
    assert difference(scores[3], scores[1]).value > 0
    with pytest.raises(ValueError, match="different prompts"):
        difference(scores[3], scores[3].take([0, 1]))


def test_unfit_requests_are_refused(
    tiny_head: EagleHead, tiny_target: Target, warm_trace: Trace, greedy_trace: Trace
) -> None:
    def ask(trace: Trace, **settings: object) -> dict[int, Score]:
        return score_chain(tiny_head, trace, tiny_target, **settings)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"rule 'greedy' does not fit text of temperature 0\.6"):
        ask(warm_trace, rule="greedy")
    with pytest.raises(ValueError, match="rule 'rejection' does not fit"):
        ask(greedy_trace, rule="rejection")
    with pytest.raises(ValueError, match="no verification rule called 'typical'"):
        ask(greedy_trace, rule="typical")
    with pytest.raises(ValueError, match="lengths is"):
        ask(greedy_trace, lengths=(0,))
    other = type(tiny_target).from_model(type(tiny_target.model)(tiny_target.model.config))
    with pytest.raises(ValueError, match="trace this target with outrider trace"):
        score_chain(tiny_head, greedy_trace, other)
