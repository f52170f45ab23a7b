"""A target without its weights: what can be planned from a config alone."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from outrider.data.anatomy import find_folder
from outrider.data.demo_target import DEMO_TARGET
from outrider.data.target import Target

MOST_SAID = 300
"""Characters of another library's message."""


def outline(name: str, *, dtype: torch.dtype, reads_rows: bool) -> Target:
    """The target called `name`, all of whose weights are on the meta device.

    `name` is smollm2-demo, a local folder, of which only config.json need be there, or a Hub id,
    of which no weights are fetched. With `reads_rows` its tokenizer is loaded, so that rows can be
    read for it; without it all rows of its output head count as tokens. Raises ValueError for a
    name without a config of a causal language model, or without a tokenizer where one is needed.
    """
    place = str(find_folder(name)) if name == DEMO_TARGET or Path(name).is_dir() else name
    try:
        config = AutoConfig.from_pretrained(place)
        tokenizer = AutoTokenizer.from_pretrained(place) if reads_rows else None
        model = empty(config, dtype)
    except Exception as error:  # whatever transformers or tokenizers raise
        what = "config.json and a tokenizer" if reads_rows else "config.json"
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        if len(why) > MOST_SAID:  # transformers lists every class it has
            why = f"{why[:MOST_SAID]} ..."
        raise ValueError(
            f"target {name!r} has no {what} of a causal language model ({why}); name a model's "
            "folder or Hub id" + ("; or give --rows and --mean-length" if reads_rows else "")
        ) from error
    return Target.outlined(model, tokenizer, name=name)


def empty(config: PretrainedConfig, dtype: torch.dtype) -> AutoModelForCausalLM:
    """The model of a config on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
