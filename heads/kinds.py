"""The kinds of draft head, by name."""

from outrider.heads.base import DraftHead
from outrider.heads.config import HeadConfig
from outrider.heads.eagle import EagleConfig, EagleHead

HEADS: dict[str, type[DraftHead]] = {"eagle3": EagleHead, "eagle1": EagleHead}
CONFIGS: dict[str, type[HeadConfig]] = {"eagle3": EagleConfig, "eagle1": EagleConfig}
