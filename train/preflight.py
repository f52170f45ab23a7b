"""What a training tells and refuses before anything is spent, by the checks of `outrider check`."""

from collections.abc import Iterable, Iterator, Sequence

from outrider.data.options import parse_options
from outrider.data.rows import Row
from outrider.data.target import Target
from outrider.data.template import Template
from outrider.heads import DraftHead, HeadConfig
from outrider.train.check.finding import Finding, refuse
from outrider.train.check.head import check_engines, check_vocabulary
from outrider.train.check.heldout import check_modes, check_some_heldout
from outrider.train.check.origin import check_origin
from outrider.train.check.target import check_capture, check_positions, check_rotary
from outrider.train.check.template import check_date
from outrider.train.refusals import check_coverage, check_head
from outrider.train.settings import DataSettings, Settings
from outrider.train.vocabulary import Vocabulary


def refuse_unfit(
    head: DraftHead, vocabulary: Vocabulary | None, target: Target, rows: Sequence[Row]
) -> None:
    """ValueError for a head that does not fit its target, or a target that cannot be captured."""
    check_head(head, target)
    check_coverage(vocabulary)
    refuse(check_rotary(head, target))
    refuse(check_capture(target, max(rows, key=len).ids, head.config.aux_layers))


def notes(
    vocabulary: Vocabulary | None, settings: Settings, config: HeadConfig, target: Target
) -> Iterator[str]:
    """Remarks worth a line before training."""
    if "started_from" in config.extra:
        yield f"starting from {config.extra['started_from']}"
    if settings.tuning is not None and settings.data.store is not None:
        yield "note: store is not used with joint: the target runs in every step"
    for one in remarks(vocabulary, settings, config, target):
        if one.verdict != "ok":
            told = "; ".join(part for part in (one.seen, one.remedy) if part)
            yield f"note: {one.name}: {told}"
        elif vocabulary is not None and one.name == "draft vocabulary":
            yield f"{one.name}: {one.seen}"


def remarks(
    vocabulary: Vocabulary | None, settings: Settings, config: HeadConfig, target: Target
) -> Iterator[Finding]:
    """The checks that need nothing but settings, and are worth a word in every training."""
    yield from check_origin(settings.head.init, target)
    yield from check_positions(config, target, settings.data.max_length)
    yield from check_engines(config)
    yield from check_vocabulary(vocabulary, target)
    if target.tokenizer is not None and target.tokenizer.chat_template:
        options = parse_options(settings.data.template_options)
        yield from check_date(
            Template(tokenizer=target.tokenizer, eos_ids=target.eos_ids, options=options)
        )
    yield from check_some_heldout(settings.data)


def mode_notes(data: DataSettings, modes: Iterable[str]) -> Iterator[str]:
    """Where held-out text was made in another mode of the chat template than the rows are."""
    yield from (f"note: {one.seen}" for one in check_modes(data, modes))
