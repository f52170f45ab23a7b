"""Drafting with a draft model for many rows at once: chains, likeliest or drawn.

As in `outrider.eval.drafters.model`; keys of drafts that stand are kept here, not run again.
Dimensions: B rows, T new tokens, H hidden size, W draft vocabulary, V target vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.data.cache import RowCache, attention_masks, query_positions
from outrider.data.rollback import check_rolls_back
from outrider.data.sampling import GREEDY_BELOW, draw
from outrider.data.target import Captured
from outrider.eval.drafters import Draft, Noise
from outrider.eval.drafters.model import DraftModel
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.plans import ChainPlan
from outrider.eval.trees.tree import chain


class _Saved(NamedTuple):
    texts: list[list[int]]
    ran: list[list[int]]


class ModelRows:
    """Drafts chains for a batch of rows; drawn at `temperature` above 0, likeliest at 0."""

    layers: tuple[int, ...] = ()

    def __init__(
        self, draft: DraftModel, plan: ChainPlan, num_rows: int, *, temperature: float = 0.0
    ) -> None:
        check_rolls_back(draft.model)
        self._draft, self._plan = draft, plan
        self._temperature = 0.0 if temperature < GREEDY_BELOW else temperature
        self._texts: list[list[int]] = [[] for _ in range(num_rows)]
        self._ran: list[list[int]] = [[] for _ in range(num_rows)]
        """Tokens whose keys and values the cache holds, drafts among them."""
        self._sure = [0] * num_rows
        """How many of them are known to be the text's."""
        self._cache = RowCache(num_rows)

    @property
    def siblings(self) -> Siblings:
        """Above temperature 0 drawn chains, else the likeliest tokens."""
        return Siblings.SINGLE if self._temperature else Siblings.CHOSEN

    def start(self, row: int, ids: Sequence[int], captured: Captured) -> None:  # noqa: ARG002
        """Run a row's prompt, as far as the model has positions."""
        alone, known = RowCache(1), list(ids[:-1])[: self._draft.limit]
        _run(self._draft, alone, [known])
        self._cache.replace_row(row, alone, 0)
        self._texts[row], self._ran[row], self._sure[row] = list(ids), known, len(known)

    def accept(
        self, tokens: Sequence[Sequence[int]], captured: Captured, kept: Sequence[Sequence[int]]
    ) -> None:
        """Go on by each row's tokens."""
        del captured, kept
        for text, ids in zip(self._texts, tokens, strict=True):
            text += ids

    def end(self, row: int, ids: Sequence[int]) -> None:
        """Nothing: a row that ends is dropped or started anew."""

    def propose(self, max_depths: Sequence[int], noises: Sequence[Noise]) -> list[Draft]:
        """Draft for every row; one past the model's positions drafts nothing."""
        limit = self._draft.limit
        depths = [
            max(0, min(self._plan.depth, room, limit - len(text) + 1))
            for room, text in zip(max_depths, self._texts, strict=True)
        ]
        self._drop_what_fell()
        fed = [
            text[len(ran) :] if depth else []
            for text, ran, depth in zip(self._texts, self._ran, depths, strict=True)
        ]
        drafts: list[list[int]] = [[] for _ in depths]
        laws: list[Tensor] = []
        for step in range(max(depths)):
            last_BH = _run(self._draft, self._cache, fed)
            for ran, ids in zip(self._ran, fed, strict=True):
                ran += ids
            logits_BW = self._draft.logits(last_BH)
            chosen = self._choose(logits_BW, step, laws, noises)
            for row, depth in enumerate(depths):
                if step < depth:
                    drafts[row].append(chosen[row])
                fed[row] = [chosen[row]] if step + 1 < depth else []
        pairs = zip(self._texts, drafts, strict=True)
        trees = [chain(text[-1], tokens) for text, tokens in pairs]
        if not self._temperature:
            return [Draft(tree) for tree in trees]
        return [Draft(tree, _ChainLaw(self._draft, laws, row)) for row, tree in enumerate(trees)]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        self._cache.keep_rows(rows)
        self._texts = [self._texts[row] for row in rows]
        self._ran = [self._ran[row] for row in rows]
        self._sure = [self._sure[row] for row in rows]

    def save(self) -> _Saved:
        """What `restore` needs: what was run of the text, for drafts may be overwritten."""
        ran = [
            one[: min(len(one), len(text) - 1)]
            for one, text in zip(self._ran, self._texts, strict=True)
        ]
        return _Saved([list(text) for text in self._texts], ran)

    def restore(self, saved: _Saved) -> None:
        """Come back to where `save` was called."""
        self._texts = [list(text) for text in saved.texts]
        self._ran = [list(ran) for ran in saved.ran]
        self._sure = list(map(len, self._ran))
        self._cache.truncate(list(map(len, self._ran)))

    def _choose(
        self, logits_BW: Tensor, step: int, laws: list[Tensor], noises: Sequence[Noise]
    ) -> list[int]:
        if not self._temperature:
            return logits_BW.argmax(-1).tolist()
        laws.append((logits_BW / self._temperature).softmax(-1))
        rows = zip(laws[-1], noises, strict=True)
        return [draw(law_W, noise.draft(step)) for law_W, noise in rows]

    def _drop_what_fell(self) -> None:
        """Roll back to what is the text's; its newest token is run in the next step."""
        for row, (text, ran) in enumerate(zip(self._texts, self._ran, strict=True)):
            sure, most = self._sure[row], min(len(ran), len(text) - 1)
            while sure < most and ran[sure] == text[sure]:
                sure += 1
            del ran[sure:]
            self._sure[row] = sure
        self._cache.truncate(self._sure)
        assert self._cache.lengths_B.tolist() == self._sure, "the draft's cache kept an entry"


class _ChainLaw:
    """The laws that a row's chain was drawn from."""

    def __init__(self, draft: DraftModel, laws: Sequence[Tensor], row: int) -> None:
        self._draft, self._laws, self._row = draft, laws, row

    def __call__(self, node: int) -> Tensor:
        """The [V] law of a node's token."""
        law_W = self._laws[node - 1][self._row]
        return torch.nn.functional.pad(law_W, (0, self._draft.target_size - len(law_W)))


def _run(draft: DraftModel, cache: RowCache, fed: Sequence[Sequence[int]]) -> Tensor:
    """Run each row's tokens, which may be none; states [B, H] after its newest."""
    model, counts = draft.model, [len(ids) for ids in fed]
    longest = max(counts)
    padded = [[*ids, *[0] * (longest - len(ids))] for ids in fed]
    lengths_B = cache.lengths_B.to(model.device)
    captured = model.run(
        torch.tensor(padded, device=model.device),
        # Padding must not ask for positions that the model has not.
        position_ids=query_positions(lengths_B, longest).clamp(max=draft.limit - 1),
        attention_mask=attention_masks(model.config, lengths_B, longest, model.dtype),
        cache=cache,
    )
    cache.advance(counts)
    last_B = torch.tensor(counts, device=model.device).sub(1).clamp(min=0)
    return captured.last_BTH[torch.arange(len(fed), device=model.device), last_B]
