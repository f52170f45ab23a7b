"""Draft heads: the networks, their mathematics and their published layouts."""

from outrider.heads.cache import HeadCache
from outrider.heads.config import EagleConfig
from outrider.heads.eagle import EagleHead
from outrider.heads.formats import load_head, save_head
from outrider.heads.plan import RowPlan
from outrider.heads.tables import Tables
from outrider.heads.unroll import unroll

HEADS = {"eagle": EagleHead}

__all__ = [
    "HEADS",
    "EagleConfig",
    "EagleHead",
    "HeadCache",
    "RowPlan",
    "Tables",
    "load_head",
    "save_head",
    "unroll",
]
