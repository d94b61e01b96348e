"""`cb-engine chat`: the session and its commands, an engine here, and a server played by the standard library."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import byte_tokenizer
import pytest
from cli_rig import Command, TinyModel
from fake_model import FakeModel
from scripted_model import ScriptedModel

import cb_engine
from cb_engine.cli.chat_backends import ChatError, LocalChat, Piece, ServerChat
from cb_engine.cli.chat_session import ChatSession, Screen
from cb_engine.cli.encoding import Encoder

# ---- the session -----------------------------------------------------------------------------------------------------


class Echo:
    """A backend that says what it was sent, word by word, and keeps it."""

    name = "echo"

    def __init__(self) -> None:
        self.calls: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.closed = 0

    def answer(self, messages: Sequence[dict[str, Any]], changes: Mapping[str, Any]) -> Generator[Piece, None, None]:
        self.calls.append((list(messages), dict(changes)))
        text = messages[-1]["content"]
        try:
            if text == "fail":
                raise ChatError("no more")
            for word in text.split():
                if word == "INTERRUPT":
                    raise KeyboardInterrupt
                if word == "BREAK":
                    raise ChatError("broken off")
                yield Piece(f"{word}. ")
        finally:
            self.closed += 1


class Paper(Screen):
    """A screen that keeps what is written."""

    def __init__(self) -> None:
        self.answers = ""
        self.notes: list[str] = []
        self.errors: list[str] = []

    def piece(self, text: str, *, dim: bool) -> None:
        self.answers += f"({text})" if dim else text

    def end_answer(self) -> None:
        self.answers += "\n"

    def note(self, text: str) -> None:
        self.notes.append(text)

    def error(self, text: str) -> None:
        self.errors.append(text)


def talk(*lines: str, backend: Any = None, **session: Any) -> tuple[Any, Paper, ChatSession]:
    """A whole conversation, which ends with the input."""
    backend, paper = backend or Echo(), Paper()
    chat = ChatSession(backend, paper, session.pop("changes", {}), **session)
    left = iter(lines)

    def read() -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    chat.run(read)
    return backend, paper, chat


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class TestSession:
    def test_the_history_goes_along(self) -> None:
        backend, paper, _ = talk("one two", "", "  three ")
        assert paper.answers == "one. two. \nthree. \n"
        assert [call[0] for call in backend.calls] == [
            [user("one two")],
            [user("one two"), assistant("one. two. "), user("three")],
        ]

    def test_clear_keeps_the_system_message(self) -> None:
        backend, _, _ = talk("one", "/clear", "two", system="be")
        assert backend.calls[1][0] == [{"role": "system", "content": "be"}, user("two")]

    def test_the_system_message_can_be_changed_and_removed(self) -> None:
        backend, _, _ = talk("/system be brief", "one", "/system", "two", system="be")
        assert backend.calls[0][0][0] == {"role": "system", "content": "be brief"}
        assert backend.calls[1][0][0] == user("one")

    @pytest.mark.parametrize("word", ["/exit", "/quit"])
    def test_exit(self, word: str) -> None:
        backend, _, _ = talk("one", word, "two")
        assert len(backend.calls) == 1

    def test_ctrl_c_at_the_prompt_leaves(self) -> None:
        def read() -> str:
            raise KeyboardInterrupt

        ChatSession(Echo(), Paper(), {}).run(read)

    def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(self) -> None:
        backend, paper, _ = talk("one INTERRUPT two", "three")
        assert paper.answers == "one. \nthree. \n"
        assert paper.notes == ["(stopped)"]
        assert backend.calls[1][0][1] == assistant("one. ")
        assert backend.closed == 2

    def test_a_message_that_got_no_answer_is_forgotten(self) -> None:
        backend, paper, _ = talk("INTERRUPT", "fail", "three")
        assert paper.errors == ["no more"]
        assert backend.calls[2][0] == [user("three")]

    def test_an_answer_that_breaks_off_is_kept(self) -> None:
        _, paper, chat = talk("one BREAK")
        assert (paper.answers, paper.errors) == ("one. \n", ["broken off"])
        assert chat.messages == [user("one BREAK"), assistant("one. ")]

    def test_settings(self) -> None:
        backend, paper, _ = talk(
            "/set temperature=0.5",
            '/set stop=["a", "b"]',
            '/set logit_bias={"3": 1}',
            "one",
            "/set temperature=",
            "two",
            changes={"top_k": 4},
        )
        assert backend.calls[0][1] == {
            "top_k": 4,
            "temperature": 0.5,
            "stop": ["a", "b"],
            "logit_bias": {3: 1},
        }
        assert "temperature" not in backend.calls[1][1]
        assert paper.errors == []

    def test_a_text_needs_no_quotes(self) -> None:
        backend, _, _ = talk("/set stop=END", "one")
        assert backend.calls[0][1] == {"stop": "END"}

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("/set top_p=3", "top_p must be above 0 and at most 1, got 3.0"),
            ("/set topp=0.3", "sampling_params has no field 'topp'"),
            ("/set topp=", "sampling_params has no field 'topp'"),
            ("/set top_p", "/set needs FIELD=VALUE"),
            ("/set n=2", "n is not for a chat"),
            ("/save", "/save needs a file"),
            ("/save /nowhere/file", "not saved: "),
            ("/foo", "/foo is no command; /help lists them"),
        ],
    )
    def test_a_wrong_command_changes_nothing(self, line: str, message: str) -> None:
        backend, paper, _ = talk(line, "one", changes={"top_k": 4})
        [error] = paper.errors
        assert error.startswith(message)
        assert backend.calls == [([user("one")], {"top_k": 4})]

    def test_settings_are_listed(self) -> None:
        assert talk("/set", changes={"top_k": 4, "stop": ["a"]})[1].notes == ['(top_k=4, stop=["a"])']
        assert talk("/set")[1].notes == ["(nothing is set: the model decides)"]

    def test_help_names_every_command(self) -> None:
        [text] = talk("/help")[1].notes
        for name in ("/system", "/set", "/clear", "/save", "/exit", "Ctrl-C"):
            assert name in text

    def test_what_is_saved_can_be_answered_again(self, tmp_path: Path) -> None:
        _, _, chat = talk("one é", f"/save {tmp_path / 'chat.jsonl'}", system="be")
        assert json.loads((tmp_path / "chat.jsonl").read_text()) == {"messages": chat.messages}
        assert len(chat.messages) == 3

    def test_reasoning_and_tool_calls_are_dim_and_not_in_the_history(self) -> None:
        class Thinker(Echo):
            def answer(self, messages: Any, changes: Any) -> Generator[Piece, None, None]:
                yield from (Piece("hm", "reasoning"), Piece("m", "reasoning"), Piece("yes"), Piece("f {}", "tool_call"))

        _, paper, chat = talk("why?", backend=Thinker())
        assert paper.answers == "(hm)(m)\nyes(f {})\n"
        assert chat.messages[1] == assistant("yes")


def test_the_screen_lets_no_control_codes_through(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().piece("a\x1b[2Jb\n\tc\x9bd\r", dim=False)
    assert capsys.readouterr().out == "a[2Jb\n\tcd"


# ---- an engine here --------------------------------------------------------------------------------------------------


@pytest.fixture
def local() -> Iterator[Callable[[FakeModel], LocalChat]]:
    managers: list[Any] = []

    def make(model: FakeModel) -> LocalChat:
        tokenizer = byte_tokenizer.make_tokenizer()
        tokenizer.chat_template = "{{ messages[-1]['content'] }}"
        manager = cb_engine.attach(model, tokenizer=tokenizer).init_continuous_batching()
        manager.start()
        managers.append(manager)
        encoder = Encoder(tokenizer=tokenizer, own_sampling=None, changes={"temperature": 0.0})
        return LocalChat("fake", manager, encoder)

    yield make
    for manager in managers:
        manager.destroy()


class TestLocal:
    def test_an_answer_comes_in_pieces(self, local: Callable[[FakeModel], LocalChat]) -> None:
        chat = local(ScriptedModel(byte_tokenizer.ids_of("héllo")))
        assert [piece.text for piece in chat.answer([user("x")], {})] == ["h", "é", "l", "l", "o"]
        assert "".join(piece.text for piece in chat.answer([user("x")], {"max_tokens": 1})) == "h"

    def test_a_closed_answer_is_cancelled(self, local: Callable[[FakeModel], LocalChat]) -> None:
        chat = local(ScriptedModel(byte_tokenizer.ids_of("a" * 400)))
        answer = chat.answer([user("x")], {"max_tokens": 400})
        assert next(answer).text == "a"
        answer.close()
        manager: Any = chat._manager
        manager.stop()
        assert manager.stats().num_running == 0
        assert manager.stats().generated_tokens < 400

    def test_what_is_wrong_is_a_chat_error(self, local: Callable[[FakeModel], LocalChat]) -> None:
        chat = local(ScriptedModel(byte_tokenizer.ids_of("a")))
        for messages, changes, message in (
            ([user("x" * 600)], {}, "the prompt has 600 tokens"),
            ([user("x")], {"min_tokens": 5, "max_tokens": 2}, "min_tokens must not exceed"),
            ([{"role": "user"}], {}, "the prompt is empty"),
        ):
            with pytest.raises(ChatError, match=message):
                list(chat.answer(messages, changes))


def test_one_answer_and_nothing_else(command: Command, tiny_model: TinyModel) -> None:
    options = ["--device", "cpu", "-t", 0, "--max-tokens", 4]
    done = command("chat", tiny_model.folder, "--prompt", "hi", *options)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == tiny_model.text_of("<user>hi<assistant>", 4) + "\n"


def test_lines_of_a_pipe_are_turns(command: Command, tiny_model: TinyModel) -> None:
    options = ["--device", "cpu", "--temperature", 0, "--max-tokens", 4]
    done = command("chat", "--model", tiny_model.folder, *options, "--system", "be", stdin="hi\nso\n/exit\nnot this\n")
    first = tiny_model.text_of("<system>be<user>hi<assistant>", 4)
    second = tiny_model.text_of(f"<system>be<user>hi<assistant>{first}<user>so<assistant>", 4)
    assert (done.code, done.stdout, done.stderr) == (0, f"{first}\n{second}\n", "")


# ---- a server --------------------------------------------------------------------------------------------------------


class FakeServer(ThreadingHTTPServer):
    """Lists two models and streams what it is told to, event by event."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.events: list[str] = []
        self.error: tuple[int, Any] | None = None
        self.requests: list[tuple[str, Any, str | None]] = []
        self.hold: threading.Event | None = None  # waits for it after the events
        self.models: list[str] = ["first", "second"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def say(self, *deltas: dict[str, Any]) -> None:
        self.events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas] + ["[DONE]"]


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._note(None)
        self._json(200, {"object": "list", "data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        self._note(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.error is not None:
            return self._json(*self.server.error)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": keep-alive\r\n\r\nevent: message\n")
        for event in self.server.events:
            self.wfile.write(f"data: {event}\n\n".encode())
            self.wfile.flush()
        if self.server.hold is not None:
            self.server.hold.wait(30)

    def _note(self, body: Any) -> None:
        self.server.requests.append((self.path, body, self.headers["Authorization"]))

    def _json(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        fake.shutdown()
        thread.join()


class TestServer:
    def test_a_streamed_answer(self, server: FakeServer, command: Command) -> None:
        server.say({"role": "assistant", "content": ""}, {"content": "Pa"}, {"content": "ris é"}, {})
        done = command("chat", "--base-url", server.url, "--prompt", "where?", "-t", 0, "--stop", "x", "--seed", 3)
        assert (done.code, done.stdout, done.stderr) == (0, "Paris é\n", "")
        assert [path for path, _, _ in server.requests] == ["/v1/models", "/v1/chat/completions"]
        assert server.requests[1][1] == {
            "model": "first",
            "messages": [user("where?")],
            "stream": True,
            "temperature": 0.0,
            "stop": ["x"],
            "seed": 3,
        }
        assert server.requests[1][2] is None

    def test_a_form_goes_by_the_servers_names(self, server: FakeServer, command: Command) -> None:
        server.say({"content": "{}"})
        form = '{"json_schema": {"type": "object"}, "compact": true}'
        command("chat", "--base-url", server.url, "--prompt", "x", "--structured", form)
        assert server.requests[1][1]["structured_outputs"] == {"json": {"type": "object"}, "compact": True}

    @pytest.mark.parametrize("form", ["argument", "option"])
    def test_the_model_and_the_key_are_sent(self, form: str, server: FakeServer, command: Command) -> None:
        server.say({"content": "yes"})
        name = ["other"] if form == "argument" else ["--model", "other"]
        done = command("chat", *name, "--base-url", f"{server.url}/v1/", "--api-key", "k", "--prompt", "x")
        assert done.stdout == "yes\n"
        [(path, body, key)] = server.requests
        assert (path, body["model"], key) == ("/v1/chat/completions", "other", "Bearer k")

    def test_reasoning_and_tool_calls(self, server: FakeServer) -> None:
        server.say(
            {"reasoning_content": "hm"},
            {"reasoning": "m"},
            {"content": "yes"},
            {"tool_calls": [{"function": {"name": "f", "arguments": '{"a":'}}]},
            {"tool_calls": [{"function": {"arguments": "1}"}}]},
        )
        assert list(ServerChat(server.url, None, None).answer([user("x")], {})) == [
            Piece("hm", "reasoning"),
            Piece("m", "reasoning"),
            Piece("yes"),
            Piece('\nf {"a":', "tool_call"),
            Piece("1}", "tool_call"),
        ]

    def test_a_stream_may_end_without_done(self, server: FakeServer) -> None:
        server.say({"content": "yes"})
        server.events.pop()
        server.events.append(json.dumps({"choices": [], "usage": {"total_tokens": 3}}))
        assert [piece.text for piece in ServerChat(server.url, "m", None).answer([user("x")], {})] == ["yes"]

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"error": {"message": "too long", "type": "x"}}, "too long"),
            ({"error": "too long"}, "too long"),
            ({"detail": [{"msg": "too long"}]}, "[{'msg': 'too long'}]"),
            ("plain text", "plain text"),
        ],
        ids=["openai", "string", "fastapi", "text"],
    )
    def test_a_refusal_is_one_line(self, body: Any, message: str, server: FakeServer, command: Command) -> None:
        server.error = (400, body)
        done = command("chat", "--base-url", server.url, "--prompt", "x")
        assert (done.code, done.stdout) == (1, "")
        assert done.error == f"the server refused (400 Bad Request): {message}"

    @pytest.mark.parametrize(
        ("event", "message"),
        [('{"error": {"message": "out of memory"}}', "out of memory"), ("{", "the server sent what is no JSON: '{'")],
        ids=["error", "broken"],
    )
    def test_an_error_within_a_stream(self, event: str, message: str, server: FakeServer, command: Command) -> None:
        server.say({"content": "so far"})
        server.events[1:] = [event]
        done = command("chat", "--base-url", server.url, "--prompt", "x")
        assert (done.code, done.stdout, done.error) == (1, "so far\n", message)

    def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(
        self, server: FakeServer, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.say({"content": "for ev"})
        server.events.pop()
        server.hold = threading.Event()
        written = Screen.piece

        def interrupt_after(self: Screen, text: str, *, dim: bool) -> None:
            written(self, text, dim=dim)
            if text == "for ev":
                threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
                server.say({"content": "again"})

        monkeypatch.setattr(Screen, "piece", interrupt_after)
        done = command("chat", "--base-url", server.url, stdin="one\n/exit\n")
        server.hold.set()
        assert (done.code, done.stdout, done.stderr) == (0, "for ev\n", "(stopped)\n")

    def test_nobody_is_there(self, server: FakeServer, command: Command) -> None:
        done = command("chat", "--base-url", "http://127.0.0.1:9", "--prompt", "x")
        assert done.code == 1
        assert done.error.startswith("cb-engine: no answer from http://127.0.0.1:9/v1: ")
        assert done.error.endswith("is the server running there?")

    def test_a_server_without_models(self, server: FakeServer, command: Command) -> None:
        server.models.clear()
        done = command("chat", "--base-url", server.url, "--prompt", "x")
        assert (done.code, done.error) == (
            1,
            f"cb-engine: {server.url}/v1/models lists no model; name one with --model",
        )

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--base-url", "localhost:8000"], "--base-url must be like http://127.0.0.1:8000, got 'localhost:8000'"),
            (["--base-url", "http://x", "--dtype", "float32"], "--dtype is for a model in this process"),
            (["--base-url", "http://x", "--max-num-seqs", "3"], "--max-num-seqs is for a model in this process"),
            (["demo", "--model", "demo"], "--model and MODEL are the same; give one of them"),
            (["demo", "--api-key", "k"], "--api-key is for a server; give its --base-url, or leave the key out"),
        ],
        ids=["url", "dtype", "engine", "twice", "key"],
    )
    def test_wrong_use(self, arguments: list[str], message: str, command: Command) -> None:
        done = command("chat", *arguments, "--prompt", "x")
        assert done.code == 2
        assert message in done.error


def test_a_model_without_a_chat_template(command: Command, tiny_model: TinyModel, tmp_path: Path) -> None:
    for file in tiny_model.folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    done = command("chat", tmp_path, "--prompt", "x")
    assert done.code == 2
    assert "has no chat template; use `cb-engine generate`" in done.error
