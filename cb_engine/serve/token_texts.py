"""Token ids as clients read them, and log-probabilities in the shapes of each interface. Owns a table of texts."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from cb_engine.detokenizer import token_bytes
from cb_engine.outputs import GenerationOutput, TokenLogprob

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_LOWEST = -9999.0  # JSON knows no infinity


class TokenTexts:
    """The text of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._bytes_of = lru_cache(maxsize=1 << 16)(lambda token_id: token_bytes(tokenizer, token_id))

    def data(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        return self._bytes_of(token_id)

    def text(self, token_id: int, *, as_id: bool = False) -> str:
        """A token's text, U+FFFD where its bytes are no characters; `as_id`: vLLM's `token_id:N`."""
        return f"token_id:{token_id}" if as_id else self.data(token_id).decode("utf-8", "replace")


def chat_logprobs(texts: TokenTexts, output: GenerationOutput, num_top: int, *, as_ids: bool) -> dict[str, Any]:
    """`choices[].logprobs` of a chat.

    Args:
        num_top: how many candidates each token is given with.
    """
    content = []
    for index, token_id in enumerate(output.generated_tokens):
        entry = _chat_entry(texts, token_id, output.logprobs[index], as_ids)
        content.append({**entry, "top_logprobs": _chat_top(texts, output, index, num_top, as_ids)})
    return {"content": content, "refusal": None}


def _chat_entry(texts: TokenTexts, token_id: int, logprob: float, as_ids: bool) -> dict[str, Any]:
    return {
        "token": texts.text(token_id, as_id=as_ids),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(texts.data(token_id)),
    }


def _chat_top(
    texts: TokenTexts, output: GenerationOutput, index: int, num_top: int, as_ids: bool
) -> list[dict[str, Any]]:
    candidates = best(output.top_logprobs[index], num_top) if output.top_logprobs and num_top else []
    return [_chat_entry(texts, c.token_id, c.logprob, as_ids) for c in candidates]


def best(candidates: Iterable[TokenLogprob], count: int) -> list[TokenLogprob]:
    """The `count` likeliest; the chosen token is among the candidates also where it is none of them."""
    return sorted(candidates, key=lambda c: -c.logprob)[:count]


class CompletionLogprobs:
    """`choices[].logprobs` of a completion, which counts characters from the beginning of its text."""

    def __init__(self, texts: TokenTexts, num_top: int, *, as_ids: bool) -> None:
        self._texts, self._num_top, self._as_ids = texts, num_top, as_ids
        self._offset = 0  # whole characters so far
        self._decoder = _Utf8Decoder("replace")

    def of_output(self, output: GenerationOutput) -> dict[str, Any]:
        """Of generated tokens; pieces of a stream go on where the last one ended."""
        return self._table(output.generated_tokens, output.logprobs, output.top_logprobs or [])

    def of_prompt(self, output: GenerationOutput) -> dict[str, Any]:
        """Of the prompt's tokens, the first of which has none."""
        entries = output.prompt_logprobs or [None] * len(output.prompt_ids)
        chosen = [_logprob_of(t, entry) for t, entry in zip(output.prompt_ids, entries, strict=True)]
        return self._table(output.prompt_ids, chosen, entries)

    def _table(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[Sequence[TokenLogprob] | None],
    ) -> dict[str, Any]:
        tokens, offsets = [], []
        for token_id in token_ids:
            tokens.append(self._key(token_id))
            data = self._texts.data(token_id)
            offsets.append(self._offset + self._begins_anew(data))
            self._offset += len(self._decoder.decode(data))
        return {
            "tokens": tokens,
            "token_logprobs": [None if value is None else max(value, _LOWEST) for value in logprobs],
            "top_logprobs": [self._top_of(entry) for entry in top] if self._num_top else None,
            "text_offset": offsets,
        }

    def _begins_anew(self, data: bytes) -> bool:
        """Whether bytes of earlier tokens wait for the rest of a character, and this is none of it."""
        pending, _ = self._decoder.getstate()
        if not (pending and data):
            return False
        try:
            _Utf8Decoder().decode(pending + data[:1])
        except UnicodeDecodeError:
            return True
        return False

    def _top_of(self, entry: Sequence[TokenLogprob] | None) -> dict[str, float] | None:
        if entry is None:
            return None
        # OpenAI's shape: the N best, and the chosen token with them.
        return {self._key(c.token_id): max(c.logprob, _LOWEST) for c in entry}

    def _key(self, token_id: int) -> str:
        """A text that no other candidate has: bytes that are no characters are spelt out, as OpenAI does."""
        if self._as_ids:
            return self._texts.text(token_id, as_id=True)
        data = self._texts.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def join_tables(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Two tables of `CompletionLogprobs`, one after the other."""
    return {
        name: None if value is None and second[name] is None else [*(value or ()), *(second[name] or ())]
        for name, value in first.items()
    }


def prompt_logprobs(texts: TokenTexts, output: GenerationOutput) -> list[dict[str, Any] | None] | None:
    """vLLM's shape: for each token of the prompt its candidates by id; None for the first."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if entry is None
        else {
            str(c.token_id): {
                "logprob": max(c.logprob, _LOWEST),
                "rank": c.rank,
                "decoded_token": texts.text(c.token_id),
            }
            for c in entry
        }
        for entry in output.prompt_logprobs
    ]


def _logprob_of(token_id: int, entry: Sequence[TokenLogprob] | None) -> float | None:
    return None if entry is None else next((c.logprob for c in entry if c.token_id == token_id), None)
