"""On-policy text: requests answered into files of rows, by this process or by a server.

A run may be killed at any moment and any number of times: each finished row is kept at once, under
its id, and the same call goes on with the others. The files are in the order of the requests.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from tqdm import tqdm

from outrider.data.answers import (
    Answer,
    Answers,
    Decoding,
    Emit,
    Request,
    Speaker,
    prompt_ids,
    template_of,
)
from outrider.data.local_answers import LocalAnswers
from outrider.data.manifest import (
    check_finished,
    manifest_path,
    read_counts,
    tokenizer_hash,
    write_manifest,
)
from outrider.data.rowfile import PartialRows, write_rows
from outrider.data.target import Target
from outrider.data.template import Template, template_hash


class Written(NamedTuple):
    """What a run left in its files."""

    num_rows: int
    num_answer_tokens: int
    num_new_rows: int
    """Rows answered by this call; the others were found finished."""
    was_finished: bool
    """Whether the files were there, whole, before this call."""
    num_other_ids: int
    """Rows that came back as text which gives another number of tokens than were drawn."""


class _Run(NamedTuple):
    """What every row of a run has in common."""

    template: Template
    decoding: Decoding
    mode: Mapping[str, Any]
    """Options of the chat template, as rows state them."""


def generate(target: Target, requests: Sequence[Request], out: Path, decoding: Decoding) -> Written:
    """`generate_files` with one file, answered in this process."""
    return generate_files(target, {out: requests}, LocalAnswers(target, decoding), decoding)


def generate_files(
    speaker: Speaker,
    wanted: Mapping[Path, Sequence[Request]],
    answers: Answers,
    decoding: Decoding,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    overwrite: bool = False,
) -> Written:
    """Answer every request into its file, one JSON row each, in the order given.

    `options` go to the chat template, and the rows state them. Finished rows are kept beside the
    first file, as `FILE.partial.jsonl`, until all are done, so that the same call goes on where a
    stopped one was; FILE.manifest.json then says what a file was made with. Files that are there
    with the same settings are left alone.

    Raises ValueError for repeated ids, for a prompt that does not fit the target, and for a file or
    a partial file made with other settings or prompts, unless `overwrite` says to replace it.
    """
    requests = [request for several in wanted.values() for request in several]
    prompts = list(zip(requests, prompt_ids(speaker, requests, options), strict=True))
    _check(prompts, speaker, decoding)
    mode = {"template_options": dict(options)} if options else {}
    run = _Run(template_of(speaker, options), decoding, mode)
    path = _partial_path(next(iter(wanted)))
    settings = _settings(speaker, prompts, run)
    if not overwrite and _are_finished(wanted, settings | answers.settings(), path):
        return _written(wanted, num_new=0, was_finished=True)
    answers.open()
    settings |= answers.settings()
    with PartialRows(path, settings, fresh=overwrite) as partial:
        partial.note({"outrider": version("outrider"), **answers.notes()})
        todo = [pair for pair in prompts if pair[0].id not in partial.rows]
        with _progress(len(prompts), len(todo)) as bar:
            answers.answer(todo, _keeper(partial, run, bar))
        for out, several in wanted.items():
            rows = [partial.rows[request.id] for request in several]
            manifest_path(out).unlink(missing_ok=True)
            write_rows(out, rows)
            facts = {"target": speaker.name, "runs": partial.notes}
            write_manifest(out, rows, settings, facts)
        path.unlink()
    return _written(wanted, num_new=len(todo))


def _partial_path(first: Path) -> Path:
    return first.with_name(f"{first.name}.partial.jsonl")


def _are_finished(wanted: Iterable[Path], settings: Mapping[str, Any], partial: Path) -> bool:
    """Whether nothing is left to do. Raises ValueError where a file would be overwritten."""
    if partial.exists():  # a run that was killed while it wrote its files may have left some
        wanted = [out for out in wanted if manifest_path(out).exists()]
    found = [check_finished(out, settings) for out in wanted]
    return all(found) and not partial.exists()


def _keeper(partial: PartialRows, run: _Run, bar: "tqdm[NoReturn]") -> Emit:
    """What takes answers as they come: into the partial file, and into the progress bar."""
    num_tokens = 0

    def keep(answer: Answer) -> None:
        nonlocal num_tokens
        partial.append(_row(answer, run))
        num_tokens += len(answer.answer_ids)
        bar.set_postfix_str(f"{num_tokens / bar.format_dict['elapsed']:.0f} tok/s", False)
        bar.update(1)

    return keep


def _row(answer: Answer, run: _Run) -> dict[str, Any]:
    template, request = run.template, answer.request
    text = template.tokenizer.decode(answer.answer_ids, skip_special_tokens=True)
    stated = request.sampling.record()
    marks: dict[str, Any] = {}
    if answer.is_retokenised:
        marks["retokenised"] = "same count" if answer.is_same_count else "other"
    elif not _gives_back(template, answer):
        marks["text_gives_other_ids"] = True
    return {
        "id": request.id,
        **request.extra,
        "temperature": request.sampling.temperature,
        **({"sampling": stated} if stated.keys() - {"temperature"} else {}),
        "seed": run.decoding.seed,
        **run.mode,
        "messages": [*request.messages, {"role": "assistant", "content": text}],
        "prompt_ids": answer.prompt_ids,
        "answer_ids": answer.answer_ids,
        "finish": answer.finish,
        **marks,
    }


def _gives_back(template: Template, answer: Answer) -> bool:
    """Whether the row's text, tokenised, gives the ids that were drawn."""
    ids = answer.prompt_ids + answer.answer_ids
    return template.tokenise(template.text(ids)).ids == ids


def _settings(
    speaker: Speaker, prompts: Sequence[tuple[Request, list[int]]], run: _Run
) -> dict[str, Any]:
    """All that the answers depend on besides what answers: target, prompts, sampling, seed."""
    samplings = Counter(request.sampling for request, _ in prompts)
    digest = hashlib.sha256()
    for request, ids in prompts:
        digest.update(json.dumps([*request, ids], default=asdict).encode())
    return {
        "target": speaker.fingerprint()[:16],
        "tokenizer": tokenizer_hash(run.template.tokenizer),
        "template": template_hash(run.template.tokenizer),
        **run.mode,
        "prompts": f"{len(prompts)} by hash {digest.hexdigest()[:16]}",
        "max_new_tokens": run.decoding.max_new_tokens,
        "seed": run.decoding.seed,
        "samplings": [
            {"rows": num, "temperature": sampling.temperature, **sampling.record()}
            for sampling, num in sorted(samplings.items(), key=repr)
        ],
    }


def _check(
    prompts: Sequence[tuple[Request, list[int]]], speaker: Speaker, decoding: Decoding
) -> None:
    ids = Counter(request.id for request, _ in prompts)
    if len(ids) < len(prompts):
        twice = ", ".join(repr(name) for name, times in ids.items() if times > 1)[:200]
        raise ValueError(
            f"{len(prompts)} requests share {len(ids)} ids; give each its own id, not {twice}"
        )
    limit = speaker.config.max_position_embeddings
    for request, tokens in prompts:
        if len(tokens) + decoding.max_new_tokens > limit:
            raise ValueError(
                f"request {request.id!r} has {len(tokens)} tokens and max_new_tokens is "
                f"{decoding.max_new_tokens}; the target holds {limit}: shorten one of them"
            )


def _progress(num_rows: int, num_todo: int) -> "tqdm[NoReturn]":
    return tqdm(total=num_rows, initial=num_rows - num_todo, unit="row", mininterval=2)


def _written(wanted: Iterable[Path], num_new: int, *, was_finished: bool = False) -> Written:
    counts = [read_counts(out) for out in wanted]
    return Written(
        num_rows=sum(one["rows"] for one in counts),
        num_answer_tokens=sum(one["answer_tokens"] for one in counts),
        num_new_rows=num_new,
        was_finished=was_finished,
        num_other_ids=sum(one["retokenised_to_other_ids"] for one in counts),
    )
