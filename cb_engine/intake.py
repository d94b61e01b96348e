"""The door: raw input in, valid `Request`s out.

Owns the rules that a prompt and its options have to meet, and the numbering of requests. What passes here can be
run; what does not is a `ValueError` or `TypeError` that names it, and nothing else is disturbed. Thread-safe.
"""

from __future__ import annotations

import itertools
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from cb_engine.config import ResolvedConfig
from cb_engine.grammar.compiler import GrammarCompiler
from cb_engine.grammar.state import GrammarState
from cb_engine.kv_cache.block_manager import BlockManager
from cb_engine.request import Request
from cb_engine.sampling import derive_seed
from cb_engine.sampling_params import SamplingParams
from cb_engine.structured_output import StructuredOutput, check_unicode


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """What may be said of a request beside its prompt and sampling."""

    request_id: str | None = None
    eos_token_id: int | Iterable[int] | None = None  # overrides the model's; -1 turns EOS off
    streaming: bool = False
    deltas: bool = False  # outputs hold only what is new since the one before; see `GenerationOutput`
    record_timestamps: bool = False

    def __post_init__(self) -> None:
        if self.request_id is not None and (not isinstance(self.request_id, str) or not self.request_id):
            raise TypeError(f"request_id must be a string that is not empty, or None, not {self.request_id!r}")


class Intake:
    """See the module docstring."""

    def __init__(
        self,
        config: ResolvedConfig,
        blocks: BlockManager,
        *,
        vocab_size: int,
        eos_token_id: int | Iterable[int] | None,
        tokenizer: Any | None = None,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._vocab_size = vocab_size
        self._eos = _eos_ids(eos_token_id)
        self._tokenizer = tokenizer
        self._grammars = GrammarCompiler(tokenizer, vocab_size)
        # The last token of an answer is not computed, so it needs no room.
        room = blocks.capacity(config.max_model_len, config.max_prefill_chunk)
        self.longest = min(config.max_model_len, room + 1)  # prompt and answer, as model, settings and pools allow
        self._seed = secrets.randbits(64) if config.seed is None else config.seed
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._arrivals = itertools.count()

    def make(self, prompt: Any, params: SamplingParams, options: RequestOptions) -> list[Request]:
        """Returns the `params.n` requests of one prompt, the one with the plain id last, as transformers orders them.

        Args:
            prompt: token ids (list, tuple, array or tensor), or a string if a tokenizer is attached.

        Raises:
            ValueError, TypeError: naming what is wrong with the prompt or the options.
            ImportError: structured output is asked for, and the package that it needs is not installed.
        """
        token_ids = self.token_ids_of(prompt)
        self._check_prompt(token_ids, params)
        params.validate_vocab(self._vocab_size)
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer: pass tokenizer= to attach, or use stop_token_ids")
        most = self._config.max_logprobs
        if most is not None and (params.logprobs or 0) > most:
            raise ValueError(f"logprobs={params.logprobs} is more than the {most} a device with static shapes reports")
        if params.logprobs is None and self._config.return_logprobs:
            params = params.clone(logprobs=0)
        eos = self._eos if options.eos_token_id is None else _eos_ids(options.eos_token_id)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        grammars = self._start_grammars(params, stops, eos)
        room = self._config.max_model_len - len(token_ids)
        wanted = room if params.max_tokens is None else params.max_tokens
        with self._lock:
            request_id = options.request_id if options.request_id is not None else f"req_{next(self._numbers)}"
            numbered = re.fullmatch(r"req_(\d+)", request_id)
            if options.request_id is not None and numbered:  # a caller's own id must not meet one of ours later
                self._numbers = itertools.count(max(next(self._numbers), int(numbered[1]) + 1))
            arrivals = [next(self._arrivals) for _ in range(params.n)]
        base_seed = derive_seed(self._seed, arrivals[0]) if params.seed is None else params.seed
        ids = [f"{request_id}__child#{i}" for i in range(params.n - 1)] + [request_id]
        return [
            Request(
                request_id=sample_id,
                prompt_token_ids=token_ids,
                sampling_params=params,
                max_tokens=min(wanted, room),
                limited_by_model=wanted > room or params.max_tokens is None,
                eos_token_ids=eos,
                stop_token_ids=stops,
                bad_words_ids=self._bad_words(params),
                grammar=grammars[index],
                family=request_id,
                seed=derive_seed(base_seed, index),
                arrival=arrivals[index],
                streaming=options.streaming,
                deltas=options.deltas,
                record_timestamps=options.record_timestamps,
            )
            for index, sample_id in enumerate(ids)
        ]

    def token_ids_of(self, prompt: Any) -> list[int]:
        """See `to_token_ids`."""
        return to_token_ids(prompt, self._tokenizer)

    def _check_prompt(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty; give at least one token (a BOS token, for example)")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            bad = next(t for t in token_ids if not 0 <= t < self._vocab_size)
            raise ValueError(f"token id {bad} is outside the vocabulary of {self._vocab_size}")
        limit = self._config.max_model_len
        if len(token_ids) > limit or (len(token_ids) == limit and params.max_tokens != 0):
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and the maximum length is {limit}, which leaves nothing to "
                "generate; shorten the prompt, or raise max_model_len if it was set below the model's own limit"
            )
        # Of one token or none, nothing is computed beyond the prompt.
        num_tokens = len(token_ids) + (params.max_tokens is None or params.max_tokens > 1)
        shortage = self._blocks.capacity_shortage(num_tokens, self._config.max_prefill_chunk)
        if shortage is not None:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and needs {shortage[0]} KV blocks of "
                f"{self._config.block_size} tokens; the pool has {shortage[1]}; shorten the prompt or raise num_blocks"
            )
        if params.min_tokens > self.longest - len(token_ids):
            raise ValueError(
                f"min_tokens={params.min_tokens} do not fit behind the prompt of {len(token_ids)} tokens: the longest "
                f"sequence is {self.longest}; ask for fewer, or shorten the prompt"
            )

    def _start_grammars(
        self, params: SamplingParams, stops: frozenset[int], eos: frozenset[int]
    ) -> Sequence[GrammarState | None]:
        """The grammar of each sample, all at its start."""
        if not isinstance(params.structured, StructuredOutput):
            return [None] * params.n
        return self._grammars.start(params.structured, params.n, stop_token_ids=stops, eos_token_ids=eos)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """bad_words as token ids; a word in text is banned at the start of a text and after a space."""
        words: list[tuple[int, ...]] = []
        for word in params.bad_words:
            if not isinstance(word, str):
                words.append(tuple(word))
                continue
            if self._tokenizer is None:
                raise ValueError("bad_words in text need a tokenizer: pass tokenizer= to attach, or give token ids")
            for text in (word, " " + word.lstrip()):
                ids = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
                if ids and ids not in words:
                    words.append(ids)
        return tuple(words)


def to_token_ids(prompt: Any, tokenizer: Any | None) -> list[int]:
    """A prompt as a list of ints.

    Args:
        prompt: token ids (list, tuple, array or tensor; a batch of one is accepted), or a string, which goes through
            the tokenizer with its special tokens, as in `tokenizer(text)`.

    Raises:
        TypeError: the prompt is something else, or text without a tokenizer.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError("a text prompt needs a tokenizer: pass tokenizer= to attach, or give token ids")
        check_unicode("the prompt", prompt)  # tokenizers only say that they want text
        return [int(i) for i in tokenizer(prompt)["input_ids"]]
    if hasattr(prompt, "tolist"):  # tensors and arrays
        prompt = prompt.tolist()
    if isinstance(prompt, Mapping):
        raise TypeError("a prompt is a list of token ids or a string, not a tokenizer's output; pass its ['input_ids']")
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise TypeError(f"a prompt is a list of token ids or a string, not {type(prompt).__name__}")
    if len(prompt) == 1 and isinstance(prompt[0], Sequence) and not isinstance(prompt[0], str | bytes):
        prompt = prompt[0]  # a batch of one, as tokenizers return it
    prompt = [token.item() if getattr(token, "ndim", None) == 0 else token for token in prompt]
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise TypeError(f"a prompt holds token ids, and {token!r} is none")
    return [int(token) for token in prompt]


@contextmanager
def naming_input(index: int) -> Iterator[None]:
    """Lets the errors of one input name it."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"inputs[{index}]: {error}") from error
    except ValueError as error:
        raise ValueError(f"inputs[{index}]: {error}") from error


def _eos_ids(eos_token_id: int | Iterable[int] | None) -> frozenset[int]:
    """A model's or a caller's EOS as a set; None, and transformers' -1, mean that there is none."""
    if eos_token_id is None:
        return frozenset()
    if hasattr(eos_token_id, "tolist"):
        eos_token_id = eos_token_id.tolist()
    ids = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
    return frozenset(i for i in ids if i >= 0)
