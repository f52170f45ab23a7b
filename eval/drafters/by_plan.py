"""The drafter that a plan asks for."""

from outrider.eval.drafters import Drafter
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.drafters.lookup import PromptLookup
from outrider.eval.trees.plans import LookupPlan, Plan
from outrider.heads import DraftHead


def drafter_by(plan: Plan, head: DraftHead | None, *, temperature: float = 0.0) -> Drafter:
    """Drafts by a plan, with a head where the plan needs one.

    Raises ValueError for a plan that needs a head and has none.
    """
    if isinstance(plan, LookupPlan):
        return PromptLookup(plan)
    if head is None:
        raise ValueError(
            "this draft plan needs a head and head is None; give --head, or draft by lookup:LENGTH"
        )
    return HeadDrafter(head, plan, temperature=temperature)
