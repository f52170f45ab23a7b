"""The kinds of draft head, by name."""

from outrider.heads.base import DraftHead
from outrider.heads.config import HeadConfig
from outrider.heads.eagle import EagleConfig, EagleHead
from outrider.heads.hydra import HydraConfig, HydraHead
from outrider.heads.medusa import MedusaConfig, MedusaHead
from outrider.heads.mtp import MtpConfig, MtpHead

HEADS: dict[str, type[DraftHead]] = {
    "eagle3": EagleHead,
    "eagle1": EagleHead,
    "medusa": MedusaHead,
    "hydra": HydraHead,
    "mtp": MtpHead,
}
CONFIGS: dict[str, type[HeadConfig]] = {
    "eagle3": EagleConfig,
    "eagle1": EagleConfig,
    "medusa": MedusaConfig,
    "hydra": HydraConfig,
    "mtp": MtpConfig,
}
