"""`outrider lossy`: what inexact acceptance rules do to the text, and what speed that buys."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro

from outrider.data.files import write_whole
from outrider.data.sampling import Sampling, row_key
from outrider.data.target import Target
from outrider.eval.bias import Bias, bias, decode_lossy
from outrider.eval.decode import Decoding
from outrider.eval.drafters.head import HeadDrafter
from outrider.eval.link import judged_head
from outrider.eval.lossy import LOSSY_RULES, LossyRule, ensemble, nucleus, threshold, typical
from outrider.eval.offline.texts import read_texts
from outrider.eval.packing import packed
from outrider.eval.trees.plans import ChainPlan, plan_named

Name = Literal["typical", "nucleus", "threshold", "ensemble"]


@dataclass(frozen=True, kw_only=True)
class LossySettings:
    """Which rules, with which head, on which prompts."""

    target: str
    """smollm2-demo, a Hub id, or a local folder."""

    head: str
    """Folder of an exported head."""

    rule: tuple[Name, ...] = ("typical", "nucleus", "threshold", "ensemble")
    """Rules: Medusa's typical and nucleus, SGLang's threshold, transformers' ensemble."""

    draft: str = "chain:3"
    """Draft plan; the ensemble rule takes a chain, whose tokens are then drawn."""

    epsilon: float = 0.3
    """typical: a draft stands above this probability, whatever the entropy."""

    delta: float = 0.09
    """typical: or above this times exp(-entropy), if that is less."""

    accept: float = 0.7
    """threshold: what the summed probability of the drafts is divided by; 1 is exact."""

    single: float = 1.0
    """threshold: a draft at least this likely stands; 1 is exact."""

    weight: float = 0.7
    """ensemble: the target's share of the law that is emitted; 1 is exact."""

    text: str = "demo:heldout"
    """Answered rows whose prompts are used: demo:heldout or a file of outrider generate."""

    per_kind: int = 2
    """Prompts of each kind."""

    max_new_tokens: int = 64
    """Tokens to write for each prompt."""

    seed: int = 0
    """Keys the noise."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of target and head."""

    device: str = "cpu"
    """Where both run: cpu, cuda, cuda:1 ..."""

    out: Path | None = None
    """Write the rows to this .json file; they are marked inexact."""

    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))

    def __post_init__(self) -> None:
        if self.sampling.is_greedy:
            raise ValueError(
                f"temperature is {self.sampling.temperature}; lossy rules are measured above 0"
            )
        if "ensemble" in self.rule and not isinstance(plan_named(self.draft), ChainPlan):
            raise ValueError(
                f"draft is {self.draft!r} with rule ensemble, which judges drawn chains; give "
                "chain:LENGTH or leave ensemble out of --rule"
            )
        if self.out is not None and self.out.suffix != ".json":
            raise ValueError(f"out is {self.out}; name a file that ends in .json")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print the bias of each rule."""
    settings = tyro.cli(
        LossySettings,
        args=argv,
        prog="outrider lossy",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    dtype = getattr(torch, settings.dtype)
    target = Target.load(settings.target, dtype=dtype, device=settings.device)
    head = judged_head(settings.head, target, dtype=dtype)
    # Only the prompts count: any answers to them will do.
    prompts: dict[tuple[int, ...], str] = {}
    for text in read_texts(settings.text, Sampling(), per_kind=settings.per_kind):
        prompts.setdefault(tuple(text.prompt_ids), text.row_id)
    decoding = Decoding(
        max_new_tokens=settings.max_new_tokens, sampling=settings.sampling, seed=settings.seed
    )
    plan = plan_named(settings.draft)
    found: list[Bias] = []
    for name in settings.rule:
        rule = make_rule(settings, name)
        temperature = settings.sampling.temperature if rule.draws_drafts else 0.0
        drafter = HeadDrafter(head, plan, temperature=temperature)
        with packed(target, head):
            texts = [
                decode_lossy(rule, target, ids, drafter, decoding, row=row_key(row_id))
                for ids, row_id in prompts.items()
            ]
        found.append(bias(name, rule, texts))
    print(f"INEXACT: these texts are not the target's. {settings.draft}, {len(prompts)} prompts")
    print(table(found))
    if settings.out is not None:
        write_whole(settings.out, json.dumps([one.row() for one in found], indent=1) + "\n")
        print(settings.out)


def make_rule(settings: LossySettings, name: Name) -> LossyRule:
    """The rule with its settings."""
    makers: dict[str, Callable[[], LossyRule]] = {
        "typical": lambda: typical(settings.epsilon, settings.delta),
        "nucleus": nucleus,
        "threshold": lambda: threshold(settings.accept, settings.single),
        "ensemble": lambda: ensemble(settings.weight),
    }
    assert makers.keys() == LOSSY_RULES.keys()
    return makers[name]()


def table(found: Sequence[Bias]) -> str:
    """The biases as lines of text."""
    columns = ("rule", "TV a token", "largest", "formula", "agree for", "tokens a call")
    widths = (11, 12, 9, 9, 17, 15)
    lines = ["".join(f"{name:<{width}}" for name, width in zip(columns, widths, strict=True))]
    lines[0] += "what the formula says"
    for one in found:
        formula = "-" if one.closed_form_tv is None else f"{one.closed_form_tv:.4f}"
        agree = f"{one.divergence_length:.1f} of {one.longest}"
        lines.append(
            f"{one.rule:<11}{one.tv_per_step:<12.4f}{one.largest_tv:<9.3f}{formula:<9}{agree:<17}"
            f"{one.tokens_a_call:<15.2f}{one.formula}"
        )
    return "\n".join(lines)
