"""Settings of speculation: what is taken, what it comes to, and what is said of what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from cb_engine.config import EngineConfig, translate_config
from cb_engine.speculative_config import SpeculativeConfig, speculative_config

FIELDS = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "model", "num_draft_layers")
METHODS: dict[str, dict[str, Any]] = {  # with what each cannot do without
    "ngram": {},
    "suffix": {},
    "draft_model": {"model": "some/model"},
    "eagle3": {"model": "some/folder"},
}


def make(method: str = "ngram", **settings: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, **{**METHODS[method], **settings})


# ---- what settings come to -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "resolved"),
    [
        ("ngram", ("ngram", 8, 2, 5, None, None)),
        ("suffix", ("suffix", 8, None, None, None, None)),
        ("draft_model", ("draft_model", 3, None, None, "some/model", None)),
        ("eagle3", ("eagle3", 2, None, None, "some/folder", None)),
    ],
)
def test_defaults(method: str, resolved: tuple[Any, ...]) -> None:
    config = make(method)
    assert tuple(getattr(config, name) for name in FIELDS) == resolved
    assert config.adaptive is True
    assert config.num_tokens == resolved[1]
    assert {*FIELDS, "adaptive"} == {f.name for f in dataclasses.fields(SpeculativeConfig)}, "a field without a test"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 5, 64])
def test_the_number_of_tokens_is_taken_as_it_is(method: str, count: int) -> None:
    assert make(method, num_speculative_tokens=count).num_tokens == count
    assert make(method, num_speculative_tokens=count).num_speculative_tokens == count


@pytest.mark.parametrize(
    ("given", "range_"),
    [
        ({}, (2, 5)),
        ({"prompt_lookup_min": 1}, (1, 5)),
        ({"prompt_lookup_min": 5}, (5, 5)),
        ({"prompt_lookup_min": 9}, (9, 9)),
        ({"prompt_lookup_max": 1}, (1, 1)),
        ({"prompt_lookup_max": 2}, (2, 2)),
        ({"prompt_lookup_max": 64}, (2, 64)),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 7}, (1, 7)),
    ],
)
def test_the_sizes_of_ngrams_fit_each_other(given: dict[str, int], range_: tuple[int, int]) -> None:
    config = make(**given)
    assert config.lookup_range == (config.prompt_lookup_min, config.prompt_lookup_max) == range_


def test_a_draft_model_is_a_model_of_its_own_or_the_first_layers() -> None:
    loaded = object()
    assert make("draft_model", model=loaded).model is loaded
    assert make("draft_model", model=Path("some/model")).model == Path("some/model")
    layers = SpeculativeConfig(method="draft_model", num_draft_layers=7)
    assert (layers.model, layers.num_draft_layers, layers.num_tokens) == (None, 7, 3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("adaptive", [True, False])
def test_adaptive_is_taken_as_it_is(method: str, adaptive: bool) -> None:
    assert make(method, adaptive=adaptive).adaptive is adaptive


def test_nobody_changes_a_config() -> None:
    config = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.adaptive = False  # type: ignore[misc]
    assert config == make()
    assert config != make(adaptive=False)
    assert dataclasses.replace(config, num_speculative_tokens=2) == make(num_speculative_tokens=2)


# ---- as a part of an engine's config -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_dict_says_the_same_as_the_class(method: str) -> None:
    settings = {"method": method, **METHODS[method], "num_speculative_tokens": 4, "adaptive": False}
    config = make(method, num_speculative_tokens=4, adaptive=False)
    for given in (settings, MappingProxyType(settings), config):
        assert EngineConfig(speculative=given).speculative == config
        assert translate_config({"speculative": given, "page_size": 8}).config.speculative == config
    assert EngineConfig(speculative=config).speculative is config


def test_none_is_no_speculation() -> None:
    assert speculative_config(None) is None
    assert EngineConfig().speculative is None
    assert EngineConfig(speculative=None).speculative is None


@pytest.mark.parametrize("given", ["ngram", 7, True, False, 0, ("ngram",), ["ngram"], SpeculativeConfig, 1.5])
def test_what_is_no_dict_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"speculative must be a dict .*\{'method': 'ngram'\}.* not ") as error:
        EngineConfig(speculative=given)
    assert repr(given)[:60] in str(error.value)


@pytest.mark.parametrize("key", ["k", "num_tokens", "Method", "", 3, None, ("method",)])
def test_an_unknown_key_is_named_and_so_are_those_that_there_are(key: Any) -> None:
    given: Mapping[Any, Any] = {"method": "ngram", key: 1}
    with pytest.raises(ValueError, match="speculative has an unknown key") as error:
        EngineConfig(speculative=given)
    assert repr(key) in str(error.value)
    assert f"known keys: {', '.join((*FIELDS, 'adaptive'))}" in str(error.value)


@pytest.mark.parametrize("given", [{}, {"num_speculative_tokens": 3}, {"model": "x", "adaptive": False}])
def test_a_dict_without_a_method_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="speculative needs a method: 'ngram', 'suffix', 'draft_model', 'eagle3'"):
        EngineConfig(speculative=given)


def test_a_caller_may_change_its_dict_afterwards() -> None:
    given: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3}
    config = EngineConfig(speculative=given)
    given["num_speculative_tokens"] = 5
    assert config.speculative == make(num_speculative_tokens=3)


# ---- what is refused -----------------------------------------------------------------------------------------------

NO_INTEGERS: tuple[Any, ...] = (True, False, 2.0, 2.5, float("nan"), "2", "", [2], (2,), {}, object())


@pytest.mark.parametrize("method", ["medusa", "NGRAM", "", None, 1, True, ["ngram"], {"ngram": 1}])
def test_an_unknown_method_is_refused(method: Any) -> None:
    with pytest.raises(ValueError, match="must be one of 'ngram', 'suffix', 'draft_model', 'eagle3'") as error:
        SpeculativeConfig(method=method)
    assert f"speculative method={method!r}" in str(error.value)
    with pytest.raises(ValueError, match="must be one of"):
        EngineConfig(speculative={"method": method})


@pytest.mark.parametrize("adaptive", [None, 0, 1, 1.0, "", "yes", []])
def test_adaptive_is_true_or_false(adaptive: Any) -> None:
    with pytest.raises(TypeError, match="speculative adaptive must be True or False, not ") as error:
        make(adaptive=adaptive)
    assert repr(adaptive) in str(error.value)


COUNTS = [
    ("ngram", "num_speculative_tokens", 64),
    ("suffix", "num_speculative_tokens", 64),
    ("draft_model", "num_speculative_tokens", 64),
    ("eagle3", "num_speculative_tokens", 64),
    ("ngram", "prompt_lookup_min", 64),
    ("ngram", "prompt_lookup_max", 64),
    ("draft_model", "num_draft_layers", 65536),
]


def with_count(method: str, name: str, value: Any) -> SpeculativeConfig:
    return make(method, **{"model": None} if name == "num_draft_layers" else {}, **{name: value})


@pytest.mark.parametrize(("method", "name", "most"), COUNTS)
def test_counts_have_bounds(method: str, name: str, most: int) -> None:
    for value in (1, most):
        assert getattr(with_count(method, name, value), name) == value
    for value in (0, -1, most + 1, 10**30):
        with pytest.raises(ValueError, match=rf"^speculative {name}={value} must be from 1 to {most}$"):
            with_count(method, name, value)


@pytest.mark.parametrize("value", NO_INTEGERS)
@pytest.mark.parametrize(("method", "name", "most"), COUNTS)
def test_counts_are_integers(method: str, name: str, most: int, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"^speculative {name} must be an integer or None, not ") as error:
        with_count(method, name, value)
    assert str(error.value).endswith(repr(value))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((6, 5), "prompt_lookup_min=6 exceeds prompt_lookup_max=5; lower it, or raise the latter"),
        ((3, 1), "prompt_lookup_min=3 exceeds prompt_lookup_max=1"),
    ],
)
def test_ngrams_whose_sizes_cross_are_refused(given: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(prompt_lookup_min=given[0], prompt_lookup_max=given[1])


FOREIGN = {
    "ngram": ("model", "num_draft_layers"),
    "suffix": ("model", "num_draft_layers", "prompt_lookup_min", "prompt_lookup_max"),
    "draft_model": ("prompt_lookup_min", "prompt_lookup_max"),
    "eagle3": ("num_draft_layers", "prompt_lookup_min", "prompt_lookup_max"),
}


@pytest.mark.parametrize(("method", "name"), [(m, name) for m, names in FOREIGN.items() for name in names])
def test_settings_of_another_method_are_refused(method: str, name: str) -> None:
    shown = name if name == "model" else f"{name}=2"
    with pytest.raises(ValueError, match=rf"^speculative {shown} is not for method='{method}'; leave it out$"):
        make(method, **{name: 2})


def test_a_draft_model_is_needed_and_only_one() -> None:
    message = r"speculative method='draft_model' needs either model, .* or num_draft_layers"
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(method="draft_model")
    with pytest.raises(ValueError, match=r"^speculative model and num_draft_layers=1 are both given; leave one out"):
        make("draft_model", num_draft_layers=1)
    with pytest.raises(ValueError, match=r"method='eagle3' needs model: the folder of an EAGLE-3 checkpoint"):
        SpeculativeConfig(method="eagle3")
