"""How long a run takes: operations over the rate at which a machine does such operations."""

from pathlib import Path
from typing import NamedTuple

from outrider.data.rows import FIRST_LABEL
from outrider.data.sampling import Sampling
from outrider.eval.offline.texts import read_texts
from outrider.train.assembly import is_stored
from outrider.train.job import Job, Steps, disk_of
from outrider.train.machine import DISK, Machine
from outrider.train.memory import count
from outrider.train.settings import SHIPPED
from outrider.train.validate import spread
from outrider.train.vocabulary import MOST_MASS_TOKENS
from outrider.train.work import forward_ops, law_ops, moment_bytes, muon_ops, pass_ops, step_ops


class Time(NamedTuple):
    """Seconds of each part of a run."""

    start: float
    rows: float
    features: float
    """And a draft vocabulary by mass, which takes the target's passes, too."""
    heldout: float
    """The held-out text's trace, and every evaluation."""
    steps: float
    saving: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def time_of(job: Job, steps: Steps, machine: Machine) -> Time:
    """Seconds of each part: operations over the machine's rate of such operations."""
    settings, rows, target = job.settings, job.rows, job.target
    precision, dtype = settings.run.precision, settings.target.target_dtype
    forward = machine.rate("forward", dtype)
    ops = job.scale * forward_ops(target, rows)
    raw = 2 * (len(job.head.config.aux_layers) + 1) * target.hidden_size * job.num_tokens
    features = 0.0
    if is_stored(settings):
        laws = job.scale * law_ops(rows, job.layout) / forward
        features = ops / forward + laws + raw / machine.write
    features += vocabulary_seconds(job, forward)
    a_batch = step_ops(job.head, settings, rows, job.layout) / machine.rate("step", precision)
    reading = settings.run.epochs * raw / machine.read
    if not is_stored(settings):
        reading = settings.run.epochs * ops * (4 if settings.tuning is not None else 1) / forward
    a_step = moment_bytes(job.head, settings) / machine.rate("optimiser", "adamw")
    if settings.optim.optimizer == "muon":
        a_step += muon_ops(job.head, settings) / machine.rate("optimiser", "muon")
    evaluations = steps.total // (settings.run.eval_every or steps.per_epoch)
    saves = steps.total // (settings.run.save_every or steps.per_epoch)
    disk = disk_of(job)
    return Time(
        start=machine.start,
        rows=job.rows_seconds or job.scale * len(rows) / machine.rows,
        features=features,
        heldout=heldout_seconds(job, machine, evaluations),
        steps=steps.micro_batches * a_batch + steps.total * a_step + reading,
        saving=saves * disk.checkpoints / (settings.run.keep_last + 1) / DISK,
    )


def vocabulary_seconds(job: Job, forward: float) -> float:
    """The target's laws on the rows that it chooses a draft vocabulary by mass from."""
    choice, target, tokens = job.settings.head, job.target, job.num_tokens
    is_kept = choice.init not in (None, SHIPPED) and not choice.rebuild_vocab
    if choice.draft_vocab_by != "mass" or isinstance(choice.draft_vocab, str) or is_kept:
        return 0.0
    labels = sum(int(row.mask[FIRST_LABEL:].sum()) for row in job.rows)
    laws = 2 * target.hidden_size * target.vocab_size * labels
    share = min(1.0, MOST_MASS_TOKENS / tokens)
    return share * job.scale * (forward_ops(target, job.rows) + laws) / forward


def heldout_seconds(job: Job, machine: Machine, evaluations: int) -> float:
    """The trace of the held-out text, and a chain scored on it so many times, in float32."""
    data, run = job.settings.data, job.settings.run
    if data.heldout is None or (Path(data.heldout) / "meta.json").is_file():
        return 0.0
    texts = spread(read_texts(data.heldout, Sampling(temperature=0.0)), data.heldout_rows)
    answers = sum(len(text.answer_ids) for text in texts)
    lengths = [len(text.prompt_ids) + len(text.answer_ids) for text in texts]
    target, config = job.target, job.head.config
    table = 2 * target.hidden_size * target.vocab_size
    layers = sum(pass_ops(target, [length]) for length in lengths)
    forward = machine.rate("forward", job.settings.target.target_dtype)
    trace = layers / forward + answers * table / forward
    head = 2 * count(job.head, is_trained=True) + 2 * count(job.head, is_trained=False)
    outputs = 2 * config.hidden_size * config.draft_vocab_size
    chain = run.eval_depth * answers * (head + outputs) + answers * table
    return trace + evaluations * chain / machine.rate("step", "fp32")


def clock(seconds: float) -> str:
    """Seconds in the units that people use."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min"
