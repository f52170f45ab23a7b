"""On the real target: every drafter that only the loop can follow writes plain decoding's text."""

from functools import cache

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.data.sampling import Sampling, row_key
from outrider.data.target import Target
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.by_plan import drafter_by
from outrider.eval.drafters.oracle import OracleDrafter
from outrider.eval.drafters.universal import as_text_model
from outrider.eval.link import tables
from outrider.eval.offline.texts import read_texts
from outrider.eval.trees.loop_plans import HybridPlan, UniversalPlan, WindowPlan, draft_named
from outrider.heads import EagleConfig, EagleHead

pytestmark = pytest.mark.slow

LENGTH = 32
DRAFTS = {
    "hybrid:lookup:8+tree:3,3,6": 1,
    "window:3,32,4": 10,
    "universal:4": 1,
    "suffix:8,8,2000": 1,
    "lookahead:4,3,4": 1,
    "oracle:4": 40,
    "synthetic:4,0.8,0.6": 10,
}
"""Each with the least number of drafts that it must have right."""


@pytest.fixture(scope="module")
def target():
    return Target.load("smollm2-demo")


@pytest.fixture(scope="module")
def other(target):
    """A small model with a tokenizer of its own, both trained on answers to other prompts."""
    texts = read_texts("demo:heldout", Sampling())
    said = [target.tokenizer.decode(text.answer_ids) for text in texts]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(said, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(made),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    ids = torch.tensor(made("\n".join(said))["input_ids"])
    starts = torch.randint(len(ids) - 65, (150, 8), generator=torch.Generator().manual_seed(0))
    for row in starts:
        ids_BT = torch.stack([ids[start : start + 64] for start in row.tolist()])
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Target.from_model(model, made, name="small")


@pytest.fixture(scope="module")
def networks(target, other):
    torch.manual_seed(0)
    config = EagleConfig.from_target(
        target.config, draft_vocab_size=8192, tokenizer_size=target.tokenizer_size
    )
    head = EagleHead(config, torch.arange(8192)).attach(tables(target)).eval()
    return {HybridPlan: head, WindowPlan: target, UniversalPlan: as_text_model(other, target)}


@pytest.fixture(scope="module")
def answered(target):
    """Three texts and their plain answers at a temperature, decoded once."""

    @cache
    def answers(temperature):
        sampling = Sampling(temperature=temperature)
        rule = "greedy" if sampling.is_greedy else "match"
        decoding = Decoding(max_new_tokens=LENGTH, sampling=sampling, rule=rule, seed=1)
        texts = read_texts("demo:heldout", sampling, per_kind=1)[:3]
        plain = [
            decode(target, text.prompt_ids, None, decoding, row=row_key(text.row_id)).ids
            for text in texts
        ]
        if sampling.is_greedy:
            assert plain == [text.answer_ids[:LENGTH] for text in texts]
        return decoding, list(zip(texts, plain, strict=True))

    return answers


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_text_is_plain_decodings(target, networks, answered, draft, temperature):
    plan, right = draft_named(draft), 0
    drafter = drafter_by(plan, networks.get(type(plan)))
    decoding, texts = answered(temperature)
    for text, plain_ids in texts:
        if isinstance(drafter, OracleDrafter):
            drafter.learn(text.prompt_ids, plain_ids)
        found = decode(target, text.prompt_ids, drafter, decoding, row=row_key(text.row_id))
        assert found.ids == plain_ids, text.row_id
        right += sum(one.accepted for one in found.rounds)
    if not temperature:
        assert right >= DRAFTS[draft]
