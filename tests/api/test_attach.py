"""What `attach`, and what it adds to a model, refuse at the door."""

from __future__ import annotations

import pytest
import tiny
import torch

import cb_engine
from cb_engine.errors import UnsupportedModelError


def test_a_path_is_no_model() -> None:
    with pytest.raises(TypeError, match=r"needs a loaded model, not 'some/model'; load it with .*from_pretrained"):
        cb_engine.attach("some/model")


def test_a_compiled_model_is_refused_with_the_name_of_the_one_inside() -> None:
    compiled = torch.compile(tiny.family("llama")[0])
    with pytest.raises(UnsupportedModelError, match=r"attach the one that was compiled \(`compiled._orig_mod`\)"):
        cb_engine.attach(compiled)


@pytest.mark.parametrize("params", [None, cb_engine.SamplingParams()])
@pytest.mark.parametrize(
    ("name", "value"),
    [("speculative", {"method": "ngram"}), ("assistant_model", "a model"), ("prompt_lookup_num_tokens", 3)],
)
def test_a_call_that_asks_for_speculation_is_told_where_it_is_set(
    name: str, value: object, params: cb_engine.SamplingParams | None
) -> None:
    model = cb_engine.attach(tiny.make_model("llama"))
    with pytest.raises((TypeError, ValueError), match=rf'{name}.*continuous_batching_config={{"speculative": {{'):
        model.generate_batch([[1, 2]], sampling_params=params, **{name: value})
