"""Policies by the names that a command line has for them."""

from collections.abc import Callable

from outrider.eval.policies.policy import (
    Confidence,
    Dynamic,
    Entropy,
    Heuristic,
    Kept,
    Oracle,
    Policy,
    Table,
)

FORMS = (
    "fixed:K, confidence:P,MOST, kept:P,MOST, entropy:NATS,MOST, heuristic:FIRST,MOST, "
    "transient:FIRST,MOST, dynamic:P,MOST, table:BATCH=K,BATCH=K@BATCH or oracle:MOST"
)

_LENGTHS: dict[str, Callable[[float, int], Policy]] = {
    "fixed": lambda _, most: Policy(most),
    "oracle": lambda _, most: Oracle(most),
}
_NAMED: dict[str, Callable[[float, int], Policy]] = {
    "confidence": lambda value, most: Confidence(most, _share(value)),
    "kept": lambda value, most: Kept(most, _share(value)),
    "entropy": lambda value, most: Entropy(most, _nats(value)),
    "dynamic": lambda value, most: Dynamic(most, _share(value)),
    "heuristic": lambda value, most: Heuristic(most, _whole(value)),
    "transient": lambda value, most: Heuristic(most, _whole(value), is_transient=True),
}


def policy_named(text: str) -> Policy:
    """Read a policy as it is written. Raises ValueError for anything else than `FORMS`."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "table":
            return _table(rest)
        *first, most = rest.split(",")
        value, length = float(first[0]) if first else None, int(most)
        if (value is None) != (kind in _LENGTHS) or len(first) > 1:
            raise ValueError(rest)
        named = _NAMED.get(kind) or _LENGTHS[kind]
    except (ValueError, KeyError) as error:
        raise ValueError(f"policy is {text!r}; write {FORMS}, such as fixed:4") from error
    return named(0.0 if value is None else value, length)


def _table(rest: str) -> Table:
    rows, _, batch = rest.partition("@")
    pairs = [tuple(map(int, row.split("="))) for row in rows.split(",")]
    sizes, lengths = (tuple(column) for column in zip(*pairs, strict=True))
    if list(sizes) != sorted(set(sizes)) or sizes[0] != 1 or min(lengths) < 0 or int(batch) < 1:
        raise ValueError(rest)
    return Table(max(1, *lengths), sizes, lengths, int(batch))


def _share(value: float) -> float:
    if not 0 <= value <= 1:
        raise ValueError(f"a policy's probability is {value}; give 0 to 1")
    return value


def _nats(value: float) -> float:
    if not value >= 0:
        raise ValueError(f"a policy's entropy is {value}; give nats, 0 or more")
    return value


def _whole(value: float) -> int:
    if not value.is_integer():
        raise ValueError(f"a heuristic schedule starts at {value}; give a whole number")
    return int(value)
