"""transformers' GenerationConfig in our words: what is translated, what is refused, what stays as it was."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from transformers import GenerationConfig

from cb_engine.api.generation_config import GenerationSettings
from cb_engine.sampling_params import SamplingParams


def settings(given: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **overrides: Any):
    return GenerationSettings.of(
        None if model is None else GenerationConfig(**model),
        None if given is None else GenerationConfig(**given),
        overrides,
    )


def params(prompt_length: int = 10, **fields: Any) -> SamplingParams:
    return settings(fields).sampling_params(prompt_length)


GREEDY = SamplingParams(temperature=0.0)


# ---- what is translated ------------------------------------------------------------------------------------------


def test_with_nothing_said_generation_is_greedy_and_open_ended():
    assert params() == GREEDY
    assert GenerationSettings.of(None, None, {}).sampling_params(3) == GREEDY


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_new_tokens": 7}, {"max_tokens": 7}),
        ({"max_length": 17}, {"max_tokens": 7}),  # it counts the prompt's 10
        ({"max_length": 10}, {"max_tokens": 0}),
        ({"max_length": 4}, {"max_tokens": 0}),
        ({"max_length": 17, "max_new_tokens": 3}, {"max_tokens": 3}),
        ({"min_new_tokens": 4}, {"min_tokens": 4}),
        ({"min_length": 13}, {"min_tokens": 3}),
        ({"min_length": 5}, {"min_tokens": 0}),
        ({"min_length": 13, "min_new_tokens": 1}, {"min_tokens": 1}),
        ({"stop_strings": "END"}, {"stop": ("END",)}),
        ({"stop_strings": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"bad_words_ids": [[1, 2], [3]]}, {"bad_words": ((1, 2), (3,))}),
        ({"suppress_tokens": [5, 6]}, {"bad_words": ((5,), (6,))}),
        ({"bad_words_ids": [[1, 2]], "suppress_tokens": [5]}, {"bad_words": ((1, 2), (5,))}),
        ({"output_scores": True}, {"logprobs": 0}),
        ({"output_scores": False}, {}),
        # Without do_sample nothing is drawn, whatever else is said of the distribution.
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, {}),
        ({"do_sample": False, "temperature": 0.7}, {}),
    ],
)
def test_a_field_is_translated(fields: dict[str, Any], expected: dict[str, Any]):
    assert params(**fields) == SamplingParams(**({"temperature": 0.0} | expected))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"temperature": 1.0}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"top_k": 5}, {"top_k": 5}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_p": 0.9}, {"top_p": 0.9}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"num_return_sequences": 3}, {"n": 3}),
    ],
)
def test_with_do_sample_the_distribution_is_translated(fields: dict[str, Any], expected: dict[str, Any]):
    assert params(do_sample=True, **fields) == SamplingParams(**({"temperature": 1.0} | expected))


def test_a_sequence_bias_of_single_tokens_is_a_logit_bias():
    expected = {7: 1.5, 8: -math.inf}
    as_list = params(sequence_bias=[[[7], 1.5], [[8], -math.inf]]).logit_bias
    as_dict = params(sequence_bias={(7,): 1.5, (8,): -math.inf}).logit_bias
    assert dict(as_list or {}) == dict(as_dict or {}) == expected


def test_a_sequence_bias_of_longer_sequences_is_refused_by_name():
    with pytest.raises(ValueError, match="sequence_bias"):
        params(sequence_bias=[[[7, 8], 1.5]])


def test_changes_go_before_the_config():
    made = settings({"max_new_tokens": 7, "min_new_tokens": 2}).sampling_params(3, max_tokens=2, seed=5)
    assert made == SamplingParams(temperature=0.0, max_tokens=2, min_tokens=2, seed=5)


def test_several_samples_may_be_asked_for_without_sampling():
    assert settings({}, num_return_sequences=3).sampling_params(3).n == 3


def test_a_value_out_of_range_is_refused_by_name():
    with pytest.raises(ValueError, match="top_p"):
        params(do_sample=True, top_p=1.5)
    with pytest.raises(ValueError, match="min_tokens"):
        params(max_new_tokens=2, min_new_tokens=3)


def test_eos_and_the_announced_length_are_told():
    made = settings({"eos_token_id": [1, 2], "max_new_tokens": 9})
    assert (made.eos_token_id, made.max_new_tokens) == ([1, 2], 9)
    assert (settings().eos_token_id, settings().max_new_tokens) == (None, None)


# ---- which config ------------------------------------------------------------------------------------------------


def test_the_models_config_holds_where_none_is_given():
    made = settings(model={"max_new_tokens": 4, "eos_token_id": 3})
    assert (made.sampling_params(1).max_tokens, made.eos_token_id) == (4, 3)


def test_a_given_config_replaces_the_models_but_for_a_missing_eos():
    made = settings({"do_sample": True}, model={"max_new_tokens": 4, "eos_token_id": 3})
    assert made.sampling_params(1) == SamplingParams(temperature=1.0)
    assert made.eos_token_id == 3
    assert settings({"eos_token_id": 5}, model={"eos_token_id": 3}).eos_token_id == 5


def test_overrides_go_before_both():
    made = settings({"max_new_tokens": 4}, model={"max_new_tokens": 5}, max_new_tokens=6, do_sample=True)
    assert made.sampling_params(1) == SamplingParams(temperature=1.0, max_tokens=6)


def test_the_originals_stay_as_they_are():
    model, given = GenerationConfig(eos_token_id=[3], max_new_tokens=5), GenerationConfig(bad_words_ids=[[1]])
    before = model.to_dict(), given.to_dict()
    made = GenerationSettings.of(model, given, {"max_new_tokens": 9, "num_return_sequences": 2})
    made.config.bad_words_ids.append([2])
    made.config.temperature = 0.5
    assert (model.to_dict(), given.to_dict()) == before


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_tokens", "max_new_token", "sampling", "_secret", "logits_processor"])
def test_an_unknown_override_is_a_type_error_that_names_it(name: str):
    with pytest.raises(TypeError, match=name):
        settings({}, **{name: 3})


NGRAM, DRAFT_MODEL = '"method": "ngram"', '"method": "draft_model"'


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("prompt_lookup_num_tokens", 6, NGRAM + ', "num_speculative_tokens": 6}'),
        ("max_matching_ngram_size", 3, NGRAM + ', "prompt_lookup_max": 3}'),
        ("assistant_early_exit", 4, DRAFT_MODEL + ', "num_draft_layers": 4}'),
        ("num_assistant_tokens", 5, DRAFT_MODEL + ', "model": ..., "num_speculative_tokens": 5}'),
        ("num_assistant_tokens_schedule", "heuristic", DRAFT_MODEL + ', "model": ...}'),
        ("assistant_confidence_threshold", 0.5, DRAFT_MODEL + ', "model": ...}'),
        ("assistant_lookbehind", 4, DRAFT_MODEL + ', "model": ...}'),
        ("target_lookbehind", 4, DRAFT_MODEL + ', "model": ...}'),
        ("is_assistant", True, DRAFT_MODEL + ', "model": ...}'),
    ],
)
def test_assisted_generation_is_refused_with_what_to_say_instead(name: str, value: Any, fix: str, given: bool):
    origin = "^generation_config" if given else "^keyword argument"
    wanted = re.escape(f'continuous_batching_config={{"speculative": {{{fix}}}')
    with pytest.raises(ValueError, match=rf"{origin}: {name}={value!r} .*{wanted}"):
        params(**{name: value}) if given else settings({}, **{name: value})


@pytest.mark.parametrize(
    ("name", "fix"), [("assistant_model", DRAFT_MODEL), ("assistant_tokenizer", DRAFT_MODEL), ("speculative", "")]
)
def test_arguments_of_assisted_generation_are_refused_with_what_to_say_instead(name: str, fix: str):
    for value in (object(), None):
        with pytest.raises(TypeError, match=rf'{name}.* continuous_batching_config={{"speculative": {{{fix}'):
            settings({}, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_assistant_tokens", 20),
        ("num_assistant_tokens_schedule", "constant"),
        ("assistant_confidence_threshold", 0.4),
        ("assistant_lookbehind", 10),
        ("target_lookbehind", 10),
        ("max_matching_ngram_size", 2),
        ("is_assistant", False),
        ("assistant_early_exit", 0),
        ("prompt_lookup_num_tokens", None),
    ],
)
def test_defaults_of_assisted_generation_ask_for_nothing(name: str, value: Any):
    assert params(**{name: value}) == settings({}, **{name: value}).sampling_params(3) == GREEDY


def test_what_assisting_has_left_in_a_models_config_asks_for_nothing():
    """transformers counts there how many tokens to draft next; callers often give a copy of that config."""
    left = {"num_assistant_tokens": 7.0, "num_assistant_tokens_schedule": "heuristic", "is_assistant": True}
    assert settings(model=left).sampling_params(3) == settings(left, model=left).sampling_params(3) == GREEDY
    with pytest.raises(ValueError, match="num_assistant_tokens=8"):
        settings({**left, "num_assistant_tokens": 8}, model=left).sampling_params(3)
    with pytest.raises(ValueError, match="num_assistant_tokens=7"):
        settings(model=left, num_assistant_tokens=7)
    with pytest.raises(ValueError, match="the model's generation_config: prompt_lookup_num_tokens=3"):
        settings(model={"prompt_lookup_num_tokens": 3}).sampling_params(3)


def test_what_sampling_params_have_and_the_config_has_not_is_sent_there():
    with pytest.raises(TypeError, match=r"'presence_penalty': .*; put it into sampling_params$"):
        settings({}, presence_penalty=1.0)


@pytest.mark.parametrize("name", ["validate", "to_dict", "save_pretrained", "update"])
@pytest.mark.parametrize("value", [True, None])
def test_a_method_of_the_config_is_no_field_of_it(name: str, value: Any):
    with pytest.raises(TypeError, match=name):
        settings({}, **{name: value})


_UNSUPPORTED: list[tuple[str, Any]] = [
    ("num_beams", 2),
    ("num_beam_groups", 2),
    ("use_mtp", True),
    ("max_time", 3.0),
    ("typical_p", 0.9),
    ("top_h", 0.5),
    ("epsilon_cutoff", 0.1),
    ("eta_cutoff", 0.1),
    ("encoder_repetition_penalty", 1.2),
    ("no_repeat_ngram_size", 2),
    ("encoder_no_repeat_ngram_size", 2),
    ("forced_bos_token_id", 0),
    ("forced_eos_token_id", 3),
    ("exponential_decay_length_penalty", (5, 1.1)),
    ("begin_suppress_tokens", [3]),
    ("token_healing", True),
    ("guidance_scale", 1.5),
    ("watermarking_config", {"greenlist_ratio": 0.3}),
    ("output_attentions", True),
    ("output_hidden_states", True),
    ("output_logits", True),
    ("prompt_lookup_num_tokens", 3),
    ("penalty_alpha", 0.6),
    ("dola_layers", "low"),
    ("diversity_penalty", 0.5),
    ("constraints", ["one"]),
    ("force_words_ids", [[1]]),
    ("assistant_early_exit", 4),
]
UNSUPPORTED = [(name, value) for name, value in _UNSUPPORTED if hasattr(GenerationConfig(), name)]  # some are new


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_what_this_engine_does_not_do_is_refused_by_name(name: str, value: Any):
    with pytest.raises(ValueError, match=f"keyword argument: {name}="):
        settings({}, **{name: value}).sampling_params(3)


def test_a_refused_setting_is_blamed_on_where_it_came_from():
    config = GenerationConfig(num_beams=2)
    with pytest.raises(ValueError, match=r"^generation_config: num_beams=2"):
        GenerationSettings.of(None, config, {"top_k": 3}).sampling_params(3)
    with pytest.raises(ValueError, match=r"^the model's generation_config: num_beams=2"):
        GenerationSettings.of(config, None, {"top_k": 3}).sampling_params(3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 1),
        ("num_beam_groups", 1),
        ("typical_p", 1.0),
        ("epsilon_cutoff", 0.0),
        ("eta_cutoff", 0.0),
        ("encoder_repetition_penalty", 1.0),
        ("no_repeat_ngram_size", 0),
        ("diversity_penalty", 0.0),
        ("guidance_scale", 1.0),
        ("token_healing", False),
        ("output_logits", False),
        ("max_time", None),
        ("use_cache", True),
        ("cache_implementation", "static"),
        ("pad_token_id", 0),
        ("bos_token_id", 1),
        ("return_dict_in_generate", True),
        ("renormalize_logits", True),
        ("length_penalty", 2.0),
        ("early_stopping", True),
        ("disable_compile", True),
    ],
)
def test_what_asks_for_nothing_is_accepted(name: str, value: Any):
    assert settings({}, **{name: value}).sampling_params(3) == GREEDY


def test_every_field_of_generation_config_is_translated_refused_or_moot():
    """A new field upstream has to be looked at: by default it is refused, never ignored."""
    known = {name for name, _ in UNSUPPORTED}
    silent = []
    for name in GenerationConfig().to_dict():
        if name in known or name.startswith("_") or name == "transformers_version":
            continue
        try:
            before, after = GREEDY, settings({}, **{name: _odd(name)}).sampling_params(3)
        except (ValueError, TypeError):
            continue
        if after == before:
            silent.append(name)
    assert set(silent) <= SILENT


def _odd(name: str) -> Any:
    """A value that asks for something."""
    odd = {"stop_strings": "x", "do_sample": True, "bad_words_ids": [[1]], "suppress_tokens": [1], "eos_token_id": 2}
    return odd.get(name, {(1,): 2.0} if name == "sequence_bias" else 5)


# Without do_sample the first row says nothing; eos_token_id is read by the manager; the rest does not change tokens.
SILENT = {
    *("temperature", "top_k", "top_p", "min_p"),
    "eos_token_id",
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "renormalize_logits", "pad_token_id"),
    *("bos_token_id", "return_dict_in_generate", "compile_config", "disable_compile", "continuous_batching_config"),
    *("low_memory", "prefill_chunk_size", "early_stopping", "length_penalty", "remove_invalid_values"),
    "decoder_start_token_id",
}
