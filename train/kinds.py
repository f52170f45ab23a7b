"""Settings of each kind of head and of its objective: one group of flags for each entry point."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from typing_extensions import override

from outrider.train.schedule import check_range
from outrider.train.settings import HeadSettings, ObjectiveSettings, Settings


@dataclass(frozen=True, kw_only=True)
class EagleHeadSettings(HeadSettings):
    """The head's kind and geometry; everything left out follows the target's config."""

    GEOMETRY: ClassVar[Mapping[str, str]] = {
        **HeadSettings.GEOMETRY,
        "aux_layers": "aux_layers",
        "head_hidden": "hidden_size",
        "head_intermediate": "intermediate_size",
        "norm_before_residual": "norm_before_residual",
        "norm_before_fc": "norm_before_fc",
        "fc_norm": "fc_norm",
        "norm_output": "norm_output",
    }

    head: Literal["eagle3", "eagle1"] = "eagle3"
    """eagle3 fuses three layers of the target; eagle1 continues the target's last state."""

    aux_layers: tuple[int, ...] | None = None
    """Decoder layers whose inputs are the features (0-based; 2, n/2, n-3 by default)."""

    head_hidden: int | None = None
    """Hidden size of the head; the target's by default."""

    head_intermediate: int | None = None
    """Width of the head's MLP; the target's by default."""

    norm_before_residual: bool = False
    """Take the residual after the hidden norm (SGLang ignores this flag)."""

    norm_before_fc: bool = False
    """Normalise the concatenated features before the fusing layer."""

    fc_norm: bool = False
    """Normalise each layer's features before the fusing layer (EAGLE-3.1)."""

    norm_output: bool = False
    """Feed the normalised output back as the next step's hidden input (EAGLE-3.1)."""

    freeze_output: bool = False
    """eagle3 only: keep the output head's first rows, the target's own, instead of training them.
    Worth it on few rows, where a trained output head learns their wording by heart."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("head_hidden", "head_intermediate"):
            value = getattr(self, name)
            if value is not None:
                check_range(name, value, low=1)

    @property
    @override
    def freezes_output(self) -> bool:
        return self.freeze_output


@dataclass(frozen=True, kw_only=True)
class EagleObjective(ObjectiveSettings):
    """What is optimised: the divergence from the target, over the unrolled draft steps."""

    unroll_steps: int | None = None
    """Draft steps trained in a row (training-time test): 7 for eagle3 if left out, 1 for eagle1."""

    feature_weight: float = 1.0
    """eagle1 only: weight of the smooth-L1 loss on the target's last state."""

    token_weight: float = 0.1
    """eagle1 only: weight of the divergence beside the feature loss."""

    feature_noise: bool = True
    """eagle1 only: disturb the input features by EAGLE's uniform noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unroll_steps is not None:
            check_range("unroll_steps", self.unroll_steps, low=1, high=32)
        for name in ("feature_weight", "token_weight"):
            check_range(name, getattr(self, name), low=0)


@dataclass(frozen=True, kw_only=True)
class EagleRun(Settings):
    """Train an EAGLE draft head on the features of a frozen target.

    Settings come from a recipe file (--recipe) and from flags; flags win.
    """

    head: EagleHeadSettings
    objective: EagleObjective

    def __post_init__(self) -> None:
        if self.head.head == "eagle1" and self.objective.unroll_steps not in (None, 1):
            raise ValueError(
                f"unroll_steps is {self.objective.unroll_steps} with head eagle1, which trains "
                "single steps; leave it out or set it to 1"
            )
        for name in ("draft_vocab", "aux_layers", "freeze_output"):
            value = getattr(self.head, name)
            if self.head.head == "eagle1" and value not in (None, False):
                raise ValueError(
                    f"{name} is {value} with head eagle1, which continues the target's last state "
                    "with the target's own output head; leave it out or use head eagle3"
                )

    @property
    @override
    def num_steps(self) -> int:
        default = 1 if self.head.head == "eagle1" else 7
        return self.objective.unroll_steps or default


@dataclass(frozen=True, kw_only=True)
class DepthHeadsSettings(HeadSettings):
    """What heads that each draft one depth share: Medusa's and Hydra's."""

    GEOMETRY: ClassVar[Mapping[str, str]] = {
        **HeadSettings.GEOMETRY,
        "num_draft_heads": "num_draft_heads",
        "num_draft_layers": "num_draft_layers",
        "freeze_output": "shared_output",
    }

    num_draft_heads: int = 4
    """Heads, which is tokens drafted ahead."""

    num_draft_layers: int = 1
    """Residual blocks of each head."""

    freeze_output: bool = False
    """Use the target's output rows for all heads, instead of training a copy for each: rows of
    their own (draft vocabulary x width x heads) outweigh all else that is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("num_draft_heads", self.num_draft_heads, low=1, high=32)
        check_range("num_draft_layers", self.num_draft_layers, low=1)


@dataclass(frozen=True, kw_only=True)
class DepthHeadsRun(Settings):
    """Settings of heads that each draft one depth: as many steps as heads."""

    head: DepthHeadsSettings
    objective: ObjectiveSettings

    @property
    @override
    def num_steps(self) -> int:
        return self.head.num_draft_heads


@dataclass(frozen=True, kw_only=True)
class MedusaHeadSettings(DepthHeadsSettings):
    """The heads' geometry; everything left out follows the target's config."""

    head: Literal["medusa"] = "medusa"
    """Medusa-1: heads on the last state of a frozen target."""


@dataclass(frozen=True, kw_only=True)
class MedusaRun(DepthHeadsRun):
    """Train Medusa heads on the features of a frozen target.

    Settings come from a recipe file (--recipe) and from flags; flags win.
    """

    head: MedusaHeadSettings


@dataclass(frozen=True, kw_only=True)
class HydraHeadSettings(DepthHeadsSettings):
    """The heads' geometry; everything left out follows the target's config."""

    GEOMETRY: ClassVar[Mapping[str, str]] = {
        **DepthHeadsSettings.GEOMETRY,
        "prefix_layer": "prefix_layer",
    }

    head: Literal["hydra"] = "hydra"
    """Hydra: Medusa's heads, told the tokens drafted so far."""

    num_draft_layers: int = 2
    """Residual blocks of each head; the first one narrows its input."""

    prefix_layer: bool = False
    """Run the text's states through one decoder layer first (Hydra++)."""


@dataclass(frozen=True, kw_only=True)
class HydraRun(DepthHeadsRun):
    """Train Hydra heads on the features of a frozen target.

    Settings come from a recipe file (--recipe) and from flags; flags win.
    """

    head: HydraHeadSettings


@dataclass(frozen=True, kw_only=True)
class MtpHeadSettings(HeadSettings):
    """The module's geometry; everything left out follows the target's config."""

    GEOMETRY: ClassVar[Mapping[str, str]] = {
        **HeadSettings.GEOMETRY,
        "head_intermediate": "intermediate_size",
    }

    head: Literal["mtp"] = "mtp"
    """One module as in DeepSeek-V3, with the target's embedding and output head."""

    init: str | None = None
    """Folder of an exported head to start from, whose draft vocabulary is kept; or `target`, the
    module that the target's own checkpoint ships."""

    head_intermediate: int | None = None
    """Width of the module's MLP; the target's by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_intermediate is not None:
            check_range("head_intermediate", self.head_intermediate, low=1)


@dataclass(frozen=True, kw_only=True)
class MtpObjective(ObjectiveSettings):
    """What is optimised: the divergence from the target, over the unrolled draft steps."""

    unroll_steps: int = 3
    """Draft steps trained in a row; 1 trains the module as the target's own makers do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("unroll_steps", self.unroll_steps, low=1, high=32)


@dataclass(frozen=True, kw_only=True)
class MtpRun(Settings):
    """Train an MTP module on the features of a frozen target.

    Settings come from a recipe file (--recipe) and from flags; flags win.
    """

    head: MtpHeadSettings
    objective: MtpObjective

    @property
    @override
    def num_steps(self) -> int:
        return self.objective.unroll_steps
