"""Settings of each kind of head and of its objective: one group of flags for each entry point."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from typing_extensions import override

from outrider.train.joint import JointSettings
from outrider.train.objective_settings import ObjectiveSettings
from outrider.train.schedule import check_range
from outrider.train.settings import HeadSettings, Settings


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
        "head_layers": "num_layers",
        "head_heads": "num_heads",
        "head_kv_heads": "num_kv_heads",
        "head_dim": "head_dim",
        "sliding_window": "sliding_window",
        "full_attention_layers": "full_attention_layers",
    }

    head: Literal["eagle3", "eagle1"] = "eagle3"
    """eagle3 fuses three layers of the target; eagle1 continues the target's last state."""

    aux_layers: tuple[int, ...] | None = None
    """Decoder layers whose inputs are the features, any number of them, rising: 0 is the embedding,
    n-1 the last layer's input, n its output before the final norm; 2, n/2, n-3 by default."""

    head_hidden: int | None = None
    """Hidden size of the head; the target's by default."""

    head_intermediate: int | None = None
    """Width of the head's MLP; the target's by default."""

    head_layers: int | None = None
    """eagle3 only: decoder layers of the head, 1 by default; those after the first are ordinary."""

    head_heads: int | None = None
    """Query heads of the head's attention; the target's by default."""

    head_kv_heads: int | None = None
    """Key and value heads; the target's by default."""

    head_dim: int | None = None
    """Channels of one attention head; the target's by default."""

    sliding_window: int | None = None
    """eagle3 only: let a row see this many positions, itself included, instead of the whole text.
    vLLM reads it from the exported head; SGLang wants it as a flag, less one."""

    full_attention_layers: tuple[int, ...] | None = None
    """Layers of the head, from 0, that see the whole text beside a sliding window."""

    embedding: Literal["target", "frozen", "trained"] | None = None
    """eagle3 only: the target's embedding, lent; a copy of it in the head, frozen; or a trained
    copy. By default the target's, and a trained one where the head is not as wide as the target."""

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

    start: Literal["induction", "fitted", "target"] = "induction"
    """eagle3 only: what a new head begins with. induction: attention that finds the current token
    earlier in the text and copies what followed, at no cost. fitted: that, and least squares on the
    target's states, so that it drafts before the first step; the better one for sampled text.
    target: only the target's own rows and norm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("hidden", "intermediate", "layers", "heads", "kv_heads", "dim")
        for name in (*(f"head_{size}" for size in sizes), "sliding_window"):
            value = getattr(self, name)
            if value is not None:
                check_range(name, value, low=1)

    @property
    @override
    def freezes_output(self) -> bool:
        return self.freeze_output

    @property
    @override
    def starts_from_states(self) -> bool:
        return self.head == "eagle3" and self.start != "target" and self.init is None

    @override
    def geometry(self) -> dict[str, Any]:
        own = None if self.embedding is None else self.embedding != "target"
        return super().geometry() | {"own_embedding": own}


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

    feature_noise_std: float = 0.0
    """eagle3 only: disturb the fused features in training by normal noise of this share of each
    channel's standard deviation over the batch."""

    feature_dropout: float = 0.0
    """eagle3 only: chance that an entry of the fused features is zero in a step of training; the
    others grow to keep the mean."""

    layer_dropout: float = 0.0
    """eagle3 only: the same of the channels inside the layer, of attention's output and the MLP."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("feature_noise_std", self.feature_noise_std, low=0)
        for name in ("feature_dropout", "layer_dropout"):
            check_range(name, getattr(self, name), low=0, below=1)
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
        super().__post_init__()
        if self.head.head == "eagle1" and self.objective.unroll_steps not in (None, 1):
            raise ValueError(
                f"unroll_steps is {self.objective.unroll_steps} with head eagle1, which trains "
                "single steps; leave it out or set it to 1"
            )
        eagle3_only = ("draft_vocab", "aux_layers", "freeze_output", "head_layers")
        for name in (*eagle3_only, "sliding_window", "full_attention_layers", "embedding"):
            value = getattr(self.head, name)
            if self.head.head == "eagle1" and value not in (None, False):
                raise ValueError(
                    f"{name} is {value} with head eagle1, one layer that continues the target's "
                    "last state with the target's own tables; leave it out or use head eagle3"
                )
        for name in ("feature_noise_std", "feature_dropout", "layer_dropout"):
            value = getattr(self.objective, name)
            if self.head.head == "eagle1" and value:
                raise ValueError(
                    f"{name} is {value} with head eagle1, which is disturbed by --feature-noise; "
                    "leave it out"
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
    """Heads on the target's last state, each for one depth."""


@dataclass(frozen=True, kw_only=True)
class MedusaRun(DepthHeadsRun):
    """Train Medusa heads: on a frozen target (Medusa-1), or with --joint together with it (-2).

    Settings come from a recipe file (--recipe) and from flags; flags win.
    """

    head: MedusaHeadSettings
    joint: JointSettings

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.joint.joint != "none" and self.objective.normalise != "token":
            raise ValueError(
                f"normalise is {self.objective.normalise} with joint {self.joint.joint}, which "
                "holds the target to its original token by token; leave it at token"
            )

    @property
    @override
    def tuning(self) -> JointSettings | None:
        return None if self.joint.joint == "none" else self.joint


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
