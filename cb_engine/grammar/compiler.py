"""From a `StructuredOutput` to grammars at their start.

Owns the compiled grammars, the latest used of them, and the tokenizer in the form that llguidance reads. Runs on the
callers' threads, at the door: what is compiled wrongly or too dear is a ValueError there, and no step waits for it.
Thread-safe; requests with the same constraint compile it once.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from cb_engine.grammar.state import DEAD_END, EndTokens, GrammarState, plain
from cb_engine.structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_MAX_KEPT = 256  # compiled grammars
_MAX_KEPT_CHARS = 2**20  # of their texts together: a compiled one takes some 200 bytes for each

# Where JSON may have whitespace it may have that much of it: enough for any indentation, and a model that has nothing
# better to say cannot fill its output with it.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"

_COMPACT: JsonCompileOptions = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ",",
    "key_separator": ":",
}

# llguidance's own limits, with two changes: a request's lexer may take some 50 MB (250,000 states would be 500), and
# errors come without the state of the parser.
_LIMITS: dict[str, Any] = {"max_lexer_states": 25_000, "verbose_errors": False}

# Grammars are compiled by recursion: the deepest that the limits of StructuredOutput let in needs less than 64 MB.
# Untouched, a stack takes none.
_STACK_BYTES = 2**28

# Numbers are compared as 64-bit floats there: beyond this not every integer is one.
_LARGEST_BOUND = 2**53
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

_END = "<|cb_engine: the grammar may end here|>"

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Vocabulary:
    """A tokenizer as llguidance reads it, with a token more, that stands for the end of a grammar."""

    tokenizer: LLTokenizer
    sentinel: int
    num_tokens: int  # of a mask: those of the model, and that one


@dataclass(frozen=True)
class _Compiled:
    """A grammar at its start; copied, never advanced."""

    matcher: LLMatcher
    can_roll_back: bool


class GrammarCompiler:
    """See the module docstring.

    Args:
        tokenizer: the model's, a fast one of transformers; None: nothing can be compiled.
        vocab_size: how many logits the model gives. Those beyond the tokenizer's tokens are never allowed.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # guards what is kept
        self._kept: OrderedDict[StructuredOutput, Future[_Compiled]] = OrderedDict()  # the latest used last
        self._vocabulary: _Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()

    def start(
        self,
        structured: StructuredOutput,
        count: int,
        *,
        stop_token_ids: frozenset[int],
        eos_token_ids: frozenset[int],
    ) -> list[GrammarState]:
        """Returns `count` states of a grammar, all at its start.

        Args:
            stop_token_ids: what ends the request; legal where the grammar can end.
            eos_token_ids: those of them that are not there are ignored, and never legal.

        Raises:
            ValueError: the constraint cannot be compiled, or there is no tokenizer to compile it for.
            ImportError: llguidance is not installed.
        """
        _check_bounds(structured)
        vocabulary = self._get_vocabulary()
        compiled = self._get(structured, vocabulary)
        # A token beyond the mask cannot be generated.
        legal = frozenset(t for t in stop_token_ids if t < vocabulary.num_tokens)
        ignored = frozenset(t for t in eos_token_ids - stop_token_ids if t < vocabulary.num_tokens)
        ends = EndTokens(vocabulary.sentinel, legal, ignored)
        return [
            GrammarState(
                compiled.matcher.deep_copy(), ends, vocabulary.num_tokens, can_roll_back=compiled.can_roll_back
            )
            for _ in range(count)
        ]

    def _get(self, structured: StructuredOutput, vocabulary: _Vocabulary) -> _Compiled:
        with self._lock:
            future = self._kept.get(structured)
            is_new = future is None
            if future is None:
                future = self._kept[structured] = Future()
                self._forget_oldest()
            else:
                self._kept.move_to_end(structured)
        if is_new:
            try:
                future.set_result(_compile(structured, vocabulary))
            except BaseException as error:
                with self._lock:
                    if self._kept.get(structured) is future:
                        del self._kept[structured]
                future.set_exception(error)
        return future.result()

    def _forget_oldest(self) -> None:
        num_chars = sum(structured.num_chars for structured in self._kept)
        while len(self._kept) > _MAX_KEPT or (num_chars > _MAX_KEPT_CHARS and len(self._kept) > 1):
            num_chars -= self._kept.popitem(last=False)[0].num_chars

    def _get_vocabulary(self) -> _Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = _make_vocabulary(self._tokenizer, self._vocab_size)
            return self._vocabulary


def _make_vocabulary(tokenizer: Any | None, vocab_size: int) -> _Vocabulary:
    if tokenizer is None:
        raise ValueError("structured output needs a tokenizer: pass tokenizer= to attach")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"structured output needs a fast tokenizer, one of the tokenizers library, and {type(tokenizer).__name__} "
            "is none; load it with AutoTokenizer.from_pretrained(..., use_fast=True)"
        )
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise ImportError(
            "structured output needs llguidance, which is not installed: pip install cb-engine[structured]"
        ) from error
    own = type(backend).from_str(backend.to_str())  # a copy
    own.no_padding()
    own.no_truncation()
    own.add_special_tokens([_END])
    sentinel = int(own.token_to_id(_END))
    size = max(vocab_size, sentinel + 1)
    try:
        read = LLTokenizer(own.to_str(), n_vocab=size, eos_token=sentinel)
    except ValueError as error:
        raise ValueError(f"structured output cannot use this tokenizer: {plain(str(error))}") from error
    return _Vocabulary(read, sentinel, size)


def _compile(structured: StructuredOutput, vocabulary: _Vocabulary) -> _Compiled:
    from llguidance import LLMatcher, LLParserLimits

    name = f"structured.{structured.constraint}"
    try:
        text = _grammar_text(structured)
    except ValueError as error:
        raise ValueError(f"{name}: {plain(str(error))}") from None
    limits = LLParserLimits(**_LIMITS)
    matcher = _on_deep_stack(lambda: LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits))
    # The first masks show what is wrong with a grammar that can be read; copies find the first one half done.
    first = np.frombuffer(matcher.compute_bitmask(), np.uint8).copy() if not matcher.is_error() else None
    if first is None or matcher.is_error():
        raise ValueError(f"{name} cannot be used: {plain(matcher.get_error())}")
    EndTokens(vocabulary.sentinel, frozenset(), frozenset()).apply(first.reshape(1, -1), [0])
    tokens = np.flatnonzero(np.unpackbits(first, bitorder="little"))
    if not len(tokens):
        raise ValueError(f"{name} allows nothing but the empty text; leave structured out, or allow some")
    probe = matcher.deep_copy()
    probe.consume_token(int(tokens[0]))
    probe.compute_bitmask()
    if probe.is_error() and (reason := plain(probe.get_error())) != DEAD_END:  # another token may lead on
        raise ValueError(f"{name} cannot be used: {reason}")
    return _Compiled(matcher, can_roll_back=probe.rollback(1) and not probe.is_error())


def _grammar_text(structured: StructuredOutput) -> str:
    """A constraint in the form that llguidance compiles."""
    from llguidance import LLMatcher

    if structured.json_schema is not None or structured.json_object:
        schema = structured.json_schema if isinstance(structured.json_schema, str) else '{"type":"object"}'
        # A schema may say otherwise (`x-guidance`) of whitespace, unless there is to be none.
        defaults: JsonCompileOptions = {} if structured.compact else {"whitespace_pattern": _WHITESPACE}
        return LLMatcher.grammar_from_json_schema(schema, defaults, _COMPACT if structured.compact else {})
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_escaped, structured.choice)))
    return LLMatcher.grammar_from_lark(structured.grammar or "")


def _escaped(text: str) -> str:
    """A regular expression of this text alone."""
    return "".join(c if c.isalnum() or c == " " else f"\\x{{{ord(c):x}}}" for c in text)


def _on_deep_stack(function: Callable[[], _Result]) -> _Result:
    """Runs a function on a thread of its own, whose stack is deep enough for any grammar."""
    future: Future[_Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="cb_engine grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return future.result()


_STACK_LOCK = threading.Lock()  # the size of stacks is the process's


def _check_bounds(structured: StructuredOutput) -> None:
    """Raises for bounds of numbers that would be kept to only roughly."""
    todo: list[Any] = [] if structured.json_schema is None else [json.loads(str(structured.json_schema))]
    while todo:
        value = todo.pop()
        if isinstance(value, list):
            todo += value
        if not isinstance(value, dict):
            continue
        for name in _BOUNDS:
            bound = value.get(name)
            if isinstance(bound, (int, float)) and abs(bound) > _LARGEST_BOUND:
                raise ValueError(
                    f"structured.json_schema: {name}={bound} is beyond 2**53, up to where numbers are told apart; "
                    "use an enum, or a string with a pattern"
                )
        todo += value.values()
