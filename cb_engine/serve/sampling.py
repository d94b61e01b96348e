"""From a client's fields to the engine's SamplingParams, the defaults of model and server included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cb_engine.sampling_params import SamplingParams
from cb_engine.serve.errors import bad_request
from cb_engine.serve.protocol.base import ResponseFormat, SamplingFields
from cb_engine.serve.settings import Limits
from cb_engine.structured_output import StructuredOutput

# Fields that have one name and one meaning on both sides.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "allowed_token_ids"),
    *("skip_special_tokens", "prompt_logprobs", "priority", "cache_salt", "speculative", "n"),
)
_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def model_defaults(generation_config: Any) -> dict[str, Any]:
    """What the model's makers recommend, in the words of SamplingParams."""
    values = {name: getattr(generation_config, name, None) for name in _FROM_MODEL}
    return {name: value for name, value in values.items() if value is not None}


def sampling_params(
    request: SamplingFields,
    *,
    defaults: Mapping[str, Any],
    limits: Limits,
    max_tokens: int | None,
    logprobs: int | None,
    structured: Mapping[str, Any] | None = None,
    around_form: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    **changes: Any,
) -> SamplingParams:
    """The settings of all samples of a request.

    Args:
        max_tokens, logprobs: in the engine's words, since each interface has its own.
        structured: a form that the whole answer must have, beside the one that the request itself asks for.
        around_form: makes of the latter one for the whole answer, reasoning included.

    Raises:
        APIError: more than the limits allow. ValueError, TypeError: a value is wrong.
    """
    _check_limits(request, limits, logprobs)
    given = {name: getattr(request, name) for name in _SAME}
    fields = {**defaults, **{name: value for name, value in given.items() if value is not None}, **changes}
    if request.logit_bias is not None:
        fields["logit_bias"] = {_token_id(key): value for key, value in request.logit_bias.items()}
    form = _form_of(request, structured, around_form)
    if form is not None:
        fields["structured"] = StructuredOutput.of(form)
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **fields)


def _check_limits(request: SamplingFields, limits: Limits, logprobs: int | None) -> None:
    counts = {
        "logprobs": (logprobs or 0, limits.max_logprobs),
        "prompt_logprobs": (request.prompt_logprobs or 0, limits.max_logprobs),
        "stop": (1 if isinstance(request.stop, str) else len(request.stop or ()), limits.max_stop),
        "stop_token_ids": (len(request.stop_token_ids or ()), limits.max_stop),
        "logit_bias": (len(request.logit_bias or ()), limits.max_logit_bias),
        "bad_words": (len(request.bad_words or ()), limits.max_bad_words),
    }
    for name, (count, most) in counts.items():
        if count > most:
            raise bad_request(f"{name}: {count} is more than this server's limit of {most}", name)


def check_num_samples(count: int, limits: Limits) -> None:
    """Refuses too many answers to one HTTP request.

    Raises:
        APIError: there are.
    """
    if count > limits.max_samples:
        raise bad_request(
            f"n: {count} answers (n times the number of prompts) are more than this server's limit of "
            f"{limits.max_samples}; send several requests",
            "n",
        )


def _token_id(key: str) -> int:
    if not key.isdecimal():
        raise bad_request(f"logit_bias: {key!r} is no token id", "logit_bias")
    return int(key)


def _form_of(
    request: SamplingFields,
    structured: Mapping[str, Any] | None,
    around: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> Mapping[str, Any] | None:
    """The one form that an answer must have, if there is one."""
    outputs = request.structured_outputs
    forms = {
        "response_format": _form_of_response(request.response_format),
        "structured_outputs": None if outputs is None else outputs.fields(),
        "tool_choice": structured,
    }
    given = {name: form for name, form in forms.items() if form is not None}
    if len(given) > 1:
        raise bad_request(f"{' and '.join(given)} exclude each other; give one of them", next(iter(given)))
    if not given:
        return None
    return structured if structured is not None else around(next(iter(given.values())))


def _form_of_response(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.json_schema is None:
        return {"json_object": True}
    return {"json_schema": response_format.json_schema.schema_}
