"""Logits through the cache, at ragged rows, equal each row alone without a cache."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from outrider.data.cache import GROWTH, RowCache, attention_masks, query_mask, query_positions
from outrider.data.target import Target

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention"] * 2
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3, mixed": Qwen3Config(
        **SIZES, use_sliding_window=True, sliding_window=5, layer_types=MIXED
    ),
    "mistral, all sliding": MistralConfig(**SIZES, sliding_window=6),
    "gemma2, mixed and eager": Gemma2Config(
        **SIZES, sliding_window=5, layer_types=MIXED, query_pre_attn_scalar=8
    ),
    "gemma3, mixed": Gemma3TextConfig(
        **SIZES, sliding_window=5, layer_types=MIXED, query_pre_attn_scalar=8
    ),
}
LENGTHS = [11, 3, 7]


def assert_same(target, got, want):
    """Equal to 1e-9; under eager attention transformers takes the softmax in float32."""
    atol = 1e-5 if target.config._attn_implementation == "eager" else 1e-9
    torch.testing.assert_close(got, want, atol=atol, rtol=0)


@pytest.fixture(scope="module", params=CONFIGS)
def target(request):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    attention = "eager" if "eager" in request.param else "sdpa"
    model = AutoModelForCausalLM.from_config(
        CONFIGS[request.param], attn_implementation=attention, dtype=torch.float64
    )
    return Target.from_model(model)


def tokens(*shape, seed=0):
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def alone(target, row_ids):
    """Logits [T, V] of one row, without a cache and with the model's own mask."""
    with torch.no_grad():
        return target.model(input_ids=torch.tensor([row_ids]), use_cache=False).logits[0]


def forward(target, cache, ids_Bn, ancestors=None):
    lengths_B, num_new = cache.lengths_B, ids_Bn.shape[1]
    mask = attention_masks(target.config, lengths_B, num_new, target.dtype, ancestors)
    positions_Bn = query_positions(lengths_B, num_new, ancestors)
    captured = target.run(ids_Bn, position_ids=positions_Bn, attention_mask=mask, cache=cache)
    return target.logits(captured.last_BTH)


def prefilled(target, rows):
    """A cache of ragged rows, padded on the right, and each row's logits."""
    cache = RowCache(len(rows))
    ids_BT = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, ids in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
    logits_BTV = forward(target, cache, ids_BT)
    cache.advance([len(ids) for ids in rows])
    return cache, [logits_BTV[row, : len(ids)] for row, ids in enumerate(rows)]


@pytest.fixture
def rows():
    return [tokens(length, seed=length).tolist() for length in LENGTHS]


def assert_next_logits(target, cache, rows, seed):
    """Feed three more tokens to every row, two at once and one more; all must match."""
    fresh = tokens(len(rows), 3, seed=seed)
    got = forward(target, cache, fresh[:, :2])
    cache.advance(2)
    got = torch.cat([got, forward(target, cache, fresh[:, 2:])], dim=1)
    cache.truncate(cache.lengths_B - 2)
    for row, ids in enumerate(rows):
        want = alone(target, [*ids, *fresh[row].tolist()])[-3:]
        assert_same(target, got[row], want)


def test_ragged_prefill_and_steps_equal_each_row_alone(target, rows):
    cache, logits = prefilled(target, rows)
    assert cache.lengths_B.tolist() == LENGTHS
    for row, ids in enumerate(rows):
        assert_same(target, logits[row], alone(target, ids))
    assert_next_logits(target, cache, rows, seed=1)
    assert cache.lengths_B.tolist() == LENGTHS


def test_rows_go_on_from_where_they_were_cut(target, rows):
    cache, _ = prefilled(target, rows)
    cache.truncate([5, 0, 6])
    assert_next_logits(target, cache, [rows[0][:5], [], rows[2][:6]], seed=2)


#        0
#      / | \         nodes 1 and 2 and 5 are siblings; 3 and 4 continue 1; 6 continues 5
PARENTS = [None, 0, 0, 1, 1, 0, 5]


def ancestors():
    seen = torch.eye(len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent is not None:
            seen[node] |= seen[parent]
    return seen


def path_to(node):
    return [] if node is None else [*path_to(PARENTS[node]), node]


def test_tree_nodes_see_their_own_path_only(target, rows):
    cache, _ = prefilled(target, rows)
    nodes = tokens(3, len(PARENTS), seed=3)
    logits = forward(target, cache, nodes, ancestors())
    for row, ids in enumerate(rows):
        for node in range(len(PARENTS)):
            path = [*ids, *nodes[row, path_to(node)].tolist()]
            want = alone(target, path)[-1]
            assert_same(target, logits[row, node], want)


def test_each_row_may_have_its_own_tree(target, rows):
    nodes = tokens(3, len(PARENTS), seed=3)
    chain = torch.ones(len(PARENTS), len(PARENTS), dtype=torch.bool).tril()
    cache, _ = prefilled(target, rows)
    mixed = forward(target, cache, nodes, torch.stack([ancestors(), chain, ancestors()]))
    same = forward(target, cache, nodes, ancestors())
    straight = forward(target, cache, nodes)
    assert_same(target, mixed[[0, 2]], same[[0, 2]])
    assert_same(target, mixed[1], straight[1])


@pytest.mark.parametrize("kept", [[0, 5, 6], [0, 1, 4], [0], []])
def test_an_accepted_path_stays_and_the_rest_goes(target, rows, kept):
    cache, _ = prefilled(target, rows)
    nodes = tokens(3, len(PARENTS), seed=4)
    forward(target, cache, nodes, ancestors())
    cache.advance(len(PARENTS))
    keeps = [kept, [0, 1, 3], [0, 2]]
    for row, keep in enumerate(keeps):
        cache.compact(row, LENGTHS[row], keep)
    longer = [ids + nodes[row, keeps[row]].tolist() for row, ids in enumerate(rows)]
    assert_next_logits(target, cache, longer, seed=5)


def test_compaction_with_overlap_moves_every_slot(target, rows):
    cache, _ = prefilled(target, rows)
    before = [keys[0].clone() for keys in cache.keys]
    cache.compact(0, 2, [1, 2, 3, 4, 5, 6, 7, 8])
    for keys, old in zip(cache.keys, before, strict=True):
        assert torch.equal(keys[0, :, 2:10], old[:, 3:11])


def test_a_finished_row_is_replaced_and_the_others_are_untouched(target, rows):
    cache, _ = prefilled(target, rows)
    fresh = [tokens(GROWTH + 3, seed=8).tolist(), tokens(9, seed=9).tolist()]
    other, _ = prefilled(target, fresh)
    cache.reset_row(2)
    cache.replace_row(2, other, 0)
    assert cache.lengths_B.tolist() == [11, 3, GROWTH + 3]
    assert_next_logits(target, cache, [rows[0], rows[1], fresh[0]], seed=6)
    cache.replace_row(0, other, 1)
    cache.keep_rows([2, 0])
    assert_next_logits(target, cache, [fresh[0], fresh[1]], seed=7)


def test_a_single_wrong_position_is_noticed(target, rows, monkeypatch):
    def shifted(lengths_B, num_new, ancestors=None):
        positions_Bn = query_positions(lengths_B, num_new, ancestors).clone()
        positions_Bn[1, -1] += 1
        return positions_Bn

    cache, _ = prefilled(target, rows)
    monkeypatch.setitem(globals(), "forward", lambda *a: faulty(*a, shifted))
    with pytest.raises(AssertionError):
        assert_next_logits(target, cache, rows, seed=1)


def faulty(target, cache, ids_Bn, positions):
    mask = attention_masks(target.config, cache.lengths_B, ids_Bn.shape[1], target.dtype)
    captured = target.run(
        ids_Bn,
        position_ids=positions(cache.lengths_B, ids_Bn.shape[1]),
        attention_mask=mask,
        cache=cache,
    )
    return target.logits(captured.last_BTH)


def test_mask_by_hand():
    lengths_B = torch.tensor([2, 0])
    mask = query_mask(lengths_B, 2)[:, 0].int().tolist()
    assert mask == [[[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]]
    windowed = query_mask(lengths_B, 2, window=2)[:, 0].int().tolist()
    assert windowed == [[[0, 1, 1, 0], [0, 0, 1, 1]], [[1, 0, 0, 0], [1, 1, 0, 0]]]


def test_messages():
    cache = RowCache(2)
    cache.advance([4, 6])
    with pytest.raises(ValueError, match=r"truncate lengths are \[5, 6\] for rows of \[4, 6\]"):
        cache.truncate([5, 6])
    with pytest.raises(ValueError, match=r"compact keeps slots \[6\] from 5 of row 1, which has 6"):
        cache.compact(1, 5, [1])
    config = LlamaConfig(**SIZES)
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2'; load the target with 'sdpa'"):
        attention_masks(config, torch.tensor([1]), 1, torch.float32)
    config = Qwen3Config(**SIZES, layer_types=["linear_attention", *MIXED[1:]])
    config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="linear_attention"):
        attention_masks(config, torch.tensor([1]), 1, torch.float32)
