"""From the settings of transformers' `generate` to the loop's: what is honoured, what is refused.

Nothing is passed over in silence: a setting that would change the text and is not built in is an
error that says what to do instead.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from outrider.data.sampling import Sampling

# transformers 5.24, generation/configuration_utils.py, _get_default_generation_params.
_TOP_K, _NEW_TOKENS = 50, 20

_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_HONOURED = {
    *_SAMPLING,
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "pad_token_id",
    "prefill_chunk_size",
    "repetition_penalty",
    "return_dict_in_generate",
    "stop_strings",
}
_METADATA = {"_from_model_config", "transformers_version", "_commit_hash"}
# Values at which a setting says nothing; None always does.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "assistant_ensemble_weight": (),
    "diversity_penalty": (0.0,),
    "early_stopping": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "guidance_scale": (1.0,),
    "is_assistant": (False,),
    "length_penalty": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_logits": (False,),
    "output_scores": (False,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "synced_gpus": (False,),
    "token_healing": (False,),
    "top_h": (1.0,),
    "typical_p": (1.0,),
    "use_cache": (True,),
    "use_mtp": (False,),
}
# What a model's own generation_config may hold without a say in what is written here: beams'
# settings, tokens of encoder-decoders, which buffers to use, and how it would draft elsewhere.
_OF_NO_ACCOUNT = {
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "decoder_start_token_id",
    "disable_compile",
    "early_stopping",
    "is_assistant",
    "length_penalty",
    "max_cache_len",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "target_lookbehind",
    "use_cache",
}
_REMEDIES: Mapping[str, str] = {
    "assistant_early_exit": "draft with the target's own first layers: "
    "head=first_layers(target, N) of outrider.eval.drafters.model",
    "assistant_ensemble_weight": "it changes the law of the text; nothing here does",
    "assistant_model": "give the draft model as head=, and its length as draft='chain:5'",
    "custom_generate": "call the model's own generate",
    "logits_processor": "only temperature, top_k, top_p, min_p and repetition_penalty are applied; "
    "call the model's own generate for others",
    "max_matching_ngram_size": "write draft='lookup:10,2' for n-grams of 2",
    "max_time": "leave it out, or end the text from outside",
    "min_length": "leave it out, or call the model's own generate",
    "min_new_tokens": "leave it out, or call the model's own generate",
    "num_assistant_tokens": "write draft='chain:5' for 5 tokens",
    "num_beams": "beams cannot be drafted for; leave it out",
    "num_return_sequences": "repeat the prompt in the batch: equal prompts get unlike samples",
    "output_logits": "verification does not keep them; call the model's own generate",
    "output_scores": "verification does not keep them; call the model's own generate",
    "prompt_lookup_num_tokens": "write draft='lookup:10' for 10 tokens",
    "stopping_criteria": "use stop_strings or eos_token_id",
    "use_mtp": "export the module as a head (see outrider-train-mtp) and give its folder as head=",
}
_NAMES = set(GenerationConfig().to_dict()) | set(_REMEDIES)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a call of `generate` asks for."""

    sampling: Sampling
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    pad_id: int | None
    """Fills answers up to the longest."""
    hidden_id: int | None
    """Marks padding in prompts without an attention mask, as transformers guesses it."""
    stop_strings: tuple[str, ...]
    prefill_chunk: int | None
    returns_dict: bool


def read_settings(
    model: PreTrainedModel,
    given: GenerationConfig | None,
    more: Mapping[str, Any],
    num_prompt: int,
) -> Wanted:
    """Settings as transformers takes them: keywords before `given` before the model's own.

    A keyword of None takes a default away. Raises ValueError for a setting that is not built in.

    Args:
        model: Whose `generation_config` fills in.
        given: The call's `generation_config`.
        more: The call's keywords.
        num_prompt: Width of the padded prompts, which max_length counts.
    """
    own = _set_in(model.generation_config)
    asked = _set_in(given) | dict(more)
    values = own | asked
    is_sampled = bool(values.get("do_sample"))
    for name, value in values.items():
        _check(name, value, is_asked=name in asked, is_sampled=is_sampled)
    stops = values.get("stop_strings") or ()
    chunk = values.get("prefill_chunk_size")
    eos_ids = _ids("eos_token_id", values.get("eos_token_id"))
    given_pad = _ids("pad_token_id", values.get("pad_token_id"))
    pad = given_pad or eos_ids
    return Wanted(
        sampling=_sampling(values, is_sampled=is_sampled),
        max_new_tokens=_room(values, num_prompt),
        eos_ids=eos_ids,
        pad_id=pad[0] if pad else None,
        hidden_id=given_pad[0] if given_pad and given_pad[0] not in eos_ids else None,
        stop_strings=(stops,) if isinstance(stops, str) else tuple(stops),
        prefill_chunk=None if chunk is None else int(chunk),
        returns_dict=bool(values.get("return_dict_in_generate")),
    )


def _set_in(config: GenerationConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    return {
        name: value
        for name, value in config.to_dict().items()
        if value is not None and name not in _METADATA
    }


def _check(name: str, value: object, *, is_asked: bool, is_sampled: bool) -> None:
    """Raise ValueError, or warn, where a setting would be passed over."""
    if not is_sampled and name in (*_SAMPLING, "typical_p", "epsilon_cutoff", "eta_cutoff"):
        neutral = {"top_k": (0, _TOP_K), "min_p": (0.0,)}.get(name, _NEUTRAL.get(name, (1.0,)))
        if is_asked and value is not None and value not in neutral:
            warnings.warn(
                f"{name} is {value} and do_sample is off, so the likeliest token is taken; pass "
                "do_sample=True to sample",
                stacklevel=5,
            )
        return
    if name in _HONOURED or value is None or value in _NEUTRAL.get(name, ()):
        return
    if not is_asked and name in _OF_NO_ACCOUNT:
        return
    if name in ("bos_token_id", "decoder_start_token_id"):
        return  # prompts are given, so neither is ever written
    where = "" if is_asked else " in the model's generation_config"
    remedy = _REMEDIES.get(name, "leave it out, or call the model's own generate")
    if name not in _NAMES:
        remedy = (
            "no setting of this name is known; see the docstring of outrider.eval.generate for "
            "those that are"
        )
    if not is_asked:
        remedy += f"; {name}=None turns it off"
    raise ValueError(f"{name} is {value!r}{where}, which outrider's generate has not: {remedy}")


def _sampling(values: Mapping[str, Any], *, is_sampled: bool) -> Sampling:
    penalty = values.get("repetition_penalty")
    penalty = 1.0 if penalty is None else float(penalty)
    if not is_sampled:
        return Sampling(repetition_penalty=penalty)
    top_k = values.get("top_k", _TOP_K)
    temperature, top_p, min_p = (values.get(name) for name in ("temperature", "top_p", "min_p"))
    return Sampling(
        temperature=1.0 if temperature is None else float(temperature),
        top_k=0 if top_k is None else int(top_k),
        top_p=1.0 if top_p is None else float(top_p),
        min_p=0.0 if min_p is None else float(min_p),
        repetition_penalty=penalty,
    )


def _room(values: Mapping[str, Any], num_prompt: int) -> int:
    """Tokens to write; max_new_tokens goes before max_length, 20 without either."""
    asked, length = values.get("max_new_tokens"), values.get("max_length")
    if asked is not None:
        return int(asked)
    if length is None:
        return _NEW_TOKENS
    if length <= num_prompt:
        raise ValueError(
            f"max_length is {length} and the prompts have {num_prompt} tokens, padding included, "
            "which count; give more, or max_new_tokens"
        )
    return int(length) - num_prompt


def _ids(name: str, value: Any) -> tuple[int, ...]:  # noqa: ANN401 - what users give
    """One id or several, in whatever form."""
    if value is None:
        return ()
    found: Any = value.tolist() if hasattr(value, "tolist") else value
    ids: list[Any] = list(found) if isinstance(found, (list, tuple)) else [found]
    if not all(type(one) is int and one >= 0 for one in ids):
        raise ValueError(f"{name} is {value!r}; give a token id, or a list of them")
    return tuple(ids)
