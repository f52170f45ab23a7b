"""A tiny random target, text of its own, and a head that has learned a little of it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.data.sampling import Sampling, Stream, draw_rows, process, uniform
from outrider.data.target import Target
from outrider.eval.link import tables
from outrider.eval.traces import Text
from outrider.heads import EagleConfig, EagleHead

VOCAB, EOS, LAYERS = 61, 3, (1, 3, 5)


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=EOS,
        tie_word_embeddings=False,
        # Wide weights make the laws peaked, as a trained model's are.
        initializer_range=0.18,
    )
    return Target.from_model(LlamaForCausalLM(config))


def answer(
    target: Target, name: str, prompt: list[int], sampling: Sampling, length: int, seed: int = 0
) -> list[int]:
    """Plain decoding without a cache: the slowest and simplest reference."""
    ids = list(prompt)
    row = int(name.split("-")[-1])
    while len(ids) - len(prompt) < length:
        last_BTH = target.run(torch.tensor([ids])).last_BTH
        seen = torch.zeros(1, VOCAB, dtype=torch.bool)
        seen[0, ids] = True
        probs = process(target.logits(last_BTH[0, -1:]), sampling, seen)
        coin = uniform(seed, row, len(ids), Stream.TARGET)
        ids.append(int(draw_rows(probs, [coin])[0]))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


MakeTexts = Callable[..., list[Text]]


@pytest.fixture(scope="session")
def make_texts(tiny_target: Target) -> MakeTexts:
    def make(sampling: Sampling, count: int, length: int = 24) -> list[Text]:
        generator = torch.Generator().manual_seed(7)
        found = []
        for i in range(count):
            size = int(torch.randint(4, 9, (), generator=generator))
            prompt = torch.randint(4, VOCAB, (size,), generator=generator).tolist()
            name, kind = f"row-{i}", ("chat", "code")[i % 2]
            ids = answer(tiny_target, name, prompt, sampling, length)
            found.append(Text(name, kind, prompt, ids))
        return found

    return make


@pytest.fixture(scope="session")
def greedy_texts(make_texts: MakeTexts) -> list[Text]:
    return make_texts(Sampling(), 20)


@pytest.fixture(scope="session")
def sampled_texts(make_texts: MakeTexts) -> list[Text]:
    return make_texts(Sampling(temperature=1.0), 40)


@pytest.fixture(scope="session")
def tiny_head(tiny_target: Target, sampled_texts: list[Text]) -> EagleHead:
    torch.manual_seed(1)
    config = EagleConfig.from_target(
        tiny_target.config, aux_layers=LAYERS, draft_vocab_size=48, tokenizer_size=VOCAB
    )
    head = EagleHead(config, torch.arange(3, 51)).attach(tables(tiny_target))
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.0)
    rows = [torch.tensor(text.prompt_ids + text.answer_ids) for text in sampled_texts]
    ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    captured = tiny_target.run(ids_BT, layers=LAYERS)
    law_NV = tiny_target.logits(captured.last_BTH[:, 1:-1]).softmax(-1)[..., 3:51]
    for _ in range(120):
        feature = head.project(captured.aux_BTF[:, :-2], None)
        position = torch.arange(feature.shape[1])[None]
        hidden = head.step(feature, ids_BT[:, 1:-1], position)
        logp = F.log_softmax(head.draft_logits(hidden), -1)
        loss = -(law_NV * logp).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval().requires_grad_(requires_grad=False)
