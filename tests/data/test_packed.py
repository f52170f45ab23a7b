"""Packed stores: states within their bounds, laws that are the target's, sizes, and no silent mix.

Letters: W ids of a law's vocabulary.
"""

import pytest
import torch

from outrider.data import layout as layout_module
from outrider.data import store as store_module
from outrider.data.batches import Batches
from outrider.data.choices import TOP_K
from outrider.data.laws import TopLaw, Vocabulary, short_factors
from outrider.data.layout import Packed, layout_of
from outrider.data.quantise import CODECS, Rotated
from outrider.data.rows import Row
from outrider.data.states import TargetStates
from outrider.data.store import FeatureStore, store_bytes

LAYERS = (1, 3, 5)
DRAFT_IDS = torch.arange(0, 400, 3)


def make_rows(count=12, seed=0):
    """Two answers in a row, an unsupervised end, and one row with nothing to learn."""
    made = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        length = int(torch.randint(8, 20, (), generator=made))
        ids = torch.randint(3, 300, (length,), generator=made)
        mask = torch.zeros(length, dtype=torch.bool)
        mask[3:5] = True
        mask[6 : length - index % 3] = True
        rows.append(Row(ids, mask, f"row-{index}", "chat", 3))
    rows.append(
        Row(torch.arange(5), torch.tensor([True, True, False, False, False]), "none", "", 0)
    )
    return rows


@pytest.fixture
def build(target, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_TOKENS", 60)

    def make(form="int8", rows=None, layers=LAYERS, **settings):
        settings = {"top_k": 8, "draft_ids_W": DRAFT_IDS} | settings
        layout = layout_of(target, layers, form, **settings)
        rows = make_rows() if rows is None else rows
        return FeatureStore.build_or_open(
            target, rows, layout=layout, root=tmp_path, progress=False
        )

    return make


def check(store, target, rows, ids_W, top_k, slack, layers=LAYERS):
    """Everything in the store against the target's own pass, in float64."""
    for index, row in enumerate(rows):
        captured = target.run(row.ids[None], layers=layers)
        found = store.row(index)
        states = captured.aux_BTF[0] if layers else captured.last_BTH[0]
        ours = (found.aux_TF if layers else found.last_TH).float()
        supervised = [m for m in range(2, len(row)) if row.mask[m]]
        kept = supervised[-1] if supervised else 0
        scale = states.norm(dim=-1)[:kept]
        assert ((ours - states)[:kept].norm(dim=-1) <= slack * scale).all()
        assert not ours[kept:].any()
        logits = captured.last_BTH[0].double() @ target.output_VH[ids_W].double().T
        logs = logits.log_softmax(-1)
        for m in range(1, len(row)):
            law = TopLaw(*(x[m - 1] for x in found.law.tensors), found.law.num_rest)
            if m not in supervised:
                assert not any(x.any() for x in law.tensors)
                continue
            assert law.log_probs.tolist() == sorted(law.log_probs.tolist(), reverse=True)
            places = torch.searchsorted(ids_W, law.ids.long())
            assert torch.equal(ids_W[places], law.ids.long())
            torch.testing.assert_close(
                law.log_probs.double(), logs[m - 1, places], rtol=2**-10, atol=2e-3
            )
            best = logs[m - 1].topk(top_k).values
            torch.testing.assert_close(law.log_probs.double(), best, rtol=2**-10, atol=2e-3)
            assert float(law.log_normaliser) == pytest.approx(
                float(logits[m - 1].logsumexp(-1)), abs=1e-4
            )
            assert float(law.tail) == pytest.approx(1 - float(best.exp().sum()), abs=1e-4)


@pytest.mark.parametrize(("form", "slack"), [("int8", 0.02), ("fp8", 0.06), ("int4", 0.2)])
@pytest.mark.parametrize("layers", [LAYERS, ()])
def test_a_packed_store_holds_the_targets_states_and_laws(build, target, form, slack, layers):
    rows = make_rows()
    store = build(form, rows, layers=layers)
    assert store.row(0).law.num_rest == len(DRAFT_IDS) - 8
    check(store, target, rows, DRAFT_IDS, 8, slack, layers)


def test_laws_may_be_over_all_of_the_targets_ids(build, target):
    rows = make_rows()
    store = build(rows=rows, draft_ids_W=None)
    check(store, target, rows, torch.arange(target.tokenizer_size), 8, 0.02)


@pytest.mark.parametrize("family", ["gemma", "qwen"])
def test_other_families_with_a_soft_cap_or_an_own_table(make_target, tmp_path, family):
    target, rows = make_target(family=family), make_rows(4)
    layout = layout_of(target, LAYERS, "int8", top_k=6)
    store = FeatureStore.build_or_open(target, rows, layout=layout, root=tmp_path, progress=False)
    row = rows[0]
    logs = target.logits(target.run(row.ids[None]).last_BTH[0]).double().log_softmax(-1)
    law = store.row(0).law
    m = int(row.mask.nonzero()[0])
    size = target.tokenizer_size
    expected = (logs[m - 1, :size] - logs[m - 1, :size].logsumexp(-1)).topk(6)
    torch.testing.assert_close(law.log_probs[m - 1].double(), expected.values, rtol=1e-3, atol=2e-3)


def wrong_scale(monkeypatch):
    encode = Rotated.encode

    def planted(self, state_NLH):
        found = encode(self, state_NLH)
        return found | {"scale": found["scale"].roll(1, 0)}

    monkeypatch.setattr(Rotated, "encode", planted)


def rows_shifted(monkeypatch):
    of = TargetStates.of

    def planted(self, rows):
        return [type(x)(*(state.roll(1, 0) for state in x)) for x in of(self, rows)]

    monkeypatch.setattr(TargetStates, "of", planted)


def teacher_of_the_next_position(monkeypatch):
    encode = Packed.encode

    def planted(self, row, aux_TF, last_TH):
        return encode(self, row, aux_TF, last_TH.roll(-1, 0))

    monkeypatch.setattr(Packed, "encode", planted)


def tail_of_another_vocabulary(monkeypatch):
    top = Vocabulary.top

    def planted(self, last_NH, size):
        return top(self, last_NH, size)._replace(tail=top(self, last_NH, size + 1).tail)

    monkeypatch.setattr(Vocabulary, "top", planted)


@pytest.mark.parametrize(
    "plant", [wrong_scale, rows_shifted, teacher_of_the_next_position, tail_of_another_vocabulary]
)
def test_planted_faults_are_seen(build, target, monkeypatch, plant):
    rows = make_rows()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(build(rows=rows), target, rows, DRAFT_IDS, 8, 0.02)


@pytest.mark.parametrize(("form", "most"), [("int8", 0.42), ("fp8", 0.42), ("int4", 0.25)])
@pytest.mark.parametrize("width", [576, 2048, 4096])
def test_bytes_of_a_token_with_its_law_against_three_layers_and_the_last_state(
    target, form, most, width
):
    vocabulary = Vocabulary(target, torch.arange(8192))
    layout = Packed(layers=(2, 15, 27), width=width, form=form, vocabulary=vocabulary, top_k=TOP_K)
    size = sum(part.field.num_bytes for part in layout.parts.values())
    assert size <= most * 4 * width * 2
    assert layout.parts["law_ids"].field.dtype == torch.uint16


def test_ids_take_four_bytes_where_two_do_not_fit(target):
    sizes = {1 << 16: torch.uint16, (1 << 16) + 1: torch.int32}
    for size, dtype in sizes.items():
        vocabulary = Vocabulary(target, torch.arange(size))
        layout = Packed(layers=(1,), width=32, form="int8", vocabulary=vocabulary, top_k=4)
        assert layout.id_dtype == dtype


@pytest.mark.parametrize("form", CODECS)
def test_the_size_is_known_before_writing(build, target, form):
    rows = make_rows(60)
    store = build(form, rows)
    real = sum(path.stat().st_size for path in store.folder.local.iterdir())
    real -= (store.folder.local / "key.json").stat().st_size
    layout = layout_of(target, LAYERS, form, top_k=8, draft_ids_W=DRAFT_IDS)
    assert store_bytes(rows, layout) == pytest.approx(real, rel=0.05)


def test_batches_carry_the_laws_to_their_places(build):
    rows = make_rows()
    store = build(rows=rows)
    batch = Batches(store, size=40, batch_size=2, seed=0).batch(0, 0)
    moved = batch.to("meta")
    assert moved.law.ids.device.type == "meta"
    seen = 0
    for pack, names in enumerate(batch.row_ids):
        for number, name in enumerate(names, start=1):
            index = next(i for i, row in enumerate(rows) if row.row_id == name)
            inside = batch.document_BT[pack] == number
            for ours, theirs in zip(batch.law.tensors, store.row(index).law.tensors, strict=True):
                assert torch.equal(ours[pack][inside], theirs)
            seen += 1
    assert seen >= 4
    assert not batch.law.log_probs[batch.document_BT == 0].any()


def test_c18_other_settings_make_another_packed_store(build, target):
    """C18: quantiser, k, vocabulary, row names and laws' reach are in the key."""

    def renamed():
        return [Row(r.ids, r.mask, "x" + r.row_id, r.kind, 3) for r in make_rows()]

    first = build().folder.name
    assert build().folder.name == first
    changes = [
        {"form": "int4"},
        {"form": "fp8"},
        {"form": "bfloat16"},
        {"top_k": 9},
        {"draft_ids_W": DRAFT_IDS[:-1]},
        {"draft_ids_W": DRAFT_IDS[1:] - 1},
        {"draft_ids_W": None},
        {"rows": renamed()},
        {"layers": (1, 3)},
    ]
    names = {build(**change).folder.name for change in changes}
    assert len(names | {first}) == len(changes) + 1


def test_c18_a_store_under_another_stores_name_is_refused(build):
    """C18: files that were copied to another key are refused, naming what differs."""
    one, other = build().folder.local, build(top_k=9).folder.local
    (one / "key.json").write_bytes((other / "key.json").read_bytes())
    with pytest.raises(ValueError, match=r"was made with other settings .*top_k 9, not 8"):
        build()


def test_a_new_packing_makes_another_store(build, monkeypatch):
    first = build().folder.name
    monkeypatch.setattr(layout_module, "PACK_VERSION", 2)
    assert build().folder.name != first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "int5"}, "feature_dtype is 'int5'; choose one of float32, bfloat16"),
        ({"top_k": 0}, "top_k is 0; a law needs at least 1 id"),
        ({"draft_ids_W": torch.tensor([5, 400])}, "laws holds id 400; .* ids are 0 to 399"),
        ({"layers": (9,)}, r"layers holds \[9\]"),
    ],
)
def test_refusals(build, change, message):
    with pytest.raises(ValueError, match=message):
        build(**change)


def test_short_factors_multiply_exactly_and_leave_the_setting_as_it_was():
    setting = torch.backends.mkldnn.matmul
    before = setting.fp32_precision
    made = torch.Generator().manual_seed(0)
    a = torch.randn(40, 576, generator=made).bfloat16()
    b = torch.randn(300, 576, generator=made).bfloat16()
    with short_factors():
        found = a.float() @ b.float().T
    assert setting.fp32_precision == before
    exact = a.double() @ b.double().T
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()
    with pytest.raises(ZeroDivisionError), short_factors():
        _ = 1 / 0
    assert setting.fp32_precision == before
