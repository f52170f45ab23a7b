"""Held-out acceptance during training: the evaluator's own figures, from exported files."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.data.sampling import Sampling
from outrider.data.target import Target
from outrider.eval.link import judged_head
from outrider.eval.offline.chain import score_chain
from outrider.eval.offline.scores import Score as ChainScore
from outrider.eval.offline.texts import Text, read_texts
from outrider.eval.offline.trace_info import FORMAT
from outrider.eval.offline.traces import Trace, build_trace
from outrider.train.parts import Score
from outrider.train.settings import DataSettings

GREEDY = Sampling(temperature=0.0)


def heldout_trace(
    data: DataSettings, target: Target, layers: Sequence[int], store: Path
) -> Trace | None:
    """The trace that checkpoints are judged on; None without held-out rows."""
    if data.heldout is None:
        return None
    folder = Path(data.heldout)
    if (folder / "meta.json").is_file():
        trace = Trace(folder)
        if not trace.sampling.is_greedy:
            raise ValueError(
                f"heldout {data.heldout!r} is a trace of temperature {trace.sampling.temperature}; "
                "heads are kept by greedy acceptance: give a trace of temperature 0"
            )
        return trace
    texts = spread(read_texts(data.heldout, GREEDY), data.heldout_rows)
    key = hashlib.sha256()
    for part in (
        [text[:4] for text in texts],
        target.fingerprint(),
        list(layers),
        str(target.dtype),
        FORMAT,  # a store outlives versions; what another wrote is traced anew beside it
    ):
        key.update(json.dumps(part).encode())
    folder = store / f"heldout-{key.hexdigest()[:16]}"
    return build_trace(target, texts, folder, sampling=GREEDY, layers=layers)


def spread(texts: list[Text], limit: int | None) -> list[Text]:
    """At most `limit` texts, as many of each kind as can be, evenly over each kind's list."""
    if limit is None or limit >= len(texts):
        return texts
    kinds: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        kinds.setdefault(text.kind, []).append(index)
    share = dict.fromkeys(kinds, 0)
    while limit:
        for kind in [kind for kind in kinds if share[kind] < len(kinds[kind])][:limit]:
            share[kind] += 1
            limit -= 1
    chosen = [
        found[place * len(found) // share[kind]]
        for kind, found in kinds.items()
        for place in range(share[kind])
    ]
    return [texts[index] for index in sorted(chosen)]


def judge(trace: Trace, target: Target, depth: int) -> Callable[[Path], Score]:
    """Scores an exported folder: exact tokens per target call for chains up to `depth`."""

    def score(folder: Path) -> Score:
        head = judged_head(folder, target)
        return score_of(score_chain(head, trace, target, lengths=range(1, depth + 1)))

    return score


def score_of(found: Mapping[int, ChainScore]) -> Score:
    """The result of chains by length; the longest one's picks the best head."""
    longest = found[max(found)]
    details: dict[str, Any] = {
        "tau": round(longest.tau, 5),
        "tau_by_length": {str(length): round(one.tau, 5) for length, one in found.items()},
        "survival": [round(share, 5) for share in longest.survival],
        "alpha": round(longest.alpha, 5),
        "tokens": int(longest.tokens_R.sum()),
    }
    return Score(math.log(longest.tau), details)
