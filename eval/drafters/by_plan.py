"""The drafter that a plan asks for."""

from outrider.eval.drafters import Drafter
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.drafters.lookup import PromptLookup
from outrider.eval.drafters.model import DraftModel, ModelDrafter
from outrider.eval.drafters.suffix import SuffixDrafter
from outrider.eval.trees.plans import ChainPlan, LookupPlan, Plan, SuffixPlan, TextPlan
from outrider.heads import DraftHead


def drafter_by(
    plan: Plan, head: DraftHead | DraftModel | None, *, temperature: float = 0.0
) -> Drafter:
    """Drafts by a plan, with a head or a draft model where the plan needs one.

    Raises ValueError for a plan that needs a head and has none, or a chain's model and another
    shape.
    """
    if isinstance(plan, LookupPlan | SuffixPlan):
        return text_drafter(plan)
    if isinstance(head, DraftModel):
        if not isinstance(plan, ChainPlan):
            raise ValueError(f"plan is {plan}; a draft model drafts chains: give chain:LENGTH")
        return ModelDrafter(head, plan, temperature=temperature)
    if head is None:
        raise ValueError(
            "this draft plan needs a head and head is None; give --head, or draft by lookup:LENGTH"
        )
    return HeadDrafter(head, plan, temperature=temperature)


def text_drafter(plan: TextPlan) -> PromptLookup | SuffixDrafter:
    """Drafts from the text alone."""
    return PromptLookup(plan) if isinstance(plan, LookupPlan) else SuffixDrafter(plan)
