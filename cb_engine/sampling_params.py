"""What a caller asks of sampling, checked once at the door.

Owns: the names, defaults and legal values of every sampling option; a `SamplingParams` that exists is valid.
Does not know: tensors, tokenizers, models. The vocabulary's size is only known later, so `validate_vocab` is
a call of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, cast, get_args

from cb_engine.structured_output import StructuredOutput

_GREEDY_BELOW = 1e-5  # logits divided by less leave the range of fp32
_LARGEST_PENALTY = 1e6
_LARGEST_TEMPERATURE = 1e38  # of what fp32 holds
_LARGEST_BIAS = 3e38
_LARGEST_COUNT = 2**31 - 1  # devices count in 32 bits

LogprobsMode = Literal["processed", "raw"]


class _FrozenBias(Mapping[int, float]):
    """A mapping that nobody can change after it was checked, so that its owner can be hashed."""

    __slots__ = ("_items", "_table")

    def __init__(self, table: Mapping[int, float]) -> None:
        self._items = tuple(sorted(table.items()))
        self._table = dict(self._items)

    def __getitem__(self, token_id: int) -> float:
        return self._table[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return repr(self._table)

    def __reduce__(self) -> tuple[type[_FrozenBias], tuple[dict[int, float]]]:
        return _FrozenBias, (self._table,)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Immutable, hashable, picklable, and valid from construction on.

    Every field holds for its own request only, whatever else is in the batch. `stop`, `stop_token_ids` and
    `bad_words` accept any sequence (`stop` a single string too) and are stored as tuples; `logit_bias`
    accepts any mapping and is stored as an immutable one. A bias of `-inf` bans a token. `structured` accepts a
    `StructuredOutput` or a mapping of its fields: nothing but text that fits is generated, and an end only where the
    text is complete. A text that cannot go on ends, also before `min_tokens` are out.

    Raises:
        TypeError: if a field has the wrong type.
        ValueError: if a field has an illegal value, or two fields contradict each other.
    """

    n: int = 1
    temperature: float = 1.0  # 0, and what rounds to it (below 1e-5): greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off; -1 means the same and is stored as 0
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    seed: int | None = None  # None: the engine makes one
    max_tokens: int | None = None  # None: up to the maximum length; 0: nothing is generated
    min_tokens: int = 0  # no EOS and no stop token before this many tokens
    stop: str | Sequence[str] | None = ()  # one that begins before min_tokens are out is passed over
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: the sampled token's; N: those of the N best as well
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    logprobs_mode: LogprobsMode = "processed"  # of the distribution that was drawn from, or of the model's own
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    priority: int = 0  # lower runs sooner
    cache_salt: str | None = None  # requests share cached prefixes only with requests of the same salt
    structured: StructuredOutput | Mapping[str, Any] | None = None  # what the text must be
    speculative: bool = True  # False: this request's tokens are never guessed, where the engine speculates
    skip_special_tokens: bool = True  # False: special tokens are part of the text, but for the one that ends it

    def __post_init__(self) -> None:
        """Check every field and store it in its one normal form."""
        self._normalise_numbers()
        self._normalise_collections()
        for name in ("ignore_eos", "speculative", "skip_special_tokens"):
            if type(getattr(self, name)) is not bool:
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.structured is not None:
            self._store("structured", StructuredOutput.of(self.structured))
        if self.logprobs_mode not in get_args(LogprobsMode):
            raise ValueError(f"logprobs_mode must be 'processed' or 'raw', got {self.logprobs_mode!r}")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise TypeError(f"cache_salt must be a string or None, got {self.cache_salt!r}")
        if self.cache_salt == "":
            raise ValueError("cache_salt must not be empty, got ''; use None to share the cache with all")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not exceed max_tokens, got min_tokens={self.min_tokens} and "
                f"max_tokens={self.max_tokens}; lower min_tokens or raise max_tokens"
            )

    def _normalise_numbers(self) -> None:
        ints: dict[str, int | None] = {
            "n": _int("n", self.n, low=1, high=_LARGEST_COUNT),
            "top_k": _int("top_k", self.top_k, low=-1, high=_LARGEST_COUNT, hint="use 0 or -1 to turn it off"),
            "min_tokens": _int("min_tokens", self.min_tokens, low=0, high=_LARGEST_COUNT),
            "priority": _int("priority", self.priority),
        }
        if ints["top_k"] == -1:
            ints["top_k"] = 0
        for name in ("max_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            limits = {"low": 0, "high": _LARGEST_COUNT}
            ints[name] = None if value is None else _int(name, value, **limits, hint="use None to leave it open")
        if self.seed is not None:
            ints["seed"] = _int("seed", self.seed, low=-(2**63), high=2**64 - 1)
        floats = {
            "temperature": _float(
                "temperature", self.temperature, low=0.0, high=_LARGEST_TEMPERATURE, hint="use 0 for greedy decoding"
            ),
            "top_p": _float("top_p", self.top_p, low=0.0, high=1.0, open_low=True, hint="use 1 to turn it off"),
            "min_p": _float("min_p", self.min_p, low=0.0, high=1.0, hint="use 0 to turn it off"),
            "repetition_penalty": _float(
                "repetition_penalty",
                self.repetition_penalty,
                low=1.0 / _LARGEST_PENALTY,
                high=_LARGEST_PENALTY,
                hint="use 1 to turn it off",
            ),
            "presence_penalty": _float(
                "presence_penalty", self.presence_penalty, low=-_LARGEST_PENALTY, high=_LARGEST_PENALTY
            ),
            "frequency_penalty": _float(
                "frequency_penalty", self.frequency_penalty, low=-_LARGEST_PENALTY, high=_LARGEST_PENALTY
            ),
        }
        if floats["temperature"] < _GREEDY_BELOW:
            floats["temperature"] = 0.0
        for name, number in (*ints.items(), *floats.items()):
            self._store(name, number)

    def _normalise_collections(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop)
        for text in stop:
            if not isinstance(text, str):
                raise TypeError(f"stop must hold strings, got {text!r}; use stop_token_ids for token ids")
            if not text:
                raise ValueError("stop must not hold an empty string, got ''; leave it out")
        self._store("stop", stop)
        self._store("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError("allowed_token_ids must not be empty, got (); use None to allow every token")
            self._store("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._store("logit_bias", _bias(self.logit_bias))
        words = _sequence("bad_words", self.bad_words)
        self._store("bad_words", tuple(_bad_word(word) for word in words))

    def _store(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the class is frozen for everyone else

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is taken, without a draw."""
        return self.temperature == 0.0

    def clone(self, **changes: Any) -> SamplingParams:
        """Return a copy with `changes` applied, checked like a new one.

        Raises:
            TypeError: if a name in `changes` is not a field, or its value has the wrong type.
            ValueError: if the changed parameters are not legal.
        """
        return dataclasses.replace(self, **changes)

    def validate_vocab(self, vocab_size: int) -> None:
        """Check every token id that the caller named against a vocabulary.

        Args:
            vocab_size: how many logits the model gives; legal ids are `0 .. vocab_size - 1`.

        Raises:
            ValueError: if an id lies outside, naming the field and the id.
        """
        named: dict[str, Sequence[int]] = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": tuple(self.logit_bias or ()),
            "bad_words": tuple(token_id for word in self.bad_words if not isinstance(word, str) for token_id in word),
        }
        for name, token_ids in named.items():
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise ValueError(
                        f"{name} holds token id {token_id}, but the vocabulary has {vocab_size} tokens; "
                        f"use ids from 0 to {vocab_size - 1}"
                    )


def _int(name: str, value: object, *, low: int | None = None, high: int | None = None, hint: str = "") -> int:
    # bool is an int to Python, but `n=True` is a mistake.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bounds}, got {number}" + (f"; {hint}" if hint else ""))
    return number


def _float(
    name: str,
    value: object,
    *,
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    hint: str = "",
) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    tail = f"; {hint}" if hint else ""
    try:
        number = float(value)
    except OverflowError:  # an int of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}{tail}")
    too_low = low is not None and (number <= low if open_low else number < low)
    if too_low or (high is not None and number > high):
        bounds = f"{'above' if open_low else 'at least'} {low:g}" + (f" and at most {high:g}" if high else "")
        raise ValueError(f"{name} must be {bounds}, got {number}{tail}")
    return number


def _sequence(name: str, value: object) -> tuple[Any, ...]:
    if value is None:  # "none", as in other engines' parameters
        return ()
    # A string is a sequence of strings, a set has no order, a mapping has values: none is what the caller
    # meant.
    if isinstance(value, (str, bytes, Mapping, set, frozenset)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name} must be a list or tuple, got {value!r}")
    return tuple(cast("Sequence[Any]", value))


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    return tuple(_int(name, token_id, low=0) for token_id in _sequence(name, value))


def _bias(value: object) -> _FrozenBias:
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, got {value!r}")
    table: dict[int, float] = {}
    for token_id, bias in value.items():
        key = _int("logit_bias", token_id, low=0)
        if isinstance(bias, bool) or not isinstance(bias, Real):
            raise TypeError(f"logit_bias[{key}] must be a number, got {bias!r}")
        if math.isnan(bias) or bias == math.inf:
            raise ValueError(
                f"logit_bias[{key}] must be finite, or -inf to ban the token, got {bias}; "
                "use allowed_token_ids to force one"
            )
        if bias != -math.inf and abs(float(bias)) > _LARGEST_BIAS:
            raise ValueError(f"logit_bias[{key}] must be between -{_LARGEST_BIAS:g} and {_LARGEST_BIAS:g}, or -inf")
        table[key] = float(bias)
    return _FrozenBias(table)


def _bad_word(word: object) -> str | tuple[int, ...]:
    if isinstance(word, Integral):
        raise TypeError(f"bad_words must hold strings or sequences of token ids, got {word!r}; write [{word!r}]")
    normal = word if isinstance(word, str) else _token_ids("bad_words", word)
    if not normal:
        raise ValueError(f"bad_words must not hold an empty entry, got {word!r}; leave it out")
    return normal
