"""Draft vocabularies: choice, maps, coverage, refusals; case C09's maps and C13's padded sizes."""

from typing import Any

import pytest
import torch

from outrider.heads import EagleConfig, EagleHead, Tables
from outrider.heads.vocab import choose, coverage, offsets, selected, to_draft

TARGET = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


def test_choose_takes_frequent_ids_and_always_keeps_the_named():
    counts = torch.tensor([0, 5, 5, 9, 0, 1])
    assert choose(counts, 3).tolist() == [1, 2, 3]
    assert choose(counts, 3, always=[4, 0]).tolist() == [0, 3, 4]
    assert choose(counts, 2).tolist() == [1, 3]


def test_choose_never_takes_padding_ids():
    counts = torch.zeros(128)
    counts[100:] = 7
    ids = choose(counts, 64, always=[96], tokenizer_size=97)
    assert int(ids.max()) == 96
    assert ids.tolist() == sorted(set(ids.tolist()))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": 7}, "size is 7; it must hold the 0 ids that are always in and be at most 6"),
        ({"size": 1, "always": [1, 2]}, "size is 1; it must hold the 2 ids"),
        ({"size": 3, "always": [6]}, r"ids \[6\] are always in but do not exist"),
        ({"size": 3, "tokenizer_size": 9}, "give one count for each of the target's ids"),
    ],
)
def test_choose_refuses(kwargs: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        choose(torch.ones(6), **kwargs)


def test_c09_maps_are_inverse():
    """40 distinct tokens, draft vocabulary 64, target 128."""
    counts = torch.zeros(128)
    counts[torch.randperm(128, generator=torch.Generator().manual_seed(0))[:40]] = 3
    ids = choose(counts, 64)
    assert coverage(counts, ids) == 1.0
    assert torch.equal(offsets(ids) + torch.arange(64), ids)
    assert int(selected(ids, 128).sum()) == 64
    back = to_draft(ids, 128)
    assert torch.equal(back[ids], torch.arange(64))
    assert int((back == -1).sum()) == 64


def test_coverage_is_the_share_of_counted_tokens():
    assert coverage(torch.tensor([6, 3, 1]), torch.tensor([0, 2])) == pytest.approx(0.7)
    with pytest.raises(ValueError, match="all token counts are zero"):
        coverage(torch.zeros(3), torch.tensor([0]))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.arange(63), r"give int64 of shape \(64,\)"),
        (torch.arange(64).int(), "torch.int32"),
        (torch.arange(64).flip(0), "do not rise strictly"),
        (torch.arange(64) + 40, "run from 40 to 103; they must be in 0..96"),
        (None, "no draft ids are given"),
    ],
)
def test_a_head_refuses_a_bad_map(ids: torch.Tensor | None, message: str):
    config = EagleConfig.from_target(TARGET, draft_vocab_size=64, tokenizer_size=97)
    with pytest.raises(ValueError, match=message):
        EagleHead(config, ids)


def test_a_full_head_refuses_a_map():
    with pytest.raises(ValueError, match="leave them out"):
        EagleHead(EagleConfig.from_target(TARGET), torch.arange(128))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_c13_padding_ids_are_never_proposed(kind: str):
    config = EagleConfig.from_target(TARGET, kind=kind, tokenizer_size=97)
    table = torch.randn(128, 16)
    table[97:] *= 100  # padding rows that would win every argmax
    head = EagleHead(config).attach(
        Tables(embedding_VH=table, output_VH=table, tokenizer_size=97, num_layers=8)
    )
    head.start_from_target()
    hidden = torch.randn(200, 16)
    assert not config.is_reduced
    logits = head.draft_logits(hidden)
    assert logits.shape == (200, 128)
    assert int(logits.argmax(-1).max()) < 97
    for temperature in (0.0, 1.0, 5.0):
        probs = head.draft_probs(hidden, temperature)
        assert not probs[:, 97:].any()
        assert torch.allclose(probs.sum(-1), torch.ones(200))


def test_scatter_places_probabilities_at_target_ids():
    ids = torch.tensor([3, 50, 90])
    head = EagleHead(EagleConfig.from_target(TARGET, draft_vocab_size=3), ids)
    probs = torch.tensor([[0.2, 0.3, 0.5]])
    wide = head.scatter(probs)
    assert wide.shape == (1, 128)
    assert torch.equal(wide[:, ids], probs)
    assert float(wide.sum()) == 1.0
    assert head.to_target(torch.tensor([2, 0])).tolist() == [90, 3]


def test_choosing_leaves_the_scores_as_they_are():
    scores = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    choose(scores, 2, always=[0])
    assert scores.tolist() == [0.1, 0.4, 0.2, 0.3]
