"""From tables of chances to scores: the renewal recursion for every length of chain at once.

B rows, T places in the answer, K drafts at most, L = K + 1 draft lengths.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outrider.eval.offline.cells import cells
from outrider.eval.offline.coins import Coins
from outrider.eval.offline.renewal import Renewal, renewal, survival
from outrider.eval.offline.scores import Floats, Score, in_order, join
from outrider.eval.offline.traces import Trace, TraceRow


def score_lengths(
    batch: Sequence[TraceRow], coins: Coins, lengths: Sequence[int], rule: str, form: str
) -> dict[int, Score]:
    """Scores of chains that draft at most so many tokens, by length.

    A longer chain than the tables hold scores like the longest. `form` names a draft of length {}.
    """
    depth = coins.accept.shape[2]
    tokens_B = torch.tensor([row.num_tokens for row in batch])
    solved = renewal(coins.accept, tokens_B)
    return {
        length: _score(batch, coins, solved, min(length, depth), rule, form.format(length))
        for length in lengths
    }


def collect(
    parts: dict[int, list[Score]], batch: Sequence[TraceRow], coins: Coins, rule: str, form: str
) -> None:
    """Add a batch's scores of every length to those of the batches before."""
    for length, part in score_lengths(batch, coins, list(parts), rule, form).items():
        parts[length].append(part)


def joined(
    parts: Mapping[int, list[Score]], trace: Trace, rows: Sequence[int] | None
) -> dict[int, Score]:
    """All batches' scores by length, in the trace's order or that of `rows`."""
    wanted = [trace.row_ids[i] for i in (range(len(trace)) if rows is None else rows)]
    return {length: in_order(join(found), wanted) for length, found in parts.items()}


def _score(
    batch: Sequence[TraceRow], coins: Coins, solved: Renewal, length: int, rule: str, draft: str
) -> Score:
    num_places = coins.accept.shape[1]
    tokens_B = torch.tensor([row.num_tokens for row in batch])
    place_TK = torch.arange(num_places)[:, None] + torch.arange(length)
    end_B11 = tokens_B[:, None, None]
    visits_BT = solved.visits_BLT[:, length]
    reach_BTK = survival(coins.accept.double())[..., :length]
    arrive_BTK = visits_BT[..., None] * reach_BTK
    drafted_BTK = coins.is_drafted[..., :length]
    judged_BTK = arrive_BTK * drafted_BTK * (place_TK < end_B11)

    def weighed(table_BTK: Tensor) -> Tensor:
        return judged_BTK * table_BTK[..., :length]

    kept_BTK, best_BTK = weighed(coins.alpha), weighed(coins.best)
    inside_BTK = weighed(coins.inside)
    is_text_BT = torch.arange(num_places) < tokens_B[:, None]
    tables = {
        "tokens": is_text_BT.double(),
        "starts": visits_BT,
        "judged": _by_context(judged_BTK),
        "kept": _by_context(kept_BTK),
        "best": _by_context(best_BTK),
        # A chain is as wide as its plan everywhere.
        "wide": _by_context(best_BTK),
        "inside": _by_context(inside_BTK),
    }
    return Score(
        draft=draft,
        rule=rule,
        row_ids=tuple(row.row_id for row in batch),
        kinds=tuple(row.kind for row in batch),
        tokens_R=(tokens_B - 1).double().numpy(),
        rounds_R=solved.rounds_BL[:, length].numpy(),
        drafted_R=(visits_BT[..., None] * drafted_BTK).sum((1, 2)).numpy(),
        cut_R=(arrive_BTK * (place_TK == end_B11)).sum((1, 2)).numpy(),
        undrafted_R=(arrive_BTK * (1 - drafted_BTK) * (place_TK < end_B11)).sum((1, 2)).numpy(),
        judged_RK=_per_depth(judged_BTK),
        kept_RK=_per_depth(kept_BTK),
        hit_RK=_per_depth(weighed(coins.accept)),
        best_RK=_per_depth(best_BTK),
        wide_RK=_per_depth(best_BTK),
        inside_RK=_per_depth(inside_BTK),
        top_inside_RK=_per_depth(weighed(coins.top_inside)),
        cells=cells(batch, tables),
    )


def _per_depth(value_BTK: Tensor) -> Floats:
    return value_BTK.sum(1).numpy()


def _by_context(value_BTK: Tensor) -> Tensor:
    """Sums over rounds by the place that is judged, [B, T]: draft i of a round at t is at t + i."""
    found_BT = torch.zeros_like(value_BTK[..., 0])
    num_places = found_BT.shape[1]
    for step in range(min(value_BTK.shape[2], num_places)):
        found_BT[:, step:] += value_BTK[:, : num_places - step, step]
    return found_BT
