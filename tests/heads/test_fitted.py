"""A head fitted by least squares drafts, and copies, before it is trained."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from outrider.heads import EagleHead, Tables
from outrider.heads.base import States
from outrider.heads.eagle import EagleConfig
from outrider.heads.fitted import Started, start_fitted
from outrider.heads.layer_rows import Pack, Packs
from outrider.heads.lookup import LARGEST_TURN, code_channels, roles, still_channels
from outrider.heads.rope import cos_sin, rotary, rotate

VOCAB, WIDTH, PERIOD = 200, 128, 24
TARGET = {
    "hidden_size": WIDTH,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 512,
}


def tables() -> Tables:
    made = torch.Generator().manual_seed(7)
    table = torch.randn(VOCAB, WIDTH, generator=made) + 0.5
    norm = torch.rand(WIDTH, generator=made) + 0.5
    return Tables(
        embedding_VH=table,
        output_VH=table,
        tokenizer_size=VOCAB,
        num_layers=8,
        norm_H=norm,
    )


def fresh_head(vocab: int = VOCAB, width: int = WIDTH, **settings: object) -> EagleHead:
    torch.manual_seed(0)
    own = {name: settings.pop(name) for name in list(settings) if name not in TARGET}
    config = EagleConfig.from_target(
        {**TARGET, **settings}, hidden_size=width, draft_vocab_size=vocab, **own
    )
    ids = torch.arange(vocab) if vocab < VOCAB else None
    return EagleHead(config, ids).attach(tables()).start_from_target()


def states(ids_BT: Tensor, last_BTH: Tensor, noise: float = 0.3) -> States:
    """The first fused layer tells the token."""
    made = torch.Generator().manual_seed(2)
    aux = torch.randn(*ids_BT.shape, 3 * WIDTH, generator=made)
    aux[..., :WIDTH] = tables().embedding_VH[ids_BT] + noise * aux[..., :WIDTH]
    return States(aux, last_BTH, ids_BT, torch.arange(ids_BT.shape[1]).expand_as(ids_BT))


def repeated_text(noise: float = 0.3) -> States:
    """Random tokens, each stretch said three times, which the target foresees when it can."""
    made = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(VOCAB, (80, PERIOD), generator=made).repeat(1, 3)
    known = tables().output_VH[ids_BT.roll(-1, 1)]
    known = known / known.pow(2).mean(-1, keepdim=True).sqrt() * tables().norm_H
    known[:, : PERIOD - 1] = torch.randn(known[:, : PERIOD - 1].shape, generator=made)
    return states(ids_BT, known, noise)


def packs_of(text: States, rows: int = 10, document: Tensor | None = None) -> Packs:
    document_BT = torch.ones_like(text.ids_BT) if document is None else document

    def packs() -> Iterator[Pack]:
        for part in torch.arange(len(text.ids_BT)).split(rows):
            mask = document_BT[part] > 0
            yield Pack(States(*(x[part] for x in text)), mask, document_BT[part])

    return packs


def started(head: EagleHead, text: States, steps: int = 3) -> Started:
    return start_fitted(head, packs_of(text), steps)


def hit_rate(head: EagleHead, text: States) -> float:
    """Share of drafts in the second and third saying that are what the first one went on with."""
    next_BT = text.ids_BT.roll(-1, 1)
    hidden = head.step(head.project(text.aux_BTF, None), next_BT, text.position_BT)
    guess_BT = head.to_target(head.draft_logits(hidden).argmax(-1))
    inside = slice(PERIOD, 3 * PERIOD - 2)
    return float((guess_BT[:, inside] == text.ids_BT.roll(-2, 1)[:, inside]).float().mean())


def test_an_untrained_head_copies():
    head, text = fresh_head(), repeated_text()
    assert hit_rate(head, text) < 0.05
    line = str(started(head, text))
    assert line.startswith("fitted start: least squares on")
    assert "looks up earlier text by 8 channels" in line
    assert hit_rate(head, text) > 0.5


@pytest.mark.parametrize("layer", [0, 2])
def test_whichever_fused_layer_tells_the_token_is_read(layer: int):
    text = repeated_text()
    parts = list(text.aux_BTF.split(WIDTH, dim=-1))
    parts[0], parts[layer] = parts[layer], parts[0]
    moved = text._replace(aux_BTF=torch.cat(parts, dim=-1))
    head = fresh_head()
    found = started(head, moved)
    assert found.fit > 0.5
    assert hit_rate(head, moved) > 0.5


def test_states_that_tokens_decide_are_explained_and_no_other_ones():
    """The state at s is a sum over x_s and x_{s-1}: row t knows both of those at t+1.

    Were the wanted state one later, a token that no row has seen would decide half of it.
    """
    made = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCAB, (120, 60), generator=made)
    now, before = tables().embedding_VH @ torch.randn(2, WIDTH, WIDTH, generator=made)
    last = now[ids] + before[ids.roll(1, 1)]
    last = last / last.pow(2).mean(-1, keepdim=True).sqrt() * tables().norm_H
    shares = started(fresh_head(), states(ids, last)).explained
    assert shares[0] > 0.7
    late = started(fresh_head(), states(ids, last.roll(-1, 1))).explained
    assert late[0] < 0.5


def test_the_fit_is_where_the_error_no_longer_falls():
    """By autograd through drafting itself, not by the sums: only the ridge's is left."""
    made = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCAB, (60, 40), generator=made)
    text = states(ids, torch.randn(VOCAB, WIDTH, generator=made)[ids])
    head = fresh_head()
    started(head, text, steps=1)
    down = head.layer.mlp.down_proj.weight

    def error() -> Tensor:
        out = head.step(head.project(text.aux_BTF, None), ids.roll(-1, 1), text.position_BT)
        wanted = (text.last_BTH / tables().norm_H).roll(-1, 1) * size
        return (out - wanted)[:, 1:-2].pow(2).sum()

    feature = text.aux_BTF.flatten(0, 1) @ fresh_head().fc.weight.detach().T
    kept = (text.position_BT > 0).flatten() & (text.position_BT < 38).flatten()
    size = float(feature[kept].pow(2).mean(-1).sqrt().median())
    at_fit = torch.autograd.grad(error(), down)[0].norm()
    with torch.no_grad():
        down.zero_()
    without = torch.autograd.grad(error(), down)[0].norm()
    assert float(at_fit) < 0.05 * float(without)


def test_equal_rows_give_equal_heads_whatever_the_parts():
    text, heads = repeated_text(), []
    for rows in (10, 10, 80):
        head = fresh_head()
        start_fitted(head, packs_of(text, rows), 2)
        heads.append(head.state_dict())
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    for name, weight in heads[0].items():
        gap = (heads[2][name].float() - weight.float()).norm()
        assert gap <= 1e-2 * weight.float().norm(), name


def test_padding_and_what_is_not_supervised_leave_no_trace():
    text, one, other = repeated_text(), fresh_head(), fresh_head()
    started(one, text)
    padded = States(*(torch.cat([x, torch.zeros_like(x[:10])]) for x in text))
    padded.aux_BTF[80:] = 1e6
    real = torch.ones_like(padded.ids_BT)
    real[80:] = 0
    start_fitted(other, packs_of(padded, 10, real), 3)
    ours, theirs = one.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    untouched = fresh_head()
    found = start_fitted(untouched, packs_of(text, 10, torch.zeros_like(text.ids_BT)), 3)
    assert str(found) == "note: no fitted start: no token of the sample is supervised"
    fresh = fresh_head().state_dict()
    assert all(torch.equal(untouched.state_dict()[name], fresh[name]) for name in fresh)


@pytest.mark.parametrize(
    ("settings", "noise", "said"),
    [({"rope_theta": 10.0}, 0.1, "turn slowly"), ({}, 60.0, "badly")],
)
def test_a_head_that_cannot_look_up_is_fitted_all_the_same(
    settings: dict, noise: float, said: str
) -> None:
    head, text = fresh_head(**settings), repeated_text(noise)
    found = started(head, text)
    assert found.num_channels == 0
    assert "not looked up: " in str(found)
    assert said in str(found)
    assert found.num_rows > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"fc_norm": True},
        {"norm_before_fc": True},
        {"norm_before_residual": True},
        {"norm_output": True},
        {"num_layers": 2},
        {"num_key_value_heads": 8, "num_attention_heads": 8},
        {"sliding_window": 40},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_geometry_starts(settings: dict):
    head, text = fresh_head(**settings), repeated_text()
    before = hit_rate(head, text)
    found = started(head, text)
    assert before < 0.05
    assert found.num_channels >= 8
    assert hit_rate(head, text) > 0.25
    assert all(weight.isfinite().all() for weight in head.parameters())


def test_a_narrow_draft_with_a_reduced_vocabulary_starts():
    head, text = fresh_head(150, 96), repeated_text()
    assert hit_rate(head, text) < 0.05
    started(head, text)
    assert hit_rate(head, text) > 0.15  # a quarter of the tokens cannot be drafted


@torch.no_grad()
def test_a_matching_row_scores_above_all_others():
    """Scores of a copying and of an own-token head, in float64 from the parameters alone."""
    head, text, size = fresh_head(), repeated_text(noise=0.1), 32
    started(head, text)
    attention = head.layer.self_attn
    embed = head.embed(text.ids_BT.roll(-1, 1), torch.float64)
    embed = embed / (embed.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    feature = text.aux_BTF.double() @ head.fc.weight.double().T
    feature = feature / (feature.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    x = torch.cat([embed, feature], dim=-1)
    cos, sin = cos_sin(rotary(head.config.rope, size), text.position_BT, torch.float64)
    k = rotate((x @ attention.k_proj.weight[:size].double().T)[:, :, None], cos, sin)[:, :, 0]
    row, earlier = 2 * PERIOD - 5, PERIOD - 4  # the query's token is x[row + 1] = x[earlier]
    assert torch.equal(text.ids_BT[:, row + 1], text.ids_BT[:, earlier])
    for first, match, same in ((0, earlier, text.ids_BT), (size, row, text.ids_BT.roll(-1, 1))):
        rows = attention.q_proj.weight[first : first + size].double()
        q = rotate((x @ rows.T)[:, :, None], cos, sin)[:, :, 0]
        scores_BT = (q[:, row, None] * k[:, : row + 1]).sum(-1) / size**0.5
        match_B = scores_BT[:, match]
        others = scores_BT.clone()
        others[same[:, : row + 1] == text.ids_BT[:, row + 1, None]] = -torch.inf
        assert float((match_B > others.amax(1)).float().mean()) > 0.8
        assert 1.5 < float(match_B.mean()) < 20.0


def test_a_window_bounds_the_distance_that_codes_must_stand() -> None:
    config = fresh_head(rope_theta=1e3).config
    turning = rotary(config.rope, 32)
    whole = code_channels(config, turning, 400, None)
    near = code_channels(config, turning, 400, 4)
    assert whole < near


@pytest.mark.parametrize(
    ("heads", "kv_heads", "copying", "own"),
    [(9, 3, [0, 3, 6], [1, 4, 7]), (4, 4, [0, 2], [1, 3]), (1, 1, [0], [])],
)
def test_heads_have_one_role(heads: int, kv_heads: int, copying: list[int], own: list[int]) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    found = roles(EagleConfig.from_target({**TARGET, **sizes}))
    assert (found.copying, found.own) == (copying, own)


@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_still_channels_keep_their_product_over_the_distance(partial: float):
    rope = {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": partial}
    turning, distance = rotary(rope, 64), 512
    still = still_channels(turning, 64, distance)
    cos, sin = cos_sin(turning, torch.tensor([0, distance]), torch.float64)
    for channel in range(64):
        x_TAE = torch.zeros(2, 1, 64, dtype=torch.float64)
        x_TAE[..., channel] = 1
        turned = rotate(x_TAE, cos, sin)[:, 0]
        kept = float(turned[0] @ turned[1])
        assert (channel in still) == (kept >= torch.tensor(LARGEST_TURN).cos() - 1e-6)
