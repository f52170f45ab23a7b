"""On the real target: offline scores are the loop's, and come at least five times sooner."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from outrider.data.capture import default_layers
from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.decode import Decoded, Decoding, decode
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.link import tables
from outrider.eval.offline.chain import score_chain
from outrider.eval.offline.scores import Score
from outrider.eval.offline.texts import Text, read_texts
from outrider.eval.offline.traces import Trace, build_trace
from outrider.eval.offline.tree import score_tree
from outrider.eval.stats import ratio
from outrider.eval.trees.plans import ChainPlan, TreePlan, plan_named
from outrider.heads import EagleConfig, EagleHead

pytestmark = pytest.mark.slow

NUM_STEPS, ROWS_A_STEP, LENGTH = 30, 4, 40
MakeTrace = Callable[[float], tuple[Trace, list[Text]]]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("smollm2-demo")


@pytest.fixture(scope="module")
def head(target: Target) -> EagleHead:
    """A few steps on the demo's training rows: enough to accept a share of the drafts."""
    torch.manual_seed(0)
    layers = default_layers(target.num_layers)
    texts = read_texts("demo", Sampling(), per_kind=4) + read_texts(
        "demo", Sampling(temperature=1.0), per_kind=4
    )
    config = EagleConfig.from_target(
        target.config,
        aux_layers=layers,
        draft_vocab_size=4096,
        tokenizer_size=target.tokenizer_size,
    )
    ids = torch.tensor([token for text in texts for token in text.answer_ids])
    counts = torch.bincount(ids, minlength=config.vocab_size)
    draft_ids = counts.argsort(descending=True, stable=True)[:4096].sort().values
    head = EagleHead(config, draft_ids).attach(tables(target))
    with torch.no_grad():
        head.lm_head.weight.copy_(target.output_VH[draft_ids])
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    for step in range(NUM_STEPS):
        chosen = [texts[(step * ROWS_A_STEP + i) % len(texts)] for i in range(ROWS_A_STEP)]
        rows = [torch.tensor(text.prompt_ids + text.answer_ids) for text in chosen]
        ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        captured = target.run(ids_BT, layers=layers)
        feature = head.project(captured.aux_BTF[:, :-2], None)
        hidden = head.step(feature, ids_BT[:, 1:-1], torch.arange(feature.shape[1])[None])
        inside = ids_BT[:, 2:] > 0
        logits_NW = head.draft_logits(hidden[inside])
        law_NW = target.logits(captured.last_BTH[:, 1:-1][inside])[:, draft_ids].softmax(-1)
        loss = -(law_NW * F.log_softmax(logits_NW, -1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def traced(target: Target, tmp_path_factory: pytest.TempPathFactory) -> MakeTrace:
    def make(temperature: float) -> tuple[Trace, list[Text]]:
        sampling = Sampling(temperature=temperature)
        # The start of a text is a text of that length limit.
        texts = [
            text._replace(answer_ids=text.answer_ids[:LENGTH])
            for text in read_texts("demo:heldout", sampling, per_kind=2)
        ]
        folder = tmp_path_factory.mktemp("trace") / "t"
        layers = default_layers(target.num_layers)
        return build_trace(target, texts, folder, sampling=sampling, layers=layers), texts

    return make


def loop(
    target: Target, head: EagleHead, texts: list[Text], draft: str, decoding: Decoding
) -> list[Decoded]:
    plan = plan_named(draft)
    temperature = decoding.sampling.temperature if isinstance(plan, ChainPlan) else 0.0
    return [
        decode(target, text.prompt_ids, HeadDrafter(head, plan, temperature=temperature), decoding)
        for text in texts
    ]


def offline(head: EagleHead, trace: Trace, target: Target, draft: str) -> Score:
    plan = plan_named(draft)
    if isinstance(plan, TreePlan):
        return score_tree(head, trace, target, plan)
    return score_chain(head, trace, target, lengths=[plan.length])[plan.length]


@pytest.mark.parametrize("draft", ["chain:3", "tree:4,4,16"])
def test_greedy_rounds_are_the_loops_and_come_five_times_sooner(
    draft: str, target: Target, head: EagleHead, traced: MakeTrace
) -> None:
    trace, texts = traced(0.0)
    begun = time.process_time()
    score = offline(head, trace, target, draft)
    offline_seconds = time.process_time() - begun
    begun = time.process_time()
    decoded = loop(target, head, texts, draft, Decoding(max_new_tokens=LENGTH))
    loop_seconds = time.process_time() - begun
    assert [one.ids for one in decoded] == [text.answer_ids for text in texts]
    assert [len(one.rounds) for one in decoded] == score.rounds_R.tolist()
    assert score.tau > 1.1
    assert loop_seconds > 5 * offline_seconds


@pytest.mark.parametrize("draft", ["chain:3", "tree:4,4,16"])
def test_sampled_tau_lies_in_the_loops_interval(
    draft: str, target: Target, head: EagleHead, traced: MakeTrace
) -> None:
    trace, texts = traced(1.0)
    score = offline(head, trace, target, draft)
    decoding = Decoding(max_new_tokens=LENGTH, sampling=trace.sampling, seed=5)
    decoded = loop(target, head, texts, draft, decoding)
    tokens = [float(len(one.ids) - 1) for one in decoded]
    interval = ratio(tokens, [float(len(one.rounds)) for one in decoded])
    assert score.tau in interval
