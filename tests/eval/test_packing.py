"""A head and its target draft and verify by packed weights, with the tokens they had."""

import pytest
import torch

from outrider.data import packed_linears as module
from outrider.eval.decode import Decoding, decode
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.drafters.model import as_draft_model
from outrider.eval.packing import packed
from outrider.eval.trees.plans import plan_named

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


def test_rounds_are_those_of_plain_weights(tiny_target, tiny_head, greedy_texts):
    drafter = HeadDrafter(tiny_head, plan_named("tree:3,2,5"))
    for text in greedy_texts[:4]:
        decoding = Decoding(max_new_tokens=24)
        before = decode(tiny_target, text.prompt_ids, drafter, decoding)
        with packed(tiny_target, tiny_head, None) as can:
            assert can
            within = decode(tiny_target, text.prompt_ids, drafter, decoding)
        assert within.ids == before.ids
        assert within.rounds == before.rounds


def test_every_product_of_a_decoding_is_packed(tiny_target, tiny_head, greedy_texts):
    plain = []
    with pytest.MonkeyPatch.context() as patch, packed(tiny_target, tiny_head):
        patch.setattr(module, "_plain_linear", lambda *given: plain.append(given))
        drafter = HeadDrafter(tiny_head, plan_named("chain:3"))
        decode(tiny_target, greedy_texts[0].prompt_ids, drafter, Decoding(max_new_tokens=6))
    assert not plain


def test_a_draft_model_is_packed_too(tiny_target):
    model = as_draft_model(tiny_target, tiny_target)
    with packed(tiny_target, model):
        tables = {one._plain.data_ptr() for one in module._contexts[0].values()}
    assert model.model.output_VH.data_ptr() in tables
