"""A draft model with another tokenizer: it goes by the text, its drafts by the target's ids.

Universal assisted decoding (Timor et al. 2025, "Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies", string-level exact match). The
text so far is encoded for the model, its likeliest continuation is decoded and encoded again for
the target. Drafts are chosen, never drawn: one text has many encodings, so no token's law is known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from outrider.data.cache import RowCache
from outrider.data.target import Captured, Target
from outrider.eval.drafters import Draft, Noise
from outrider.eval.drafters.chains import run_new
from outrider.eval.drafters.retoken import IdsOf, TextOf, continued, decoded
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.loop_plans import UniversalPlan
from outrider.eval.trees.tree import chain


@dataclass(frozen=True, eq=False)
class TextModel:
    """A causal LM of any tokenizer that may draft for a target."""

    model: Target
    target: Target

    @property
    def tokenizers(self) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
        """The model's and the target's."""
        ours, theirs = self.model.tokenizer, self.target.tokenizer
        assert ours is not None, "as_text_model checks both"
        assert theirs is not None, "as_text_model checks both"
        return ours, theirs

    @property
    def limit(self) -> int:
        """Positions of the model, past which it drafts nothing."""
        return int(getattr(self.model.config, "max_position_embeddings", 1 << 62))


def text_model(name: str, target: Target) -> TextModel:
    """Load a draft model of any tokenizer: a folder or a Hub id."""
    return as_text_model(Target.load(name, dtype=target.dtype, device=target.device), target)


def as_text_model(model: Target, target: Target) -> TextModel:
    """A model beside its target. Raises ValueError where either has no fast tokenizer."""
    for one in (model, target):
        if one.tokenizer is None or not one.tokenizer.is_fast:
            kind = "no tokenizer" if one.tokenizer is None else "a slow tokenizer"
            raise ValueError(
                f"{one.name} has {kind}; drafts pass from one tokenizer to another by the places "
                "of tokens in the text, so both need a tokenizer.json"
            )
    return TextModel(model, target)


class UniversalDrafter:
    """Drafts chains for one row at a time, by a model that sees text alone."""

    layers: tuple[int, ...] = ()
    siblings = Siblings.CHOSEN

    def __init__(self, draft: TextModel, plan: UniversalPlan) -> None:
        self._draft, self._plan = draft, plan

    def start(self, ids: Sequence[int], captured: Captured) -> None:  # noqa: ARG002
        """Begin a row."""
        ours, theirs = self._draft.tokenizers
        self._text, self._own = TextOf(theirs), IdsOf(ours)
        self._cache, self._cached = RowCache(1), list[int]()
        self._text.add(ids)

    def accept(self, ids: Sequence[int], captured: Captured) -> None:  # noqa: ARG002
        """Go on by these tokens."""
        self._text.add(ids)

    @torch.no_grad()
    def propose(self, max_depth: int, noise: Noise) -> Draft:  # noqa: ARG002
        """At most the plan's length of the target's tokens; none inside a character."""
        length = min(self._plan.length, max_depth)
        root, tokens = self._text.ids[-1], list[int]()
        if length > 0 and self._text.is_whole:
            self._own.become(self._text.text)
            tokens = self._translated(self._drafted(self._own.ids))[:length]
        return Draft(chain(root, tokens))

    def _drafted(self, ids: list[int]) -> list[int]:
        """The model's own next tokens, up to its end token or its last position."""
        found: list[int] = []
        # It must have a token to start from, and the last draft need not be run.
        room = self._draft.limit - len(ids) + 1 if ids else 0
        while len(found) < min(self._plan.length, room):
            found.append(self._step([*ids, *found]))
            if found[-1] in self._draft.model.eos_ids:
                break
        return found

    def _translated(self, drafted: Sequence[int]) -> list[int]:
        """The target's ids of a continuation by the model; an end token stands for the other."""
        (ours, theirs), target = self._draft.tokenizers, self._draft.target
        is_ended = bool(drafted) and drafted[-1] in self._draft.model.eos_ids
        said = drafted[:-1] if is_ended else drafted
        # Spaces of the first token may depend on the one before it.
        before = decoded(ours, self._own.ids[-1:])
        more = decoded(ours, [*self._own.ids[-1:], *said])
        if not more.startswith(before):
            return []
        more = more[len(before) :].rstrip("\ufffd")
        tokens = continued(theirs, self._text.ids, more) if more else []
        ends = is_ended and target.eos_ids and (tokens or not more)
        return [*tokens, target.eos_ids[0]] if ends else tokens

    def _step(self, ids: list[int]) -> int:
        """Run what the cache lacks of these tokens; the likeliest next one."""
        model, cache = self._draft.model, self._cache
        same = 0
        while same < min(len(self._cached), len(ids) - 1) and self._cached[same] == ids[same]:
            same += 1
        cache.truncate([same])
        logits_1V = model.logits(run_new(model, cache, ids[same:]))
        self._cached = list(ids)
        return int(logits_1V[0, : model.tokenizer_size].float().argmax())
