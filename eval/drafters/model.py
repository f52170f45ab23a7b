"""An independent draft model: any causal LM with the target's tokenizer drafts a chain.

Leviathan et al. 2023, section 2. It reads the text alone, none of the target's states. Dimensions:
V vocabulary, W draft vocabulary (the first ids of both models).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.data.cache import RowCache
from outrider.data.sampling import GREEDY_BELOW
from outrider.data.target import Captured, Target
from outrider.eval.drafters import Draft, Noise
from outrider.eval.drafters.chains import draft_chain, run_new
from outrider.eval.rules.verdict import Siblings
from outrider.eval.trees.plans import ChainPlan


@dataclass(frozen=True, eq=False)
class DraftModel:
    """A causal LM that may draft for a target."""

    model: Target
    num_ids: int
    """W: it may propose the ids below."""
    target_size: int
    """V of the target."""

    @property
    def limit(self) -> int:
        """Positions of the model, past which it drafts nothing."""
        return int(getattr(self.model.config, "max_position_embeddings", 1 << 62))

    def logits(self, last_NH: Tensor) -> Tensor:
        """Draft logits [N, W] from states after the model's final norm, fp32."""
        return self.model.logits(last_NH)[..., : self.num_ids].float()


def draft_model(name: str, target: Target) -> DraftModel:
    """Load a draft model: a folder, a Hub id, or layers:N for the target's own first N layers.

    Raises ValueError for a model of another tokenizer.
    """
    kind, _, number = name.partition(":")
    if kind == "layers":
        count = int(number) if number.isdecimal() else 0
        return as_draft_model(first_layers(target, count), target)
    return as_draft_model(Target.load(name, dtype=target.dtype, device=target.device), target)


def as_draft_model(model: Target, target: Target) -> DraftModel:
    """A model beside its target. Raises ValueError where their tokenizers differ."""
    ours, theirs = (
        None if one.tokenizer is None else one.tokenizer.get_vocab() for one in (target, model)
    )
    if ours != theirs or model.tokenizer_size != target.tokenizer_size:
        raise ValueError(
            f"the draft model {model.name} has another tokenizer than {target.name} "
            f"({model.tokenizer_size} and {target.tokenizer_size} ids); its tokens would mean "
            "other text: name a model of the target's family"
        )
    return DraftModel(model, target.tokenizer_size, target.vocab_size)


def first_layers(target: Target, count: int) -> Target:
    """A model of the target's first `count` layers, with its norm and tables: an early exit.

    Raises ValueError for a count that the target has not.
    """
    if not 1 <= count < target.num_layers:
        raise ValueError(
            f"layers is {count}; draft with 1 to {target.num_layers - 1} of the target's layers"
        )
    # The tables are frozen and large: share them, copy the rest.
    shared: dict[int, object] = {id(one): one for one in target.model.parameters()}
    model = copy.deepcopy(target.model, shared)
    config = model.config.get_text_config(decoder=True)
    config.num_hidden_layers = count
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(config.layer_types)[:count]
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ModuleList) and len(child) == target.num_layers:
                setattr(module, name, child[:count])
    return Target.from_model(model, target.tokenizer, name=f"{target.name}, {count} layers")


class ModelDrafter:
    """Drafts chains for one row at a time; drawn at `temperature` above 0, likeliest at 0."""

    layers: tuple[int, ...] = ()

    def __init__(self, draft: DraftModel, plan: ChainPlan, *, temperature: float = 0.0) -> None:
        self._draft, self._plan = draft, plan
        self._temperature = 0.0 if temperature < GREEDY_BELOW else temperature

    @property
    def siblings(self) -> Siblings:
        """Above temperature 0 drawn chains, else the likeliest tokens."""
        return Siblings.SINGLE if self._temperature else Siblings.CHOSEN

    def start(self, ids: Sequence[int], captured: Captured) -> None:  # noqa: ARG002
        """Begin a row."""
        self._ids, self._cache = list(ids), RowCache(1)

    def accept(self, ids: Sequence[int], captured: Captured) -> None:  # noqa: ARG002
        """Go on by these tokens."""
        self._ids += ids

    @torch.no_grad()
    def propose(self, max_depth: int, noise: Noise) -> Draft:
        """Draft at most `max_depth` tokens ahead of the root, within the model's positions."""
        known = len(self._ids)
        depth = min(self._plan.depth, max_depth, self._draft.limit - known + 1)
        draft = draft_chain(
            self._ids[-1],
            depth,
            lambda tokens: self._step([*self._ids, *tokens]),
            temperature=self._temperature,
            noise=noise,
            scatter=self._scatter,
        )
        # Keys of drafts go, whether they will stand or not, and the root's: it runs again.
        self._cache.truncate([min(known - 1, self._cache.get_seq_length())])
        return draft

    def _step(self, ids: Sequence[int]) -> Tensor:
        """Run what the cache lacks of these tokens; logits [W] after the newest."""
        new = ids[self._cache.get_seq_length() :]
        return self._draft.logits(run_new(self._draft.model, self._cache, new))[0]

    def _scatter(self, law_W: Tensor) -> Tensor:
        """The law over the target's vocabulary."""
        return torch.nn.functional.pad(law_W, (0, self._draft.target_size - len(law_W)))
