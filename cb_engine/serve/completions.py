"""/v1/completions: from prompts to texts, whole or streamed. Owns the shapes of answers and chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from cb_engine.api.async_engine import AsyncEngine
from cb_engine.outputs import GenerationOutput
from cb_engine.request import Request
from cb_engine.sampling_params import SamplingParams
from cb_engine.serve.chunks import stream_chunks, usage_so_far
from cb_engine.serve.context import ServerContext
from cb_engine.serve.errors import bad_request
from cb_engine.serve.generation import Generation, Sample, Usage
from cb_engine.serve.protocol.completions import CompletionRequest
from cb_engine.serve.sampling import check_num_samples, sampling_params
from cb_engine.serve.sse import event
from cb_engine.serve.token_texts import CompletionLogprobs, join_tables, prompt_logprobs

_DEFAULT_MAX_TOKENS = 16  # as in OpenAI's interface


def completion_params(request: CompletionRequest, context: ServerContext) -> SamplingParams:
    """The settings of all samples.

    Raises:
        APIError, ValueError, TypeError: something is wrong with the request.
    """
    max_tokens = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens == 0 and not request.echo:
        raise bad_request("max_tokens: 0 asks for nothing; with echo=true it scores the prompt", "max_tokens")
    changes: dict[str, Any] = {}
    if request.echo and request.logprobs is not None:  # the prompt's own are wanted
        changes["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return sampling_params(
        request,
        defaults=context.loaded.defaults,
        limits=context.settings.limits,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        **changes,
    )


class CompletionAnswer:
    """What all texts of one request have in common, and how each is written."""

    def __init__(
        self, request: CompletionRequest, prompts: Sequence[str], context: ServerContext, answer_id: str
    ) -> None:
        self._request = request
        self._prompts = prompts
        self._texts = context.loaded.texts
        self._id = answer_id
        self._created = int(time.time())
        self._model_name = request.model or context.settings.model_name
        self._retry_after = context.settings.retry_after
        num_choices = request.num_samples * len(request.prompts)
        self._tables = [
            CompletionLogprobs(self._texts, request.logprobs or 0, as_ids=bool(request.return_tokens_as_token_ids))
            for _ in range(num_choices)
        ]
        self._started = set[int]()

    def whole(self, outputs: Sequence[GenerationOutput], usage: Usage) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices = [self._choice(Sample(i, output)) for i, output in enumerate(outputs)]
        return self._head() | {"choices": choices, "usage": usage.as_openai()}

    def chunks(self, generation: Generation, first: Sequence[Sample]) -> AsyncGenerator[bytes, None]:
        """The events of a stream; see `stream_chunks`."""
        return stream_chunks(
            generation,
            first,
            lambda sample: event(self._chunk([self._choice(sample)], generation.usage)),
            usage_chunk=(lambda: self._chunk([], generation.usage)) if self._request.includes_usage else None,
            retry_after=self._retry_after,
        )

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model_name}

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        chunk = self._head() | {"choices": choices}
        return chunk | usage_so_far(self._request, usage)

    def _choice(self, sample: Sample) -> dict[str, Any]:
        """A choice, or the next piece of one."""
        output, is_first = sample.output, sample.choice not in self._started
        self._started.add(sample.choice)
        text = output.text or ""
        if self._request.echo and is_first:
            text = self._prompts[sample.choice // self._request.num_samples] + text
        choice: dict[str, Any] = {
            "index": sample.choice,
            "text": text,
            "logprobs": self._logprobs(sample, is_first),
            "finish_reason": output.finish_reason,
        }
        if output.is_finished():
            choice["stop_reason"] = output.stop_reason if output.finish_reason == "stop" else None
        return choice | self._details(output, is_first)

    def _logprobs(self, sample: Sample, is_first: bool) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        table = self._tables[sample.choice]
        if not (self._request.echo and is_first):
            return table.of_output(sample.output)
        return join_tables(table.of_prompt(sample.output), table.of_output(sample.output))

    def _details(self, output: GenerationOutput, is_first: bool) -> dict[str, Any]:
        details: dict[str, Any] = {}
        if self._request.prompt_logprobs is not None and is_first:
            details["prompt_logprobs"] = prompt_logprobs(self._texts, output)
        if self._request.return_token_ids:
            details["token_ids"] = output.generated_tokens
            if is_first:
                details["prompt_token_ids"] = output.prompt_ids
        return details


async def prepare_completion(
    request: CompletionRequest, engine: AsyncEngine, context: ServerContext, answer_id: str
) -> tuple[CompletionAnswer, list[list[Request]]]:
    """All that comes before the engine.

    Raises:
        APIError, ValueError, TypeError: something is wrong with the request.
    """
    if not request.prompts:
        raise bad_request("prompt: the list is empty; give at least one prompt", "prompt")
    check_num_samples(request.num_samples * len(request.prompts), context.settings.limits)
    groups = await context.prepare(
        engine,
        request.prompts,
        completion_params(request, context),
        answer_id,
        streaming=bool(request.stream),
        add_special_tokens=request.add_special_tokens is not False,
    )
    prompts = await context.workers.run(_texts_of, request, groups, context) if request.echo else []
    return CompletionAnswer(request, prompts, context, answer_id), groups


def _texts_of(request: CompletionRequest, groups: Sequence[Sequence[Request]], context: ServerContext) -> list[str]:
    """The prompts in text, to be echoed."""
    decode = context.loaded.tokenizer.decode
    return [
        prompt if isinstance(prompt, str) else decode(group[0].prompt_token_ids, skip_special_tokens=False)
        for prompt, group in zip(request.prompts, groups, strict=True)
    ]
