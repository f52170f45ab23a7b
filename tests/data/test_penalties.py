"""Every processor against transformers' own, and its messages."""

import itertools
import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.data.penalties import Prefix, ban
from outrider.data.sampling import Sampling, process

VOCAB = 50
PREFIXES = [
    Prefix([4, 9, 9, 17, 4, 30], 2),
    Prefix([9, 17], 1),
    Prefix([30], 1),
    Prefix([5, 5, 5, 9, 17, 30, 30, 30, 30], 3),
]


def theirs(sampling, logits_V, prefix):
    """The law by transformers' processors in the order in which its `generate` puts them."""
    chain = LogitsProcessorList()
    bias = dict(sampling.logit_bias)
    if bias:
        chain.append(SequenceBiasLogitsProcessor([[[token], x] for token, x in bias.items()]))
    if sampling.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    answer = prefix.ids[prefix.num_prompt :]
    lost = {
        token: -sampling.presence_penalty - sampling.frequency_penalty * answer.count(token)
        for token in set(answer)
    }
    if any(lost.values()):
        chain.append(SequenceBiasLogitsProcessor([[[token], x] for token, x in lost.items()]))
    if sampling.bad_words:
        chain.append(NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_word_ids]))
    chain.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain(torch.tensor([prefix.ids]), logits_V[None].clone()).softmax(-1)[0]


FIELDS = {
    "temperature": (0.6, 1.0, 1.7),
    "repetition_penalty": (1.0, 1.3, 0.8),
    "presence_penalty": (0.0, 0.9),
    "frequency_penalty": (0.0, 0.5, -0.3),
    "logit_bias": ((), ((9, 2.5), (17, -1.0), (0, 4.0))),
    "bad_words": ((), ("30", "9,17", "17,30,12", "4,9,9,17,4,30,2")),
    "top_k": (0, 12),
    "top_p": (1.0, 0.8),
    "min_p": (0.0, 0.05),
}


def samplings():
    """Every pair of settings of two fields occurs, others at random."""
    generator = torch.Generator().manual_seed(0)
    for one, other in itertools.combinations(FIELDS, 2):
        for a, b in itertools.product(FIELDS[one], FIELDS[other]):
            chosen = {
                name: values[int(torch.randint(len(values), (), generator=generator))]
                for name, values in FIELDS.items()
            }
            yield Sampling(**{**chosen, one: a, other: b})


def test_every_law_is_that_of_transformers_processors():
    generator = torch.Generator().manual_seed(1)
    moved = 0
    for sampling in samplings():
        logits_NV = 3 * torch.randn(len(PREFIXES), VOCAB, generator=generator)
        ours_NV = process(logits_NV, sampling, PREFIXES)
        for row, prefix in enumerate(PREFIXES):
            wanted_V = theirs(sampling, logits_NV[row], prefix)
            torch.testing.assert_close(ours_NV[row], wanted_V, atol=1e-6, rtol=0)
        plain_NV = process(logits_NV, Sampling(temperature=sampling.temperature))
        moved += bool((ours_NV - plain_NV).abs().max() > 1e-3)
    assert moved > 150


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_counting_the_prompt_would_be_seen(name):
    logits_NV = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    sampling = Sampling(temperature=1.0, **{name: 0.5})
    right_NV = process(logits_NV, sampling, PREFIXES)
    wrong_NV = process(logits_NV, sampling, [Prefix(prefix.ids, 0) for prefix in PREFIXES])
    # The first prompt is in its answer again, which presence cannot tell.
    assert ((right_NV - wrong_NV).abs().amax(-1)[1:] > 1e-3).all()


def test_joint_filters_are_judged_on_the_whole_law():
    logits_NV = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    settings = {"temperature": 1.0, "top_k": 2, "top_p": 0.55}
    # 0.4 / 0.7 is 0.571 already; of the whole law 0.4 is too little, so two tokens stay.
    assert process(logits_NV, Sampling(**settings)).tolist() == [[1, 0, 0, 0]]
    joint_NV = process(logits_NV, Sampling(**settings, filters="joint"))
    assert joint_NV[0].tolist() == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_joint_filters_keep_what_passes_each_alone():
    generator = torch.Generator().manual_seed(3)
    parts = [{"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.1}]
    differs = 0
    for _ in range(40):
        logits_NV = 2 * torch.randn(1, VOCAB, generator=generator)
        every = {key: value for part in parts for key, value in part.items()}
        joint_NV = process(logits_NV, Sampling(temperature=1.0, **every, filters="joint"))
        passes_NV = torch.stack(
            [process(logits_NV, Sampling(temperature=1.0, **part)) > 0 for part in parts]
        ).all(0)
        assert torch.equal(joint_NV > 0, passes_NV)
        chain_NV = process(logits_NV, Sampling(temperature=1.0, **every))
        differs += not torch.equal(chain_NV > 0, passes_NV)
    assert differs


def test_greedy_is_the_argmax_of_the_moved_logits():
    logits_NV = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    prefix = [Prefix([2, 1], 1)]
    assert process(logits_NV, Sampling(bad_words=("2,1,2", "1")), prefix).argmax() == 0
    assert process(logits_NV, Sampling(presence_penalty=1.5), prefix).argmax() == 2
    assert process(logits_NV, Sampling(logit_bias=((3, 3.5),))).argmax() == 3


def test_messages():
    logits_NV = torch.zeros(1, 4)
    with pytest.raises(ValueError, match=r"logit_bias names tokens \[4\].*ids 0 to 3"):
        process(logits_NV, Sampling(logit_bias=((4, 1.0),)))
    with pytest.raises(ValueError, match=r"bad_words names tokens \[7\].*ids 0 to 3"):
        process(logits_NV, Sampling(bad_words=("1,7",)), [Prefix([1], 1)])
    with pytest.raises(ValueError, match="forbids every token at one place; leave some"):
        ban(logits_NV, [[0], [1], [2], [0, 3]], [Prefix([0], 1)])
    assert ban(logits_NV, [[0], [1], [2], [0, 3]], [Prefix([1], 1)])[0, 3] > -math.inf
