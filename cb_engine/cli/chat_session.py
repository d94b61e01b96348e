"""A chat between a person and a backend: the history, what was set, and the `/commands`.

Owns the messages and the settings. Reads lines through a function and writes to a `Screen`, so that tests need no
terminal.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from cb_engine.cli.chat_backends import ChatBackend, ChatError, Message
from cb_engine.cli.options import changes_from_json
from cb_engine.cli.spreading import one_line
from cb_engine.sampling_params import SamplingParams

HELP = """\
/system TEXT      set the system message; without TEXT, remove it
/set FIELD=VALUE  set a field of SamplingParams (temperature=0.7, stop=["\\n"]); FIELD= unsets it, /set alone lists
/clear            forget the conversation; the system message stays
/save FILE        write the conversation as a line that `cb-engine generate` reads
/exit             leave, as Ctrl-D does
Ctrl-C stops an answer."""

_NOT_HERE = ("n", "logprobs", "prompt_logprobs", "logprobs_mode")  # a chat has one answer, and shows only its text
# Codes with which a model could rewrite the screen.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Screen:
    """Where a chat is written: the answer on stdout; all else goes to stderr, so that a pipe gets answers alone."""

    def piece(self, text: str, *, dim: bool) -> None:
        """A part of an answer."""
        typer.secho(text.translate(_CONTROLS), dim=dim or None, nl=False)

    def end_answer(self) -> None:
        """The line after an answer."""
        typer.echo()

    def note(self, text: str) -> None:
        """Something that is not the model's."""
        typer.secho(text, dim=True, err=True)

    def error(self, text: str) -> None:
        """Something that went wrong."""
        typer.secho(one_line(text), fg="red", err=True)


class ChatSession:
    """One conversation.

    Args:
        backend: who answers.
        changes: fields of SamplingParams that hold until they are set anew.
        system: the system message.
    """

    def __init__(
        self, backend: ChatBackend, screen: Screen, changes: dict[str, Any], system: str | None = None
    ) -> None:
        self._backend = backend
        self._screen = screen
        self._changes = dict(changes)
        self._system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """The conversation with its system message."""
        head = [] if self._system is None else [{"role": "system", "content": self._system}]
        return head + self._turns

    def run(self, read: Callable[[], str]) -> None:
        """Reads and answers until the user leaves.

        Args:
            read: the next line; raises EOFError or KeyboardInterrupt at the end.
        """
        while True:
            try:
                line = read().strip()
            except (EOFError, KeyboardInterrupt):
                return
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self.say(line)

    def say(self, text: str) -> bool:
        """Sends a message and writes the answer as it comes; returns whether it came to a proper end."""
        self._turns.append({"role": "user", "content": text})
        said: list[str] = []
        proper_end = False
        try:
            self._stream(said)
            proper_end = True
        except KeyboardInterrupt:
            self._screen.end_answer()
            self._screen.note("(stopped)")
        except ChatError as error:
            if said:
                self._screen.end_answer()
            self._screen.error(str(error))
        if said or proper_end:
            self._turns.append({"role": "assistant", "content": "".join(said)})
        else:
            self._turns.pop()  # it was never answered: the next message takes its place
        return proper_end

    def _stream(self, said: list[str]) -> None:
        """Writes an answer; what it says goes to `said` at once, to be there if it is cut off."""
        kind = "content"
        with contextlib.closing(self._backend.answer(self.messages, self._changes)) as pieces:
            for piece in pieces:
                if piece.kind != kind and kind != "content":
                    self._screen.end_answer()
                kind = piece.kind
                if kind == "content":
                    said.append(piece.text)
                self._screen.piece(piece.text, dim=kind != "content")
        self._screen.end_answer()

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._screen.note(HELP),
            "/clear": self._clear,
            "/system": self._set_system,
            "/save": self._save,
            "/set": self._set,
        }
        if name in commands:
            commands[name](rest.strip())
        else:
            self._screen.error(f"{name} is no command; /help lists them")

    def _clear(self, _: str) -> None:
        self._turns.clear()
        self._screen.note("(the conversation begins anew)")

    def _set_system(self, text: str) -> None:
        self._system = text or None
        self._screen.note("(system message set)" if text else "(no system message)")

    def _save(self, name: str) -> None:
        if not name:
            return self._screen.error("/save needs a file: /save chat.jsonl")
        path = Path(name).expanduser()
        try:
            path.write_text(json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            return self._screen.error(f"not saved: {error}")
        self._screen.note(f"(saved {len(self.messages)} messages to {path})")

    def _set(self, text: str) -> None:
        if not text:
            settings = ", ".join(f"{name}={json.dumps(value)}" for name, value in self._changes.items())
            return self._screen.note(f"({settings or 'nothing is set: the model decides'})")
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            return self._screen.error("/set needs FIELD=VALUE, for example /set temperature=0.7")
        try:
            self._changes = _changed(self._changes, name, value)
        except (ValueError, TypeError) as error:
            return self._screen.error(str(error))
        self._screen.note(f"({name}={value})" if value else f"({name} is unset)")


def _changed(changes: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    """`changes` with one field set, or unset if `text` is empty. A value is JSON, or bare text.

    Raises:
        ValueError, TypeError: there is no such field, or the value is wrong.
    """
    if name in _NOT_HERE:
        raise ValueError(f"{name} is not for a chat, which shows one answer and its text")
    changed = {field: value for field, value in changes.items() if field != name}
    if text:
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        changed[name] = value
    else:
        changes_from_json({name: None})  # the name may be wrong
    changed = changes_from_json(changed)
    SamplingParams(**changed)
    return changed
