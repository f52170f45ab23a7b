"""What a head's chains say at every place of traced answers: the rows that policies replay.

N starts of rounds in a row, S tokens of prompt and answer, D head width, W draft vocabulary,
R drafted rows, K drafts at most.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.data.sampling import Sampling
from outrider.eval.offline.batching import check_rule
from outrider.eval.offline.chain import hidden_steps
from outrider.eval.offline.coins import Contexts
from outrider.eval.offline.contexts import DraftVocabulary
from outrider.eval.offline.traces import Trace, TraceRow
from outrider.eval.policies.policy import Ahead
from outrider.eval.policies.replay import Path
from outrider.heads import DraftHead, HeadCache

_STARTS = 128


@dataclass(frozen=True)
class HeadRow:
    """One traced answer; index t of each list is a place, 0 (the prefill's token) is unused."""

    num_tokens: int
    accepts: list[list[float]]
    along_text: list[Path]
    along_draft: list[Path]

    def accept(self, place: int) -> Sequence[float]:
        """Chance that each draft of a round from `place` is accepted, given the text."""
        return self.accepts[place]

    def on_text(self, place: int) -> Path:
        """The path along the text."""
        return self.along_text[place]

    def drafted(self, place: int) -> Sequence[tuple[float, Path]]:
        """The one path that the draft takes, or, where drafts are drawn, one that it drew."""
        return ((1.0, self.along_draft[place]),)


def head_rows(
    head: DraftHead,
    trace: Trace,
    *,
    depth: int,
    rule: str | None = None,
    rows: Sequence[int] | None = None,
    seed: int = 0,
    position_limit: int | None = None,
) -> Iterator[HeadRow]:
    """Rows of a trace, in order.

    Where drafts are chosen (every rule but rejection) each figure is that of the text. Where they
    are drawn, what is drafted behind a rejection depends on the draws: it is taken from one path
    drawn at every place, so figures of drafted tokens are unbiased and as noisy as one decoding
    over all places; target calls and accepted tokens stay exact.

    Args:
        head: Attached to the target's tables.
        trace: The target's own text with the states that the head reads.
        depth: Longest chain that any policy may draft.
        rule: greedy, rejection, match or point_mass; by default that of `score_chain`.
        rows: Indices of trace rows; all by default.
        seed: Of the drawn paths.
        position_limit: Positions of the target, if it has an end.
    """
    rule = check_rule(rule, trace.sampling)
    is_drawn = rule == "rejection"
    generator = torch.Generator().manual_seed(seed)
    for index in range(len(trace)) if rows is None else rows:
        row = trace.row(index, head.config.aux_layers)
        caps = _caps(head, row, depth, position_limit)
        temperature = trace.sampling.temperature if is_drawn else 0.0
        own_tokens, drafts = _own_paths(head, row, depth, temperature, generator)
        drafted = [_cut(path, cap) for path, cap in zip(drafts, caps, strict=True)]
        if is_drawn:
            accepts, paths = _text_paths(head, row, depth, trace.sampling)
            on_text = [_cut(path, cap) for path, cap in zip(paths, caps, strict=True)]
        else:
            accepts, on_text = _matches(row, own_tokens), drafted
        yield HeadRow(row.num_tokens, accepts, on_text, drafted)


def _cut(path: Path, length: int) -> Path:
    return Path(path.own[:length], path.ahead[:length])


def _caps(head: DraftHead, row: TraceRow, depth: int, position_limit: int | None) -> list[int]:
    """Most drafts of a round from each place, as in decoding: positions of head and target end."""
    known = [row.prompt_length + place for place in range(row.num_tokens)]
    limit = head.config.max_position_embeddings
    caps = [min(depth, head.config.max_drafts, limit - tokens + 2) for tokens in known]
    if position_limit is not None:
        caps = [min(cap, position_limit - tokens) for cap, tokens in zip(caps, known, strict=True)]
    return [max(0, cap) for cap in caps]


def _matches(row: TraceRow, tokens: list[list[int]]) -> list[list[float]]:
    text = row.ids_T[row.prompt_length :].tolist()
    return [
        [float(token == wanted) for token, wanted in zip(path, text[place:], strict=False)]
        for place, path in enumerate(tokens)
    ]


@torch.no_grad()
def _own_paths(
    head: DraftHead, row: TraceRow, depth: int, temperature: float, generator: torch.Generator
) -> tuple[list[list[int]], list[Path]]:
    """Tokens and path that the draft takes from every place: argmax, or drawn above 0."""
    device = head.device
    ids_1S = row.ids_T[None].to(device)
    feature_1SD = head.project(row.aux_TF[None].to(device), row.last_TH[None].to(device))
    cache = HeadCache()
    num_rows = ids_1S.shape[1] - 1
    position_1S = torch.arange(num_rows, device=device)[None]
    hidden_1SD = head.step(feature_1SD[:, :-1], ids_1S[:, 1:], position_1S, cache)
    tokens: list[list[int]] = [[]]
    paths = [Path((), ())]
    # A round from place t starts at row prompt + t - 2, t from 1.
    roots = range(row.prompt_length - 1, num_rows - 1)
    for first in range(0, len(roots), _STARTS):
        root_N = torch.tensor(roots[first : first + _STARTS], device=device)
        found = _Paths(head, temperature, generator)
        seen_NS = torch.arange(num_rows, device=device) <= root_N[:, None]
        own_NN = torch.eye(len(root_N), dtype=torch.bool, device=device)
        hidden_1ND = hidden_1SD[:, root_N]
        for level in range(min(depth, head.config.max_drafts)):
            if level:
                seen_NS = torch.cat([seen_NS, own_NN], dim=1)
                position_1N = (root_N + level)[None]
                mask = seen_NS[None, None]
                hidden_1ND = head.step(
                    hidden_1ND, found.newest_N[None], position_1N, cache, mask, depth=level
                )
            found.add(head.draft_logits(hidden_1ND, level)[0])
        cache.truncate(num_rows)
        tokens += found.tokens()
        paths += found.paths()
    return tokens, paths


class _Paths:
    """Paths of several starts as they grow."""

    def __init__(self, head: DraftHead, temperature: float, generator: torch.Generator) -> None:
        self._ids_W, self._temperature, self._generator = head.draft_ids_W, temperature, generator
        self._columns: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    @property
    def newest_N(self) -> Tensor:  # noqa: N802 - a dimension suffix
        """The tokens added last."""
        return self._columns[-1][0]

    def add(self, logits_NW: Tensor) -> None:
        """Take one more token of every path from these logits."""
        law_NW = (logits_NW.float() / (self._temperature or 1.0)).softmax(-1)
        if self._temperature:
            picked_N = law_NW.cpu().multinomial(1, generator=self._generator)[:, 0]
            picked_N = picked_N.to(law_NW.device)
        else:
            picked_N = logits_NW.argmax(-1)
        own_N = law_NW.gather(-1, picked_N[:, None])[:, 0]
        entropy_N = torch.special.entr(law_NW).sum(-1)
        self._columns.append((self._ids_W[picked_N], own_N, law_NW.max(-1).values, entropy_N))

    def tokens(self) -> list[list[int]]:
        """Tokens of every path."""
        return torch.stack([column[0] for column in self._columns], 1).tolist()

    def paths(self) -> list[Path]:
        """What was said along every path."""
        own, top, entropy = (
            torch.stack([column[i] for column in self._columns], 1).tolist() for i in (1, 2, 3)
        )
        return [
            Path(one, [Ahead(*pair) for pair in zip(tops, entropies, strict=True)])
            for one, tops, entropies in zip(own, top, entropy, strict=True)
        ]


@torch.no_grad()
def _text_paths(
    head: DraftHead, row: TraceRow, depth: int, sampling: Sampling
) -> tuple[list[list[float]], list[Path]]:
    """Acceptance and path along the text, for drafts drawn at the text's temperature."""
    context = Contexts.of([row])
    hidden_KND = hidden_steps(head, [row], context, depth)
    vocabulary = DraftVocabulary.of(head)
    num = row.num_tokens
    slot_N = vocabulary.slot_V[row.ids_T[row.prompt_length + 1 :]]
    chance_N = row.logprob_N[1:].exp()
    if (chance_N <= 0).any():
        raise ValueError(
            f"trace row {row.row_id!r} holds a token of probability zero under the trace's "
            "sampling; build the trace again from the target's own text"
        )
    accepts: list[list[float]] = [[] for _ in range(num)]
    own: list[list[float]] = [[] for _ in range(num)]
    ahead: list[list[Ahead]] = [[] for _ in range(num)]
    for step, hidden_ND in enumerate(hidden_KND):
        # Context n is the place n + 1; the draft of depth `step` for it started `step` earlier.
        starts = range(num - 1 - step)
        for first in range(0, len(starts), _STARTS):
            root_N = torch.tensor(starts[first : first + _STARTS])
            logits_NW = head.draft_logits(hidden_ND[root_N.to(hidden_ND.device)], step)
            law_NW = (logits_NW.float().cpu() / sampling.temperature).softmax(-1)
            drafted_N = slot_N[root_N + step]
            q_N = law_NW.gather(-1, drafted_N.clamp(min=0)[:, None])[:, 0] * (drafted_N >= 0)
            accept_N = (q_N / chance_N[root_N + step]).clamp(max=1)
            top_N, entropy_N = law_NW.max(-1).values, torch.special.entr(law_NW).sum(-1)
            parts = (root_N + 1, accept_N, q_N, top_N, entropy_N)
            for place, accept, q, top, entropy in zip(*(p.tolist() for p in parts), strict=True):
                accepts[place].append(accept)
                own[place].append(q)
                ahead[place].append(Ahead(top, entropy))
    return accepts, [Path(*pair) for pair in zip(own, ahead, strict=True)]
