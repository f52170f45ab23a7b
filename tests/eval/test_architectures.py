"""Trees and seeds on tiny models of eight architectures, in double precision.

A wrong mask, window, position or soft cap moves logits by far more than 1e-9, and a text written
with another law leaves plain sampling's within a few tokens.
"""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval import decode as decode_module
from outrider.eval import rules
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters import Draft
from outrider.eval.drafters.replay import Plain, Replay
from outrider.eval.trees.tree import Tree

VOCAB = 53
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention"] * 2
GEMMA = {"layer_types": MIXED, "sliding_window": 5, "query_pre_attn_scalar": 8}
NEOX = {key: value for key, value in SIZES.items() if "key_value" not in key and key != "head_dim"}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral, window": MistralConfig(**SIZES, sliding_window=6),
    "gemma2, window and soft caps": Gemma2Config(
        **SIZES, **GEMMA, final_logit_softcapping=5.0, attn_logit_softcapping=2.0
    ),
    "gemma3, window": Gemma3TextConfig(**SIZES, **GEMMA),
    "gpt-neox": GPTNeoXConfig(**NEOX),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=128, initializer_range=0.3
    ),
}
PROMPT = [5, 9, 14, 22, 8, 31, 40, 17, 3]


@pytest.fixture(scope="module", params=CONFIGS)
def target(request):
    torch.manual_seed(0)
    # Soft caps on attention exist in the eager form only.
    attention = "eager" if "soft caps" in request.param else "sdpa"
    model = AutoModelForCausalLM.from_config(
        CONFIGS[request.param], attn_implementation=attention, dtype=torch.float64
    )
    return Target.from_model(model)


@pytest.fixture(autouse=True)
def double_softmax(monkeypatch):
    """Eager attention takes its softmax in float32, which would hide what is looked for here."""
    softmax = torch.nn.functional.softmax

    def in_double(input, dim=None, dtype=None, **more):  # noqa: A002 (torch's name)
        return softmax(input, dim=dim, dtype=None if dtype == torch.float32 else dtype, **more)

    monkeypatch.setattr(torch.nn.functional, "softmax", in_double)


class Forks(Replay):
    """A tree along a text: the right token behind a wrong sibling, at times wrong altogether."""

    def propose(self, max_depth, noise):
        path = super().propose(max_depth, noise).tree.tokens
        tokens, parents, parent = [path[0]], [-1], 0
        for depth, token in enumerate(path[1:]):
            right = token if (self._place + depth) % 5 else token + 2
            tokens += [(token + 1) % VOCAB, right % VOCAB]
            parents += [parent, parent]
            parent = len(tokens) - 1
        return Draft(Tree(tuple(tokens), tuple(parents)))


def node_errors(target):
    """Largest difference of each tree node's logits from those of its linear prefix."""
    run = decode_module._Run(target, PROMPT, Plain(), Decoding(ignore_eos=True), 0, rules.greedy)
    run.prefill()
    root = run.new_ids[0]
    tree = Tree((root, 8, 9, 10, 11, 12, 13, 14, 15), (-1, 0, 0, 1, 1, 2, 5, 4, 7))
    _, logits_NV = run._verify(tree)
    for node in range(len(tree)):
        linear = [*PROMPT, root, *(tree.tokens[step] for step in tree.path(node))]
        # The model's own forward: no cache, mask or position of ours, and its own output head.
        with torch.no_grad():
            wanted_V = target.model(torch.tensor([linear]), use_cache=False).logits[0, -1]
        yield float((logits_NV[node] - wanted_V).abs().max())


def test_node_logits_are_those_of_the_linear_prefix(target):
    assert max(node_errors(target)) < 1e-9


def test_positions_by_slot_would_be_seen(target, monkeypatch):
    positions = decode_module.query_positions
    monkeypatch.setattr(
        decode_module,
        "query_positions",
        lambda lengths, num, ancestors=None: positions(lengths, num),
    )
    assert max(node_errors(target)) > 1e-6


@pytest.mark.parametrize("drafter", [Replay, Forks])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_match_writes_the_text_of_plain_sampling(target, temperature, drafter):
    sampling = Sampling(temperature=temperature)
    decoding = Decoding(max_new_tokens=24, sampling=sampling, rule="match", seed=3, ignore_eos=True)
    plain = decode(target, PROMPT, None, decoding)
    # Every third token is wrong, so that rounds are rolled back.
    text = [*PROMPT, *plain.ids, *[0] * 9]
    text[len(PROMPT) + 2 :: 3] = [(token + 1) % VOCAB for token in text[len(PROMPT) + 2 :: 3]]
    found = decode(target, PROMPT, drafter(text, 4), decoding)
    assert found.ids == plain.ids
    assert any(one.accepted for one in found.rounds)
    assert any(one.accepted < 4 for one in found.rounds)
