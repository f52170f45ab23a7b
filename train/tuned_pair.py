"""A head and its tuned target as they leave a joint run: written together, judged from the files.

A run's `best` and `last` hold the head itself, `target` (the tuned target, a model folder like any
other) and, with LoRA, `adapter` (peft's layout, to be used with the original).
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.data.answers import Decoding, Request
from outrider.data.local_answers import answers
from outrider.data.target import Target
from outrider.eval.link import judged_head
from outrider.eval.offline.chain import score_chain
from outrider.eval.offline.texts import Text
from outrider.eval.offline.traces import Trace, build_trace
from outrider.heads import DraftHead
from outrider.heads.formats import read_notes, save_head
from outrider.train.drift import measure_drift
from outrider.train.parts import Score
from outrider.train.tuning import Tuning
from outrider.train.validate import GREEDY, score_of
from outrider.train.vocabulary import tokens_hash

TARGET = "target"
"""Folder of the tuned target inside a head's."""


@dataclass(frozen=True, kw_only=True)
class TunedPair:
    """What a joint run exports and is judged by."""

    head: DraftHead
    tuning: Tuning
    texts: Sequence[Text]
    """Greedy answers of the original that never train; none where there are no held-out rows."""
    depth: int
    """Longest chain of drafts that is scored."""
    chat: Mapping[str, Any] = field(default_factory=dict)
    """The chat's mode, written beside the head."""

    def export(self, folder: Path) -> None:
        """Write both, the head with notes on the pair.

        They name the tuned target's hash, so that evaluating the head on the original says so, and
        how far the tuned target has drifted on the held-out rows.
        """
        original = self.tuning.target
        work = folder.with_name(f"{folder.name}.tuned")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        self.tuning.write(work)
        tuned = self.load(work / TARGET)
        notes: dict[str, Any] = {
            "target": f"{original.name} tuned with this head",
            "target_fingerprint": tuned.fingerprint(),
            "original": original.name,
            "original_fingerprint": original.fingerprint(),
            "draft_tokens": tokens_hash(tuned, self.head.draft_ids_W),
            "chat": dict(self.chat),
        }
        if self.texts:
            drift = measure_drift(
                original,
                self.texts,
                self.tuning.original_states,
                lambda ids_BT: tuned.run(ids_BT).last_BTH,
            )
            notes["drift"] = drift.record()
        save_head(self.head, folder, provenance=notes)
        for part in sorted(work.iterdir()):
            part.rename(folder / part.name)
        work.rmdir()

    def score(self, folder: Path) -> Score:
        """Exact tokens per target call on what the tuned target itself answers, and its drift.

        It answers the held-out prompts anew: the original's answers are not its own.
        """
        tuned = self.load(folder / TARGET)
        head = judged_head(folder, tuned)
        with tempfile.TemporaryDirectory() as name:
            trace = own_trace(tuned, self.texts, Path(name), head.config.aux_layers)
            found = score_of(score_chain(head, trace, tuned, lengths=range(1, self.depth + 1)))
        return found._replace(details=found.details | {"drift": read_notes(folder)["drift"]})

    def load(self, folder: Path) -> Target:
        """The tuned target from its files, where and how the original runs."""
        original = self.tuning.target
        return Target.load(str(folder), dtype=original.dtype, device=original.device)


def own_trace(target: Target, texts: Sequence[Text], folder: Path, layers: Sequence[int]) -> Trace:
    """A trace of what a target answers greedily to the prompts of the texts, as long at most."""
    longest = max(len(text.answer_ids) for text in texts)
    prompts = [(Request(text.row_id, [], GREEDY, {}), text.prompt_ids) for text in texts]
    made = {
        answer.request.id: answer.answer_ids
        for answer in answers(target, prompts, Decoding(max_new_tokens=longest))
    }
    own = [text._replace(answer_ids=made[text.row_id]) for text in texts]
    return build_trace(target, own, folder, sampling=GREEDY, layers=layers)


def texts_of(trace: Trace | None) -> list[Text]:
    """The prompts and answers of a trace."""
    found = []
    for index in range(0 if trace is None else len(trace)):
        assert trace is not None
        row = trace.row(index, ())
        ids, cut = row.ids_T.tolist(), row.prompt_length
        found.append(Text(row.row_id, row.kind, ids[:cut], ids[cut:]))
    return found
