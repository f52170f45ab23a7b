"""Self-speculation: the target drafts for itself with the first and the last positions alone.

For long texts, where reading keys and values takes most of a step: attention sinks and a window
stand in for the whole past (StreamingLLM, Xiao et al. 2023, as the draft of MagicDec, Chen et al.
2024). Their keys and values are the verified ones, copied, each with the position it was made at,
so nothing is ever run twice. Dimensions: C slots, S sinks, W window.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.data.cache import SLIDING, RowCache, attention_masks, query_positions
from outrider.data.sampling import GREEDY_BELOW
from outrider.data.target import Captured, Target
from outrider.eval.drafters import Draft, Noise
from outrider.eval.drafters.chains import draft_chain
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.loop_plans import WindowPlan


class WindowDrafter:
    """Drafts chains with the target's own weights; drawn at `temperature` above 0.

    A slot holds a position as long as it is a sink or among the last W; position p beyond the sinks
    lies in slot S + (p - S) mod W. Attention does not ask in which order slots lie.
    """

    layers: tuple[int, ...] = ()

    def __init__(self, target: Target, plan: WindowPlan, *, temperature: float = 0.0) -> None:
        """Draft for a target. Raises ValueError for one that has a sliding window itself."""
        config = target.config
        types = getattr(config, "layer_types", None)
        if SLIDING in types if types else getattr(config, "sliding_window", None) is not None:
            raise ValueError(
                f"target {target.name} has layers with a sliding window; {plan.label} drafts for "
                "targets that attend to the whole text: draft with a head or by lookup:LENGTH"
            )
        self._target, self._plan = target, plan
        self._temperature = 0.0 if temperature < GREEDY_BELOW else temperature
        self._verified: RowCache | None = None

    @property
    def siblings(self) -> Siblings:
        """Above temperature 0 drawn chains, else the likeliest tokens."""
        return Siblings.SINGLE if self._temperature else Siblings.CHOSEN

    def share(self, cache: RowCache) -> None:
        """Note where the verified keys and values are."""
        self._verified = cache

    def start(self, ids: Sequence[int], captured: Captured) -> None:  # noqa: ARG002
        """Begin a row."""
        assert self._verified is not None, "the loop shares its cache before it starts a row"
        self._root, self._known = ids[-1], len(ids)
        self._cache, self._num_copied = RowCache(1), 0

    def accept(self, ids: Sequence[int], captured: Captured) -> None:  # noqa: ARG002
        """Go on by these tokens."""
        self._root = ids[-1]
        self._known += len(ids)

    @torch.no_grad()
    def propose(self, max_depth: int, noise: Noise) -> Draft:
        """Draft at most `max_depth` tokens ahead of the root."""
        depth = min(self._plan.length, max_depth)
        if depth > 0:
            self._catch_up()
        num_kept = self._cache.get_seq_length()
        draft = draft_chain(
            self._root, depth, self._step, temperature=self._temperature, noise=noise
        )
        # Keys of drafts go, whether they will stand or not: the verified ones are copied.
        self._cache.truncate([num_kept])
        return draft

    def _catch_up(self) -> None:
        """Copy what the target has verified since."""
        verified, sinks, window = self._verified, self._plan.sinks, self._plan.window
        assert verified is not None
        end = self._known - 1
        assert int(verified.lengths_B[0]) == end, "the newest token alone is not verified"
        first = max(self._num_copied, sinks, end - window)
        places = [*range(self._num_copied, min(sinks, end)), *range(first, end)]
        slots = [p if p < sinks else sinks + (p - sinks) % window for p in places]
        self._cache.copy_slots(0, slots, verified, 0, places)
        self._num_copied = end

    def _step(self, tokens: Sequence[int]) -> Tensor:
        """Run the root or the newest draft; logits [V] after it."""
        target, cache = self._target, self._cache
        newest = tokens[-1] if tokens else self._root
        place = self._known - 1 + len(tokens)
        lengths_B = cache.lengths_B.to(target.device)
        captured = target.run(
            torch.tensor([[newest]], device=target.device),
            position_ids=query_positions(torch.full_like(lengths_B, place), 1),
            attention_mask=attention_masks(target.config, lengths_B, 1, target.dtype),
            cache=cache,
        )
        cache.advance(1)
        return target.logits(captured.last_BTH[0, -1:])[0].float()
