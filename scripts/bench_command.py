"""`outrider bench`: wall-clock speed of a head against plain decoding, on the same prompts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.bench import BenchSettings, Prompt, bench, table
from outrider.eval.link import judged_head
from outrider.eval.offline.texts import read_texts
from outrider.eval.report.page import write_report
from outrider.eval.report.provenance import file_hashes


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Which head on which prompts, and what is timed."""

    target: str
    """smollm2-demo, a Hub id, or a local folder."""

    head: str
    """Folder of an exported head."""

    text: str = "demo:heldout"
    """Answered rows whose prompts are used: demo:heldout or a file of outrider generate."""

    per_kind: int = 3
    """Prompts of each kind."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of target and head, the same for plain decoding."""

    threads: int | None = None
    """CPU threads; torch's default when left out."""

    device: str = "cpu"
    """Where both run: cpu, cuda, cuda:1 ..."""

    out: Path | None = None
    """Write this .json file, and a page with plots beside it."""

    bench: BenchSettings = field(default_factory=BenchSettings)

    def __post_init__(self) -> None:
        for name in ("per_kind", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; give 1 or more")
        if self.out is not None and self.out.suffix != ".json":
            raise ValueError(f"out is {self.out}; name a file that ends in .json")


def main(argv: Sequence[str] | None = None) -> None:
    """Time a head and print the table."""
    settings = tyro.cli(
        Settings,
        args=argv,
        prog="outrider bench",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    dtype = getattr(torch, settings.dtype)
    target = Target.load(settings.target, dtype=dtype, device=settings.device)
    head = judged_head(settings.head, target, dtype=dtype)
    prompts = bench_prompts(settings.text, settings.per_kind, settings.bench.sampling)
    result = bench(target, head, prompts, settings.bench)
    print(table(result))
    cost = result["cost"]
    print(
        f"c, a draft step over a plain step: {cost['c']:.3f}; checking n tokens at once: "
        + ", ".join(f"{one['tokens']}: {one['ratio']:.2f}x" for one in cost["verify"])
    )
    if settings.out is not None:
        notes: dict[str, Any] = {
            "target": {"name": target.name, "hash": target.fingerprint()},
            "heads": {settings.head: file_hashes(Path(settings.head))},
        }
        title = f"Speed on {settings.target}"
        paths = write_report(settings.out, {"bench": result}, notes=notes, title=title)
        print(f"{paths.json} and {paths.html}")


def bench_prompts(source: str, per_kind: int, sampling: Sampling) -> list[Prompt]:
    """The first prompts of each kind, kinds in turn; rows of another sampling are left out."""
    texts = read_texts(source, sampling, per_kind=per_kind)
    used: Counter[str] = Counter()
    ranked = []
    for text in texts:
        ranked.append((used[text.kind], Prompt(text.kind, text.prompt_ids)))
        used[text.kind] += 1
    return [prompt for _, prompt in sorted(ranked, key=lambda pair: pair[0])]
