"""How fast a machine is at what a run does: measured there, or from its data sheet.

A rate is work a second, so that one machine serves plans of any size; what a data sheet says is
multiplied by the share of it that such work reaches, and is an estimate.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from outrider.data.files import write_whole
from outrider.eval.tune.gpus import SHEETS
from outrider.train.schedule import check_range

FORWARD_SHARE, STEP_SHARE = 0.4, 0.25
"""Of the peak: large products of a target's pass, and the narrow ones of a head's step. Published
shares of whole draft trainings are about 0.44 (SpecForge); a head's own step was seen at 0.42 to
0.79 of a CPU's (scripts/throughput_bench.py)."""
DISK = 1e9
"""Bytes a second to and from a disk of which nothing is known."""
START = 20.0
"""Seconds to start Python and load a small target, where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one device."""

    name: str
    source: str
    """`measured` and with what, or the data sheet."""
    is_measured: bool
    device: str
    """cpu or cuda."""
    threads: int | None = None
    """CPU threads that were measured with."""
    memory: float | None = None
    """Bytes of memory."""
    target_dtype: str | None = None
    """Precision of the target that `forward` was measured in; None: of any."""
    precision: str | None = None
    """Compute precision of the head that `step` was measured in."""
    optimizer: str | None = None
    """What `optimiser` is the rate of: muon (operations a second) or adamw (bytes a second)."""
    forward: Mapping[str, float]
    """Operations a second of the target's pass, by its precision."""
    step: Mapping[str, float]
    """Operations a second of a head's forward and backward pass, by precision."""
    optimiser: Mapping[str, float]
    """By optimiser: Muon's operations, or bytes of AdamW's state, a second."""
    write: float
    """Bytes of raw states a second that are encoded and written."""
    read: float
    """Bytes of raw states a second that are read, decoded and packed."""
    start: float = START
    """Seconds before anything happens: Python, torch and the target's weights."""
    rows: float = 500.0
    """Rows a second that are rendered and tokenised."""

    def __post_init__(self) -> None:
        for name in ("name", "source", "device"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: text")
        for name in ("write", "read", "rows"):
            _check_number(name, getattr(self, name), above=0)
        _check_number("start", self.start, low=0)
        if self.memory is not None:
            _check_number("memory", self.memory, above=0)
        for name in ("forward", "step", "optimiser"):
            rates = getattr(self, name)
            if not isinstance(rates, Mapping):
                raise ValueError(f"{name} is {rates!r}; allowed: rates by name")
            for key, rate in rates.items():
                _check_number(f"{name}[{key}]", rate, above=0)

    def save(self, path: Path) -> None:
        """Keep it as JSON, for --machine."""
        write_whole(path, json.dumps(asdict(self), indent=1) + "\n")

    def rate(self, piece: str, kind: str) -> float:
        """The rate of a piece (forward, step, optimiser) for a precision or an optimiser.

        Raises ValueError where the machine was not measured for it.
        """
        known: Mapping[str, float] = getattr(self, piece)
        if kind not in known:
            raise ValueError(
                f"machine {self.name!r} has no rate of {piece} for {kind} (it has "
                f"{', '.join(known) or 'none'}); measure it with these settings (--measure)"
            )
        return known[kind]


def _check_number(name: str, value: object, **limits: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}; allowed: a number")
    check_range(name, value, **limits)


def machine_named(name: str, efficiency: float | None = None) -> Machine:
    """A machine by file (written by --measure), or by the name of a GPU in SHEETS.

    `efficiency` is the share of a data sheet's peak that products reach.
    """
    path = Path(name)
    if path.is_file():
        if efficiency is not None:
            raise ValueError(
                f"efficiency is {efficiency} and machine is the file {name!r}, whose rates were "
                "measured; leave efficiency out, or name a GPU"
            )
        return read_machine(path)
    if name not in SHEETS:
        raise ValueError(
            f"machine is {name!r}, which is no file; known are {', '.join(SHEETS)}, or measure "
            "yours with --measure and give the file that it writes"
        )
    sheet = SHEETS[name]
    forward, step = efficiency or FORWARD_SHARE, efficiency or STEP_SHARE
    peaks = {"bfloat16": sheet.bf16, "float32": sheet.fp32}
    return Machine(
        name=sheet.title,
        source=sheet.source,
        is_measured=False,
        device="cuda",
        memory=sheet.memory,
        forward={dtype: forward * peak for dtype, peak in peaks.items()},
        step={"bf16": step * sheet.bf16, "fp32": step * sheet.fp32},
        optimiser={"muon": step * sheet.bf16, "adamw": 0.7 * sheet.bandwidth},
        write=DISK,
        read=DISK,
    )


def read_machine(path: Path) -> Machine:
    """The machine of a file that `Machine.save` wrote; ValueError for any other file."""
    known = {field.name for field in fields(Machine)}
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"it has the unknown keys {', '.join(unknown)}")
        return Machine(**values)
    except (ValueError, TypeError, AttributeError) as problem:
        raise ValueError(
            f"machine {path} is not a file that outrider plan --measure wrote: {problem}; measure "
            "again"
        ) from problem
