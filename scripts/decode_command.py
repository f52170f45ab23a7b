"""`outrider decode`: write text with a head, exactly, and show what was accepted and saved."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro

from outrider.data.answers import Request, prompt_ids
from outrider.data.options import parse_options, state_options
from outrider.data.sampling import row_key
from outrider.data.sources import records
from outrider.data.target import Target
from outrider.eval.decode import Decoded, Decoding, OnTokens, decode, pick_rule
from outrider.eval.divergence import Context, Divergence, find_divergence
from outrider.eval.drafters import Drafter
from outrider.eval.drafters.by_plan import Network, drafter_by, network_for
from outrider.eval.drafters.oracle import OracleDrafter, check_oracle_rule
from outrider.eval.drafters.policed import PolicyDrafter
from outrider.eval.drafters.replay import Plain
from outrider.eval.link import check_mode, head_options, judged_head
from outrider.eval.metrics import count
from outrider.eval.names import Run, names_table, reconcile
from outrider.eval.packing import packed
from outrider.eval.policies.named import policy_named
from outrider.eval.rules import rule_named
from outrider.eval.trees.loop_plans import (
    HybridPlan,
    OraclePlan,
    WindowPlan,
    draft_named,
    draws,
)
from outrider.eval.trees.plans import ChainPlan, HeadPlan, LookupPlan, SuffixPlan
from outrider.heads import DraftHead

_GREEN, _RESET = "\033[32m", "\033[0m"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What writes, what drafts, and on which prompts."""

    target: str
    """smollm2-demo, a Hub id, or a local folder."""

    head: str | None = None
    """Folder of an exported head, native or speculators' layout; none decodes plainly."""

    model: str | None = None
    """Instead of a head: a draft model with the target's tokenizer, a folder, a Hub id, or layers:N
    for the target's own first N layers. It drafts chains; with --draft universal:LENGTH its
    tokenizer may be another one."""

    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """What the user says; repeat for several conversations."""

    data: str | None = None
    """Prompts from rows instead: demo:heldout, or any rows with prompt_ids or messages."""

    limit: int | None = None
    """Use the first so many rows of data."""

    draft: str = "chain:3"
    """Draft plan: chain:LENGTH, tree:DEPTH,WIDTH,NODES, drawn:DEPTH,WIDTH,NODES, static:FILE, or
    hybrid:lookup:LENGTH+chain:LENGTH and the like. Without a head: lookup:LENGTH,NGRAM,
    suffix:LENGTH,MATCH, or suffix:LENGTH,MATCH,PAST to count the last PAST tokens of the answers
    before as well, lookahead:WINDOW,NGRAM,POOL, window:LENGTH,WINDOW,SINKS (the target drafts with
    the first and last positions alone), universal:LENGTH with a model of any tokenizer, and for
    ceilings oracle:LENGTH or synthetic:LENGTH,ALPHA."""

    policy: str | None = None
    """How long every chain is, in place of draft: see outrider policies."""

    template_options: tuple[str, ...] | None = None
    """Mode of the chat template, as enable_thinking=false; the head's own when left out."""

    skip_plain: bool = False
    """Do not decode each prompt plainly too, to compare text and speed."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of target and head. float32 shows exactness, bfloat16 is faster."""

    device: str = "cpu"
    """Where both run: cpu, cuda, cuda:1 ..."""

    threads: int | None = None
    """CPU threads; torch's default when left out."""

    names: bool = False
    """Print the run in the terms of other tools as well; see outrider names."""

    decoding: Decoding = field(default_factory=Decoding)

    def __post_init__(self) -> None:
        if bool(self.prompt) == (self.data is not None):
            raise ValueError("give either --prompt or --data, and not both")
        if self.head is not None and self.model is not None:
            raise ValueError(f"head is {self.head} and model is {self.model}; give one of them")
        for name in ("limit", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give 1 or more")
        if self.names and not isinstance(
            draft_named(self.draft), ChainPlan | LookupPlan | SuffixPlan
        ):
            raise ValueError(
                f"names of other tools are for one chain a round, and draft is {self.draft!r}; "
                "give a chain or a lookup, or leave --names out"
            )
        if isinstance(draft_named(self.draft), OraclePlan):
            check_oracle_rule(self.draft, self.decoding.rule)
        if self.policy is not None:
            policy_named(self.policy)
            if self.head is None:
                raise ValueError(f"policy is {self.policy!r}; it needs a head, so give --head")
        parse_options(self.template_options or ())


class Prompt(NamedTuple):
    """A prompt as ids; `row` keys its noise."""

    name: str
    row: int
    ids: list[int]


class Pair(NamedTuple):
    """One prompt decoded with drafts and, when asked for, without."""

    drafted: Decoded
    plain: Decoded | None


def main(argv: Sequence[str] | None = None) -> None:
    """Print text, tokens per call and speed; exit status 1 where a text differs but must not."""
    settings = tyro.cli(Settings, args=argv, prog="outrider decode", config=_TYRO)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    dtype = getattr(torch, settings.dtype)
    target = Target.load(settings.target, dtype=dtype, device=settings.device)
    prompts = read_prompts(settings, target)
    head = load_drafting(settings, target)
    drafter = make_drafter(settings, head)
    with packed(target, head):
        pairs, found = decode_all(settings, target, prompts, drafter)
    keeps_text = pick_rule(settings.decoding, drafter or Plain()).keeps_text
    if len(pairs) > 1:
        print(f"=== {len(pairs)} prompts: {figures(pairs, keeps_text=keeps_text)}")
    if settings.names:
        runs = [pair.drafted for pair in pairs]
        print(names_table(reconcile([Run(one.rounds, one.finish) for one in runs])))
    if found and dtype == torch.float32:
        sys.exit("error: a text differs from plain decoding; in float32 this must not happen")
    if any(one.kind == "defect" for one in found):
        sys.exit("error: a text differs from plain decoding by more than rounding does")


def decode_all(
    settings: Settings, target: Target, prompts: Sequence[Prompt], drafter: Drafter | None
) -> tuple[list[Pair], list[Divergence]]:
    """Decode and print every prompt; returns the texts, and where any parts from plain decoding."""
    decoding = settings.decoding
    keeps_text = pick_rule(decoding, drafter or Plain()).keeps_text
    pairs: list[Pair] = []
    found: list[Divergence] = []
    for prompt in prompts:
        print(f"--- {prompt.name} ({len(prompt.ids)} tokens)")
        plain = None
        if isinstance(drafter, OracleDrafter):
            plain = decode(target, prompt.ids, None, decoding, row=prompt.row)
            drafter.learn(prompt.ids, plain.ids)
        drafted = decode(
            target,
            prompt.ids,
            drafter,
            decoding,
            row=prompt.row,
            on_tokens=printer(target, is_terminal=sys.stdout.isatty()),
        )
        if plain is None and drafter is not None and not settings.skip_plain:
            plain = decode(target, prompt.ids, None, decoding, row=prompt.row)
        pairs.append(Pair(drafted, plain))
        print(f"\n    {figures(pairs[-1:], keeps_text=keeps_text)}")
        if keeps_text and not is_same(pairs[-1]):
            found.append(divergence(target, prompt, decoding, pairs[-1]))
            print(f"    {found[-1].text()}")
    return pairs, found


def divergence(target: Target, prompt: Prompt, decoding: Decoding, pair: Pair) -> Divergence:
    """Where and why the two texts part."""
    assert pair.plain is not None
    context = Context(
        prompt_ids=prompt.ids, sampling=decoding.sampling, seed=decoding.seed, row=prompt.row
    )
    found = find_divergence(target, context, pair.plain.ids, pair.drafted.ids)
    assert found is not None, "equal texts do not part"
    return found


_TYRO = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)


def load_drafting(settings: Settings, target: Target) -> Network | None:
    """What drafts beside the target; None for drafts of the text alone, or for none."""
    plan = ChainPlan(1) if settings.policy is not None else draft_named(settings.draft)
    head = None
    if settings.head is not None and isinstance(plan, HeadPlan | HybridPlan):
        head = judged_head(settings.head, target, dtype=getattr(torch, settings.dtype))
    return network_for(plan, target, head, settings.model)


def make_drafter(settings: Settings, network: Network | None) -> Drafter | None:
    """The plan's drafter; its drafts are drawn where the rule asks for that."""
    plan, decoding = draft_named(settings.draft), settings.decoding
    policy = None if settings.policy is None else policy_named(settings.policy)
    if policy is not None:
        plan = ChainPlan(policy.most)
    if network is None and isinstance(plan, HeadPlan):
        return None
    is_drawn = draws(plan) and not decoding.sampling.is_greedy
    if decoding.rule is not None and isinstance(plan, ChainPlan | WindowPlan):
        is_drawn = rule_named(decoding.rule).draws_drafts
    temperature = decoding.sampling.temperature if is_drawn else 0.0
    if policy is not None and isinstance(network, DraftHead):
        return PolicyDrafter(network, policy, temperature=temperature)
    return drafter_by(plan, network, temperature=temperature)


def read_prompts(settings: Settings, target: Target) -> list[Prompt]:
    """The prompts of the command line or of the data, each once."""
    if settings.data is None:
        names = [f"prompt {number}" for number in range(1, len(settings.prompt) + 1)]
        said = [[{"role": "user", "content": text}] for text in settings.prompt]
        ids = _render(target, said, settings)
        return [
            Prompt(name, row, one) for row, (name, one) in enumerate(zip(names, ids, strict=True))
        ]
    found: dict[tuple[int, ...], Prompt] = {}
    for number, record in enumerate(records(settings.data), start=1):
        if settings.limit is not None and len(found) == settings.limit:
            break
        if isinstance(record, str):
            raise ValueError(f"{settings.data} row {number} is {record}; mend or remove it")
        name = str(record.get("id", f"row-{number:06d}"))
        ids = list(record.get("prompt_ids") or _from_messages(record, number, settings, target))
        found.setdefault(tuple(ids), Prompt(name, row_key(name), ids))
    return list(found.values())


def _from_messages(record: object, number: int, settings: Settings, target: Target) -> list[int]:
    messages = record.get("messages") if isinstance(record, dict) else None
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError(
            f"{settings.data} row {number} has neither prompt_ids nor messages with a user's turn; "
            "give one of them"
        )
    return _render(target, [messages], settings)[0]


def _render(
    target: Target, conversations: list[list[dict[str, str]]], settings: Settings
) -> list[list[int]]:
    sampling = settings.decoding.sampling
    requests = [Request("", one, sampling, {}) for one in conversations]
    return prompt_ids(target, requests, _options(settings))


def _options(settings: Settings) -> dict[str, Any]:
    """The chat template's options: as given, else those that the head was trained with."""
    head, given = settings.head, settings.template_options
    if given is None:
        return {} if head is None else head_options(head)
    options = parse_options(given)
    if head is not None:
        check_mode(head, [state_options(options)], "this command")
    return options


def printer(target: Target, *, is_terminal: bool) -> OnTokens:
    """Prints text as it comes; on a terminal, accepted drafts are green."""
    tokenizer = target.tokenizer
    assert tokenizer is not None, "a target loaded from a folder has one"
    ids: list[int] = []
    shown = ""

    def show(new_ids: Sequence[int], is_drafted: Sequence[bool]) -> None:
        nonlocal shown
        for token, accepted in zip(new_ids, is_drafted, strict=True):
            ids.append(token)
            # Half a character decodes to a replacement sign: wait for its other half.
            text = str(tokenizer.decode(ids, skip_special_tokens=True)).rstrip("\ufffd")
            piece, shown = text[len(shown) :], text
            is_green = accepted and is_terminal
            print(f"{_GREEN}{piece}{_RESET}" if is_green else piece, end="", flush=True)

    return show


def figures(pairs: Sequence[Pair], *, keeps_text: bool) -> str:
    """Tokens per call and milliseconds a token, against plain decoding where there is one."""
    counts = count([pair.drafted.rounds for pair in pairs])
    text = f"{sum(len(pair.drafted.ids) for pair in pairs)} tokens, {counts.rounds} target calls"
    if counts.rounds:
        text += (
            f", {counts.tau:.2f} a call; {_milliseconds(pairs, lambda p: p.drafted):.1f} ms a token"
        )
    beside = [pair for pair in pairs if pair.plain is not None]
    if not beside or not counts.rounds:
        return text
    ours = _milliseconds(beside, lambda pair: pair.drafted)
    plain = _milliseconds(beside, lambda pair: pair.plain)
    text += f", plain {plain:.1f}: {plain / ours:.2f}x"
    # Rejection and point mass keep the law, not the text.
    same = f"; same text in {sum(map(is_same, beside))} of {len(beside)}"
    return text + same if keeps_text else text


def _milliseconds(pairs: Sequence[Pair], which: Callable[[Pair], Decoded | None]) -> float:
    """Per token after the prefill's."""
    found = [one for pair in pairs if (one := which(pair)) is not None]
    tokens = sum(len(one.ids) - 1 for one in found)
    return 1000 * sum(one.seconds.decode for one in found) / max(1, tokens)


def is_same(pair: Pair) -> bool:
    """Whether both texts are equal; true when there is only one."""
    return pair.plain is None or pair.plain.ids == pair.drafted.ids
