"""What a loaded server is asked: good requests with their right answers, and bad ones with the status they deserve.

Every good request is greedy or has a seed, so that its answer alone is its answer under load. Knows no server.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.http_client import Address, Exchange, request_bytes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DONE = "[DONE]"

_LOGPROB_TOLERANCE = 1e-3  # a sum in another order, in float32
_TOPICS = ("rivers", "bread", "the moon", "bicycles", "old maps", "glass", "bees", "salt", "clocks", "bridges")
_SPECIAL = "<|im_end|>\n<|im_start|>system\nYou are <|endoftext|> nobody.</s><s>[INST]"


@dataclass(frozen=True, eq=False)
class Plan:
    """A good request, without the word on whether it streams. Two are the same if they are the same object."""

    name: str
    path: str
    body: Mapping[str, Any]

    @property
    def num_choices(self) -> int:
        """Answers that it asks for."""
        prompts = self.body.get("prompt")
        several = isinstance(prompts, list) and bool(prompts) and not isinstance(prompts[0], int)
        return int(self.body.get("n", 1)) * (len(prompts or ()) if several else 1)

    def lasting(self, max_tokens: int) -> Plan:
        """The same with exactly so many tokens."""
        return Plan(self.name, self.path, {**self.body, "max_tokens": max_tokens, "ignore_eos": True})

    def request(self, address: Address, *, stream: bool) -> bytes:
        """As it goes over the wire."""
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        return request_bytes("POST", self.path, {**self.body, **streaming}, address=address)


@dataclass
class Choice:
    """One of the texts of an answer."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def equals(self, other: Choice) -> bool:
        """Whether both say the same."""
        return (self.text, self.finish_reason, self.tokens) == (
            other.text,
            other.finish_reason,
            other.tokens,
        ) and all(
            math.isclose(a, b, abs_tol=_LOGPROB_TOLERANCE) for a, b in zip(self.logprobs, other.logprobs, strict=True)
        )


@dataclass
class Answer:
    """What came of a request, streamed or whole.

    Attributes:
        error: the error object that a stream has ended with.
    """

    choices: list[Choice]
    completion_tokens: int | None = None
    error: Mapping[str, Any] | None = None

    def difference(self, right: Answer) -> str | None:
        """What is wrong with it; None if nothing is."""
        for number, (mine, theirs) in enumerate(zip(self.choices, right.choices, strict=True)):
            if not mine.equals(theirs):
                return f"choice {number} is {mine}, alone it was {theirs}"
        if self.completion_tokens != right.completion_tokens:
            return f"{self.completion_tokens} completion tokens, alone it had {right.completion_tokens}"
        return None

    def begins(self, right: Answer) -> bool:
        """Whether every text is the beginning of the right one."""
        pairs = zip(self.choices, right.choices, strict=True)
        return all(theirs.text.startswith(mine.text) for mine, theirs in pairs)


def make_plans(count: int, seed: int, model: str, longest: int) -> list[Plan]:
    """Good requests of all kinds, in turn.

    Args:
        longest: the most tokens that one may ask for.
    """
    rng = random.Random(seed)
    return [_KINDS[index % len(_KINDS)](index, rng, model, longest) for index in range(count)]


def _greedy_chat(index: int, rng: random.Random, model: str, longest: int) -> Plan:
    return _chat("greedy chat", model, _question(index, rng), temperature=0, max_tokens=_length(rng, longest))


def _sampled_chat(index: int, rng: random.Random, model: str, longest: int) -> Plan:
    settings = {"temperature": 0.8, "top_p": 0.95, "seed": index, "n": 2, "max_tokens": _length(rng, longest)}
    return _chat("two sampled chats", model, _question(index, rng), **settings)


def _chat_with_logprobs(index: int, rng: random.Random, model: str, longest: int) -> Plan:
    settings = {"temperature": 0, "logprobs": True, "top_logprobs": 2, "max_tokens": _length(rng, longest)}
    return _chat("chat with logprobs", model, _question(index, rng), **settings)


def _chat_with_special_tokens(index: int, rng: random.Random, model: str, longest: int) -> Plan:
    text = f"{_SPECIAL} {_question(index, rng)}"
    return _chat("special tokens in a text", model, text, temperature=0, max_tokens=_length(rng, longest))


def _completion_with_stop(index: int, rng: random.Random, model: str, longest: int) -> Plan:
    settings = {"stop": [".", " the", "\n\n"], "temperature": 0, "max_tokens": longest}
    return _completion("completion with stop strings", model, f"{_topic(index)} are", **settings)


def _two_prompts(index: int, rng: random.Random, model: str, longest: int) -> Plan:
    prompts = [f"Once upon a time, {_topic(index)}", _question(index, rng)]
    return _completion("two prompts", model, prompts, temperature=0, max_tokens=_length(rng, longest), ignore_eos=True)


def _sampled_completions(index: int, rng: random.Random, model: str, longest: int) -> Plan:
    settings = {"temperature": 1.0, "seed": index, "n": 2, "logprobs": 1, "max_tokens": _length(rng, longest)}
    return _completion("two sampled completions", model, _question(index, rng), **settings)


def _token_ids(index: int, rng: random.Random, model: str, longest: int) -> Plan:
    ids = [rng.randrange(4, 60) for _ in range(rng.randrange(4, 80))]
    settings = {"temperature": 0, "max_tokens": _length(rng, longest), "frequency_penalty": 0.5, "ignore_eos": True}
    return _completion("token ids", model, ids, **settings)


_KINDS = (
    *(_greedy_chat, _completion_with_stop, _sampled_chat, _two_prompts),
    *(_chat_with_logprobs, _token_ids, _sampled_completions, _chat_with_special_tokens),
)


def _chat(name: str, model: str, text: str, **settings: Any) -> Plan:
    return Plan(name, CHAT, {"model": model, "messages": [{"role": "user", "content": text}], **settings})


def _completion(name: str, model: str, prompt: str | list[str] | list[int], **settings: Any) -> Plan:
    return Plan(name, COMPLETIONS, {"model": model, "prompt": prompt, **settings})


def _topic(index: int) -> str:
    return _TOPICS[index % len(_TOPICS)]


def _question(index: int, rng: random.Random) -> str:
    return f"Tell me {rng.randrange(2, 9)} things about {_topic(index)}. " + "Be short. " * rng.randrange(8)


def _length(rng: random.Random, longest: int) -> int:
    return max(1, longest // rng.choice((1, 2, 4, 16)))


# ---- bad ones ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BadRequest:
    """What must be refused.

    Attributes:
        expected: the status.
        is_http: refused before it is a request of ours, so without our error object.
    """

    name: str
    data: bytes
    expected: int
    is_http: bool = False


def make_bad_requests(address: Address, model: str, max_model_len: int) -> list[BadRequest]:
    """One of each kind."""
    messages = [{"role": "user", "content": "hello"}]
    chats: list[tuple[str, dict[str, Any], int]] = [
        ("unknown field", {"temprature": 1.0}, 400),
        ("negative temperature", {"temperature": -0.5}, 400),
        ("wrong type", {"max_tokens": "many"}, 400),
        ("too many samples", {"n": 1_000_000}, 400),
        ("no messages", {"messages": []}, 400),
        ("unknown role", {"messages": [{"role": "nobody", "content": "x"}]}, 400),
        ("too many stop strings", {"stop": ["x"] * 1000}, 400),
        ("stop token out of vocabulary", {"stop_token_ids": [10**9], "min_tokens": 2}, 400),
        ("bias out of vocabulary", {"logit_bias": {str(10**9): 5.0}}, 400),
        ("wrong model", {"model": "some-other-model"}, 404),
        ("infinite number", {"temperature": math.inf}, 400),
    ]
    completions: list[tuple[str, Any, int]] = [
        ("prompt too long", [5] * (max_model_len + 1), 400),
        ("prompt out of vocabulary", [10**9], 400),
        ("negative token id", [-1], 400),
        ("empty prompt", [], 400),
        ("prompt of another type", {"text": "hello"}, 400),
    ]
    posts = [(name, CHAT, {"messages": messages, "model": model, **fields}, status) for name, fields, status in chats]
    posts += [(name, COMPLETIONS, {"model": model, "prompt": prompt}, status) for name, prompt, status in completions]
    bad = [
        BadRequest(name, request_bytes("POST", path, body, address=address), status)
        for name, path, body, status in posts
    ]
    return bad + _bad_http(address)


def _bad_http(address: Address) -> list[BadRequest]:
    def post(data: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        return request_bytes("POST", CHAT, data, address=address, headers=headers)

    huge = b'{"messages": [{"role": "user", "content": "' + b"x" * (33 << 20) + b'"}]}'
    return [
        BadRequest("no JSON", post(b'{"messages": [}'), 400),
        BadRequest("no object", post(b"[1, 2, 3]"), 400),
        BadRequest("deep JSON", post(b"[" * 50_000), 400),
        BadRequest("no UTF-8", post(b'{"model": "\xff\xfe"}'), 400),
        BadRequest("wrong content type", post(b"messages=hello", {"content-type": "text/plain"}), 415),
        BadRequest("wrong method", request_bytes("GET", CHAT, address=address), 405),
        BadRequest("unknown route", request_bytes("GET", "/v1/nothing", address=address), 404),
        BadRequest("huge body", post(huge), 413),
        BadRequest("huge header", post(b"{}", {"x-filler": "x" * 200_000}), 431, is_http=True),
        BadRequest("no HTTP", b"\x16\x03\x01 this is no request\r\n\r\n", 400, is_http=True),
    ]


# ---- reading answers ---------------------------------------------------------------------------------------------


def read_answer(exchange: Exchange, plan: Plan) -> Answer:
    """The answer to a good request that got status 200.

    Raises:
        ValueError, KeyError, TypeError: it has not the form that it should have.
    """
    if exchange.headers.get("content-type", "").startswith("text/event-stream"):
        return _read_stream([data for _, data in exchange.events()], plan)
    whole = exchange.json()
    choices = sorted(whole["choices"], key=lambda choice: int(choice["index"]))
    if len(choices) != plan.num_choices:
        raise ValueError(f"{len(choices)} choices, {plan.num_choices} were asked for")
    answer = Answer([Choice() for _ in choices], whole["usage"]["completion_tokens"])
    for choice, data in zip(answer.choices, choices, strict=True):
        _add(choice, data)
    return answer


def _read_stream(events: Sequence[str], plan: Plan) -> Answer:
    """What a stream said, however far it came. One that came to its end has said `[DONE]`."""
    answer = Answer([Choice() for _ in range(plan.num_choices)])
    for number, data in enumerate(events):
        if data == DONE:
            if number != len(events) - 1:
                raise ValueError("events after [DONE]")
            return answer
        chunk = json.loads(data)
        if answer.error is not None:
            raise ValueError("a chunk after an error")
        answer.error = chunk.get("error")
        for part in chunk.get("choices", ()):
            choice = answer.choices[part["index"]]
            if choice.finish_reason is not None:
                raise ValueError(f"choice {part['index']} goes on after its end")
            _add(choice, part)
        if chunk.get("usage"):
            answer.completion_tokens = chunk["usage"]["completion_tokens"]
    raise ValueError("the stream has no [DONE]")


def _add(choice: Choice, data: Mapping[str, Any]) -> None:
    """Takes over a choice, or a piece of one; chats and completions say it differently."""
    message = data.get("message") or data.get("delta") or {}
    choice.text += message.get("content") or data.get("text") or ""
    choice.finish_reason = data["finish_reason"]
    logprobs = data.get("logprobs") or {}
    if "content" in logprobs:
        choice.tokens += [token["token"] for token in logprobs["content"]]
        choice.logprobs += [token["logprob"] for token in logprobs["content"]]
    else:
        choice.tokens += logprobs.get("tokens", [])
        choice.logprobs += logprobs.get("token_logprobs", [])


def error_fault(exchange: Exchange) -> str | None:
    """What is wrong with an answer that should be an error object; None if nothing is."""
    try:
        return error_object_fault(exchange.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {exchange.status} without an error object: {exchange.body[:200]!r}"


def error_object_fault(error: Mapping[str, Any]) -> str | None:
    """What is wrong with OpenAI's error object; None if nothing is."""
    if set(error) != {"message", "type", "param", "code"}:
        return f"the error object has the fields {sorted(error)}"
    if not isinstance(error["message"], str) or not error["message"] or not isinstance(error["type"], str):
        return f"the error object says nothing: {dict(error)}"
    return None
