"""The drafter that a plan asks for."""

from typing import TypeAlias

from outrider.data.target import Target
from outrider.eval.drafters import Drafter
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.drafters.hybrid import Costs, HybridDrafter
from outrider.eval.drafters.lookahead import LookaheadDrafter
from outrider.eval.drafters.lookup import PromptLookup
from outrider.eval.drafters.model import DraftModel, ModelDrafter, draft_model
from outrider.eval.drafters.oracle import OracleDrafter
from outrider.eval.drafters.suffix import SuffixDrafter
from outrider.eval.drafters.universal import TextModel, UniversalDrafter, text_model
from outrider.eval.drafters.window import WindowDrafter
from outrider.eval.trees.loop_plans import (
    HybridPlan,
    LookaheadPlan,
    LoopPlan,
    OraclePlan,
    PastPlan,
    UniversalPlan,
    WindowPlan,
)
from outrider.eval.trees.plans import (
    ChainPlan,
    HeadPlan,
    LookupPlan,
    Plan,
    SuffixPlan,
    TextPlan,
)
from outrider.heads import DraftHead

Network: TypeAlias = DraftHead | DraftModel | TextModel | Target
"""What may draft; the target itself where it drafts with a window of its past."""

_HEAD_STEP, _MODEL_STEP = 0.06, 0.35
"""A draft step over a target call, roughly: one layer of thirty and its table; a third of one."""


def drafter_by(
    plan: Plan | LoopPlan, network: Network | None, *, temperature: float = 0.0
) -> Drafter:
    """Drafts by a plan, with a head, a draft model or the target where the plan needs one.

    A hybrid's model drafts at temperature 0, whatever the text's. Raises ValueError for a plan that
    needs a network of another kind than this, or a chain's model and another shape.
    """
    if isinstance(plan, LookupPlan | SuffixPlan):
        return text_drafter(plan)
    if isinstance(plan, PastPlan):
        return SuffixDrafter(plan.suffix, past=plan.past)
    if isinstance(plan, LookaheadPlan):
        return LookaheadDrafter(plan)
    if isinstance(plan, OraclePlan):
        return OracleDrafter(plan)
    if isinstance(plan, WindowPlan):
        if not isinstance(network, Target):
            raise ValueError(f"plan is {plan.label}; the target drafts for itself: give the target")
        return WindowDrafter(network, plan, temperature=temperature)
    if isinstance(plan, UniversalPlan):
        if not isinstance(network, TextModel):
            raise ValueError(f"plan is {plan.label}; it needs a draft model: give --model")
        return UniversalDrafter(network, plan)
    if isinstance(plan, HybridPlan):
        model = _by_network(plan.model, network, 0.0)
        step = _HEAD_STEP if isinstance(network, DraftHead) else _MODEL_STEP
        costs = Costs(model=step * plan.model.depth)
        return HybridDrafter(text_drafter(plan.text), model, costs)
    return _by_network(plan, network, temperature)


def network_for(
    plan: Plan | LoopPlan, target: Target, head: DraftHead | None, model: str | None
) -> Network | None:
    """What a plan drafts with: nothing, the target, a model by this name, or the head.

    Raises ValueError for a model that has another tokenizer, unless the plan goes by text.
    """
    if isinstance(plan, LookupPlan | SuffixPlan | PastPlan | LookaheadPlan | OraclePlan):
        return None
    if isinstance(plan, WindowPlan):
        return target
    if model is None:
        return head
    return (
        text_model(model, target) if isinstance(plan, UniversalPlan) else draft_model(model, target)
    )


def text_drafter(plan: TextPlan) -> PromptLookup | SuffixDrafter:
    """Drafts from the text alone."""
    return PromptLookup(plan) if isinstance(plan, LookupPlan) else SuffixDrafter(plan)


def _by_network(plan: HeadPlan, network: Network | None, temperature: float) -> Drafter:
    if isinstance(network, DraftModel):
        if not isinstance(plan, ChainPlan):
            raise ValueError(f"plan is {plan}; a draft model drafts chains: give chain:LENGTH")
        return ModelDrafter(network, plan, temperature=temperature)
    if not isinstance(network, DraftHead):
        kind = "None" if network is None else type(network).__name__
        raise ValueError(
            f"this draft plan needs a head and head is {kind}; give --head, or draft by "
            "lookup:LENGTH"
        )
    return HeadDrafter(network, plan, temperature=temperature)
