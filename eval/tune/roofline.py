"""Rounds on hardware one does not own: what is read over bandwidth, what is computed over speed.

A pass takes max(bytes / bandwidth, operations / speed), plus overhead (Williams et al. 2009); every
row reads keys and values of its own (MagicDec, Chen et al. 2024). Letters: B rows, n tokens of a
row's call.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from outrider.eval.trees.plans import ChainPlan, DrawnPlan, LookupPlan, SuffixPlan, plan_named
from outrider.eval.tune.costs import PLAIN, Pieces
from outrider.eval.tune.gpus import SHEETS
from outrider.eval.tune.models import DraftSizes, TargetSizes, bytes_of


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator, or several alike that share every layer."""

    name: str
    bandwidth: float
    """Bytes of memory a second, of one."""
    flops: float
    """Operations a second at the precision of the pass, of one."""
    memory: float
    """Bytes of memory, of one."""
    source: str
    bandwidth_share: float = 0.8
    """Share of the bandwidth that passes reach. An assumption: measure, or give 1 for the bound."""
    flops_share: float = 0.6
    """Share of the speed that passes reach; an assumption, too."""
    memory_share: float = 0.9
    """Share of the memory for weights, keys and values (vLLM's gpu_memory_utilization)."""
    step_overhead: float = 1.21e-3
    """Seconds of a round outside the passes: SpecDecode-Bench's engine on an H100
    (arXiv:2601.11580)."""
    draft_overhead: float = 2e-4
    """Seconds of a draft step outside what it reads and computes: launches. An assumption."""
    tensor_parallel: int = 1
    """Accelerators that share every layer."""
    sum_latency: float = 1e-5
    """Seconds of a sum over them, of which every decoder layer has two; an assumption."""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops", "memory"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} of {self.name} is {getattr(self, name)}; give above 0")
        for name in ("bandwidth_share", "flops_share", "memory_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a share above 0, up to 1")
        for name in ("step_overhead", "draft_overhead", "sum_latency"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; give seconds, 0 or more")
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel is {self.tensor_parallel}; give 1 or more")


def hardware_named(name: str, dtype: str = "bfloat16", **settings: float) -> Hardware:
    """A GPU of the table; `settings` are any fields of `Hardware` to change."""
    if name not in SHEETS:
        raise ValueError(
            f"gpu is {name!r}; known are {', '.join(SHEETS)}, or describe another one with "
            "--bandwidth, --flops and --memory"
        )
    sheet = SHEETS[name]
    values: dict[str, float] = {
        "bandwidth": sheet.bandwidth,
        "flops": sheet.fp32 if dtype == "float32" else sheet.bf16,
        "memory": sheet.memory,
        **settings,
    }
    whole = int(values.pop("tensor_parallel", 1))
    return Hardware(name=sheet.title, source=sheet.source, tensor_parallel=whole, **values)


class Capacity(NamedTuple):
    """Rows that fit beside the weights."""

    plain: int
    drafted: int


@dataclass(frozen=True, kw_only=True)
class RooflineCosts:
    """Rounds of a target and a head on hardware, by what they read and compute."""

    hardware: Hardware
    target: TargetSizes
    draft: DraftSizes | None = None
    """None: drafts cost nothing (look-up, or a bound)."""
    dtype: str = "bfloat16"
    """Precision of target and head."""
    weight_bytes: float | None = None
    """Bytes of a weight of the target where it is quantised; by default those of `dtype`."""
    kv_bytes: float | None = None
    """Bytes of a number in the caches; by default those of `dtype`."""

    def __post_init__(self) -> None:
        for name in ("weight_bytes", "kv_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; give bytes above 0, such as 0.5 for 4 bits")

    @property
    def name(self) -> str:
        """What the costs are of."""
        many = self.hardware.tensor_parallel
        times = f"{many} x " if many > 1 else ""
        return f"{times}{self.hardware.name}, {self.dtype}, roofline"

    def round(self, draft: str, tokens: int, batch: int, context: float) -> Pieces:
        """See `Costs`."""
        if batch < 1 or tokens < 1 or context < 0:
            raise ValueError(
                f"batch is {batch}, tokens {tokens} and context {context}; give 1 or more, 1 or "
                "more and 0 or more"
            )
        drafting = 0.0 if draft == PLAIN else self._draft(draft, batch, context)
        return Pieces(drafting, self.verify(tokens, batch, context), self.hardware.step_overhead)

    def verify(self, tokens: int, batch: int, context: float) -> float:
        """A target's pass over `tokens` new tokens of each row."""
        target, total = self.target, batch * tokens
        read = target.read(total) * self._weight + batch * target.kept(context) * self._kv
        ops = 2 * target.active * total + target.score_ops * total * (context + tokens / 2)
        sums = 0.0
        if self.hardware.tensor_parallel > 1:
            sums = 2 * target.num_layers * self.hardware.sum_latency
        return self._pass(read, ops) + sums

    def largest_batch(self, context: float, tokens: int) -> Capacity:
        """Rows of `context` positions, and the call's own, that fit without and with the head."""
        hardware = self.hardware
        room = hardware.memory * hardware.memory_share * hardware.tensor_parallel
        room -= self.target.parameters * self._weight
        row = self.target.kept(context + 1) * self._kv
        plain = math.floor(room / row)
        if self.draft is None:
            return Capacity(max(0, plain), max(0, plain))
        room -= self.draft.parameters * bytes_of(self.dtype)
        longer = context + tokens
        row = (self.target.kept(longer) + self.draft.kv_numbers * longer) * self._kv
        return Capacity(max(0, plain), max(0, math.floor(room / row)))

    @property
    def _weight(self) -> float:
        return self.weight_bytes or bytes_of(self.dtype)

    @property
    def _kv(self) -> float:
        return self.kv_bytes or bytes_of(self.dtype)

    def _draft(self, draft: str, batch: int, context: float) -> float:
        """Steps of the head: accepted tokens first (two a row, as a rule), then level by level."""
        plan = plan_named(draft)
        if self.draft is None or isinstance(plan, LookupPlan | SuffixPlan):
            return 0.0
        if self.draft.is_parallel:
            return self._step(2, batch, context)
        width = plan.width if not isinstance(plan, ChainPlan) else 1
        if isinstance(plan, DrawnPlan):
            width = plan.width
        later = self._step(width, batch, context)
        return self._step(2, batch, context) + (plan.depth - 1) * later

    def _step(self, tokens: int, batch: int, context: float) -> float:
        assert self.draft is not None
        read = self.draft.step * bytes_of(self.dtype)
        read += batch * self.draft.kv_numbers * context * self._kv
        ops = 2 * self.draft.step * batch * tokens
        return self._pass(read, ops) + self.hardware.draft_overhead

    def _pass(self, read: float, ops: float) -> float:
        hardware = self.hardware
        many = hardware.tensor_parallel
        bandwidth = hardware.bandwidth * hardware.bandwidth_share * many
        return max(read / bandwidth, ops / (hardware.flops * hardware.flops_share * many))
