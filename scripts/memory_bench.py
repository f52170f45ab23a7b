"""Peak memory of a training step of EAGLE-3, by row length and unroll steps.

python -m outrider.scripts.memory_bench [--tokens 512 1024 ...] [--out FILE.json]

The head has the demo target's geometry; tables and states are random, and every token of the one
row is supervised, which is the most that a row can cost. Every cell has a process of its own.
Measured is what a step needs above what
was resident before it: on Linux the peak of the resident set, which the kernel forgets on request;
on CUDA the peak of allocated memory. A step on a short row goes first, so that gradients, thread
pools and kernels' own buffers are there already.

Letters: T tokens, K unroll steps, D hidden size, W draft vocabulary.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from transformers import LlamaConfig

from outrider.data.batches import Batch
from outrider.data.files import write_whole
from outrider.heads import EagleConfig, EagleHead, Tables
from outrider.heads.fused import score_pairs, teacher_of, teacher_probs
from outrider.heads.losses import soft_ce
from outrider.train.kinds import EagleObjective
from outrider.train.memory import step_bytes
from outrider.train.objectives import DraftTask, task_of

MIB = 1024**2
DEMO = LlamaConfig(  # SmolLM2-135M-Instruct
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
)
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_TOKENS = 64
# Large blocks go back to the system when freed, so that what is resident is what is in use.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement."""

    part: Literal["step", "chunked", "full"]
    """A whole training step, or the loss alone: in chunks, or with all logits at once."""
    precision: str
    tokens: int
    steps: int
    draft_vocab: int
    device: str


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to measure."""

    tokens: tuple[int, ...] = (512, 1024, 2048, 4096)
    """Row lengths."""

    steps: tuple[int, ...] = (1, 3, 7)
    """Unroll steps."""

    precision: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
    """Compute precision of the head."""

    parts: tuple[Literal["step", "chunked", "full"], ...] = ("step", "chunked", "full")
    """The whole step, and the loss alone in chunks and with all logits at once."""

    draft_vocab: int = 8192
    """Size of the draft vocabulary."""

    device: str = "cpu"
    """cpu or cuda."""

    out: Path | None = None
    """Write the figures to this .json file too."""

    cell: str | None = None
    """Measure this one cell in this process and print it as JSON; the other processes' flag."""

    def __post_init__(self) -> None:
        for name in ("tokens", "steps"):
            low = WARM_TOKENS if name == "tokens" else 1
            wrong = [value for value in getattr(self, name) if value < low]
            if wrong:
                raise ValueError(f"{name} holds {wrong[0]}; give numbers of at least {low}")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every cell and print the tables."""
    settings = tyro.cli(BenchSettings, args=argv, prog="memory_bench")
    if settings.cell is not None:
        print(json.dumps(measure(Cell(**json.loads(settings.cell)))))
        return
    found: list[dict[str, Any]] = []
    for cell in cells(settings):
        found.append(asdict(cell) | in_fresh_process(cell))
        print(line(found[-1]), file=sys.stderr, flush=True)
    print(table(found))
    if settings.out is not None:
        write_whole(settings.out, json.dumps(found, indent=1) + "\n")


def cells(settings: BenchSettings) -> list[Cell]:
    """All cells in the order of the table."""
    return [
        Cell(
            part=part,
            precision=precision,
            tokens=tokens,
            steps=steps,
            draft_vocab=settings.draft_vocab,
            device=settings.device,
        )
        for part in settings.parts
        for precision in settings.precision
        for steps in settings.steps
        for tokens in settings.tokens
    ]


def in_fresh_process(cell: Cell) -> dict[str, float]:
    """The figures of a cell."""
    command = [sys.executable, "-m", "outrider.scripts.memory_bench", "--cell"]
    command.append(json.dumps(asdict(cell)))
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | ALLOCATOR
    )
    if done.returncode:
        raise RuntimeError(f"cell {cell} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def measure(cell: Cell) -> dict[str, float]:
    """Peak bytes of a cell above what was resident before, and what the formula says."""
    torch.manual_seed(0)
    device = torch.device(cell.device)
    dtype = None if cell.precision == "fp32" else PRECISIONS[cell.precision]
    head = make_head(cell.draft_vocab, device)
    task = task_of(head, EagleObjective(), num_steps=cell.steps, dtype=dtype)
    run = step if cell.part == "step" else loss
    once = run(task, replace(cell, tokens=WARM_TOKENS))
    once()
    once = run(task, cell)
    gc.collect()
    return {
        "peak": peak_of(once, device),
        "formula": step_bytes(head.config, cell.tokens, cell.steps, dtype or torch.float32),
    }


def make_head(draft_vocab: int, device: torch.device) -> EagleHead:
    """An EAGLE-3 head for the demo target's geometry with random tables."""
    config = EagleConfig.from_target(DEMO, draft_vocab_size=draft_vocab)
    ids_W = torch.arange(draft_vocab) * (DEMO.vocab_size // draft_vocab)
    head = EagleHead(config, ids_W if config.is_reduced else None).to(device)
    table_VH = torch.randn(DEMO.vocab_size, DEMO.hidden_size)
    lent = Tables(
        embedding_VH=table_VH, output_VH=table_VH, tokenizer_size=DEMO.vocab_size, num_layers=30
    )
    return head.attach(lent)


def step(task: DraftTask, cell: Cell) -> Callable[[], None]:
    """Forward and backward of a training step over one row, all of it supervised."""
    length, width = cell.tokens, DEMO.hidden_size
    document_BT = torch.ones(1, length, dtype=torch.int64)
    inside = task.head.draft_ids_W.cpu()
    batch = Batch(
        ids_BT=inside[torch.randint(0, len(inside), (1, length))],
        mask_BT=document_BT.bool(),
        document_BT=document_BT,
        position_BT=torch.arange(length)[None],
        aux_BTF=torch.randn(1, length, 3 * width),
        last_BTH=torch.randn(1, length, width),
        row_ids=[["row"]],
    )
    work = task.prepare(batch).to(torch.device(cell.device))

    def once() -> None:
        (task(work).loss / work.weight).backward()

    return once


def loss(task: DraftTask, cell: Cell) -> Callable[[], None]:
    """Output head and loss with their gradients, in chunks or with all logits at once."""
    head, device, dtype = task.head, torch.device(cell.device), PRECISIONS[cell.precision]
    shape = (cell.tokens, cell.steps, DEMO.hidden_size)
    hidden_PKD = torch.randn(shape, device=device, dtype=dtype).requires_grad_()
    state_PH = torch.randn(cell.tokens, DEMO.hidden_size, device=device)
    weight_PK = torch.ones(shape[:2], device=device)
    teacher = teacher_of(head, state_PH, dtype)
    (output_WD,) = head.output_weights(dtype)

    def full() -> Tensor:
        logits_XW = F.linear(hidden_PKD.flatten(0, 1), output_WD.to(dtype))
        probs_XW = teacher_probs(teacher).repeat_interleave(cell.steps, 0)
        return soft_ce(logits_XW, probs_XW).sum()

    def chunked() -> Tensor:
        return score_pairs(hidden_PKD, [output_WD], teacher, weight_PK).loss

    form = full if cell.part == "full" else chunked
    return lambda: form().backward()


def peak_of(once: Callable[[], None], device: torch.device) -> int:
    """Peak bytes while this runs, above what was in use before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        once()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    except OSError as error:
        raise ValueError(
            f"device is {device} and the kernel does not forget peaks here ({error}); run on Linux "
            "or on cuda"
        ) from error
    before = resident("VmRSS")
    once()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for entry in Path("/proc/self/status").read_text().splitlines():
        if entry.startswith(f"{field}:"):
            return 1024 * int(entry.split()[1])
    raise ValueError(f"/proc/self/status has no {field}; run on Linux or on cuda")


HEADINGS = ("part", "precision", "K", "T", "peak MiB", "of linear", "formula MiB", "share")


def line(one: dict[str, Any]) -> str:
    """A cell as it comes."""
    shown = (one[name] for name in ("part", "precision", "steps", "tokens"))
    return f"{' '.join(map(str, shown))}: {one['peak'] / MIB:.0f} MiB"


def table(found: Sequence[dict[str, Any]]) -> str:
    """All cells; `of linear` is the peak over that of the shortest row times the ratio of lengths.

    Growth with the square of the length would show as 2, 4, 8 at twice, four and eight times it.
    """
    rows = [HEADINGS]
    for one in found:
        same = [
            other
            for other in found
            if all(other[name] == one[name] for name in ("part", "precision", "steps"))
        ]
        least = min(same, key=lambda other: other["tokens"])
        linear = one["peak"] / (least["peak"] * one["tokens"] / least["tokens"])
        is_step = one["part"] == "step"
        rows.append(
            (
                one["part"],
                one["precision"],
                str(one["steps"]),
                str(one["tokens"]),
                f"{one['peak'] / MIB:.0f}",
                f"{linear:.2f}",
                f"{one['formula'] / MIB:.0f}" if is_step else "",
                f"{one['formula'] / one['peak']:.0%}" if is_step else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


if __name__ == "__main__":
    main()
