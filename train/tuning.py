"""A target that learns beside its frozen original: through LoRA adapters, or as a copy.

Both share the original's embedding and output rows, which stay as they are: heads borrow them, and
the two laws differ by the states alone.

Letters: D documents, T positions, H hidden size.
"""

import copy
import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from typing_extensions import override

from outrider.data.target import Target
from outrider.train.joint import JointSettings


class Tuning(ABC):
    """The original target and the one that learns."""

    def __init__(self, target: Target) -> None:
        self.target = target
        """The original; with adapters only inside `original`."""

    @property
    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained of the target, by name."""

    @property
    @abstractmethod
    def decoder(self) -> nn.Module:
        """The decoder that learns."""

    @abstractmethod
    def original(self) -> AbstractContextManager[Any]:
        """In this block `target` is the original."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the tuned target as a model folder, `target`, and adapters as peft does."""

    def states(self, ids_DT: Tensor) -> Tensor:
        """The tuned target's last states [D, T, H], after its final norm; differentiable."""
        return self.decoder(input_ids=ids_DT, use_cache=False).last_hidden_state

    def original_states(self, ids_DT: Tensor) -> Tensor:
        """The original's last states [D, T, H], without a gradient."""
        with self.original():
            return self.target.run(ids_DT).last_BTH

    def _write_tokenizer(self, folder: Path) -> None:
        if self.target.tokenizer is not None:
            self.target.tokenizer.save_pretrained(folder)


class LoraTuning(Tuning):
    """Low-rank adapters on every linear layer of the decoder; without them it is the original."""

    def __init__(self, target: Target, *, rank: int, alpha: int) -> None:
        super().__init__(target)
        from peft import LoraConfig, get_peft_model  # an extra

        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        with warnings.catch_warnings():  # peft asks by a name that transformers has retired
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            self.model = get_peft_model(target.model, config)
        config.base_model_name_or_path = target.name  # not the folder it lies in here

    @property
    @override
    def parameters(self) -> dict[str, nn.Parameter]:
        return {k: value for k, value in self.model.named_parameters() if value.requires_grad}

    @property
    @override
    def decoder(self) -> nn.Module:
        return self.target.decoder

    @override
    def original(self) -> AbstractContextManager[Any]:
        return self.model.disable_adapter()

    @override
    def write(self, folder: Path) -> None:
        """The adapters, and the target's own files with the adapters in, in their precision."""
        from peft import PeftModel

        self.model.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
        (folder / "adapter" / "README.md").unlink(missing_ok=True)  # peft's empty model card
        assert self.target.folder is not None, "training loads targets from files"
        fresh = AutoModelForCausalLM.from_pretrained(self.target.folder, dtype="auto")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
            merged = PeftModel.from_pretrained(fresh, str(folder / "adapter")).merge_and_unload()
        merged.save_pretrained(folder / "target")
        self._write_tokenizer(folder / "target")


class FullTuning(Tuning):
    """A copy of the decoder's layers and norms; tables are one with the original's."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        tables = (target.model.get_input_embeddings(), target.model.get_output_embeddings())
        rows = [table.get_parameter("weight") for table in tables if table is not None]
        shared = {id(value): value for value in rows}
        self.copy = Target.from_model(
            copy.deepcopy(target.model, dict(shared)), target.tokenizer, name=target.name
        )
        for value in self.copy.model.parameters():
            value.requires_grad_(id(value) not in shared)

    @property
    @override
    def parameters(self) -> dict[str, nn.Parameter]:
        return {k: value for k, value in self.copy.model.named_parameters() if value.requires_grad}

    @property
    @override
    def decoder(self) -> nn.Module:
        return self.copy.decoder

    @override
    def original(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def write(self, folder: Path) -> None:
        self.copy.model.save_pretrained(folder / "target")
        self._write_tokenizer(folder / "target")


def tune(target: Target, joint: JointSettings, seed: int) -> Tuning:
    """The target made trainable. ValueError where its precision forbids that."""
    if joint.joint == "full":
        if target.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"joint is 'full' with target_dtype {str(target.dtype).removeprefix('torch.')}, "
                "in which small updates are lost; give --target-dtype float32, or use --joint lora"
            )
        return FullTuning(target)
    torch.manual_seed(seed)
    return LoraTuning(target, rank=joint.lora_rank, alpha=joint.lora_alpha)
