"""Who answers a chat: an engine in this process, or a server with OpenAI's interface.

Both stream pieces of the assistant's turn; closing the stream ends the answer. Owns the wire format of the server's
streams. Does not know the terminal.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlsplit

from cb_engine.cli.encoding import Encoder
from cb_engine.errors import CBEngineError

if TYPE_CHECKING:
    from cb_engine.api.manager import ContinuousBatchingManager

Message = dict[str, Any]

_CONNECT_S = 10.0
_SILENCE_S = 600.0  # a busy server may let the first token wait


@dataclass(frozen=True)
class Piece:
    """Some more of an answer. Reasoning and tool calls are not what is said, and are shown apart."""

    text: str
    kind: Literal["content", "reasoning", "tool_call"] = "content"


class ChatError(Exception):
    """No answer, or no more of it; the message is for the user."""


class ChatBackend(Protocol):
    """Answers chats."""

    name: str

    def answer(self, messages: Sequence[Message], changes: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """The assistant's turn, piece by piece.

        Args:
            messages: the chat so far.
            changes: fields of SamplingParams that the user has set.

        Raises:
            ChatError: it cannot be answered.
        """


class LocalChat:
    """An engine in this process.

    Args:
        name: the model's.
        manager: started.
        encoder: makes token ids of chats.
    """

    def __init__(self, name: str, manager: ContinuousBatchingManager, encoder: Encoder) -> None:
        self.name = name
        self._manager = manager
        self._encoder = encoder

    def answer(self, messages: Sequence[Message], changes: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """See `ChatBackend`."""
        try:
            token_ids = self._encoder.chat_token_ids(messages)
            params = self._encoder.params(len(token_ids), changes)
            request_id = self._manager.add_request(token_ids, streaming=True, sampling_params=params)
        except (ValueError, TypeError, CBEngineError) as error:
            raise ChatError(str(error)) from error
        shown = 0
        try:
            for output in self._manager.request_id_iter(request_id):
                text = output.text or ""
                if len(text) > shown:
                    yield Piece(text[shown:])
                    shown = len(text)
                if output.finish_reason == "error":
                    raise ChatError(output.error or "the request failed")
        finally:
            self._manager.cancel_request(request_id)  # the user has heard enough; does nothing at a proper end


class ServerChat:
    """A server with OpenAI's `/v1/chat/completions`.

    Args:
        base_url: where it is, with or without `/v1`.
        model: the model's name there; None takes the first one it lists.
        api_key: sent as a bearer token.

    Raises:
        ValueError: `base_url` is none. ChatError: nobody is there, or it has no models.
    """

    def __init__(self, base_url: str, model: str | None, api_key: str | None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--base-url must be like http://127.0.0.1:8000, got {base_url!r}")
        self._url = base_url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # A proxy leads out of the house; a server on this machine is not there.
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))
        self.name = model or self._first_model()

    def answer(self, messages: Sequence[Message], changes: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """See `ChatBackend`."""
        body = {"model": self.name, "messages": list(messages), "stream": True, **_as_http(changes)}
        with self._open("/chat/completions", _SILENCE_S, json.dumps(body).encode()) as response:
            try:
                for event in _events(response):
                    yield from _pieces(event)
            except (OSError, http.client.HTTPException) as error:
                raise ChatError(f"the server broke off: {type(error).__name__}: {error}") from error

    def _first_model(self) -> str:
        with self._open("/models", _CONNECT_S) as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as error:
                raise ChatError(f"{self._url}/models lists no model; name one with --model") from error

    def _open(self, path: str, timeout: float, body: bytes | None = None) -> Any:
        request = urllib.request.Request(self._url + path, body, self._headers)
        try:
            return self._opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            raise ChatError(f"the server refused ({error.code} {error.reason}): {_said(error)}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ChatError(f"no answer from {self._url}: {reason}; is the server running there?") from error


def _said(error: urllib.error.HTTPError) -> str:
    """The message in an error's body: OpenAI's form, FastAPI's, or the bare text."""
    text = error.read(4096).decode("utf-8", "replace")
    try:
        given = json.loads(text)
    except ValueError:
        return text
    if not isinstance(given, dict):
        return text
    inner = given.get("error", given.get("detail", given))
    return str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to `[DONE]` or its end."""
    for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not line.startswith("data:"):
            continue  # comments that keep the line open, names of events, blank lines
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ChatError(f"the server sent what is no JSON: {data[:100]!r}") from error
        if isinstance(event, dict):
            yield event


def _pieces(event: Mapping[str, Any]) -> Iterator[Piece]:
    """What one event adds to the answer.

    Raises:
        ChatError: it is an error.
    """
    if event.get("error"):
        error = event["error"]
        raise ChatError(str(error.get("message", error)) if isinstance(error, Mapping) else str(error))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            yield Piece(str(reasoning), "reasoning")
        if delta.get("content"):
            yield Piece(str(delta["content"]))
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            # The name comes once, the arguments in as many pieces as there are.
            name = f"\n{function['name']} " if function.get("name") else ""
            yield Piece(name + (function.get("arguments") or ""), "tool_call")


def _as_http(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams under the names that servers have for them."""
    body = dict(changes)
    structured = body.pop("structured", None)
    if structured is not None:
        names = {"json_schema": "json"}
        body["structured_outputs"] = {names.get(name, name): value for name, value in structured.items()}
    return body
