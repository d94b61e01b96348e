"""`cb-engine serve`: the OpenAI-compatible server for one model."""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cb_engine.cli.loading import load_attached
from cb_engine.cli.look import CommandFailedError, note
from cb_engine.cli.options import MODEL_HELP, EngineOptions, ModelOptions
from cb_engine.cli.spreading import OptionError, naming_options
from cb_engine.serve.settings import Limits, ServeSettings, ToolFormatName

SERVER = "Server"
SECURITY = "Security"
LIMITS = "Limits"
ANSWERS = "Answers"

_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where the server listens, and what it does in trouble."""

    host: Annotated[
        str, typer.Option("--host", help="Address to listen at; 0.0.0.0 for all.", rich_help_panel=SERVER)
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(
            "--port", help="Port to listen at; 0 for any that is free.", min=0, max=65535, rich_help_panel=SERVER
        ),
    ] = 8000
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option("--log-level", help="`info` writes a line for each request.", rich_help_panel=SERVER),
    ] = "info"
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="What clients call the model, MODEL by default; repeat it for names that mean the same.",
            rich_help_panel=SERVER,
        ),
    ] = None
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            "--shutdown-timeout",
            metavar="SECONDS",
            help="After SIGTERM what runs may go on for so long. A second one ends the server at once.",
            rich_help_panel=SERVER,
        ),
    ] = 30.0
    hang_timeout: Annotated[
        float,
        typer.Option(
            "--hang-timeout",
            metavar="SECONDS",
            help="After so long in one step of the engine /health says 503.",
            rich_help_panel=SERVER,
        ),
    ] = 300.0
    engine_restarts: Annotated[
        int,
        typer.Option(
            "--engine-restarts",
            help="How often an engine that has failed is made anew before the server is dead.",
            rich_help_panel=SERVER,
        ),
    ] = 3


@dataclass(frozen=True, kw_only=True)
class SecurityOptions:
    """Who may ask for what."""

    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="CB_ENGINE_API_KEY",
            help="Wanted of every request but /health and /metrics.",
            rich_help_panel=SECURITY,
        ),
    ] = None
    admin_key: Annotated[
        str | None,
        typer.Option(
            "--admin-key",
            envvar="CB_ENGINE_ADMIN_KEY",
            help="Turns /pause, /resume, /update_weights, /reset_prefix_cache and /weight_info on, which want it.",
            rich_help_panel=SECURITY,
        ),
    ] = None
    weights_dir: Annotated[
        Path | None,
        typer.Option(
            "--weights-dir",
            help="Folder below which /update_weights may read safetensors files.",
            exists=True,
            file_okay=False,
            rich_help_panel=SECURITY,
        ),
    ] = None
    enable_cors: Annotated[
        bool, typer.Option("--enable-cors", help="Let pages of all origins ask.", rich_help_panel=SECURITY)
    ] = False
    cors_origin: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", metavar="ORIGIN", help="Or of these; repeatable.", rich_help_panel=SECURITY),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="Host names that requests may be addressed to, `*` for any; repeatable. By default those of this "
            "machine if the server listens to nobody else, so that no page of another site gets through.",
            rich_help_panel=SECURITY,
        ),
    ] = None
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            help="Let requests bring chat templates; sandboxed, but free to compute for long.",
            rich_help_panel=SECURITY,
        ),
    ] = False

    def origins(self) -> tuple[str, ...]:
        """Origins whose pages may ask.

        Raises:
            OptionError: two options that exclude each other.
        """
        if self.enable_cors and self.cors_origin:
            raise OptionError("--enable-cors means all origins; leave it out, or --cors-origin")
        return ("*",) if self.enable_cors else tuple(self.cors_origin or ())

    def hosts(self, listens_at: str) -> tuple[str, ...]:
        """Host names that are served; none at all means any."""
        if self.allowed_host:
            return () if "*" in self.allowed_host else tuple(name.lower() for name in self.allowed_host)
        return (*_LOOPBACK_HOSTS, listens_at.lower()) if is_loopback(listens_at) else ()


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """The most of everything."""

    max_queued_requests: Annotated[
        int,
        typer.Option(
            "--max-queued-requests",
            "--max-num-queued-reqs",
            help="Requests that may wait for a seat before others get 429; 0: any number.",
            rich_help_panel=LIMITS,
        ),
    ] = 1024
    max_queued_tokens: Annotated[
        int,
        typer.Option(
            "--max-queued-tokens",
            "--max-num-queued-tokens",
            help="Prompt tokens that may wait, seat or not, before others get 429; 0: any number.",
            rich_help_panel=LIMITS,
        ),
    ] = 0
    max_waiting_time: Annotated[
        float | None,
        typer.Option("--max-waiting-time", metavar="SECONDS", help="For a request to start.", rich_help_panel=LIMITS),
    ] = None
    max_running_time: Annotated[
        float | None,
        typer.Option(
            "--max-running-time", metavar="SECONDS", help="From its start to its end.", rich_help_panel=LIMITS
        ),
    ] = None
    text_timeout: Annotated[
        float,
        typer.Option(
            "--text-timeout",
            metavar="SECONDS",
            help="For the template, tokenisation and grammars of a request.",
            rich_help_panel=LIMITS,
        ),
    ] = 30.0
    body_timeout: Annotated[
        float,
        typer.Option("--body-timeout", metavar="SECONDS", help="For a client to send.", rich_help_panel=LIMITS),
    ] = 60.0
    send_timeout: Annotated[
        float,
        typer.Option(
            "--send-timeout",
            metavar="SECONDS",
            help="For a client to take a piece of its stream; one that does not is taken to be gone.",
            rich_help_panel=LIMITS,
        ),
    ] = 60.0
    max_samples: Annotated[
        int, typer.Option("--max-samples", help="Answers to one request.", rich_help_panel=LIMITS)
    ] = 128
    max_logprobs: Annotated[
        int, typer.Option("--max-logprobs", help="Candidates of each token.", rich_help_panel=LIMITS)
    ] = 20
    max_stop: Annotated[
        int, typer.Option("--max-stop", help="Stop strings, and stop token ids.", rich_help_panel=LIMITS)
    ] = 16
    max_logit_bias: Annotated[
        int, typer.Option("--max-logit-bias", help="Tokens with a bias.", rich_help_panel=LIMITS)
    ] = 1024
    max_bad_words: Annotated[
        int, typer.Option("--max-bad-words", help="Words that are banned.", rich_help_panel=LIMITS)
    ] = 128
    max_tools: Annotated[int, typer.Option("--max-tools", help="Tools of a request.", rich_help_panel=LIMITS)] = 128
    max_body_bytes: Annotated[int, typer.Option("--max-body-bytes", help="Size of a body.", rich_help_panel=LIMITS)] = (
        8 << 20
    )
    max_header_bytes: Annotated[
        int, typer.Option("--max-header-bytes", help="Size of all headers together.", rich_help_panel=LIMITS)
    ] = 64 << 10

    def per_request(self) -> Limits:
        """Those that one request has to keep."""
        return Limits(**{field.name: getattr(self, field.name) for field in fields(Limits)})


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How prompts are made and answers are read."""

    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            metavar="FILE|TEXT",
            help="In place of the tokenizer's own.",
            rich_help_panel=ANSWERS,
        ),
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            "--chat-template-kwargs",
            metavar="JSON",
            help="Variables for the template, unless a request has its own.",
            rich_help_panel=ANSWERS,
        ),
    ] = None
    tool_format: Annotated[
        ToolFormatName,
        typer.Option(
            "--tool-format",
            "--tool-call-parser",
            help="How the model writes tool calls; `auto` reads it off its template.",
            rich_help_panel=ANSWERS,
        ),
    ] = "auto"
    reasoning: Annotated[
        Literal["auto", "on", "off"],
        typer.Option(
            "--reasoning",
            help="Give reasoning apart from the answer; `auto` if the template shows that the model reasons.",
            rich_help_panel=ANSWERS,
        ),
    ] = "auto"
    generation_config: Annotated[
        bool,
        typer.Option(
            "--generation-config/--no-generation-config",
            help="Take sampling defaults from the model's generation config.",
            rich_help_panel=ANSWERS,
        ),
    ] = True

    def template(self) -> str | None:
        """The template's text."""
        text = self.chat_template
        if text is None or "{" in text:
            return text
        try:
            return Path(text).read_text(encoding="utf-8")
        except OSError as error:
            raise OptionError(f"--chat-template {text!r} is no template, and no file: {error.strerror}") from error

    def variables(self) -> dict[str, Any]:
        """What the template is given."""
        if self.chat_template_kwargs is None:
            return {}
        try:
            given = json.loads(self.chat_template_kwargs)
        except json.JSONDecodeError:
            given = None
        if not isinstance(given, dict):
            raise OptionError(
                "--chat-template-kwargs must be a JSON object like '{\"enable_thinking\": false}', got "
                f"{self.chat_template_kwargs!r}"
            )
        return given


def serve(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    server: ServerOptions,
    security: SecurityOptions,
    limits: LimitOptions,
    answers: AnswerOptions,
    loading: ModelOptions,
    engine: EngineOptions,
) -> int:
    """Serve a model over HTTP: OpenAI's chats, completions and responses, a status page at /, figures at /metrics.

    SIGTERM, or Ctrl-C, ends it once what runs is done.
    """
    settings = _settings(model, server, security, limits, answers, engine.seed)
    # Each request has the seed, so that its answer does not depend on what came before.
    config = replace(engine, seed=None).config(
        max_queue_size=limits.max_queued_requests, max_queued_tokens=limits.max_queued_tokens
    )
    _begin_logging(server.log_level)
    if security.api_key is None and not is_loopback(server.host):
        note(f"--host {server.host} lets other machines ask, and no --api-key is set")
    from cb_engine.serve.app import build_app
    from cb_engine.serve.server import run_server

    app = build_app(_loader(model, loading), settings, config=config, hints=engine.hints())
    code = run_server(app, host=server.host, port=server.port)
    failure = app.state.context.host.load_error
    if failure is not None:
        text = str(failure) if isinstance(failure, CommandFailedError) else f"{type(failure).__name__}: {failure}"
        raise CommandFailedError(text, getattr(failure, "exit_code", 1)) from failure
    return code


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens at `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _settings(
    model: str,
    server: ServerOptions,
    security: SecurityOptions,
    limits: LimitOptions,
    answers: AnswerOptions,
    seed: int | None,
) -> ServeSettings:
    names = server.served_model_name or [model]
    groups = (server, security, limits, answers)
    with naming_options([field.name for group in groups for field in fields(group)]):
        return ServeSettings(
            model_name=names[0],
            model_aliases=tuple(names[1:]),
            api_key=security.api_key,
            admin_key=security.admin_key,
            cors_origins=security.origins(),
            allowed_hosts=security.hosts(server.host),
            max_waiting_time=limits.max_waiting_time,
            max_running_time=limits.max_running_time,
            shutdown_timeout=server.shutdown_timeout,
            text_timeout=limits.text_timeout,
            body_timeout=limits.body_timeout,
            send_timeout=limits.send_timeout,
            hang_timeout=server.hang_timeout,
            engine_restarts=server.engine_restarts,
            chat_template=answers.template(),
            chat_template_kwargs=answers.variables(),
            trust_request_chat_template=security.trust_request_chat_template,
            tool_format=answers.tool_format,
            reasoning=answers.reasoning,
            use_generation_config=answers.generation_config,
            default_seed=seed,
            weights_dir=None if security.weights_dir is None else str(security.weights_dir),
            limits=limits.per_request(),
        )


def _loader(model: str, loading: ModelOptions) -> Callable[[], tuple[Any, Any]]:
    return lambda: load_attached(model, loading, progress=False)


def _begin_logging(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("cb_engine")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False  # other libraries' handlers would write it again
