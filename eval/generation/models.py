"""Models as targets, for as long as a call lasts, and what they draft with.

A `Target` freezes its model; a caller's model is left as it was found.
"""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.data.rollback import check_rolls_back, probe_roll_back
from outrider.data.target import Target
from outrider.eval.decode import Decoding
from outrider.eval.drafters import Drafter
from outrider.eval.drafters.by_plan import drafter_by
from outrider.eval.drafters.model import DraftModel, as_draft_model
from outrider.eval.link import judged_head
from outrider.eval.rows import EachRow, RowsDrafter
from outrider.eval.rows.head import HeadRows
from outrider.eval.rows.model import ModelRows
from outrider.eval.rules import rule_named
from outrider.eval.trees.plans import (
    ChainPlan,
    DrawnPlan,
    LookupPlan,
    Plan,
    SuffixPlan,
    is_drawn,
    plan_named,
)
from outrider.heads import DraftHead

Head: TypeAlias = str | Path | DraftHead | DraftModel | Target | PreTrainedModel
"""What may draft."""

# Checks of a model cost a few passes of a few tokens: once is enough.
_wrapped: WeakKeyDictionary[PreTrainedModel, Target] = WeakKeyDictionary()


@contextmanager
def as_found(*models: object) -> Generator[None]:
    """Within, models are frozen and in eval mode; behind it they are as they were."""
    chosen = [one for one in models if isinstance(one, PreTrainedModel)]
    modes = [(module, module.training) for one in chosen for module in one.modules()]
    grads = [(weight, weight.requires_grad) for one in chosen for weight in one.parameters()]
    for one in chosen:
        one.eval().requires_grad_(requires_grad=False)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for weight, needs in grads:
            weight.requires_grad_(needs)


def target_of(model: PreTrainedModel | Target, tokenizer: PreTrainedTokenizerBase | None) -> Target:
    """A model as a target; raises ValueError where it cannot be one, or cannot be rolled back."""
    if isinstance(model, Target):
        check_rolls_back(model)
        return model
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__}; give a transformers model or an outrider Target"
        )
    found, table = _wrapped.get(model), model.get_output_embeddings()
    weight = getattr(table, "weight", None)
    is_current = (
        found is not None
        and found.tokenizer is tokenizer
        and weight is not None
        and found.output_VH.data_ptr() == weight.data_ptr()
        and found.output_VH.dtype == weight.dtype
    )
    if found is not None and is_current:
        check_rolls_back(found)  # its attention may have been set anew
        return found
    name = str(getattr(model.config, "name_or_path", "") or "in-memory")
    folder = Path(name) if Path(name).is_dir() else None
    check_rolls_back(Target.outlined(model, tokenizer, name=name))
    found = Target.from_model(model, tokenizer, name=name, folder=folder)
    probe_roll_back(found)
    _wrapped[model] = found
    return found


def drafts_with(
    head: Head | None, target: Target, tokenizer: PreTrainedTokenizerBase | None
) -> DraftHead | DraftModel | None:
    """A head from its folder, a draft model beside its target; what is loaded already as it is."""
    if isinstance(head, str | Path):
        return judged_head(head, target, dtype=target.dtype)
    if isinstance(head, PreTrainedModel):
        head = target_of(head, tokenizer or target.tokenizer)
    if isinstance(head, Target):
        check_rolls_back(head)
        return as_draft_model(head, target)
    if isinstance(head, DraftHead) and head.tables is None:
        raise ValueError(
            "head has no target tables; attach them, head.attach(tables(target)), or give its "
            "folder"
        )
    if head is not None and not isinstance(head, DraftHead | DraftModel):
        raise ValueError(
            f"head is a {type(head).__name__}; give a head's folder, a DraftHead, a draft model of "
            "transformers, or None"
        )
    return head


def plan_of(draft: str | None, drafting: DraftHead | DraftModel | None) -> Plan | None:
    """The draft plan: as it is written, chain:3 for a head, chain:5 for a model, else none.

    Raises ValueError for a head that the plan would not use.
    """
    if draft is None:
        if drafting is None:
            return None
        return ChainPlan(5 if isinstance(drafting, DraftModel) else 3)
    plan = plan_named(draft)
    if isinstance(plan, LookupPlan | SuffixPlan) and drafting is not None:
        raise ValueError(
            f"draft is {draft!r}, which drafts from the text alone, and a head is given; leave one "
            "of them out"
        )
    return plan


def temperature_of(plan: Plan | None, decoding: Decoding) -> float:
    """What drafts are drawn at: the text's, where the plan and the rule draw, else 0."""
    if plan is None or decoding.sampling.is_greedy:
        return 0.0
    draws = is_drawn(plan)
    if decoding.rule is not None and isinstance(plan, ChainPlan):
        draws = rule_named(decoding.rule).draws_drafts
    return decoding.sampling.temperature if draws else 0.0


def drafter_of(
    plan: Plan | None, drafting: DraftHead | DraftModel | None, temperature: float
) -> Drafter | None:
    """A drafter for one row; None for plain decoding."""
    return None if plan is None else drafter_by(plan, drafting, temperature=temperature)


def rows_drafter_of(
    plan: Plan | None,
    drafting: DraftHead | DraftModel | None,
    temperature: float,
    num_rows: int,
) -> RowsDrafter | None:
    """A drafter for many rows: in step where it can be, else one for each."""
    if isinstance(drafting, DraftModel) and isinstance(plan, ChainPlan):
        return ModelRows(drafting, plan, num_rows, temperature=temperature)
    if isinstance(drafting, DraftHead) and plan is not None and not isinstance(plan, DrawnPlan):
        return HeadRows(drafting, plan, num_rows, temperature=temperature)
    if plan is None:
        return None
    return EachRow(lambda: drafter_by(plan, drafting, temperature=temperature))
