"""`outrider trace`: record the target's own text with its states, once, to score heads on.

A stopped run goes on when the same command is given again.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro

from outrider.data.answers import Decoding, Request
from outrider.data.capture import default_layers
from outrider.data.files import write_whole
from outrider.data.generate import generate_files
from outrider.data.local_answers import LocalAnswers
from outrider.data.options import parse_options, state_options
from outrider.data.prompts import read_requests
from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.offline.evaluate import sampling_text
from outrider.eval.offline.texts import read_texts
from outrider.eval.offline.traces import build_trace


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """Whose text, drawn how, and where it goes."""

    target: str
    """smollm2-demo, a Hub id, or a local folder."""

    out: Path
    """Folder of the trace."""

    text: str | None = None
    """Answered rows: demo:heldout, a file of outrider generate (prompt_ids, answer_ids), or a
    server's log with token ids: vLLM's OpenAI replies asked with return_token_ids, its
    RequestOutputs, or SGLang's input_ids and output_ids."""

    prompts: str | None = None
    """Instead of text: prompts for the target to answer first, as for outrider generate."""

    layers: tuple[int, ...] | None = None
    """Decoder layers whose inputs are stored (0-based); 2, n/2, n-3 when left out."""

    per_kind: int | None = None
    """Use the first so many rows of each kind of prompt."""

    template_options: tuple[str, ...] = ()
    """With prompts: mode of the chat template, as enable_thinking=false."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision the target runs in."""

    device: str = "cpu"
    """Where the target runs: cpu, cuda, cuda:1 ..."""

    off_policy: bool = False
    """Trace text that is not the target's own at this sampling, too; the trace says so."""

    sampling: Sampling = field(default_factory=Sampling)
    decoding: Decoding = field(default_factory=Decoding)

    def __post_init__(self) -> None:
        if parse_options(self.template_options) and self.prompts is None:
            raise ValueError(
                "template_options is given without prompts; rows of text are rendered already"
            )
        if (self.text is None) == (self.prompts is None):
            raise ValueError(
                f"text is {self.text} and prompts is {self.prompts}; give one of them: text that "
                "the target wrote, or prompts for it to answer"
            )


def main(argv: Sequence[str] | None = None) -> None:
    """Trace a target."""
    settings = tyro.cli(
        TraceSettings,
        args=argv,
        prog="outrider trace",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    target = Target.load(
        settings.target, dtype=getattr(torch, settings.dtype), device=settings.device
    )
    source, seed = settings.text, None
    if settings.prompts is not None:
        source, seed = str(settings.out / "answers.jsonl"), settings.decoding.seed
        requests = read_requests(settings.prompts, settings.sampling)
        claim_answers(settings, target, requests)
        if not Path(source).exists():
            options = parse_options(settings.template_options)
            answers = LocalAnswers(target, settings.decoding)
            generate_files(target, {Path(source): requests}, answers, settings.decoding, options)
    texts = read_texts(str(source), settings.sampling, per_kind=settings.per_kind)
    trace = build_trace(
        target,
        texts,
        settings.out,
        sampling=settings.sampling,
        layers=settings.layers or default_layers(target.num_layers),
        seed=seed,
        allow_off_policy=settings.off_policy,
    )
    print(f"{settings.out}: {len(trace)} rows, {sampling_text(trace.sampling)}")
    whose = "is NOT the target's own" if trace.policy.is_off else "is the target's own"
    print(f"the text {whose}: {trace.policy.text()}")


def claim_answers(settings: TraceSettings, target: Target, requests: Sequence[Request]) -> None:
    """Note what the folder's answers are made from; answers of other requests are refused."""
    asked = [repr(request) for request in requests]
    mode = state_options(parse_options(settings.template_options))
    made_from = json.dumps([target.fingerprint(), asked, repr(settings.decoding) + mode])
    key = hashlib.sha256(made_from.encode()).hexdigest()
    note, answers = settings.out / "answers.key", settings.out / "answers.jsonl"
    known = note.read_text(encoding="utf-8").strip() if note.exists() else None
    if known != key and (known is not None or answers.exists()):
        raise ValueError(
            f"{answers} was answered from other prompts, settings or another target; give "
            "another --out, or remove the folder"
        )
    write_whole(note, key + "\n")
