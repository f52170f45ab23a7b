"""What vendors' data sheets say of common accelerators."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """What a vendor's data sheet says of one accelerator."""

    title: str
    bf16: float
    """Dense bfloat16 operations a second on tensor cores, sums in float32."""
    fp32: float
    """Float32 operations a second (no TF32)."""
    bandwidth: float
    """Bytes of memory a second."""
    memory: float
    """Bytes of memory."""
    source: str


SHEETS = {
    "a100": Sheet(
        title="NVIDIA A100 80GB SXM", bf16=312e12, fp32=19.5e12, bandwidth=2.039e12, memory=80e9,
        source="NVIDIA A100 Tensor Core GPU data sheet (2022)",
    ),
    "h100": Sheet(
        title="NVIDIA H100 SXM", bf16=989e12, fp32=67e12, bandwidth=3.35e12, memory=80e9,
        source="NVIDIA H100 Tensor Core GPU data sheet (sparse figures halved)",
    ),
    "h200": Sheet(
        title="NVIDIA H200 SXM", bf16=989e12, fp32=67e12, bandwidth=4.8e12, memory=141e9,
        source="NVIDIA H200 Tensor Core GPU data sheet (sparse figures halved)",
    ),
    "b200": Sheet(
        title="NVIDIA B200", bf16=2.25e15, fp32=75e12, bandwidth=7.67e12, memory=180e9,
        source="NVIDIA HGX B200 data sheet, an eighth of it (sparse figures halved); bandwidth as "
        "the driver of the 180 GB card states it (bus of 7,680 bits; pytorch/ao pull request 4002)",
    ),
    "l4": Sheet(
        title="NVIDIA L4", bf16=121e12, fp32=30.3e12, bandwidth=300e9, memory=24e9,
        source="NVIDIA L4 Tensor Core GPU data sheet (sparse figures halved)",
    ),
    "a10": Sheet(
        title="NVIDIA A10", bf16=125e12, fp32=31.2e12, bandwidth=600e9, memory=24e9,
        source="NVIDIA A10 Tensor Core GPU data sheet (sparse figures halved)",
    ),
    "l40s": Sheet(
        title="NVIDIA L40S", bf16=362e12, fp32=91.6e12, bandwidth=864e9, memory=48e9,
        source="NVIDIA L40S data sheet (sparse figures halved)",
    ),
    "rtx4090": Sheet(
        title="NVIDIA GeForce RTX 4090", bf16=165.2e12, fp32=82.6e12, bandwidth=1.008e12,
        memory=24e9, source="NVIDIA Ada GPU Architecture whitepaper, appendix A (dense)",
    ),
    "mi300x": Sheet(
        title="AMD Instinct MI300X", bf16=1307.4e12, fp32=163.4e12, bandwidth=5.3e12,
        memory=192e9, source="AMD Instinct MI300X data sheet (dense)",
    ),
}  # fmt: skip
