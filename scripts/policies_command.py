"""`outrider policies`: how long to draft, decided round by round, replayed exactly on a trace."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from outrider.data.files import write_whole
from outrider.data.target import Target
from outrider.eval.offline.batching import check_match, check_rule
from outrider.eval.offline.evaluate import describe, sampling_text
from outrider.eval.offline.traces import Trace
from outrider.eval.packing import packed
from outrider.eval.policies.figures import Costs, compare, play, policy_figures, policy_table
from outrider.eval.policies.named import policy_named
from outrider.eval.policies.paths import head_rows
from outrider.eval.policies.policy import Policy
from outrider.eval.report.provenance import file_hashes, plain, provenance
from outrider.eval.report.tables import signed
from outrider.heads import DraftHead
from outrider.scripts.eval_command import load_heads, open_traces


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which policies, for which heads, on which text, at which costs."""

    target: str
    """smollm2-demo, a Hub id, or a local folder."""

    head: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    """Folder of an exported head of any kind; repeat to compare."""

    trace: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Folder of a trace, or demo:heldout (what is used when left out); repeat for several."""

    policy: tuple[str, ...] = (
        "fixed:1",
        "fixed:3",
        "fixed:5",
        "confidence:0.4,8",
        "kept:0.4,8",
        "entropy:2,8",
        "heuristic:5,8",
        "dynamic:0.4,8",
        "oracle:8",
    )
    """fixed:K, confidence:P,MOST (max q below P is not drawn), kept:P,MOST (a drawn token below P
    is the last), entropy:NATS,MOST, heuristic:FIRST,MOST (and transient:), dynamic:P,MOST
    (transformers' moving threshold), table:BATCH=K,BATCH=K@BATCH, oracle:MOST (hindsight)."""

    c: float = 0.05
    """A draft step over a plain step of the target; outrider bench and tune measure it."""

    verify: tuple[str, ...] = ("1=1",)
    """TOKENS=RATIO: a call on so many tokens over a call on one, straight lines between."""

    temperature: tuple[float, ...] = (0.0,)
    """For demo:heldout: temperatures whose text is used, of 0 and 1."""

    per_kind: int | None = None
    """For demo:heldout: use the first so many prompts of each kind."""

    rule: str | None = None
    """For sampled text: rejection (drawn drafts, the default), match or point_mass."""

    out: Path | None = None
    """Write this .json file."""

    seed: int = 0
    """Of the intervals' bootstrap, and of the paths of drawn drafts."""

    def __post_init__(self) -> None:
        if not self.head or not self.policy:
            raise ValueError("no head or no policy given; name both with --head and --policy")
        for text in self.policy:
            policy_named(text)
        self.costs()
        if self.out is not None and self.out.suffix != ".json":
            raise ValueError(f"out is {self.out}; name a file that ends in .json")

    def costs(self) -> Costs:
        """The costs of the command line."""
        try:
            pairs = [(int(n), float(ratio)) for n, ratio in (one.split("=") for one in self.verify)]
        except ValueError as error:
            raise ValueError(f"verify is {list(self.verify)}; write TOKENS=RATIO") from error
        return Costs(c=self.c, verify=tuple(pairs))


def main(argv: Sequence[str] | None = None) -> None:
    """Replay the policies and print the table."""
    settings = tyro.cli(
        Settings, args=argv, prog="outrider policies", config=(tyro.conf.FlagCreatePairsOff,)
    )
    target = Target.load(settings.target)
    heads = load_heads(settings.head, target)
    policies = [policy_named(text) for text in settings.policy]
    traces = open_traces(
        settings.trace, target, heads.values(), settings.temperature, settings.per_kind
    )
    with packed(target, *heads.values()):
        parts = _replay(settings, target, heads, policies, traces)
    results, differences = parts["results"], parts["differences"]
    print(policy_table(results))
    costs = settings.costs()
    verify = ", ".join(f"{n} tokens {ratio:g}" for n, ratio in costs.verify)
    print(f"speed-up at c = {costs.c:g}, verify over a plain step: {verify}")
    for one in differences:
        print(
            f"{one['policy']} less {one['against']}, {one['head']}, {one['trace']}: speed-up "
            f"{signed(one['speedup'])}"
        )
    if settings.out is not None:
        notes = {
            "target": {"name": target.name, "hash": target.fingerprint()},
            "heads": {folder: file_hashes(Path(folder)) for folder in settings.head},
            "costs": {"c": costs.c, "verify": [list(pair) for pair in costs.verify]},
        }
        record = {"schema_version": 1, "provenance": {**provenance(), **notes}, "policies": parts}
        write_whole(settings.out, json.dumps(plain(record), indent=1, allow_nan=False) + "\n")
        print(settings.out)


def _replay(
    settings: Settings,
    target: Target,
    heads: dict[str, DraftHead],
    policies: Sequence[Policy],
    traces: dict[str, Trace],
) -> dict[str, Any]:
    """Every policy for every head on every trace."""
    results: list[dict[str, Any]] = []
    differences: list[dict[str, Any]] = []
    for trace_name, trace in traces.items():
        check_match(trace, target)
        for name, head in heads.items():
            used = fitting(policies, trace, settings.rule)
            rule = None if trace.sampling.is_greedy else settings.rule
            limit = getattr(target.config, "max_position_embeddings", None)
            rows = head_rows(
                head,
                trace,
                depth=max(policy.most for policy in used),
                rule=rule,
                seed=settings.seed,
                position_limit=limit,
            )
            named = zip(trace.row_ids, rows, strict=True)
            outcomes = play(used, named, settings.costs())
            about = {"head": name, "trace": trace_name, "sampling": sampling_text(trace.sampling)}
            about["rule"] = check_rule(rule, trace.sampling)
            results += [about | policy_figures(one, seed=settings.seed) for one in outcomes]
            differences += [about | one for one in compare(outcomes, seed=settings.seed)]
    about_traces = {name: describe(trace) for name, trace in traces.items()}
    return {"traces": about_traces, "results": results, "differences": differences}


def fitting(policies: Sequence[Policy], trace: Trace, rule: str | None) -> list[Policy]:
    """The policies that this text can be replayed with; says which cannot."""
    is_drawn = check_rule(None if trace.sampling.is_greedy else rule, trace.sampling) == "rejection"
    used = [policy for policy in policies if not (is_drawn and policy.reads_rejected)]
    for policy in policies:
        if policy not in used:
            print(
                f"{policy.label} is left out on {trace.folder.name}: it learns from rejected "
                "tokens, which a trace with drawn drafts does not hold; give --rule match"
            )
    if not used:
        raise ValueError("no policy is left to replay; give --rule match, or other policies")
    return used
