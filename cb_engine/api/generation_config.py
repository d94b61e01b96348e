"""transformers' GenerationConfig in our words. The one place where its names are known.

Owns the translation into SamplingParams. A field that asks for something this engine does not do is refused with
its name: transformers' own continuous batching drops or mis-feeds such fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from cb_engine.sampling_params import SamplingParams

# Fields that are translated below, or read by the manager.
_TRANSLATED = frozenset(
    {"max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings", "do_sample", "temperature"}
    | {"top_k", "top_p", "min_p", "repetition_penalty", "bad_words_ids", "suppress_tokens", "sequence_bias"}
    | {"num_return_sequences", "eos_token_id", "output_scores"}
)
# Fields that change nothing in what is generated here.
_MOOT = frozenset(
    {"use_cache", "cache_implementation", "cache_config", "max_cache_len", "renormalize_logits", "pad_token_id"}
    | {"bos_token_id", "return_dict_in_generate", "compile_config", "disable_compile", "continuous_batching_config"}
    | {"low_memory", "_from_model_config", "transformers_version", "prefill_chunk_size"}
    | {"early_stopping", "length_penalty", "remove_invalid_values", "decoder_start_token_id"}
)
# Assisted generation in our words: what asks for it, or tunes it, and what to say instead.
_DRAFT_MODEL = '"method": "draft_model", "model": ...'
_ASSISTED = {
    "prompt_lookup_num_tokens": '"method": "ngram", "num_speculative_tokens": {}',
    "max_matching_ngram_size": '"method": "ngram", "prompt_lookup_max": {}',
    "assistant_early_exit": '"method": "draft_model", "num_draft_layers": {}',
    "num_assistant_tokens": _DRAFT_MODEL + ', "num_speculative_tokens": {}',
    "num_assistant_tokens_schedule": _DRAFT_MODEL,
    "assistant_confidence_threshold": _DRAFT_MODEL,
    "assistant_lookbehind": _DRAFT_MODEL,
    "target_lookbehind": _DRAFT_MODEL,
    "assistant_ensemble_weight": _DRAFT_MODEL,
    "is_assistant": _DRAFT_MODEL,
}
# Those that do nothing by themselves: transformers leaves them in the config of a model that has assisted another.
_TUNING = _ASSISTED.keys() - {"prompt_lookup_num_tokens", "assistant_early_exit"}
# Arguments that are no fields, `generate`'s own and one that looks like ours.
_ASSISTED_ARGUMENTS = {
    "assistant_model": _DRAFT_MODEL,
    "assistant_tokenizer": _DRAFT_MODEL,
    "speculative": '"method": ...',
}
# Values at which any other field asks for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "diversity_penalty": (0.0,),
    "guidance_scale": (1.0, 1),
    "assistant_early_exit": (0,),
    "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant",),
    "assistant_confidence_threshold": (0.4,),
    "assistant_lookbehind": (10,),
    "target_lookbehind": (10,),
    "max_matching_ngram_size": (2,),
}


@dataclass(frozen=True)
class GenerationSettings:
    """A GenerationConfig, checked: what the manager needs of it."""

    config: GenerationConfig
    origins: Mapping[str, str]  # where settings came from, for error messages; "" stands for all others

    @classmethod
    def of(
        cls, model_config: GenerationConfig | None, given: GenerationConfig | None, overrides: Mapping[str, Any]
    ) -> GenerationSettings:
        """Takes the given config, else the model's, with the overrides on top; the originals stay as they are.

        Raises:
            TypeError: an override that GenerationConfig does not have.
            ValueError: an override that asks for assisted generation, which is no matter of sampling.
        """
        base = given if given is not None else model_config
        config = GenerationConfig() if base is None else GenerationConfig.from_dict(base.to_dict())
        fields = config.to_dict()
        for name, value in overrides.items():
            if name in _ASSISTED_ARGUMENTS:
                raise TypeError(f"unexpected argument {name!r}; {_speculation(_ASSISTED_ARGUMENTS[name])}")
            if name.startswith("_") or name not in fields:
                fix = "; put it into sampling_params" if name in SamplingParams.__dataclass_fields__ else ""
                raise TypeError(
                    f"unexpected argument {name!r}: neither generate_batch nor GenerationConfig has it{fix}"
                )
            setattr(config, name, value)
        if given is not None and model_config is not None and config.eos_token_id is None:
            config.eos_token_id = model_config.eos_token_id
        for name in _TUNING:
            if name not in overrides and getattr(config, name, None) == getattr(model_config, name, None):
                setattr(config, name, None)
        origin = "the model's generation_config" if given is None else "generation_config"
        origins = {"": origin} | dict.fromkeys(overrides, "keyword argument")
        _refuse_unsupported(config, origins, overrides.keys() & _ASSISTED.keys())
        return cls(config, origins)

    @property
    def eos_token_id(self) -> int | list[int] | None:
        """EOS ids; -1 for none."""
        return self.config.eos_token_id  # type: ignore[no-any-return]

    @property
    def max_new_tokens(self) -> int | None:
        """The announced number of new tokens, if there is one."""
        return self.config.max_new_tokens  # type: ignore[no-any-return]

    def sampling_params(self, prompt_length: int, **changes: Any) -> SamplingParams:
        """The settings for one prompt. `max_length` and `min_length` count the prompt.

        Unset means off, as in transformers' continuous batching (its `generate` would default top_k to 50).

        Raises:
            ValueError: a value out of range, or a setting that this engine does not do.
        """
        c = self.config
        _refuse_unsupported(c, self.origins, c.to_dict())
        max_tokens = c.max_new_tokens
        if max_tokens is None and c.max_length is not None:
            max_tokens = max(0, c.max_length - prompt_length)
        min_tokens = c.min_new_tokens
        if min_tokens is None and c.min_length:
            min_tokens = max(0, c.min_length - prompt_length)
        # transformers leaves the EOS out of the bad words: a ban of it would be meant for suppress_tokens.
        eos = c.eos_token_id if isinstance(c.eos_token_id, list) else [c.eos_token_id]
        bad_words = [list(ids) for ids in c.bad_words_ids or () if list(ids) not in [[e] for e in eos]]
        bad_words += [[t] for t in c.suppress_tokens or ()]
        fields: dict[str, Any] = {
            "n": c.num_return_sequences,
            "temperature": (1.0 if c.temperature is None else c.temperature) if c.do_sample else 0.0,
            "top_k": c.top_k if c.do_sample else None,
            "top_p": c.top_p if c.do_sample else None,
            "min_p": c.min_p if c.do_sample else None,
            "repetition_penalty": c.repetition_penalty,
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "stop": c.stop_strings,
            "bad_words": bad_words or None,
            "logit_bias": _bias(c.sequence_bias),
            "logprobs": 0 if c.output_scores else None,
        }
        return SamplingParams(**{k: v for k, v in (fields | changes).items() if v is not None})


def _refuse_unsupported(config: GenerationConfig, origins: Mapping[str, str], names: Iterable[str]) -> None:
    for name in names:
        value = getattr(config, name, None)
        if value is None or value is False or name in _TRANSLATED or name in _MOOT or value in _NEUTRAL.get(name, ()):
            continue
        fix = "unset it, or give sampling_params instead"
        if name in _ASSISTED:
            fix = _speculation(_ASSISTED[name], value)
        raise ValueError(f"{origins.get(name, origins[''])}: {name}={value!r} is not supported by cb_engine; {fix}")


def _speculation(settings: str, value: Any = None) -> str:
    """How to ask for it here."""
    shown = settings.format(value if isinstance(value, int) else "...")
    return f'for speculative decoding give continuous_batching_config={{"speculative": {{{shown}}}}}'


def _bias(sequence_bias: Any) -> dict[int, float] | None:
    """transformers' sequence_bias, for sequences of one token."""
    if not sequence_bias:
        return None
    pairs = sequence_bias.items() if isinstance(sequence_bias, Mapping) else sequence_bias
    bias: dict[int, float] = {}
    for sequence, value in pairs:
        if len(sequence) != 1:
            raise ValueError(f"sequence_bias for {sequence!r}: only sequences of one token are supported")
        bias[int(sequence[0])] = float(value)
    return bias
