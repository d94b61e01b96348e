"""/v1/chat/completions: from messages to an answer, whole or streamed.

Owns the shapes of answers and chunks. Streams and whole answers go through the same parser, so they say the same.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cb_engine.api.async_engine import AsyncEngine
from cb_engine.outputs import GenerationOutput
from cb_engine.request import Request
from cb_engine.sampling_params import SamplingParams
from cb_engine.serve.chunks import stream_chunks, usage_so_far
from cb_engine.serve.context import LoadedModel, ServerContext
from cb_engine.serve.conversation import conversation_of
from cb_engine.serve.errors import bad_request
from cb_engine.serve.generation import Generation, Sample, Usage
from cb_engine.serve.parsers import (
    Content,
    Event,
    Reasoning,
    ResponseParser,
    Tool,
    ToolCallArguments,
    ToolCallStart,
    collect,
    make_response_parser,
    structured_after_reasoning,
    structured_for_tools,
    validate_tools,
)
from cb_engine.serve.protocol.chat import ChatRequest
from cb_engine.serve.reasoning_tokens import ReasoningTokens
from cb_engine.serve.sampling import check_num_samples, sampling_params
from cb_engine.serve.sse import event
from cb_engine.serve.token_texts import chat_logprobs, prompt_logprobs


@dataclass(frozen=True)
class Dialogue:
    """A conversation on its way into the engine, and how its answer is to be read."""

    token_ids: list[int]
    params: SamplingParams
    tools: tuple[Tool, ...]  # that the model may call
    has_to_call: bool
    starts_in_reasoning: bool

    def reasoning_tokens(self, model: LoadedModel) -> ReasoningTokens:
        """For the tokens of one answer."""
        return ReasoningTokens(model.reasoning, model.texts, is_open=self.starts_in_reasoning)

    def parser(self, model: LoadedModel) -> ResponseParser:
        """For the text of one answer."""
        return make_response_parser(
            tools=model.tool_format if self.tools else None,
            reasoning=model.reasoning,
            starts_in_reasoning=self.starts_in_reasoning,
            functions=self.tools,
            only_calls=self.has_to_call,
        )


def prepare_dialogue(request: ChatRequest, context: ServerContext) -> Dialogue:
    """Renders, tokenises and checks. Takes time: for the workers.

    Raises:
        APIError, ValueError, TypeError: something is wrong with the request.
    """
    model = context.loaded
    conversation = conversation_of(request, context)
    tools = validate_tools([tool.model_dump(exclude_none=True) for tool in request.tools or ()])
    told = request.tool_choice != "none"
    if not told:
        conversation = replace(conversation, tools=())
    token_ids = model.template.render(conversation)
    in_reasoning = model.reasoning is not None and model.reasoning.is_open_in(_end_of(model, token_ids))
    enforced = _enforced(request, tools, model, in_reasoning)
    visible = _visible_markers(model, bool(tools) and told)
    if enforced is not None and visible and request.skip_special_tokens:
        name = "skip_special_tokens"
        raise bad_request(f"{name} hides the marks of the call that is enforced; leave it out", name)
    params = sampling_params(
        request,
        defaults={**model.defaults, **visible},
        limits=context.settings.limits,
        max_tokens=request.token_limit,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        structured=enforced,
        around_form=_free_reasoning(model, in_reasoning),
    )
    return Dialogue(token_ids, params, tools if told else (), enforced is not None, in_reasoning)


def _end_of(model: LoadedModel, token_ids: Sequence[int]) -> str:
    text: str = model.tokenizer.decode(token_ids[-16:], skip_special_tokens=False)
    return text


def _visible_markers(model: LoadedModel, with_tools: bool) -> dict[str, Any]:
    """Where the markers that the parser looks for are special tokens, the text has to hold them."""
    markers = model.tool_format.markers if with_tools else ()
    markers += model.reasoning.markers if model.reasoning is not None else ()
    return {"skip_special_tokens": False} if any(marker in model.special_tokens for marker in markers) else {}


def _enforced(
    request: ChatRequest, tools: Sequence[Tool], model: LoadedModel, in_reasoning: bool
) -> dict[str, str] | None:
    """The grammar of a `tool_choice` that has to be followed."""
    if request.tool_choice in (None, "auto", "none"):
        return None
    choice: Any = "required"
    if request.named_tool is not None:
        choice = {"type": "function", "function": {"name": request.named_tool}}
    return structured_for_tools(
        tools,
        choice,
        model.tool_format,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=model.reasoning,
        starts_in_reasoning=in_reasoning,
        special_tokens=model.special_tokens,
    )


def _free_reasoning(model: LoadedModel, in_reasoning: bool) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Lets a model that reasons do so before it keeps to a form."""
    reasoning = model.reasoning
    if reasoning is None:
        return dict
    return lambda form: structured_after_reasoning(
        form, reasoning, starts_in_reasoning=in_reasoning, special_tokens=model.special_tokens
    )


class ChatAnswer:
    """What all answers to one request have in common, and how each is written."""

    def __init__(self, request: ChatRequest, dialogue: Dialogue, context: ServerContext, answer_id: str) -> None:
        self._request = request
        self._dialogue = dialogue
        self._model = context.loaded
        self._id = answer_id
        self._created = int(time.time())
        self._model_name = request.model or context.settings.model_name
        self._retry_after = context.settings.retry_after
        self._parsers = [dialogue.parser(self._model) for _ in range(request.num_samples)]
        self._reasoning_tokens = [dialogue.reasoning_tokens(self._model) for _ in range(request.num_samples)]
        self._started = set[int]()  # choices that a chunk has gone out of

    # ---- whole -------------------------------------------------------------------------------------------------

    def whole(self, outputs: Sequence[GenerationOutput], usage: Usage) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choices = [self._choice(Sample(i, output), usage) for i, output in enumerate(outputs)]
        answer = self._head("chat.completion") | {"choices": choices, "usage": usage.as_openai()}
        if self._request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._model.texts, outputs[0])
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = outputs[0].prompt_ids
        return answer

    def _choice(self, sample: Sample, usage: Usage) -> dict[str, Any]:
        events = self._read(sample, usage)
        parsed = collect(events)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        if not parsed.tool_calls:
            message["content"] = parsed.content or ""
        if self._shows_reasoning and parsed.reasoning is not None:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in parsed.tool_calls
            ]
        choice = {"index": sample.choice, "message": message, "finish_reason": self._finish_reason(sample)}
        return choice | self._details(sample)

    # ---- streamed ----------------------------------------------------------------------------------------------

    def chunks(self, generation: Generation, first: Sequence[Sample]) -> AsyncGenerator[bytes, None]:
        """The events of a stream; see `stream_chunks`."""
        return stream_chunks(
            generation,
            first,
            lambda sample: self._chunk_of(sample, generation.usage),
            usage_chunk=(lambda: self._chunk([], generation.usage)) if self._request.includes_usage else None,
            retry_after=self._retry_after,
        )

    def _chunk_of(self, sample: Sample, usage: Usage) -> bytes:
        deltas = [self._delta(piece) for piece in self._read(sample, usage)]
        if sample.choice not in self._started:
            deltas = [{"role": "assistant", "content": ""}, *deltas]
        first = self._chunk([], usage)
        if sample.choice not in self._started and self._request.return_token_ids:
            first["prompt_token_ids"] = sample.output.prompt_ids
        if sample.choice not in self._started and self._request.prompt_logprobs is not None:
            first["prompt_logprobs"] = prompt_logprobs(self._model.texts, sample.output)
        self._started.add(sample.choice)
        delta = _merged(deltas)
        rest = delta[1:]
        finish = self._finish_reason(sample) if sample.output.is_finished() else None
        choice = {"index": sample.choice, "delta": delta[0] if delta else {}, "finish_reason": None}
        choice |= self._details(sample)
        if not rest:
            choice["finish_reason"] = finish
        data = event(first | {"choices": [choice]})
        for number, other in enumerate(rest, start=1):
            last = finish if number == len(rest) else None
            data += event(self._chunk([{"index": sample.choice, "delta": other, "finish_reason": last}], usage))
        return data

    def _delta(self, piece: Event) -> dict[str, Any]:
        match piece:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text} if self._shows_reasoning else {}
            case ToolCallStart(index, call_id, name):
                function: dict[str, Any] = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
            case ToolCallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        chunk = self._head("chat.completion.chunk") | {"choices": choices}
        return chunk | usage_so_far(self._request, usage)

    # ---- both --------------------------------------------------------------------------------------------------

    @property
    def _shows_reasoning(self) -> bool:
        return self._request.include_reasoning is not False

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model_name}

    def _read(self, sample: Sample, usage: Usage) -> list[Event]:
        """The events of a sample's new text."""
        count = self._reasoning_tokens[sample.choice].add(sample.output.generated_tokens)
        usage.reasoning_tokens += count
        parser = self._parsers[sample.choice]
        events = parser.feed(sample.output.text or "")
        if sample.output.is_finished():
            events += parser.finish()
        return events

    def _finish_reason(self, sample: Sample) -> str | None:
        """OpenAI's word for an end. A call that was cut off is no call: its client must not run it."""
        reason, parser = sample.output.finish_reason, self._parsers[sample.choice]
        if reason == "stop" and parser.is_truncated:
            return "length"
        return "tool_calls" if reason == "stop" and parser.has_called else reason

    def _details(self, sample: Sample) -> dict[str, Any]:
        """What a choice holds beside its text."""
        output = sample.output
        details: dict[str, Any] = {"logprobs": None}
        if self._request.logprobs:
            details["logprobs"] = chat_logprobs(
                self._model.texts,
                output,
                self._request.top_logprobs or 0,
                as_ids=bool(self._request.return_tokens_as_token_ids),
            )
        if self._request.return_token_ids:
            details["token_ids"] = output.generated_tokens
        if output.is_finished():
            details["stop_reason"] = None if self._finish_reason(sample) == "length" else output.stop_reason
        return details


def _merged(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fewer deltas: the role goes along with the first piece, and what is empty goes."""
    pieces = [delta for delta in deltas if delta]
    if len(pieces) > 1 and "role" in pieces[0]:
        return [pieces[0] | pieces[1], *pieces[2:]]
    return pieces


async def prepare_turn(
    request: ChatRequest, engine: AsyncEngine, context: ServerContext, answer_id: str
) -> tuple[Dialogue, list[list[Request]]]:
    """Renders a conversation and makes the engine's requests of it.

    Raises:
        APIError, ValueError, TypeError: something is wrong with the request.
    """
    check_num_samples(request.num_samples, context.settings.limits)
    dialogue = await context.workers.run(prepare_dialogue, request, context)
    groups = await context.prepare(
        engine, [dialogue.token_ids], dialogue.params, answer_id, streaming=bool(request.stream)
    )
    return dialogue, groups


async def prepare_chat(
    request: ChatRequest, engine: AsyncEngine, context: ServerContext, answer_id: str
) -> tuple[ChatAnswer, list[list[Request]]]:
    """All that comes before the engine.

    Raises:
        APIError, ValueError, TypeError: something is wrong with the request.
    """
    dialogue, groups = await prepare_turn(request, engine, context, answer_id)
    return ChatAnswer(request, dialogue, context, answer_id), groups
