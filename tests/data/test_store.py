"""The feature store: the target's own numbers, kept across kills, under keys that cannot lie."""

import os
import signal
import warnings

import pytest
import torch

from outrider.data import folders, room
from outrider.data import store as store_module
from outrider.data.batches import Batches
from outrider.data.files import temporary_for
from outrider.data.layout import layout_of
from outrider.data.rows import Row
from outrider.data.states import OnlineFeatures
from outrider.data.store import FeatureStore, store_bytes
from outrider.data.target import Target

LAYERS = (1, 3, 5)


def make_rows(count=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        length = int(torch.randint(4, 20, (), generator=generator))
        ids = torch.randint(3, 300, (length,), generator=generator)
        mask = torch.arange(length) >= 3
        rows.append(Row(ids, mask, f"row-{index}", "chat", 3))
    return rows


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_TOKENS", 25)
    monkeypatch.setattr(store_module, "PASS_TOKENS", 60)


@pytest.fixture
def build(target, tmp_path, small_shards):
    def make(rows=None, **changes):
        using = changes.pop("target", target)
        layers, form = changes.pop("layers", LAYERS), changes.pop("form", "float32")
        settings = {"layout": layout_of(using, layers, form), "root": tmp_path, "progress": False}
        rows = make_rows() if rows is None else rows
        return FeatureStore.build_or_open(using, rows, **settings | changes)

    return make


def rows_run(monkeypatch):
    """A list that grows by the rows of every pass of a target."""
    passes = []
    run = Target.run

    def counted(self, ids_BT, **settings):
        passes.append(len(ids_BT))
        return run(self, ids_BT, **settings)

    monkeypatch.setattr(Target, "run", counted)
    return passes


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16"])
def test_stored_features_are_the_targets_states(build, target, form):
    rows = make_rows()
    stored, dtype = build(rows, form=form), getattr(torch, form)
    assert len(stored) == 12
    assert stored.lengths == [len(row) for row in rows]
    for index, row in enumerate(rows):
        captured = target.run(row.ids[None], layers=LAYERS)
        found = stored.row(index)
        assert found.aux_TF.dtype == found.last_TH.dtype == dtype
        assert torch.equal(found.ids_T, row.ids)
        assert torch.equal(found.mask_T, row.mask)
        slack = {
            "rtol": 1e-2 if dtype.itemsize == 2 else 1e-4,
            "atol": 1e-2 if dtype.itemsize == 2 else 1e-4,
        }
        torch.testing.assert_close(found.aux_TF, captured.aux_BTF[0].to(dtype), **slack)
        torch.testing.assert_close(found.last_TH, captured.last_BTH[0].to(dtype), **slack)


def test_online_features_are_the_same(build, target):
    rows = make_rows()
    online, stored = OnlineFeatures(target, rows, layers=LAYERS), build(rows)
    assert (online.lengths, online.row_ids, len(online)) == (stored.lengths, stored.row_ids, 12)
    ours = Batches(stored, size=40, batch_size=2, seed=0).batch(0, 0)
    theirs = Batches(online, size=40, batch_size=2, seed=0).batch(0, 0)
    assert ours.row_ids == theirs.row_ids
    assert torch.equal(ours.ids_BT, theirs.ids_BT)
    torch.testing.assert_close(ours.aux_BTF, theirs.aux_BTF, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.last_BTH, theirs.last_BTH, rtol=1e-4, atol=1e-4)
    assert online.row(3).aux_TF.shape == (len(rows[3]), 96)


def test_no_layers_stores_the_last_state_only(build, target):
    found = build(layers=()).row(0)
    assert found.aux_TF.shape == (len(make_rows()[0]), 0)
    assert found.last_TH.shape[-1] == 32


def test_the_same_key_is_reused_without_running_the_target(build, monkeypatch):
    build()
    passes = rows_run(monkeypatch)
    build()
    assert passes == []


def test_every_dependency_changes_the_key(build, make_model, make_tokenizer, monkeypatch):
    passes = rows_run(monkeypatch)

    def rebuilt(**changes):
        passes.clear()
        build(**changes)
        return bool(passes)

    data = make_rows()
    data[3].ids[5] += 1
    masked = make_rows()
    masked[3].mask[3] = False
    nudged = make_model()
    with torch.no_grad():
        nudged.model.layers[5].mlp.up_proj.weight[0, 0] += 1e-3
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["new"])
    assert rebuilt()
    changes = {
        "data": {"rows": data},
        "mask": {"rows": masked},
        "length": {"rows": [Row(r.ids[:9], r.mask[:9], r.row_id, r.kind, 3) for r in make_rows()]},
        "order": {"rows": make_rows()[::-1]},
        "layers": {"layers": (1, 3, 4)},
        "layer order": {"layers": (3, 1, 5)},
        "precision": {"form": "bfloat16"},
        "weights": {"target": Target.from_model(nudged, make_tokenizer())},
        "template": {"target": Target.from_model(make_model(), make_tokenizer("strict"))},
        "tokenizer": {"target": Target.from_model(make_model(), tokenizer)},
        "target precision": {"target": Target.from_model(make_model().double(), make_tokenizer())},
    }
    for name, change in changes.items():
        assert rebuilt(**change), name
        assert not rebuilt(**change), name
    assert not rebuilt(progress=True)
    monkeypatch.setattr(store_module, "STORE_VERSION", 2)
    assert rebuilt()


def test_the_key_sees_what_a_targets_files_do_not_tell(build, target, tmp_path, monkeypatch):
    target.model.save_pretrained(tmp_path / "model")
    target.tokenizer.save_pretrained(tmp_path / "model")
    loaded = Target.load(str(tmp_path / "model"))
    build(target=loaded)
    passes = rows_run(monkeypatch)
    build(target=Target.load(str(tmp_path / "model")))
    assert sum(passes) == 2  # the check on loading; the store is reused
    build(target=Target.load(str(tmp_path / "model"), dtype=torch.float64))
    assert sum(passes) == 2 + 2 + 12
    loaded.tokenizer.chat_template += " "
    build(target=loaded)
    assert sum(passes) == 2 + 2 + 12 + 12


def test_a_cut_or_foreign_shard_is_built_again_and_only_it(build, monkeypatch):
    whole = build()
    shards = sorted(whole.folder.local.glob("*.safetensors"))
    assert len(shards) > 3
    expected = [whole.row(index).aux_TF.clone() for index in range(12)]  # rows are mapped files
    shards[1].write_bytes(shards[1].read_bytes()[:-8])
    shards[2].write_bytes(b"")
    passes = rows_run(monkeypatch)
    again = build()
    spans = store_module._shards(whole.lengths)
    assert sum(passes) == len(spans[1]) + len(spans[2])
    for index in range(12):
        assert torch.equal(again.row(index).aux_TF, expected[index])


def test_a_killed_build_goes_on_at_the_next_shard(build, monkeypatch):
    write = folders.write_whole

    def killed(path, content):
        if path.name == "features-000002.safetensors":
            temporary_for(path).write_bytes(b"half a shard")
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content)

    monkeypatch.setattr(folders, "write_whole", killed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # one thread here: forking is safe
        child = os.fork()
    if child == 0:
        try:
            build()
        finally:
            os._exit(1)  # not reached: the build kills its process
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    monkeypatch.setattr(folders, "write_whole", write)
    passes = rows_run(monkeypatch)
    stored = build()
    spans = store_module._shards(stored.lengths)
    assert len(spans) > 3
    assert sum(passes) == sum(len(span) for span in spans[2:])
    assert not list(stored.folder.local.glob("*.tmp"))


def test_size_is_known_first_and_a_budget_is_obeyed(build, target, monkeypatch):
    rows = make_rows()
    size = store_bytes(rows, layout_of(target, LAYERS, "bfloat16"))
    passes = rows_run(monkeypatch)
    with pytest.raises(ValueError, match=rf"max_bytes is {size - 1:,}, the features need {size:,}"):
        build(rows, form="bfloat16", max_bytes=size - 1)
    assert passes == []
    stored = build(rows, form="bfloat16", max_bytes=size)
    on_disk = sum(path.stat().st_size for path in stored.folder.local.glob("*.safetensors"))
    assert abs(on_disk / size - 1) < 0.05


def test_a_full_disk_is_refused_before_any_work(build, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ValueError, match="has 10 free; free some space"):
        build()
