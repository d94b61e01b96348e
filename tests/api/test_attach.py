"""What `attach` refuses before it looks at the layers."""

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
