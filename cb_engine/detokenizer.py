"""Token ids in, text out, a piece at a time; and where to stop.

Owns: which characters are complete, and how much text may be shown while a stop string may still be coming.
Does not know: requests, sampling, the network. A tokenizer is anything with transformers' `decode`.

Text that is out is never taken back. So the bytes of a character that is not complete wait, and if the end
comes first they are dropped; everything else comes out at once. U+FFFD comes out only where the ids really
say so.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
# Ids of the prompt that are decoded along with the output's first: enough for a tokenizer to see that it is
# not at the beginning of a text, where some drop a leading space.
_CONTEXT = 6
_LONGEST_CHAR = 4  # bytes
_WORD_START = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    # A byte-level vocabulary writes visible bytes as themselves, and the others, in order, as U+0100 and on.
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHAR = _byte_alphabet()


class IncrementalDetokenizer:
    """Turns one request's output into text as it grows, at a cost per token that does not grow with it.

    What `add` has returned is, at any time, what the tokenizer decodes from all ids so far, without clean-up
    of spaces, after the prompt's text, and less an incomplete character at the end. One exception: where a
    byte-fallback tokenizer meets invalid bytes right after a valid character that it also spells in bytes, it
    turns that character into U+FFFD too; here it is out already, and stays.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        """Begin after a prompt.

        Args:
            tokenizer: a transformers tokenizer, fast or slow.
            prompt_token_ids: what the output continues. Tokenizers that drop a leading space at the beginning
                of a
                text keep it after a prompt; without one, the text is that of `tokenizer.decode(output)`.
            skip_special_tokens: whether special tokens leave no text.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        steps = _decoding_steps(tokenizer)
        self._is_fast = steps is not None
        self._byte_level = "ByteLevel" in steps if steps is not None else hasattr(tokenizer, "byte_decoder")
        self._skipped = _special_ids(tokenizer, self._is_fast) if skip_special_tokens else frozenset()
        # The ids whose text is decoded again at each step: `_settled` ids that are out already and give the
        # others their context, then those of an incomplete character.
        self._window = self._context_of(prompt_token_ids)
        self._shown, unsettled = self._complete_text()
        self._settled = len(self._window) - unsettled

    def add(self, token_id: int) -> str:
        """Append one id and return the text that became complete, often one word, sometimes none."""
        if token_id in self._skipped:
            return ""  # kept out of the window, which needs ids that leave text
        self._window.append(token_id)
        text, unsettled = self._complete_text()
        new = text[len(self._shown) :]
        if not new:
            return ""
        del self._window[: self._settled]
        self._settled = len(self._window) - unsettled
        self._shown, _ = self._complete_text()
        return new

    def finish(self) -> str:
        """End the text and return what is left of it: nothing, for all that `add` keeps is part of a character."""
        self._window.clear()
        return ""

    def _context_of(self, prompt: Sequence[int]) -> list[int]:
        context: list[int] = []
        for token_id in reversed(prompt):
            if token_id not in self._skipped:
                context.append(token_id)
                # Not in the middle of a character: its remaining bytes could spoil the valid ones after them.
                whole = (self._bytes_of(token_id) or b"x")[0] & 0xC0 != 0x80
                if len(context) >= _CONTEXT and whole:
                    break
        return context[::-1]

    def _complete_text(self) -> tuple[str, int]:
        """Return the window's text less an incomplete character at its end, and how many ids that is part of."""
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT):
            return text, 0
        tail = self._incomplete_tail()
        if tail is None:  # bytes unknown: up to three of these may be one character in the making
            bare = text.rstrip(_REPLACEMENT)
            return text[: max(len(bare), len(text) - _LONGEST_CHAR + 1)], min(len(self._window), _LONGEST_CHAR - 1)
        ids, begins_inside = tail
        if not ids:
            return text, 0
        # Decoders that join bytes over ids put one U+FFFD for all of an incomplete character; those that know
        # bytes only as ids of their own put one for each, and may spoil the bytes before, so they must not
        # see them.
        return (text[:-1] if begins_inside else self._decode(self._window[:-ids])), ids

    def _incomplete_tail(self) -> tuple[int, bool] | None:
        """Return how many ids at the window's end hold bytes of an incomplete character; None if there is no telling.

        With it comes whether the character begins inside the first of them.
        """
        data = b""
        starts = []  # of each id, counted from the end of the data
        for token_id in reversed(self._window):
            piece = self._bytes_of(token_id)
            if piece is None:
                if not data:
                    return None
                break
            data = piece + data
            starts.append(len(data))
            if len(data) >= _LONGEST_CHAR:
                break
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(data)
        missing = len(decoder.getstate()[0])
        if not missing:
            return 0, False
        ids = next(count for count, start in enumerate(starts, 1) if start >= missing)
        return ids, starts[ids - 1] > missing

    def _bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes that an id stands for; None if there is no telling."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # a padding row of the embedding, decoded to nothing
            return b""
        data = _spelt_bytes(token, self._byte_level)
        if data is not None:
            return data
        # A slow tokenizer may have its own way to write bytes; a fast one has the two above.
        known = self._is_fast or self._byte_level or _REPLACEMENT in token
        return token.encode() if known else None

    def _decode(self, token_ids: list[int]) -> str:
        # Cleaning up would take back spaces that are out.
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """Return the bytes that a single token puts into a text; special tokens are spelt out.

    Args:
        tokenizer: a transformers tokenizer, fast or slow.
        token_id: an id; one beyond the vocabulary stands for nothing.
    """
    token = tokenizer.convert_ids_to_tokens(token_id)
    if token is None:
        return b""
    steps = _decoding_steps(tokenizer)
    data = _spelt_bytes(token, "ByteLevel" in steps if steps is not None else hasattr(tokenizer, "byte_decoder"))
    if data is not None:
        return data
    if token.startswith(_WORD_START):  # SentencePiece's mark of a space, which decoding alone drops
        text: str = token.replace(_WORD_START, " ")
        return text.encode()
    text = tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.encode()


def _spelt_bytes(token: str | bytes, is_byte_level: bool) -> bytes | None:
    """Return the bytes of a token that is written in one of the byte alphabets; None if it is not."""
    if isinstance(token, bytes):
        return token
    if is_byte_level and all(char in _BYTE_OF_CHAR for char in token):
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return None


def _decoding_steps(tokenizer: Any) -> set[str] | None:
    """Return the names of the steps by which a fast tokenizer decodes; None for a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    if backend.decoder is None:
        return set()
    description = json.loads(backend.decoder.__getstate__())
    return {step["type"] for step in description.get("decoders", [description])}


def _special_ids(tokenizer: Any, is_fast: bool) -> frozenset[int]:
    """Return the ids that `decode` skips: fast tokenizers go by a flag of the token, slow ones by a list."""
    if is_fast:
        return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset(tokenizer.all_special_ids)


class StopChecker:
    """Finds the first of several stop strings in a text that comes in pieces, and shows nothing of it.

    The stop string whose last character comes first wins; of two that end together, the longer. So the
    outcome does not depend on how the text is cut into pieces, and nothing has to wait for a longer match.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Begin a text.

        Args:
            stop: the stop strings; none at all lets everything through.

        Raises:
            ValueError: if one of them is empty.
        """
        if "" in stop:
            raise ValueError("stop must not hold an empty string, got ''; leave it out")
        self._stop = tuple(stop)
        self._longest = max((len(text) for text in stop), default=0)
        self._held = ""
        self._matched: str | None = None

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Take a piece of text.

        Args:
            delta: what follows the pieces before.

        Returns:
            The text that may be shown now, and the stop string that was found, if any. From then on nothing
            more is shown.
        """
        if self._matched is not None:
            return "", self._matched
        text = self._held + delta
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            _, at, self._matched = min(found)
            self._held = ""
            return text[:at], self._matched
        shown = self._first_possible_start(text)
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """End the text; return what was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held

    def _first_possible_start(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                return start
        return len(text)
