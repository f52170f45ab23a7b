"""Hardware and sizes for `outrider tune` where nothing is measured: data sheets and configs."""

from dataclasses import dataclass

import torch

from outrider.data.outline import outline
from outrider.data.target import Target
from outrider.eval.tune.models import DraftSizes, TargetSizes, draft_sizes, target_sizes
from outrider.eval.tune.roofline import Hardware, RooflineCosts, hardware_named
from outrider.heads import EagleConfig, EagleHead, Tables, load_head


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Hardware that one does not own, and sizes of a target that is not at hand."""

    gpu: str | None = None
    """a100, h100, h200, b200, l4, a10, l40s, rtx4090 or mi300x: costs by its data sheet."""
    bandwidth: float | None = None
    """Bytes of memory a second; in place of the data sheet's."""
    flops: float | None = None
    """Operations a second at the precision of the pass; in place of the data sheet's."""
    memory: float | None = None
    """Bytes of memory; in place of the data sheet's."""
    bandwidth_share: float | None = None
    """Share of the bandwidth that passes reach; 0.8 is assumed, 1 gives the bound."""
    flops_share: float | None = None
    """Share of the operations that passes reach; 0.6 is assumed, 1 gives the bound."""
    step_overhead: float | None = None
    """Seconds of a round outside the passes; 0.00121 is assumed."""
    draft_overhead: float | None = None
    """Seconds of a draft step outside what it reads and computes; 0.0002 is assumed."""
    tensor_parallel: int = 1
    """GPUs that share every layer."""
    weight_bytes: float | None = None
    """Bytes of a weight of a quantised target, such as 0.5."""
    kv_bytes: float | None = None
    """Bytes of a number in the caches, such as 1 for fp8."""
    parameters: float | None = None
    """Weights of the target where it is not named by --target; with --kv-per-token."""
    kv_per_token: float | None = None
    """Numbers of keys and values of one position: 2 x layers x key-value heads x head size."""
    draft_parameters: float | None = None
    """Weights of the draft where no head is named by --head; by default an EAGLE-3 head's."""


def by_data_sheet(gpu: Gpu, target: str | None, head: str | None, dtype: str) -> RooflineCosts:
    """Costs of a target and a head on hardware that is described."""
    changed = (
        "bandwidth", "flops", "memory", "bandwidth_share", "flops_share", "step_overhead",
        "draft_overhead",
    )  # fmt: skip
    values = {name: v for name in changed if (v := getattr(gpu, name)) is not None}
    if gpu.gpu is not None:
        hardware = hardware_named(gpu.gpu, dtype, tensor_parallel=gpu.tensor_parallel, **values)
    else:
        missing = [name for name in ("bandwidth", "flops", "memory") if name not in values]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} is not given; describe hardware by --bandwidth, --flops and "
                "--memory, or name one with --gpu"
            )
        hardware = Hardware(
            name="described hardware", source="as given", tensor_parallel=gpu.tensor_parallel,
            **values,
        )  # fmt: skip
    sizes, draft = _sizes(gpu, target, head)
    return RooflineCosts(
        hardware=hardware,
        target=sizes,
        draft=draft,
        dtype=dtype,
        weight_bytes=gpu.weight_bytes,
        kv_bytes=gpu.kv_bytes,
    )


def _sizes(gpu: Gpu, name: str | None, folder: str | None) -> tuple[TargetSizes, DraftSizes]:
    """Sizes of target and draft: counted from configs and files, or as given."""
    given = (gpu.parameters, gpu.kv_per_token)
    if (name is None) == (None in given):
        raise ValueError(
            f"target is {name}, parameters and kv_per_token are {given}; name the "
            "target with --target, or give both numbers"
        )
    if name is None:
        assert gpu.parameters is not None
        assert gpu.kv_per_token is not None
        sizes = TargetSizes(
            name="described target",
            parameters=gpu.parameters,
            dense=gpu.parameters,
            kv_numbers=gpu.kv_per_token,
        )
        if gpu.draft_parameters is None:
            raise ValueError(
                "draft_parameters is not given; without --target the size of a draft does not "
                "follow: give --draft-parameters"
            )
        return sizes, DraftSizes(
            name="described draft", parameters=gpu.draft_parameters, step=gpu.draft_parameters
        )
    target = outline(name, dtype=torch.bfloat16, reads_rows=False)
    if folder is not None:
        head = load_head(folder, _blank_tables(target))
        return target_sizes(target), draft_sizes(head, folder)
    if gpu.draft_parameters is not None:
        wanted = gpu.draft_parameters
        return target_sizes(target), DraftSizes(name="given", parameters=wanted, step=wanted)
    config = EagleConfig.from_target(target.config, draft_vocab_size=min(32_000, target.vocab_size))
    ids_W = None
    if config.is_reduced:
        ids_W = torch.arange(config.draft_vocab_size)
    head = EagleHead(config, ids_W)
    return target_sizes(target), draft_sizes(head, "an EAGLE-3 head with 32,000 draft tokens")


def _blank_tables(target: Target) -> Tables:
    """Tables of the target's shape that take no memory: one zero, shown everywhere."""
    zero = torch.zeros(())
    return Tables(
        embedding_VH=zero.expand(target.embedding_VH.shape),
        output_VH=zero.expand(target.output_VH.shape),
        tokenizer_size=target.tokenizer_size,
        num_layers=target.num_layers,
        softcap=target.softcap,
    )
