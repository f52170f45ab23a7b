"""EAGLE-3 with several layers and a window: faults in what a layer sees break the equality."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.heads import EagleHead, HeadCache, RowPlan
from outrider.heads import unroll as unroll_module
from outrider.heads.cache import Entries
from outrider.heads.layers import Nearness

UNROLL = unroll_module.__globals__
Plant = Callable[[pytest.MonkeyPatch], None]


def missed(name: str, ref: ModuleType) -> float:
    """How far the unrolled pass is from brute force."""
    with torch.no_grad():
        found = ref.teacher_forced(ref.make_head(**ref.FLAGS[name]), ref.packed_for(name))
    return ref.difference(found, ref.expected(name))


def drafted(name: str, ref: ModuleType) -> Tensor:
    """Logits of four steps of a chain after a prefill of five rows, in one call and row by row."""
    head, data = ref.make_head(**ref.FLAGS[name]), ref.packed_for(name)
    found: list[Tensor] = []
    with torch.no_grad():
        feature = head.project(data.aux, data.last)[1:, :5]
        ids, position = data.ids[1:, 1:], data.position[1:]
        cache = HeadCache(capacity=2)
        hidden = head.step(feature, ids[:, :5], position[:, :5], cache)[:, -1:]
        for step in range(5, 9):
            found.append(head.draft_logits(hidden[0, 0]))
            here = slice(step, step + 1)
            hidden = head.step(hidden, ids[:, here], position[:, here], cache, depth=step - 4)
    return torch.stack(found)


def reference(name: str, ref: ModuleType) -> Tensor:
    """The same by brute force."""
    head, data = ref.make_head(**ref.FLAGS[name]), ref.packed_for(name)
    alone = ref.Document(data.ids[1, :9].tolist(), data.aux[1, :9], data.last[1, :9])
    with torch.no_grad():
        drafts = ref.eagle_drafts(head, alone, 4)
        return torch.stack([next(drafts) for _ in range(4)])


# What the unrolled pass sees


def widen(which: str, by: int) -> Plant:
    """The window of one part of the keys is off by `by`."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        real = UNROLL[which]

        def wrong(keys: Sequence[Any], *rest: Any) -> Any:
            *other, window, step = rest
            return real(keys, *other, window and window + by, step)

        monkeypatch.setitem(UNROLL, which, wrong)

    return plant


def still_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The causal part's window stays where step 0 had it (as in speculators' mask)."""
    real = UNROLL["narrow"]
    monkeypatch.setitem(UNROLL, "narrow", lambda *args: real(*args[:3], 0))


def next_rows_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row reads the later keys of the row before it."""
    real = UNROLL["own_in_window"]
    monkeypatch.setitem(
        UNROLL, "own_in_window", lambda *args: [own.roll(1, 0) for own in real(*args)]
    )


def oldest_diagonals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window keeps the first own keys instead of the last."""

    def wrong(own: Sequence[Tensor], window: int | None, step: int) -> Sequence[Tensor]:
        return own if window is None else own[: min(window, step)]

    monkeypatch.setitem(UNROLL, "own_in_window", wrong)


def first_layers_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's step-0 keys are made from the first layer's input."""
    real = UNROLL["_Layer"].set_context
    first: list[Tensor] = []

    def wrong(self: Any, x: Tensor, position: Tensor) -> None:
        first.append(x)
        real(self, first[0][:, : x.shape[1]], position)

    monkeypatch.setattr(UNROLL["_Layer"], "set_context", wrong)


def leaking_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass of the first layer over all positions reads the document before."""
    real = RowPlan.everywhere.func

    def wrong(plan: RowPlan) -> Any:
        return [b._replace(key_start=max(0, b.key_start - 2)) for b in real(plan)]

    monkeypatch.setattr(RowPlan, "everywhere", property(wrong))


def early_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer's output gets the final norm, not the last one's alone."""
    real = EagleHead.leave

    def wrong(self: EagleHead, residual: Tensor, attended: Tensor, weights: Any) -> Tensor:
        hidden = real(self, residual, attended, weights)
        return hidden if weights.norm is None else self.finish(hidden, weights)

    monkeypatch.setattr(EagleHead, "leave", wrong)


def no_norm_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later layer reads what the one before put out without its norm."""
    monkeypatch.setattr(EagleHead, "go_on", lambda self, hidden, weights: hidden)


def one_window_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with full attention gets the window of the others."""
    real = UNROLL["_Layer"].__init__

    def wrong(self: Any, head: Any, weights: Any, window: int | None, *args: Any, **kw: Any):
        real(self, head, weights, head.config.sliding_window, *args, **kw)

    monkeypatch.setattr(UNROLL["_Layer"], "__init__", wrong)


TRAINING_FAULTS: dict[str, tuple[str, Plant]] = {
    "causal window too long": ("window_2", widen("narrow", 1)),
    "causal window too short": ("window_4", widen("narrow", -1)),
    "own window too long": ("window_1", widen("own_in_window", 1)),
    "own window too short": ("window_2", widen("own_in_window", -1)),
    "window standing still": ("window_4", still_window),
    "oldest diagonals": ("window_1", oldest_diagonals),
    "wrong diagonal": ("two_layers", next_rows_diagonal),
    "first layer's keys": ("two_layers", first_layers_keys),
    "leak between documents": ("two_layers", leaking_context),
    "norm after every layer": ("three_layers", early_finish),
    "no norm between layers": ("two_layers", no_norm_between),
    "window on a full layer": ("mixed_window", one_window_for_all),
}


@pytest.mark.parametrize("fault", list(TRAINING_FAULTS))
def test_a_fault_in_training_is_seen(fault: str, ref: ModuleType, monkeypatch: pytest.MonkeyPatch):
    name, plant = TRAINING_FAULTS[fault]
    assert missed(name, ref) < 1e-9
    plant(monkeypatch)
    assert missed(name, ref) > 1e-4


# What drafting sees


def shared_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer reads the first one's keys."""
    real = HeadCache.append

    def wrong(self: HeadCache, *args: Any) -> Entries:
        found = real(self, *args)
        if args[3] == 0:
            return found
        store = self._layers[0]
        return found._replace(key_BASE=store.key[:, :, : self.length])

    monkeypatch.setattr(HeadCache, "append", wrong)


def window_by(by: int) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        real = Nearness.part
        monkeypatch.setattr(
            Nearness, "part", lambda self, *a: real(self._replace(window=self.window + by), *a)
        )

    return plant


def forgotten_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached keys count as if they all stood at the newest position."""
    real = Nearness.part
    monkeypatch.setattr(
        Nearness,
        "part",
        lambda self, *a: real(self._replace(key_BS=self.key_BS * 0 + self.query_BT.max()), *a),
    )


DRAFTING_FAULTS: dict[str, tuple[str, Plant]] = {
    "cache shared by layers": ("two_layers", shared_cache),
    "window too long": ("window_4", window_by(1)),
    "window too short": ("window_4", window_by(-1)),
    "positions not kept": ("deep_window", forgotten_positions),
}


@pytest.mark.parametrize("fault", list(DRAFTING_FAULTS))
def test_a_fault_in_drafting_is_seen(fault: str, ref: ModuleType, monkeypatch: pytest.MonkeyPatch):
    name, plant = DRAFTING_FAULTS[fault]
    wanted = reference(name, ref)
    assert float((drafted(name, ref) - wanted).abs().max()) < 1e-9
    plant(monkeypatch)
    assert float((drafted(name, ref) - wanted).abs().max()) > 1e-4


@pytest.mark.parametrize("name", ["two_layers", "window_2", "deep_window", "mixed_window"])
def test_a_rolled_back_cache_is_as_if_nothing_had_been_drafted(name: str, ref: ModuleType):
    head, data = ref.make_head(**ref.FLAGS[name]), ref.Packed()
    ids, position = data.ids[1:, 1:], data.position[1:]
    feature = head.project(data.aux, data.last)[1:]
    cache, fresh = HeadCache(), HeadCache()
    with torch.no_grad():
        hidden = head.step(feature[:, :4], ids[:, :4], position[:, :4], cache)[:, -1:]
        for step in range(1, 4):
            hidden = head.step(hidden, ids[:, :1] + step, position[:, 3:4] + step, cache)
        cache.truncate(4)
        again = head.step(feature[:, 4:7], ids[:, 4:7], position[:, 4:7], cache)
        whole = head.step(feature[:, :7], ids[:, :7], position[:, :7], fresh)
    assert cache.length == fresh.length == 7
    assert torch.allclose(again, whole[:, 4:], atol=1e-12)


def test_a_window_longer_than_the_text_changes_nothing(ref: ModuleType):
    wide = ref.make_head(num_layers=2, sliding_window=30)
    with torch.no_grad():
        found = ref.teacher_forced(wide, ref.Packed())
    assert ref.difference(found, ref.expected("two_layers")) < 1e-9
