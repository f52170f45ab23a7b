"""The words of `--loss`: one divergence, or several with weights. Read before any model loads."""

import math

LOSSES = ("soft_ce", "kl", "reverse_kl", "jsd", "hard_ce", "tv", "lk_alpha", "lk_lambda")
"""Those of outrider.heads.losses."""


def parse_terms(text: str) -> tuple[tuple[str, float], ...]:
    """Names and weights of "tv" (which weighs 1) or of "tv:0.9,soft_ce:0.1".

    Raises ValueError for an unknown name, a name given twice, or a weight that is not above 0.
    """
    terms: dict[str, float] = {}
    for part in text.split(","):
        name, colon, number = (word.strip() for word in part.partition(":"))
        if name not in LOSSES:
            raise ValueError(
                f"loss is {text!r}, where {name!r} is unknown; choose of {', '.join(LOSSES)}"
            )
        if name in terms:
            raise ValueError(f"loss is {text!r}; name {name} once")
        try:
            terms[name] = float(number) if colon else 1.0
        except ValueError:
            terms[name] = math.nan
        if not 0 < terms[name] < math.inf:
            raise ValueError(
                f"loss is {text!r}, where {number!r} is no weight; write NAME:WEIGHT,NAME:WEIGHT "
                "with weights above 0"
            )
    return tuple(terms.items())
