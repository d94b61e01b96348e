"""What is named by its folder is read once for a target, and again when it has changed."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import drafting
import pytest
import tiny
import torch

from cb_engine import Engine, SamplingParams
from cb_engine.runner.drafters import loading
from cb_engine.runner.drafters.eagle3_checkpoint import save_eagle3
from cb_engine.runner.drafters.eagle3_head import Eagle3Head


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for the disk; the names that were loaded."""
    names: list[str] = []

    def load(name: str, dtype: torch.dtype) -> Any:
        names.append(name)
        return tiny.make_model("llama", seed=len(names)).to(dtype)

    monkeypatch.setattr(loading, "load_weights", load)
    return names


def test_a_draft_model_is_read_once_for_all_engines_of_a_target(loads: list[str], tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"1")
    model = tiny.make_model("llama")
    speculative = {"method": "draft_model", "model": str(tmp_path)}
    for _ in range(3):
        Engine(model, config={"speculative": speculative})
    assert len(loads) == 1
    (tmp_path / "weights").write_bytes(b"2")
    os.utime(tmp_path / "weights", ns=(0, 0))
    Engine(model, config={"speculative": speculative})
    assert len(loads) == 2
    Engine(tiny.make_model("llama", seed=9), config={"speculative": speculative})
    assert len(loads) == 3


def test_a_folder_of_weights_without_a_tokenizer_is_enough(tmp_path: Path) -> None:
    tiny.make_model("llama", seed=3).save_pretrained(tmp_path)
    draft_model = loading.load_draft_model(tmp_path, tiny.make_model("llama"), torch.float32)
    expected = tiny.make_model("llama", seed=3).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in draft_model.state_dict().items())


def test_only_the_latest_is_kept_and_no_longer_than_its_target(loads: list[str]) -> None:
    target = tiny.make_model("llama")
    kept = [weakref.ref(loading.load_draft_model(name, target, torch.float32)) for name in ("a/b", "c/d")]
    gc.collect()
    assert [ref() is None for ref in kept] == [True, False]
    assert loading.load_draft_model("c/d", target, torch.float32) is kept[1]()
    assert loading.load_draft_model("c/d", target, torch.bfloat16) is not kept[1]()
    del target
    gc.collect()
    assert kept[1]() is None


def test_a_head_is_read_once_too(tmp_path: Path) -> None:
    target = tiny.make_model("llama")
    save_eagle3(drafting.make_head(target), tmp_path)
    where = (torch.device("cpu"), torch.float32)
    head = loading.load_head(tmp_path, target, *where)
    assert loading.load_head(str(tmp_path), target, *where) is head
    target.set_input_embeddings(torch.nn.Embedding(tiny.VOCAB, 32))
    assert loading.load_head(tmp_path, target, *where).borrowed[0] is target.get_input_embeddings()
    gone = weakref.ref(target)
    del target, head
    gc.collect()
    assert gone() is None


def test_a_head_without_an_output_matrix_has_the_targets(tmp_path: Path) -> None:
    """Also where that one is not tied to the embeddings."""
    model = tiny.make_model("llama", tie_word_embeddings=False)
    lm_head = model.get_output_embeddings()
    torch.manual_seed(0)
    save_eagle3(Eagle3Head(drafting.head_config(), target_lm_head=lm_head), tmp_path)
    speculative = {"method": "eagle3", "model": str(tmp_path), "adaptive": False}
    engine = Engine(model, config={"speculative": speculative}, eos_token_id=-1)
    engine.add_request([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=12))
    while engine.has_work:
        engine.step()
    assert engine.stats().num_drafts > 0
