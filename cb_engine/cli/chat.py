"""`cb-engine chat`: a conversation in the terminal, with a model in this process or behind a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from typing import Annotated, Any

import typer

from cb_engine.cli.chat_backends import ChatBackend, ChatError, LocalChat, ServerChat
from cb_engine.cli.chat_session import ChatSession, Screen
from cb_engine.cli.encoding import Encoder
from cb_engine.cli.loading import load_attached, make_manager, own_sampling, running
from cb_engine.cli.look import FAILED, CommandFailedError
from cb_engine.cli.options import MODEL_HELP, EngineOptions, ModelOptions, SamplingOptions
from cb_engine.cli.spreading import OptionError, naming_options, option_name

SERVER = "Server"
CHAT = "Chat"

_KEY_VARIABLE = "CB_ENGINE_API_KEY"


def chat(
    *,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} With --base-url, the model's name there."),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Say this, print the answer and leave.", rich_help_panel=CHAT),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.", rich_help_panel=CHAT)] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url",
            metavar="URL",
            help="Chat with a server that has OpenAI's interface, http://127.0.0.1:8000 for one.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar=_KEY_VARIABLE, help="The server's key.", rich_help_panel=SERVER),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option("--model", help="The same as MODEL; the server's first one by default.", rich_help_panel=SERVER),
    ] = None,
    sampling: SamplingOptions,
    loading: ModelOptions,
    engine: EngineOptions,
) -> int:
    """Chat with a model, here or on a server. /help lists the commands of a chat; Ctrl-C stops an answer."""
    if model is not None and model_name is not None:
        raise OptionError("--model and MODEL are the same; give one of them")
    if api_key is not None and base_url is None and not os.environ.get(_KEY_VARIABLE):
        raise OptionError("--api-key is for a server; give its --base-url, or leave the key out")
    name = model or model_name
    changes = sampling.changes()
    with ExitStack() as stack:
        if base_url is not None:
            backend = _server(base_url, name, api_key, loading, engine)
            if engine.seed is not None:
                changes["seed"] = engine.seed
        elif name is None:
            raise OptionError("MODEL is missing: give one, `cb-engine chat demo` for example, or --base-url")
        else:
            backend = _local(stack, name, loading, engine, changes)
        session = ChatSession(backend, Screen(), changes, system)
        if prompt is not None:
            return 0 if session.say(prompt) else FAILED
        session.run(_reader(backend.name))
    return 0


def _server(
    base_url: str, name: str | None, api_key: str | None, loading: ModelOptions, engine: EngineOptions
) -> ChatBackend:
    here_only: list[tuple[Any, Any]] = [(loading, ModelOptions()), (replace(engine, seed=None), EngineOptions())]
    for given, default in here_only:
        for field in fields(given):
            if getattr(given, field.name) != getattr(default, field.name):
                raise OptionError(
                    f"{option_name(field.name)} is for a model in this process; the server of --base-url has its own"
                )
    try:
        return ServerChat(base_url, name, api_key)
    except ValueError as error:
        raise OptionError(str(error)) from error
    except ChatError as error:
        raise CommandFailedError(str(error)) from error


def _local(
    stack: ExitStack, name: str, loading: ModelOptions, engine: EngineOptions, changes: dict[str, Any]
) -> ChatBackend:
    """Loads a model and runs an engine for as long as `stack` is open."""
    config = engine.config()
    progress = sys.stderr.isatty()
    model, tokenizer = load_attached(name, loading, progress=progress)
    if tokenizer.chat_template is None:
        raise OptionError(f"MODEL {name!r} has no chat template; use `cb-engine generate`, or another model")
    encoder = Encoder(tokenizer=tokenizer, own_sampling=own_sampling(model), changes={})
    with naming_options(changes):
        encoder.params(1, changes)
    manager = make_manager(model, config, engine.hints(num_requests=1))
    stack.enter_context(running(manager, progress=progress))
    return LocalChat(name, manager, encoder)


def _reader(name: str) -> Callable[[], str]:
    """How the user's lines are read: with a prompt, and a history, where somebody sits."""
    if not sys.stdin.isatty():
        return input
    with suppress(ImportError):
        import readline  # noqa: F401 # gives `input` a history and its keys
    typer.secho(f"{name}: /help lists the commands, Ctrl-D leaves", dim=True, err=True)
    return lambda: input("> ")
