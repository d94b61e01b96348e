"""`cb-engine generate`: answers a file of prompts.

Owns the command's own options and the course of a run. How lines are read, encoded, answered and written is in
`prompts.py`, `encoding.py`, `feed.py`, `report.py` and `answers.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from tqdm import tqdm

from cb_engine.cli.answers import Answer, AnswerFile, AnswerWriter
from cb_engine.cli.encoding import Encoder
from cb_engine.cli.feed import Feed, Tally
from cb_engine.cli.loading import load_attached, make_manager, own_sampling, running
from cb_engine.cli.look import FAILED, INTERRUPTED, WRONG_OPTIONS, CommandFailedError, note
from cb_engine.cli.options import (
    MODEL_HELP,
    SAMPLING,
    EngineOptions,
    ModelOptions,
    ReportOptions,
    SamplingOptions,
)
from cb_engine.cli.prompts import InputFormat, PromptLine, PromptSource
from cb_engine.cli.report import Reporter
from cb_engine.cli.spreading import OptionError, naming_options

PROMPTS = "Prompts"
ANSWERS = "Answers"

_WINDOW = 4  # lines on their way, in batches: enough for the scheduler to see which prompts begin alike
_ORDERED_WINDOW = 8  # times that, so that one long answer does not soon hold up the rest


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How prompts are read."""

    input_format: Annotated[
        InputFormat,
        typer.Option(
            "--input-format",
            help="`text`: a prompt a line; `jsonl`: an object a line. By default by the suffix .txt or .jsonl, else by "
            "the first line.",
            rich_help_panel=PROMPTS,
        ),
    ] = "auto"
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Send text prompts through the chat template, as a user's message; off by default, as in the Python "
            "interface. `messages` always go through it, token ids never.",
            rich_help_panel=PROMPTS,
        ),
    ] = None
    system: Annotated[
        str | None,
        typer.Option(
            "--system",
            help="System message, for chats that have none; makes --chat the default.",
            rich_help_panel=PROMPTS,
        ),
    ] = None
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Check all lines first; stop at a bad one.", rich_help_panel=PROMPTS),
    ] = False
    generation_config: Annotated[
        bool,
        typer.Option(
            "--generation-config/--no-generation-config",
            help="Start from the model's own generation config, or from neutral settings (temperature 1).",
            rich_help_panel=SAMPLING,
        ),
    ] = True

    @property
    def uses_template(self) -> bool:
        """Whether text is sent as a user's message."""
        if self.system is not None and self.chat is False:
            raise OptionError("--system needs the chat template; leave --no-chat out, or --system")
        return self.system is not None if self.chat is None else self.chat


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Where answers go."""

    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="JSON lines; stdout by default. A file that a run with the same settings has left is continued: what "
            "has an answer is skipped, what failed is tried again. FILE.settings.json beside it holds the settings.",
            rich_help_panel=ANSWERS,
        ),
    ] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write an existing file anew.", rich_help_panel=ANSWERS)
    ] = False
    ordered: Annotated[
        bool,
        typer.Option(
            "--ordered", help="Answers in the order of the prompts, not as they come.", rich_help_panel=ANSWERS
        ),
    ] = False
    return_token_ids: Annotated[
        bool, typer.Option("--return-token-ids", help="Add the token ids of answers.", rich_help_panel=ANSWERS)
    ] = False
    progress: Annotated[
        bool | None,
        typer.Option(
            "--progress/--no-progress",
            help="Show a progress bar on stderr; by default where that is a terminal.",
            rich_help_panel=ANSWERS,
        ),
    ] = None

    @property
    def shows_progress(self) -> bool:
        """Whether there is a bar; answers that scroll by on the same terminal would tear it."""
        if self.progress is None:
            return sys.stderr.isatty() and not (self.output is None and sys.stdout.isatty())
        return self.progress


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that was asked for, checked."""

    model: str
    source: PromptSource
    prompts: PromptOptions
    answers: AnswerOptions
    loading: ModelOptions
    engine: EngineOptions
    changes: dict[str, Any]

    def settings(self) -> dict[str, Any]:
        """What answers depend on: a file is continued only where these are the same."""
        path = self.source.file
        return {
            "model": str(Path(self.model).resolve()) if Path(self.model).is_dir() else self.model,
            "dtype": self.loading.dtype,
            "revision": self.loading.revision,
            "input": None if path is None else str(path.resolve()),
            "input_format": self.prompts.input_format,
            "chat": self.prompts.uses_template,
            "system": self.prompts.system,
            "generation_config": self.prompts.generation_config,
            "sampling": self.changes,
            "seed": self.engine.seed,
            "max_model_len": self.engine.max_model_len,
            "return_token_ids": self.answers.return_token_ids,
        }


def generate(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    prompts: PromptOptions,
    answers: AnswerOptions,
    sampling: SamplingOptions,
    reported: ReportOptions,
    loading: ModelOptions,
    engine: EngineOptions,
    input_path: Annotated[
        Path | None,
        typer.Argument(
            metavar="INPUT",
            help="A file of prompts; stdin by default, or as `-`. JSON lines have one of `prompt` (text or token ids), "
            "`messages` (a chat) or `question`, and may have `id` and `sampling_params`.",
        ),
    ] = None,
) -> int:
    """Answer a file of prompts; one JSON line for each.

    A line that cannot be answered gets a line with its `error`, and the exit code is 1 in the end. Ctrl-C keeps what is
    done (130); the same command goes on from there.
    """
    engine.config()  # wrong values are found before anything is read or loaded
    changes = sampling.changes() | reported.changes()
    source = _source(input_path, prompts)
    run = Run(
        model=model, source=source, prompts=prompts, answers=answers, loading=loading, engine=engine, changes=changes
    )
    file = _answer_file(run)
    if prompts.strict:
        _stop_at_bad_line(source, _raise_error)
    with _wrong_file():
        answered = {} if file is None else file.answered()
    left = sum(index not in answered for index in source.indexes()) if source.is_rewindable else None
    if left == 0:
        note(f"all {len(answered)} prompts have their answers" if answered else "there are no prompts")
        return 0
    return _answer_all(run, file, answered, left)


def _source(path: Path | None, prompts: PromptOptions) -> PromptSource:
    if path is None and _sits_at_stdin():
        raise OptionError("INPUT is missing: give a file of prompts, or pipe prompts in; `-` reads from the terminal")
    if path == Path("-"):
        path = None
    if path is not None and (path.is_dir() or not path.exists()):
        problem = "is none" if path.exists() else "is missing"
        raise OptionError(f"INPUT must be a file of prompts, and {path} {problem}")
    return PromptSource(path, prompts.input_format, rewindable=prompts.strict)


def _sits_at_stdin() -> bool:
    return sys.stdin.isatty()


def _answer_file(run: Run) -> AnswerFile | None:
    path = run.answers.output
    if path is None:
        if run.answers.overwrite:
            raise OptionError("--overwrite is for --output FILE; stdout is written as it comes")
        return None
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise OptionError(f"--output must be a file in a folder that exists, got {path}")
    if run.source.file is not None and path.exists() and path.samefile(run.source.file):
        raise OptionError(f"--output must not be the input, {path}")
    return AnswerFile(path, run.settings(), overwrite=run.answers.overwrite)


def _raise_error(line: PromptLine) -> None:
    if line.error is not None:
        raise ValueError(line.error)


def _stop_at_bad_line(source: PromptSource, check: Callable[[PromptLine], object]) -> None:
    for line in source:
        try:
            check(line)
        except (ValueError, TypeError) as error:
            raise CommandFailedError(f"line {line.index + 1}: {error}; nothing was run (--strict)", FAILED) from error


def _answer_all(run: Run, file: AnswerFile | None, answered: Mapping[int, Any], left: int | None) -> int:
    """Loads the model and runs what is left; returns the exit code."""
    from cb_engine.intake import RequestOptions

    progress = run.answers.shows_progress
    model, tokenizer = load_attached(run.model, run.loading, progress=progress)
    encoder = _encoder(run, model, tokenizer)
    num_samples = encoder.params(1, {}).n
    hints = run.engine.hints(num_requests=left and left * num_samples)
    manager = make_manager(model, run.engine.config(), hints)
    if run.prompts.strict:
        _stop_at_bad_line(run.source, lambda line: manager.engine.intake.make(*encoder.encode(line), RequestOptions()))
    window = max(2, _WINDOW * manager.engine.config.max_num_seqs // num_samples)
    if run.answers.ordered:
        window *= _ORDERED_WINDOW
    with (
        running(manager, progress=progress),
        _stream(file) as stream,
        tqdm(
            total=None if left is None else left + len(answered),
            initial=len(answered),
            unit="prompt",
            disable=not progress,
        ) as bar,
    ):
        sink = _Sink(AnswerWriter(stream, ordered=run.answers.ordered), bar)
        reporter = Reporter(tokenizer, run.answers.return_token_ids)
        tally = Feed(manager, encoder, reporter, sink.deliver, window).run(_unanswered(run.source, answered))
        sink.close()
    if file is not None and run.answers.ordered:
        file.sort()  # does nothing unless an earlier run has left gaps
    return _conclude(tally, file)


def _encoder(run: Run, model: Any, tokenizer: Any) -> Encoder:
    """The encoder, once it has shown that a plain prompt passes: what fails for all lines is no line's fault."""
    encoder = Encoder(
        tokenizer=tokenizer,
        own_sampling=own_sampling(model) if run.prompts.generation_config else None,
        changes=run.changes,
        seed=run.engine.seed,
        chat=run.prompts.uses_template,
        system=run.prompts.system,
    )
    if encoder.chat and tokenizer.chat_template is None:
        raise OptionError("--chat needs a chat template, and the model's tokenizer has none; leave it out")
    try:
        with naming_options(run.changes):
            encoder.params(1, {})
    except OptionError as error:
        if "generation_config" in error.message:
            error.message += ", or --no-generation-config"
        raise
    return encoder


def _unanswered(source: PromptSource, answered: Mapping[int, Any]) -> Iterator[PromptLine]:
    for line in source:
        if line.index not in answered:
            yield line
        elif answered[line.index] != line.id:
            raise CommandFailedError(
                f"line {line.index + 1} has the id {line.id!r}, and its answer {answered[line.index]!r}: the input has "
                "changed; give another --output, or --overwrite to write it anew",
                WRONG_OPTIONS,
            )


class _Sink:
    """Writes answers and moves the progress bar."""

    def __init__(self, writer: AnswerWriter, bar: Any) -> None:
        self._writer = writer
        self._bar = bar
        self._started = time.perf_counter()
        self._num_tokens = 0

    def deliver(self, position: int, answer: Answer) -> int:
        self._num_tokens += answer.get("usage", {}).get("completion_tokens", 0)
        rate = self._num_tokens / (time.perf_counter() - self._started)
        self._bar.set_postfix_str(f"{rate:.1f} tok/s", refresh=False)
        self._bar.update()
        with _disk_errors():
            return self._writer.write(position, answer)

    def close(self) -> None:
        with _disk_errors():
            self._writer.write_held()


@contextmanager
def _stream(file: AnswerFile | None) -> Iterator[IO[bytes]]:
    if file is None:
        yield sys.stdout.buffer
        return
    with _disk_errors():
        stream = file.open()
    try:
        yield stream
    finally:
        with _disk_errors():  # what could not be written is tried once more
            stream.close()


@contextmanager
def _disk_errors() -> Iterator[None]:
    """A disk that is full, or a folder that takes no file, is one line. A closed pipe is Typer's to end."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandFailedError(f"the answers cannot be written: {error}") from error


@contextmanager
def _wrong_file() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise CommandFailedError(f"--output: {error}", WRONG_OPTIONS) from error


def _conclude(tally: Tally, file: AnswerFile | None) -> int:
    """Says how the run ended, unless all is well."""
    if tally.failed:
        total = tally.answered + tally.failed
        note(f"{tally.failed} of {total} prompts failed; the first, {tally.first_failure}")
    go_on = "" if file is None else f"; run the same command again to go on (answers are in {file.path})"
    if tally.engine_failure is not None:
        note(f"the engine failed after {tally.answered} answers: {tally.engine_failure}{go_on}")
        return FAILED
    if tally.interrupted:
        note(f"interrupted after {tally.answered} answers{go_on}")
        return INTERRUPTED
    return FAILED if tally.failed else 0
