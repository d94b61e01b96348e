"""/v1/responses: a chat's work, written as items and typed events.

Owns the events' order and numbers, and the items. A whole answer is what the stream's items come to.

    created, in_progress, { output_item.added, (content_part.added, *.delta .., *.done, content_part.done),
    output_item.done } for each item, completed | incomplete | failed
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from cb_engine.api.async_engine import AsyncEngine
from cb_engine.outputs import GenerationOutput
from cb_engine.request import Request
from cb_engine.serve.chat import Dialogue, prepare_turn
from cb_engine.serve.context import ServerContext
from cb_engine.serve.errors import as_api_error, bad_request
from cb_engine.serve.generation import Generation, Sample, Usage
from cb_engine.serve.parsers import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from cb_engine.serve.protocol.responses import ResponsesRequest
from cb_engine.serve.sse import event
from cb_engine.serve.token_texts import chat_logprobs

Typed = dict[str, Any]


class Items:
    """The output of an answer, item by item; every change of it is an event."""

    def __init__(self, *, with_logprobs: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._with_logprobs = with_logprobs
        self._open = False  # whether the last item still grows
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is still to come
        self._had_call = False

    def take(self, events: Sequence[Event], logprobs: list[dict[str, Any]]) -> Iterator[Typed]:
        """Lets the output grow.

        Args:
            logprobs: of the tokens that have come, less those of reasoning.
        """
        self._logprobs += logprobs
        for piece in events:
            match piece:
                case Content(text):
                    yield from self._ensure("message")
                    yield self._grow("response.output_text.delta", text, self._take_logprobs(text))
                case Reasoning(text):
                    yield from self._ensure("reasoning")
                    yield self._grow("response.reasoning_text.delta", text)
                case ToolCallStart(_, call_id, name):
                    yield from self.close("completed")
                    self._had_call = True
                    yield self._add({"type": "function_call", "call_id": call_id, "name": name, "arguments": ""})
                case ToolCallArguments(_, delta):
                    self.items[-1]["arguments"] += delta
                    yield self._of_item("response.function_call_arguments.delta", delta=delta)

    def close(self, status: str) -> Iterator[Typed]:
        """Ends the last item."""
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = status
        match item["type"]:
            case "function_call":
                arguments = item["arguments"]
                yield self._of_item("response.function_call_arguments.done", arguments=arguments, name=item["name"])
            case "message":
                part = item["content"][0]
                logprobs = []
                if self._with_logprobs:
                    part["logprobs"] += self._take_logprobs()  # of tokens without text, an EOS for one
                    logprobs = part["logprobs"]
                yield self._of_part("response.output_text.done", text=part["text"], logprobs=logprobs)
                yield self._of_part("response.content_part.done", part=part)
            case "reasoning":
                yield self._of_part("response.reasoning_text.done", text=item["content"][0]["text"])
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _ensure(self, kind: str) -> Iterator[Typed]:
        """Sees to it that the last item is one of this kind, and grows."""
        if self._open and self.items[-1]["type"] == kind:
            return
        yield from self.close("completed")
        if kind == "reasoning":
            added = self._add({"type": kind, "summary": [], "content": []})
            yield added
            self.items[-1]["content"].append({"type": "reasoning_text", "text": ""})
            return
        yield self._add({"type": kind, "role": "assistant", "content": []})
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
        if self._with_logprobs:
            part["logprobs"] = []
        yield self._of_part("response.content_part.added", part=dict(part))
        self.items[-1]["content"].append(part)

    def _add(self, item: dict[str, Any]) -> Typed:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[item["type"]]
        self.items.append({"id": f"{prefix}_{uuid.uuid4().hex}", "status": "in_progress", **item})
        self._open = True
        shown = {name: list(v) if isinstance(v, list) else v for name, v in self.items[-1].items()}
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": shown}

    def _take_logprobs(self, text: str = "") -> list[dict[str, Any]]:
        """Those of the tokens behind a text. Of a call and its marks there are some left over, which go nowhere."""
        taken, self._logprobs = self._logprobs, []
        if not self._had_call or not text:
            return taken
        spelt = [bytes(entry["bytes"]) for entry in taken]
        begins = (i for i in range(len(taken)) if b"".join(spelt[i:]).startswith(text.encode()))
        return taken[next(begins, len(taken)) :]

    def _grow(self, kind: str, text: str, logprobs: list[dict[str, Any]] | None = None) -> Typed:
        part = self.items[-1]["content"][0]
        part["text"] += text
        if logprobs is None:
            return self._of_part(kind, delta=text)
        if self._with_logprobs:
            part["logprobs"] += logprobs
        return self._of_part(kind, delta=text, logprobs=logprobs if self._with_logprobs else [])

    def _of_item(self, kind: str, **fields: Any) -> Typed:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _of_part(self, kind: str, **fields: Any) -> Typed:
        return self._of_item(kind, content_index=0, **fields)


class ResponsesAnswer:
    """One answer; see the module docstring."""

    def __init__(self, request: ResponsesRequest, dialogue: Dialogue, context: ServerContext, answer_id: str) -> None:
        self._request = request
        self._model = context.loaded
        self._retry_after = context.settings.retry_after
        self._parser = dialogue.parser(self._model)
        self._reasoning_tokens = dialogue.reasoning_tokens(self._model)
        self._items = Items(with_logprobs=request.wants_logprobs)
        self._sequence_number = -1
        params = dialogue.params
        self._response: dict[str, Any] = {
            "id": answer_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": request.model or context.settings.model_name,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": _format_of(request)},
            "tool_choice": _dumped(request.tool_choice) or "auto",
            "tools": [_dumped(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": request.metadata or {},
        }

    def whole(self, outputs: Sequence[GenerationOutput], usage: Usage) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        (output,) = outputs
        for _ in self._take(output, usage):
            pass  # the items remain
        self._end(output, usage)
        return self._response

    async def chunks(self, generation: Generation, first: Sequence[Sample]) -> AsyncGenerator[bytes, None]:
        """The events of a stream; `first` is the batch that was waited for."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self._response})
        batch = list(first)
        try:
            while batch:
                output = batch[0].output
                for typed in self._take(output, generation.usage):
                    yield self._event(typed)
                batch = await generation.next_batch()
        except Exception as error:
            yield self._failed(error)
            return
        self._end(output, generation.usage)
        yield self._event({"type": f"response.{self._response['status']}", "response": self._response})

    def _take(self, output: GenerationOutput, usage: Usage) -> Iterator[Typed]:
        num_reasoning = self._reasoning_tokens.add(output.generated_tokens)
        usage.reasoning_tokens += num_reasoning
        events = self._parser.feed(output.text or "")
        if output.is_finished():
            events += self._parser.finish()
        yield from self._items.take(events, self._logprobs(output)[num_reasoning:])
        if output.is_finished():
            yield from self._items.close("incomplete" if self._is_cut_off(output) else "completed")

    def _is_cut_off(self, output: GenerationOutput) -> bool:
        return output.finish_reason == "length" or self._parser.is_truncated

    def _logprobs(self, output: GenerationOutput) -> list[dict[str, Any]]:
        if not self._request.wants_logprobs:
            return []
        content: list[dict[str, Any]] = chat_logprobs(
            self._model.texts, output, self._request.top_logprobs or 0, as_ids=False
        )["content"]
        return content

    def _end(self, output: GenerationOutput, usage: Usage) -> None:
        cut_off = self._is_cut_off(output)
        self._response |= {
            "status": "incomplete" if cut_off else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": self._items.items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _failed(self, error: Exception) -> bytes:
        body = as_api_error(error, retry_after=self._retry_after).body()["error"]
        self._response |= {
            "status": "failed",
            "error": {"code": "server_error", "message": body["message"]},
            "output": self._items.items,
        }
        return self._event({"type": "response.failed", "response": self._response})

    def _event(self, typed: Typed) -> bytes:
        self._sequence_number += 1
        return event({**typed, "sequence_number": self._sequence_number}, typed["type"])


def _dumped(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value


def _format_of(request: ResponsesRequest) -> dict[str, Any]:
    form = request.text.format if request.text is not None else None
    return {"type": "text"} if form is None else form.model_dump(exclude_none=True, by_alias=True)


async def prepare_response(
    request: ResponsesRequest, engine: AsyncEngine, context: ServerContext, answer_id: str
) -> tuple[ResponsesAnswer, list[list[Request]]]:
    """All that comes before the engine.

    Raises:
        APIError, ValueError, TypeError: something is wrong with the request.
    """
    try:
        chat = request.as_chat()
    except ValueError as error:  # pydantic's own is one: fields that do not go together
        raise bad_request(_reason(error)) from error
    dialogue, groups = await prepare_turn(chat, engine, context, answer_id)
    return ResponsesAnswer(request, dialogue, context, answer_id), groups


def _reason(error: ValueError) -> str:
    details = getattr(error, "errors", None)
    return str(error) if details is None else str(details()[0]["msg"]).removeprefix("Value error, ")
