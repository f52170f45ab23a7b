"""Size, speed of writing and speed of reading of feature stores, one form after another.

    python -m outrider.scripts.store_bench --recipe demo-quick --output runs/store-bench

Writing is compared with the target's own forward passes inside the same build (its output head left
out), so that a busy machine slows both; reading is the share of real training steps that waits for
data. Size is against the layout of other trainers: all layers and the last state in bfloat16.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from accelerate import Accelerator
from typing_extensions import override

from outrider.data.rows import Row
from outrider.data.states import RowStates, TargetStates
from outrider.data.store import FeatureStore, store_bytes
from outrider.train.assembly import Ground, build, lay_ground, layout
from outrider.train.kinds import EagleRun
from outrider.train.loop import Loop
from outrider.train.recipe import parse


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    output: Path
    """Receives the stores and store-bench.json."""
    recipe: str = "demo-quick"
    """Recipe file, or the name of a shipped one."""
    data: str | None = None
    """Rows; the recipe's by default."""
    max_tokens: int = 20_000
    """Tokens stored in each form."""
    forms: tuple[str, ...] = ("bfloat16", "int8", "fp8", "int4")
    """Settings of --feature-dtype."""
    steps: int = 30
    """Training steps timed, after three that are not."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One form's figures."""

    form: str
    tokens: int
    bytes_a_token: float
    of_raw: float
    """Size against all layers and the last state in bfloat16."""
    estimate_off: float
    """Estimated size over real size, less 1."""
    write_tokens_s: float
    write_ratio: float
    """Writing speed over the speed of the target's forward passes alone."""
    read_ms: float
    """Milliseconds to read and unpack a batch, in the training thread."""
    wait_share: float
    """Share of training time that waits for data."""
    step_ms: float


class TimedStates(TargetStates):
    """The target's passes, with their time kept apart."""

    seconds = 0.0

    @override
    def of(self, rows: Sequence[Row]) -> list[RowStates]:
        begun = time.perf_counter()
        found = super().of(rows)
        self.seconds += time.perf_counter() - begun
        return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every form and print a table."""
    settings = tyro.cli(Settings, args=argv, prog="store_bench")
    found = [measure(settings, form) for form in settings.forms]
    settings.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(one) for one in found], indent=1)
    (settings.output / "store-bench.json").write_text(text + "\n", "ascii")
    print(f"{'form':10}{'B/token':>9}{'of raw':>8}{'estimate':>10}{'write tok/s':>13}", end="")
    print(f"{'of forward':>12}{'read ms':>9}{'step ms':>9}{'waits':>8}")
    for one in found:
        print(f"{one.form:10}{one.bytes_a_token:9.0f}{one.of_raw:8.3f}", end="")
        print(f"{one.estimate_off:+10.2%}{one.write_tokens_s:13.0f}{one.write_ratio:12.3f}", end="")
        print(f"{one.read_ms:9.1f}{one.step_ms:9.0f}{one.wait_share:8.2%}")


def measure(settings: Settings, form: str) -> Measured:
    """Build one store anew, then train from it."""
    recipe = recipe_of(settings, form)
    accelerator = Accelerator(cpu=recipe.run.device == "cpu")
    ground = lay_ground(recipe, accelerator.device)
    store, seconds, forward = write(ground)
    size = sum(path.stat().st_size for path in store.folder.local.glob("*.safetensors"))
    tokens = sum(store.lengths)
    loop = Loop(parts=build(recipe, accelerator), settings=recipe, accelerator=accelerator)
    for _ in range(3):
        loop.step(asked=False)
    loop.watch.read()
    for _ in range(settings.steps):
        loop.step(asked=False)
    parts = loop.watch.read()
    step = sum(parts.values()) / settings.steps
    raw = (len(ground.layers) + 1) * ground.target.hidden_size * 2
    return Measured(
        form=form,
        tokens=tokens,
        bytes_a_token=size / tokens,
        of_raw=size / tokens / raw,
        estimate_off=store_bytes(ground.rows, layout(ground)) / size - 1,
        write_tokens_s=tokens / seconds,
        write_ratio=forward / seconds,
        read_ms=1e3 * read_seconds(loop, settings.steps),
        wait_share=parts["data"] / sum(parts.values()),
        step_ms=1e3 * step,
    )


def recipe_of(settings: Settings, form: str) -> EagleRun:
    """The recipe with this form in a store of its own, without held-out rows."""
    words = ["--recipe", settings.recipe, "--heldout", "None", "--feature-dtype", form]
    words += ["--max-tokens", str(settings.max_tokens), "--device", "cpu"]
    words += ["--output", str(settings.output / f"run-{form}")]
    words += ["--store", str(settings.output / f"{form}-{time.time_ns()}")]
    if settings.data is not None:
        words += ["--data", settings.data]
    return parse(words, EagleRun)


def write(ground: Ground) -> tuple[FeatureStore, float, float]:
    """The store, the seconds it took, and those of them that the target ran."""
    ground.target.fingerprint()  # hashed once, before the clock starts
    states = TimedStates(ground.target, ground.layers)
    begun = time.perf_counter()
    store = FeatureStore.build_or_open(
        ground.target,
        ground.rows,
        layout=layout(ground),
        root=ground.store_folder,
        states=states,
        progress=False,
    )
    return store, time.perf_counter() - begun, states.seconds


def read_seconds(loop: Loop, count: int) -> float:
    """Seconds to read one batch where nothing reads ahead."""
    batches = loop.parts.batches  # on a CPU nothing reads ahead
    number = min(count, batches.epoch_length())
    begun = time.perf_counter()
    for index in range(number):
        batches.batch(1, index)
    return (time.perf_counter() - begun) / number


if __name__ == "__main__":
    main()
