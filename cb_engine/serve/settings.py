"""What an operator may say of a server, checked once. Owns `ServeSettings`; knows no engine and no HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Switch = Literal["auto", "on", "off"]
ToolFormatName = Literal["auto", "hermes", "qwen_xml", "llama3_json", "mistral", "mistral_args", "json"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that one HTTP request may ask for. What is beyond is refused with 400, 413 or 431."""

    max_samples: int = 128  # n times the number of prompts
    max_logprobs: int = 20
    max_stop: int = 16
    max_logit_bias: int = 1024
    max_bad_words: int = 128
    max_tools: int = 128
    max_body_bytes: int = 8 << 20
    max_header_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{item.name}={value!r} must be a positive integer")


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of a server. Times are in seconds; None means that there is no limit.

    Attributes:
        model_name: the name that clients use, and the ones that mean the same.
        api_key: wanted of every request but /health and /metrics; None: of none.
        admin_key: wanted of admin routes, which are off without one.
        cors_origins: origins whose pages may call the server; "*" for all.
        allowed_hosts: host names that requests may be addressed to, which keeps pages of other sites from reaching a
            server of this machine through names of their own; empty: any.
        max_waiting_time: for a request to be scheduled first.
        max_running_time: from then to its end.
        shutdown_timeout: for what runs when the server is told to end.
        text_timeout: for templates, tokenisation and grammars of one request.
        body_timeout: for a client to send its body.
        send_timeout: for a client to take a piece of a stream; one that does not is taken to be gone.
        hang_timeout: without a finished step while there is work, the engine is said to be unhealthy.
        retry_after: what clients are told when they are turned away.
        engine_restarts: how often a failed engine is made anew, over the life of the server.
        chat_template: replaces the tokenizer's.
        chat_template_kwargs: for the template, unless a request says otherwise.
        trust_request_chat_template: let requests bring templates. They run in a sandbox, without a limit on what they
            compute but `text_timeout`.
        tool_format: how the model writes tool calls; "auto": read off its template.
        reasoning: split the model's reasoning from its answer; "auto": if its template shows that it reasons.
        use_generation_config: take sampling defaults from the model's generation config.
        default_seed: of requests without a seed.
        weights_dir: the folder below which /update_weights may read; None turns that route off.
        limits: see `Limits`.
    """

    model_name: str
    model_aliases: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_waiting_time: float | None = None
    max_running_time: float | None = None
    shutdown_timeout: float = 30.0
    text_timeout: float = 30.0
    body_timeout: float = 60.0
    send_timeout: float = 60.0
    hang_timeout: float = 300.0
    retry_after: int = 1
    engine_restarts: int = 3
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_request_chat_template: bool = False
    tool_format: ToolFormatName = "auto"
    reasoning: Switch = "auto"
    use_generation_config: bool = True
    default_seed: int | None = None
    weights_dir: str | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("api_key", "admin_key"):
            key = getattr(self, name)
            if key is not None and (not key or not key.isascii() or key != key.strip()):
                raise ValueError(f"{name} must be ASCII text that is not empty, without spaces around it")
        if self.admin_key is not None and self.admin_key == self.api_key:
            raise ValueError("admin_key and api_key are the same; every client could change the weights then")
        if not all((self.model_name, *self.model_aliases, *self.allowed_hosts)):
            raise ValueError("model_name, model_aliases and allowed_hosts must hold no empty name")
        for name in ("max_waiting_time", "max_running_time"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r} must be positive, or None for no limit")
        for name in ("text_timeout", "body_timeout", "send_timeout", "hang_timeout", "retry_after"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be positive")
        for name in ("shutdown_timeout", "engine_restarts"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must not be negative")

    def is_own_name(self, model: str) -> bool:
        """Whether a client that asks for `model` means this one."""
        return model == self.model_name or model in self.model_aliases
