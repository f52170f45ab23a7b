"""`outrider generate`: the target answers prompts, which makes text to train and to judge heads on.

A stopped run goes on when the same command is given again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro

from outrider.data.demo.conversations import demo_requests
from outrider.data.generate import Decoding, Request, generate_files
from outrider.data.options import parse_options
from outrider.data.prompts import read_requests
from outrider.data.sampling import Sampling
from outrider.data.target import Target


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """Who answers what, and where the answers go."""

    target: str
    """smollm2-demo, a Hub id, or a local folder."""

    out: Path
    """File of answered rows, .jsonl, .jsonl.gz or .jsonl.xz; with --demo, the folder of both."""

    prompts: str | None = None
    """Rows with `messages` or `prompt`: a .jsonl, .json or .parquet file, or a data set."""

    demo: bool = False
    """Answer the demo's own prompts, at temperatures 0 and 1, into train and heldout.jsonl.xz."""

    demo_train: int = 520
    """Training prompts of each of the six kinds, with --demo."""

    demo_heldout: int = 24
    """Held-out prompts of each kind, with --demo."""

    template_options: tuple[str, ...] = ()
    """Mode of the chat template, as enable_thinking=false; the rows state it."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision the target runs in."""

    device: str = "cpu"
    """Where the target runs: cpu, cuda, cuda:1 ..."""

    sampling: Sampling = field(default_factory=Sampling)
    decoding: Decoding = field(default_factory=Decoding)

    def __post_init__(self) -> None:
        parse_options(self.template_options)
        if self.demo == (self.prompts is not None):
            raise ValueError(
                f"prompts is {self.prompts} and demo is {self.demo}; give --prompts FILE or --demo"
            )
        if self.demo and self.sampling != Sampling():
            raise ValueError(
                f"sampling is {self.sampling} but --demo brings its own temperatures; leave it out"
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Answer prompts with a target."""
    settings = tyro.cli(
        GenerateSettings,
        args=argv,
        prog="outrider generate",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    target = Target.load(
        settings.target, dtype=getattr(torch, settings.dtype), device=settings.device
    )
    options = parse_options(settings.template_options)
    written = generate_files(target, _wanted(settings), settings.decoding, options)
    print(
        f"{settings.out}: {written.num_rows} rows, {written.num_answer_tokens} answer tokens, "
        f"{written.num_rows - written.num_new_rows} rows taken over from a stopped run"
    )


def _wanted(settings: GenerateSettings) -> dict[Path, list[Request]]:
    """The files to write and the requests of each."""
    if not settings.demo:
        return {settings.out: read_requests(str(settings.prompts), settings.sampling)}
    numbers = {"heldout": settings.demo_heldout, "train": settings.demo_train}
    return {
        settings.out / f"{split}.jsonl.xz": demo_requests(split, num, settings.decoding.seed)
        for split, num in numbers.items()
    }
