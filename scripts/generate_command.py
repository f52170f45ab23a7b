"""`outrider generate`: the target answers prompts, which makes text to train and to judge heads on.

The target runs in this process or in a server. A stopped run goes on when the same command is given
again; a finished one is left alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro

from outrider.data.answers import Decoding, Request, TargetFiles, template_of
from outrider.data.demo.conversations import demo_requests
from outrider.data.generate import Written, generate_files
from outrider.data.local_answers import LocalAnswers
from outrider.data.options import parse_options
from outrider.data.prompts import mix_temperatures, parse_temperatures, read_requests
from outrider.data.sampling import Sampling
from outrider.data.server_answers import Server, ServerAnswers
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

    temperatures: str | None = None
    """Instead of temperature: several, one for each row, drawn by seed and row id in equal shares
    or by weight: 0,0.7,1 or 0=2,1=1. Each row states its own."""

    overwrite: bool = False
    """Replace a finished or begun file that was made with other settings."""

    template_options: tuple[str, ...] = ()
    """Mode of the chat template, as enable_thinking=false; the rows state it."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision the target runs in."""

    device: str = "cpu"
    """Where the target runs: cpu, cuda, cuda:1 ..."""

    serving: Server = field(default_factory=Server)
    sampling: Sampling = field(default_factory=Sampling)
    decoding: Decoding = field(default_factory=Decoding)

    def __post_init__(self) -> None:
        parse_options(self.template_options)
        if self.demo == (self.prompts is not None):
            raise ValueError(
                f"prompts is {self.prompts} and demo is {self.demo}; give --prompts FILE or --demo"
            )
        if self.demo and (self.sampling != Sampling() or self.temperatures):
            raise ValueError(
                f"sampling is {self.sampling} but --demo brings its own temperatures; leave it out"
            )
        if self.temperatures is not None:
            parse_temperatures(self.temperatures)
            if self.sampling.temperature:
                raise ValueError(
                    f"temperature is {self.sampling.temperature} and temperatures is "
                    f"{self.temperatures!r}; give one of them"
                )


def main(argv: Sequence[str] | None = None) -> None:
    """Answer prompts with a target."""
    settings = tyro.cli(
        GenerateSettings,
        args=argv,
        prog="outrider generate",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    written = answer(settings)
    print(
        f"{settings.out}: {written.num_rows} rows, {written.num_answer_tokens} answer tokens, "
        + (
            "finished before with the same settings: nothing to do"
            if written.was_finished
            else f"{written.num_rows - written.num_new_rows} rows taken over from a stopped run"
        )
    )
    if written.num_other_ids:
        print(
            f"{written.num_other_ids} rows came back as text that gives another number of tokens "
            "than were drawn; they say `retokenised: other`"
        )


def answer(settings: GenerateSettings) -> Written:
    """Answer what the settings ask, here or through a server."""
    wanted, options = _wanted(settings), parse_options(settings.template_options)
    decoding, overwrite = settings.decoding, settings.overwrite
    if settings.serving.server is None:
        dtype = getattr(torch, settings.dtype)
        target = Target.load(settings.target, dtype=dtype, device=settings.device)
        local = LocalAnswers(target, decoding)
        return generate_files(target, wanted, local, decoding, options, overwrite=overwrite)
    files = TargetFiles.load(settings.target)
    served = ServerAnswers(settings.serving, files, template_of(files, options), decoding)
    return generate_files(files, wanted, served, decoding, options, overwrite=overwrite)


def _wanted(settings: GenerateSettings) -> dict[Path, list[Request]]:
    """The files to write and the requests of each."""
    if not settings.demo:
        requests = read_requests(str(settings.prompts), settings.sampling)
        if settings.temperatures is not None:
            shares = parse_temperatures(settings.temperatures)
            requests = mix_temperatures(requests, shares, settings.decoding.seed)
        return {settings.out: requests}
    numbers = {"heldout": settings.demo_heldout, "train": settings.demo_train}
    return {
        settings.out / f"{split}.jsonl.xz": demo_requests(split, num, settings.decoding.seed)
        for split, num in numbers.items()
    }
