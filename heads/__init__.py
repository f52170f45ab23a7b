"""Draft heads: the networks, their mathematics and their published layouts."""

from outrider.heads.base import DraftHead, States
from outrider.heads.cache import HeadCache
from outrider.heads.config import HeadConfig
from outrider.heads.eagle import EagleConfig, EagleHead
from outrider.heads.formats import load_head, save_head
from outrider.heads.hydra import HydraConfig, HydraHead
from outrider.heads.kinds import CONFIGS, HEADS
from outrider.heads.medusa import MedusaConfig, MedusaHead
from outrider.heads.mtp import MtpConfig, MtpHead
from outrider.heads.plan import RowPlan
from outrider.heads.tables import Tables
from outrider.heads.unroll import unroll

__all__ = [
    "CONFIGS",
    "HEADS",
    "DraftHead",
    "EagleConfig",
    "EagleHead",
    "HeadCache",
    "HeadConfig",
    "HydraConfig",
    "HydraHead",
    "MedusaConfig",
    "MedusaHead",
    "MtpConfig",
    "MtpHead",
    "RowPlan",
    "States",
    "Tables",
    "load_head",
    "save_head",
    "unroll",
]
