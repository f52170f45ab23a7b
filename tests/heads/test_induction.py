"""A head that starts with induction heads copies before it is trained; without them it cannot."""

import pytest
import torch
from torch import Tensor

from outrider.heads import EagleHead, Tables
from outrider.heads.base import States
from outrider.heads.eagle import EagleConfig
from outrider.heads.induction import ridge, start_induction
from outrider.heads.lookup import roles
from outrider.heads.rope import cos_sin, rotary, rotate

VOCAB, WIDTH, PERIOD = 200, 128, 24
TARGET = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 512,
}


def fresh_head(**settings: object) -> EagleHead:
    torch.manual_seed(0)
    config = EagleConfig.from_target({**TARGET, **settings})
    table = torch.randn(VOCAB, WIDTH) + 0.5
    tables = Tables(
        embedding_VH=table,
        output_VH=table,
        tokenizer_size=VOCAB,
        num_layers=8,
        norm_H=torch.ones(WIDTH),
    )
    return EagleHead(config).attach(tables).start_from_target()


def repeated_text(head: EagleHead, noise: float = 0.5) -> States:
    """Random tokens, each stretch said three times; the first fused layer tells the token."""
    generator = torch.Generator().manual_seed(1)
    pieces = torch.randint(VOCAB, (40, PERIOD), generator=generator)
    ids_BT = pieces.repeat(1, 3)
    states = torch.randn(*ids_BT.shape, 3 * WIDTH, generator=generator)
    states[..., :WIDTH] = head.lent().embedding_VH[ids_BT] + noise * states[..., :WIDTH]
    position_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
    return States(states, states[..., -WIDTH:], ids_BT, position_BT)


def hit_rate(head: EagleHead, text: States) -> float:
    """Share of drafts in the second and third saying that are what the first one went on with."""
    next_BT = text.ids_BT.roll(-1, 1)
    feature = head.project(text.aux_BTF, None)
    hidden = head.step(feature, next_BT, text.position_BT)
    guess_BT = head.to_target(head.draft_logits(hidden).argmax(-1))
    inside = slice(PERIOD, 3 * PERIOD - 2)
    return float((guess_BT[:, inside] == text.ids_BT.roll(-2, 1)[:, inside]).float().mean())


def started(head: EagleHead, text: States) -> str:
    return str(start_induction(head, text, torch.ones_like(text.ids_BT)))


def test_an_untrained_head_copies():
    head = fresh_head()
    text = repeated_text(head)
    assert hit_rate(head, text) < 0.05
    line = started(head, text)
    assert line.startswith("induction start: 2 query heads")
    assert hit_rate(head, text) > 0.4


def test_queries_by_another_token_copy_nothing():
    """The fault that would go unseen in a loss: codes of the token after."""
    head = fresh_head()
    text = repeated_text(head)
    wrong = text._replace(ids_BT=text.ids_BT.roll(-1, 1))
    started(head, wrong)
    assert hit_rate(head, text) < 0.1


@torch.no_grad()
def test_a_matching_row_scores_above_all_others():
    """Scores of a copying query head, in float64 from the parameters alone."""
    head = fresh_head()
    text = repeated_text(head, noise=0.1)
    started(head, text)
    attention, size = head.layer.self_attn, 32
    embed = head.embed(text.ids_BT.roll(-1, 1), torch.float64)
    embed = embed / (embed.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    feature = text.aux_BTF.double() @ head.fc.weight.double().T
    feature = feature / (feature.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    x = torch.cat([embed, feature], dim=-1)
    cos, sin = cos_sin(rotary(head.config.rope, size), text.position_BT, torch.float64)
    q = rotate((x @ attention.q_proj.weight[:size].double().T)[:, :, None], cos, sin)[:, :, 0]
    k = rotate((x @ attention.k_proj.weight[:size].double().T)[:, :, None], cos, sin)[:, :, 0]
    row, earlier = 2 * PERIOD - 5, PERIOD - 4  # the query's token is x[row + 1] = x[earlier]
    scores_BT = (q[:, row, None] * k[:, : row + 1]).sum(-1) / size**0.5
    assert torch.equal(text.ids_BT[:, row + 1], text.ids_BT[:, earlier])
    match_B = scores_BT[:, earlier]
    others = scores_BT.clone()
    others[text.ids_BT[:, : row + 1] == text.ids_BT[:, row + 1, None]] = -torch.inf
    assert float((match_B > others.amax(1)).float().mean()) > 0.8
    assert 2.0 < float(match_B.mean()) < 6.0


@pytest.mark.parametrize(
    ("settings", "noise", "said"),
    [({"rope_theta": 10.0}, 0.1, "turn too fast"), ({}, 30.0, "badly")],
)
def test_a_head_that_cannot_copy_is_left_alone(settings: dict, noise: float, said: str):
    head = fresh_head(**settings)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    text = repeated_text(head, noise=noise)
    line = started(head, text)
    assert line.startswith("note: no induction start")
    assert said in line
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


def test_padding_is_no_sample():
    one, other = fresh_head(), fresh_head()
    text = repeated_text(one)
    started(one, text)
    padded = States(*(torch.cat([x, torch.zeros_like(x[:7])]) for x in text))
    padded.aux_BTF[40:] = torch.nan
    real = torch.ones_like(padded.ids_BT)
    real[40:] = 0
    start_induction(other, padded, real)
    ours, theirs = one.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    "settings", [{"fc_norm": True}, {"norm_before_fc": True}, {"num_layers": 2}]
)
def test_every_geometry_starts(settings: dict):
    torch.manual_seed(0)
    given = fresh_head()
    config = EagleConfig.from_target(TARGET, **settings)
    head = EagleHead(config).attach(given.lent()).start_from_target()
    text = repeated_text(head)
    assert started(head, text).startswith("induction start")
    if "num_layers" not in settings:
        assert hit_rate(head, text) > 0.4


def test_a_narrow_draft_with_a_reduced_vocabulary_starts():
    given = fresh_head()
    config = EagleConfig.from_target(TARGET, hidden_size=96, draft_vocab_size=150)
    head = EagleHead(config, torch.arange(150)).attach(given.lent()).start_from_target()
    text = repeated_text(head)
    assert hit_rate(head, text) < 0.05
    assert started(head, text).startswith("induction start")
    assert hit_rate(head, text) > 0.3  # a quarter of the tokens cannot be drafted


def test_a_window_bounds_the_distance_that_codes_must_stand() -> None:
    """Few channels stand still over the text, all that the window needs over the window."""
    settings = {"rope_theta": 1e3}
    given = fresh_head(**settings)
    text = repeated_text(given)
    whole = start_induction(given, text, torch.ones_like(text.ids_BT))
    config = EagleConfig.from_target({**TARGET, **settings}, sliding_window=4)
    torch.manual_seed(0)
    head = EagleHead(config).attach(given.lent()).start_from_target()
    near = start_induction(head, text, torch.ones_like(text.ids_BT))
    assert whole.num_channels < near.num_channels


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [((9, 3, 576, 64), [0, 1, 2]), ((4, 4, 64, 16), [0, 2]), ((1, 1, 8, 8), [0])],
)
def test_some_query_heads_stay(sizes: tuple[int, int, int, int], heads: list[int]):
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
    config = EagleConfig.from_target({**TARGET, **dict(zip(names, sizes, strict=True))})
    assert roles(config).kv_heads == heads


def test_ridge_is_least_squares():
    generator = torch.Generator().manual_seed(0)
    given: Tensor = torch.randn(500, 6, generator=generator) * torch.tensor([1, 9, 1, 1, 0.1, 1])
    wanted = given @ torch.randn(6, 2, generator=generator) + 3
    exact = torch.linalg.lstsq(given - given.mean(0), wanted - wanted.mean(0)).solution
    torch.testing.assert_close(ridge(given, wanted), exact, rtol=0.03, atol=0.03)
