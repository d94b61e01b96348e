"""What a caller says of speculation. Owns `SpeculativeConfig` and its rules; does not import torch.

Names are the field's own (vLLM's `speculative_config`): `method`, `num_speculative_tokens`, `prompt_lookup_min`, ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

SpeculativeMethod = Literal["ngram", "suffix", "draft_model", "eagle3"]

_MOST_TOKENS = 64  # a verify step computes so many rows more for every request
_DEFAULT_TOKENS = {"ngram": 8, "suffix": 8, "draft_model": 3, "eagle3": 2}
_FIELDS_OF = {  # beside those that all methods have
    "ngram": {"prompt_lookup_min", "prompt_lookup_max"},
    "suffix": set(),
    "draft_model": {"model", "num_draft_layers"},
    "eagle3": {"model"},
}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: a proposer guesses tokens, the model verifies them in one step. No output depends on it.

    Attributes:
        method: "ngram" looks up the request's own tokens, "suffix" those of all requests, "draft_model" runs a smaller
            model (or the first layers of the model itself), "eagle3" an EAGLE-3 head.
        num_speculative_tokens: k, the most tokens guessed at once; None: 8 for lookups, 3 for a draft model, 2 for a
            head.
        prompt_lookup_min, prompt_lookup_max: the shortest and longest n-gram that "ngram" looks for, 2 and 5. One that
            is given alone moves the other where they would cross: a min of 6 means a max of 6, a max of 1 a min of 1.
        model: "draft_model": a loaded causal LM with the same vocabulary, or where to load it from; "eagle3": the
            folder of a checkpoint, or a loaded head.
        num_draft_layers: "draft_model": draft with so many first layers of the model itself, in place of `model`.
        adaptive: speculate only as far as it pays, by measured acceptance and times; False: always, up to k tokens.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    model: Any | None = None
    num_draft_layers: int | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.method not in get_args(SpeculativeMethod):
            raise ValueError(
                f"speculative method={self.method!r} must be one of {', '.join(map(repr, get_args(SpeculativeMethod)))}"
            )
        foreign = set().union(*_FIELDS_OF.values()) - _FIELDS_OF[self.method]
        for name in sorted(foreign):
            value = getattr(self, name)
            if value is not None:
                shown = name if name == "model" else f"{name}={value!r}"  # a model's text fills screens
                raise ValueError(f"speculative {shown} is not for method={self.method!r}; leave it out")
        if not isinstance(self.adaptive, bool):
            raise TypeError(f"speculative adaptive must be True or False, not {self.adaptive!r}")
        self._default("num_speculative_tokens", _DEFAULT_TOKENS[self.method], _MOST_TOKENS)
        if self.method == "ngram":
            self._check_lookup_range()
        if self.method == "draft_model":
            self._check_draft_model()
        if self.method == "eagle3" and self.model is None:
            raise ValueError("speculative method='eagle3' needs model: the folder of an EAGLE-3 checkpoint")

    @property
    def num_tokens(self) -> int:
        """k."""
        return self.num_speculative_tokens or _DEFAULT_TOKENS[self.method]

    @property
    def lookup_range(self) -> tuple[int, int]:
        """The shortest and the longest n-gram."""
        return self.prompt_lookup_min or 1, self.prompt_lookup_max or 1

    def _check_lookup_range(self) -> None:
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if least is not None:
            self._check_count("prompt_lookup_min", _MOST_TOKENS)  # before it is compared with anything
        self._default("prompt_lookup_max", max(5, least or 0), _MOST_TOKENS)
        self._default("prompt_lookup_min", min(2, self.lookup_range[1]), _MOST_TOKENS)
        if self.lookup_range[0] > self.lookup_range[1]:
            raise ValueError(
                f"speculative prompt_lookup_min={least} exceeds prompt_lookup_max={most}; lower it, or raise the latter"
            )

    def _check_draft_model(self) -> None:
        if self.model is not None and self.num_draft_layers is not None:
            raise ValueError(
                f"speculative model and num_draft_layers={self.num_draft_layers!r} are both given; leave one out: the "
                "model drafts by itself, num_draft_layers means the first layers of the target"
            )
        if self.model is None and self.num_draft_layers is None:
            raise ValueError(
                "speculative method='draft_model' needs either model, a smaller causal LM with the same vocabulary, or "
                "num_draft_layers, to draft with the first layers of the model itself"
            )
        if self.num_draft_layers is not None:
            self._check_count("num_draft_layers", 1 << 16)

    def _default(self, name: str, default: int, most: int) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, default)
        self._check_count(name, most)

    def _check_count(self, name: str, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"speculative {name} must be an integer or None, not {value!r}")
        if not 1 <= value <= most:
            raise ValueError(f"speculative {name}={value} must be from 1 to {most}")


def speculative_config(given: SpeculativeConfig | Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """A caller's settings, checked; None is no speculation.

    Raises:
        ValueError, TypeError: an unknown name, or a value that is wrong, with the fix.
    """
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(
            "speculative must be a dict of settings ({'method': 'ngram'}, for example), a SpeculativeConfig or None, "
            f"not {given!r:.60}"
        )
    return _from_mapping(given)


def _from_mapping(given: Mapping[str, Any]) -> SpeculativeConfig:
    known = [f.name for f in fields(SpeculativeConfig)]
    for name in given:
        if name not in known:
            raise ValueError(f"speculative has an unknown key {name!r}; known keys: {', '.join(known)}")
    if "method" not in given:
        raise ValueError(f"speculative needs a method: {', '.join(map(repr, get_args(SpeculativeMethod)))}")
    return SpeculativeConfig(**given)


def parse_speculative(text: str) -> SpeculativeConfig:
    """Settings as a command line gives them: the name of a method, or a JSON object of fields.

    Raises:
        ValueError, TypeError: it is neither, or see `speculative_config`.
    """
    if not text.lstrip().startswith("{"):
        return SpeculativeConfig(method=text)  # type: ignore[arg-type] # checked there
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f'speculative must be a method or a JSON object like {{"method": "ngram"}}: {error}'
        ) from error
    return _from_mapping(given)
