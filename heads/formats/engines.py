"""What serving engines cannot do with an EAGLE-3 head, told before it is trained.

Read in vLLM 0.32.0, SGLang 0.5.23 (python/sglang/srt/models/llama_eagle3.py, llama.py and
layers/attention/flashattention_backend.py) and llama.cpp's converter. vLLM takes all of them:
several layers, windows by layer, and features from the embedding to the last layer's output.
"""

from collections.abc import Iterator

from outrider.heads.config import HeadConfig
from outrider.heads.eagle import EagleConfig


def limits(config: HeadConfig) -> Iterator[str]:
    """A line for every engine that would refuse the head or compute another one."""
    if not isinstance(config, EagleConfig) or config.kind != "eagle3":
        return
    if config.num_layers > 1:
        yield f"llama.cpp converts heads of one layer; this one has {config.num_layers}"
    if config.fc_norm or config.norm_output:
        yield "llama.cpp ignores fc_norm and norm_output, and would draft worse"
    if config.norm_before_residual:
        yield "SGLang ignores norm_before_residual, and would draft worse"
    if config.sliding_window is not None:
        yield from _window(config)
    if config.num_target_layers in config.aux_layers:
        yield (
            f"SGLang does not capture layer {config.num_target_layers}, the output of the target's "
            "last layer, for Llama and Qwen targets; vLLM does"
        )
    if len(config.aux_layers) * config.target_hidden_size == config.hidden_size:
        yield "SGLang leaves out fc when features are as wide as the head; vLLM applies it"


def _window(config: EagleConfig) -> Iterator[str]:
    assert config.sliding_window is not None
    if config.full_attention_layers or config.sliding_window == 1:
        yield (
            "SGLang has one window for all layers, of 2 positions or more; it cannot serve "
            f"sliding_window {config.sliding_window} with full_attention_layers "
            f"{config.full_attention_layers}"
        )
        return
    # FlashAttention's window there counts the keys before the row, so one less than ours.
    yield (
        "SGLang takes no window from config.json: serve with --speculative-draft-window-size "
        f"{config.sliding_window - 1}"
    )
