"""The frozen target: its tables, its logits, and the states of explicitly named layers.

What layer ids mean is told in data/capture.py; `Captured.last_BTH` is after the final norm.

Letters: B rows, T positions, N positions of any rows, H hidden size, F captured layers times H,
V rows of the output head.
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from outrider.data.anatomy import (
    cache_keyword,
    eos_ids,
    files_hash,
    find_blocks,
    find_folder,
    find_tables,
    non_finite,
    tokenizer_size,
)
from outrider.data.capture import captured, check_layers


class Captured(NamedTuple):
    """States of one forward pass of the target."""

    aux_BTF: Tensor
    """The asked-for layers' states side by side, in the order asked."""
    last_BTH: Tensor
    """After the final norm: what the output head reads."""


class _Enough(Exception):  # noqa: N818  (a signal, not an error)
    """Leaves the forward pass once the deepest wanted layer is reached."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A causal language model, frozen in eval mode, and the tables a draft head shares."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    config: PretrainedConfig
    """The text config: nested ones are unwrapped."""
    decoder: nn.Module
    blocks: nn.ModuleList
    """The decoder layers."""
    embedding_VH: Tensor
    embed_scale: float
    """What the target multiplies an embedding row by (Gemma: the root of the hidden size)."""
    output_VH: Tensor
    softcap: float | None
    """Logits are `softcap * tanh(logits / softcap)` where set."""
    eos_ids: tuple[int, ...]
    tokenizer_size: int
    """One more than the largest id the tokenizer makes; the tables may be padded beyond it."""
    folder: Path | None = None
    """Where the files lie, for targets that were loaded from files."""
    cache_keyword: str = field(default="cache", repr=False)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.blocks)

    @property
    def hidden_size(self) -> int:
        """Width of the states."""
        return self.output_VH.shape[1]

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, padding included."""
        return self.output_VH.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Precision the target runs in."""
        return self.output_VH.dtype

    @property
    def device(self) -> torch.device:
        """Where the target runs."""
        return self.output_VH.device

    @classmethod
    def load(
        cls, name: str, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
    ) -> Self:
        """Load `smollm2-demo`, a local folder, or a Hub id."""
        folder = find_folder(name)
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # whatever transformers, tokenizers or safetensors raise
            raise ValueError(
                f"target {name!r} ({folder}) does not load as a causal language model with its "
                f"tokenizer: {type(error).__name__}: {error}; name a decoder-only model's folder "
                "or Hub id, and fetch it again if a file is damaged"
            ) from error
        if absent := sorted(loading["missing_keys"]):
            raise ValueError(
                f"target {name!r}: its files lack {len(absent)} weights ({absent[0]} first), which "
                "would be random; fetch it again, or name a folder that holds a whole model"
            )
        return cls.from_model(model.to(device), tokenizer, name=name, folder=folder)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str = "in-memory",
        folder: Path | None = None,
    ) -> Self:
        """Wrap a model that is already built; it is frozen and checked with one tiny pass."""
        target = cls.outlined(model, tokenizer, name=name, folder=folder)
        _check_tables(target)
        return target

    @classmethod
    def outlined(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        folder: Path | None = None,
    ) -> Self:
        """Freeze a model and find its parts; it need not run: weights may be on the meta device."""
        model.eval().requires_grad_(requires_grad=False)
        config = model.config.get_text_config(decoder=True)
        decoder, blocks = find_blocks(model, config, name)
        tables = find_tables(model, config, name)
        return cls(
            name=name,
            model=model,
            tokenizer=tokenizer,
            config=config,
            decoder=decoder,
            blocks=blocks,
            embedding_VH=tables.embedding_VH,
            embed_scale=tables.embed_scale,
            output_VH=tables.output_VH,
            softcap=tables.softcap,
            eos_ids=eos_ids(model.generation_config, config, tokenizer),
            tokenizer_size=tokenizer_size(tokenizer, tables.output_VH.shape[0], name),
            folder=folder,
            cache_keyword=cache_keyword(decoder),
        )

    def run(
        self,
        ids_BT: Tensor,
        *,
        layers: Sequence[int] = (),
        position_ids: Tensor | None = None,
        attention_mask: object = None,
        cache: object = None,
    ) -> Captured:
        """One pass of the decoder without the output head; only `layers` are kept.

        `attention_mask` and `cache` go to the decoder as they are.
        """
        layers = check_layers(layers, self.num_layers)
        settings: dict[str, object] = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        if cache is not None:
            settings[self.cache_keyword] = cache
        with torch.no_grad(), captured(self.blocks, ids_BT, layers) as aux_BTF:
            output = self.decoder(input_ids=ids_BT, use_cache=cache is not None, **settings)
        last_BTH = output.last_hidden_state
        return Captured(aux_BTF[0] if aux_BTF else last_BTH.new_empty(*ids_BT.shape, 0), last_BTH)

    def run_inner(self, ids_BT: Tensor, *, layers: Sequence[int]) -> Tensor:
        """`run(...).aux_BTF` alone; layers deeper than the deepest of `layers` never run."""
        layers = check_layers(layers, self.num_layers)
        if not layers:
            raise ValueError("layers is empty; name at least one layer to capture")

        def stop(*_: object) -> None:
            raise _Enough

        deepest = max(layers)
        with (
            torch.no_grad(),
            captured(self.blocks, ids_BT, layers) as aux_BTF,
            ExitStack() as stack,
        ):
            if deepest < self.num_layers:  # registered last, so it fires after the capture
                hook = self.blocks[deepest].register_forward_pre_hook(stop)
            else:
                hook = self.blocks[-1].register_forward_hook(stop)
            stack.callback(hook.remove)
            try:
                self.decoder(input_ids=ids_BT, use_cache=False)
            except _Enough:
                return aux_BTF[0]
        raise AssertionError("the decoder ended without reaching the deepest layer")

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits [N, V] of states after the final norm, in the target's precision."""
        logits_NV = F.linear(hidden_NH.to(self.dtype), self.output_VH)
        if self.softcap is None:
            return logits_NV
        return torch.tanh(logits_NV / self.softcap) * self.softcap

    def fingerprint(self) -> str:
        """SHA-256 over config, weights and tokenizer: of the files, or of a model in memory."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        if self.folder is not None:
            return files_hash(self.folder)
        digest = hashlib.sha256()
        digest.update(self.model.config.to_json_string().encode())
        for key, value in self.model.state_dict().items():
            digest.update(f"\n{key} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        if self.tokenizer is not None:
            digest.update(repr(sorted(self.tokenizer.get_vocab().items())).encode())
            digest.update(repr(self.tokenizer.chat_template).encode())
        return digest.hexdigest()


def _check_tables(target: Target) -> None:
    """One tiny pass: causal, and the logits follow from the tables as `logits` computes them."""
    ids_BT = (torch.arange(4, device=target.device) % target.vocab_size).repeat(2, 1)
    ids_BT[1, -1] = (ids_BT[1, -1] + 1) % target.vocab_size
    last_BTH = target.run(ids_BT).last_BTH
    with torch.no_grad():
        logits_BTV = target.model(input_ids=ids_BT, use_cache=False).logits
    if not bool(torch.isfinite(last_BTH).all() and torch.isfinite(logits_BTV).all()):
        broken = ", ".join(non_finite(target.model)[:3]) or "none of its weights"
        raise ValueError(
            f"target {target.name!r} computes states that are not finite (weights with NaN or "
            f"infinity: {broken}); fetch its files again, or use --target-dtype float32"
        )
    slack = min(64 * torch.finfo(target.dtype).eps, 0.03)
    if not _close(last_BTH[0, :3], last_BTH[1, :3], slack):
        raise ValueError(
            f"target {target.name!r} is not causal: a later token changes earlier states; "
            f"only left-to-right language models can be targets"
        )
    if not _close(target.logits(last_BTH), logits_BTV, slack):
        raise ValueError(
            f"target {target.name!r} ({type(target.model).__name__}): its logits are not output "
            f"head times last state (with soft cap); other scaled or biased heads are not supported"
        )


def _close(ours: Tensor, theirs: Tensor, slack: float) -> bool:
    return bool((ours - theirs).abs().max() <= slack * theirs.abs().max().clamp(min=1e-9))
